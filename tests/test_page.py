"""The page of a training: what it carries is what the record holds, and nothing that it carries can do anything."""

import base64
import hashlib
import html.parser
import http.client
import json
import math
import re
import socket
import struct
import threading
import zlib
from contextlib import suppress
from importlib import util
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gaff
from gaff.cli import main
from gaff.inspection.saved import load
from gaff.record.cube import read_cubes
from gaff.record.log import EVENT, SERIES
from gaff.record.matrix import pack_series
from gaff.views.page import chunks
from gaff.views.page.chunks import Chunks, to_log16
from gaff.views.page.document import asset
from gaff.views.page.live import Board, Server
from gaff.views.page.run import document, run_of
from made_records import HOSTILE, MadeRun, make


def from_log16(codes, *, is_signed):
    """The values that codes stand for, as float64 of the same shape: what the page's script makes of them."""
    codes = np.asarray(codes).astype(np.int32)
    if is_signed:
        found = np.sign(codes) * np.exp2((np.abs(codes) - chunks._SHIFT) / chunks.PER_OCTAVE_SIGNED)
    else:
        found = np.exp2(codes / chunks.PER_OCTAVE)
    for code, value in (
        (chunks.MISSING, np.nan),
        (chunks.ZERO, 0.0),
        (chunks.INF, np.inf),
        (chunks.NEGATIVE_INF, -np.inf),
    ):
        found[codes == code] = value
    return found


NAN = math.nan
floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(floats, min_size=1, max_size=50))
def test_a_code_tells_a_number_within_its_step_and_the_odd_ones_exactly(values):
    values = np.array(values, np.float32)
    codes, is_signed = to_log16(values)
    found = from_log16(codes, is_signed=is_signed)
    steps, of_the_logarithm = (100 if is_signed else 200), 1e-5  # the latter is a float32
    worst = 2 ** (0.5 / steps) - 1 + of_the_logarithm
    for value, told in zip(values.tolist(), found.tolist(), strict=True):
        if not math.isfinite(value) or value == 0:
            assert str(told) == str(abs(value) if value == 0 else value)
        else:
            assert math.copysign(1, told) == math.copysign(1, value)
            assert abs(told / value - 1) <= worst


def unpacked(document, number):
    """A chunk as the browser decodes it."""
    told = document.chunks.told[number]
    data = zlib.decompress(document.chunks.packed[number], -15)
    shape = told["shape"]
    if told["encoding"] == "u8":
        return np.frombuffer(data, np.uint8).reshape(shape)
    size = {"f64": 8, "log16": 2, "log16s": 2}[told["encoding"]]
    rows = np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(size, -1).T)
    if told["encoding"] == "f64":
        return rows.view("<f8").reshape(shape)
    codes = np.cumsum(rows.view("<i2").reshape(shape), axis=-1, dtype=np.int16)
    return from_log16(codes, is_signed=told["encoding"] == "log16s")


def rows_of(document, stat, end, run=0):
    """(phase, site) to the row of one number."""
    told = document.head["runs"][run]
    found = {}
    for group in told["groups"]:
        ends = group["stats"].get(stat, {})
        if end in ends:
            table = unpacked(document, ends[end])
            for site, row in zip(group["sites"], table, strict=True):
                found[group["phase"], told["sites"][site][2]] = (group["last"], row)
    return found


def watched(tmp_path, steps=12):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).pow(2).mean().backward()
            optimizer.step()
    return load(tmp_path / "run")


def test_every_number_of_a_page_is_that_of_the_record(tmp_path):
    record = watched(tmp_path)
    page = document([record])
    seen = 0
    for stat, end in (("rms", "highest"), ("mean", "latest"), ("min", "lowest"), ("max", "highest"), ("zeros", "highest"),
                      ("update_ratio", "highest"), ("adam_rms", "highest"), ("lr", "latest")):  # fmt: skip
        for (phase, site), (steps, row) in rows_of(page, stat, end).items():
            series = dict(record.series(site, stat, phase))
            for step, value in zip(steps, row.tolist(), strict=True):
                truth = series.get(step, math.nan)
                if math.isnan(truth):
                    assert math.isnan(value)
                else:
                    assert value == pytest.approx(truth, rel=4e-3, abs=0)
                    seen += 1
    assert seen > 500


def test_magnitudes_are_those_of_the_record(tmp_path):
    record = watched(tmp_path)
    page = document([record])
    run = page.head["runs"][0]
    group = next(one for one in run["groups"] if one["group"] == "activations")
    for row, site in enumerate(group["sites"]):
        table = unpacked(page, group["magnitudes"][row // group["together"]])[row % group["together"]]
        name = run["sites"][site][2]
        for step, shares in record.magnitudes(name):
            column = table[:, group["marks"].index(step)]
            assert [0.0 if byte == 0 else 2.0 ** ((byte - 255) * 24 / 254) for byte in column.tolist()] == shares


def test_curves_are_those_of_the_record_to_the_last_bit(tmp_path):
    record = load(make(tmp_path / "run"))
    page = document([record])
    scalars = page.head["runs"][0]["scalars"]
    table = unpacked(page, scalars["chunk"])
    found = dict(zip(scalars["names"], table[1:].tolist(), strict=True))
    assert table[0].tolist() == [0.0, 1.0, 2.0]
    assert [str(one) for one in found["loss:l"]] == ["0.25", "nan", "inf"]


def long_run(folder, looks):
    run = MadeRun(folder)
    for step in range(looks):
        run.look(step)
    run.log.close()
    return load(folder)


def test_of_a_bucket_of_looks_the_lowest_the_highest_and_the_last_are_kept(tmp_path):
    record = long_run(tmp_path / "run", 1300)
    page = document([record])
    highest, lowest = rows_of(page, "rms", "highest"), rows_of(page, "rms", "lowest")
    steps, row = highest["train", "fc1.weight:grad"]
    series = dict(record.series("fc1.weight:grad", "rms"))
    assert len(steps) == 325  # of four looks each
    begins = [0, *(step + 1 for step in steps[:-1])]
    for begin, end, high, low in zip(begins, steps, row, lowest["train", "fc1.weight:grad"][1], strict=True):
        values = [series[step] for step in range(begin, end + 1)]
        assert high == pytest.approx(max(values), rel=4e-3)
        assert low == pytest.approx(min(values), rel=4e-3)


def test_a_range_of_steps_is_told_in_full(tmp_path):
    record = long_run(tmp_path / "run", 1300)
    cubes = read_cubes(record.part(), columns=512, marks=4, begin=600, end=700)
    assert cubes[0].first.tolist() == cubes[0].last.tolist() == list(range(600, 701))


def test_nan_in_a_number_is_no_missing_number(tmp_path):
    page = document([load(make(tmp_path / "run"))])
    steps, row = rows_of(page, "nonfinite", "highest")["train", "fc1"]
    assert row[steps.index(1)] == pytest.approx(7.0 + (1 + 1 + 7 / 8) * 0 + 0, rel=0.4)
    steps, row = rows_of(page, "rms", "highest")["train", ":output"]
    assert math.isnan(row[2])  # it was not looked at in this step


def test_what_reached_each_parameter_is_told(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen, self.zero = (nn.Linear(4, 4) for _ in range(4))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(x)) + 0 * self.zero(x)

    model = Net()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.01)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            norms = {name: one.grad.norm().item() for name, one in model.named_parameters() if one.grad is not None}
            optimizer.step()
    rows = {row["path"]: row for row in document([load(tmp_path / "run")]).head["runs"][0]["gradients"]}
    assert {path: row["state"] for path, row in rows.items() if path.endswith("weight")} == {
        "used.weight": "arrived", "unused.weight": "none", "frozen.weight": "frozen", "zero.weight": "zero",
    }  # fmt: skip
    assert rows["used.weight"]["norm"] == pytest.approx(norms["used.weight"], rel=1e-5)
    assert rows["used.weight"]["shape"] == "4x4"
    assert next(iter(rows)) == "used.weight"  # in the order of the model


def test_clips_and_edits_of_the_run_are_on_its_page(tmp_path):
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    clipping = gaff.clip_gradients(optimizer, norm=1e-3, model=model)
    edit = gaff.edit(model, {"0": gaff.edits.scale(0.5)}).attach()
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
    clipping.remove()
    edit.remove()
    changes = document([load(tmp_path / "run")]).head["runs"][0]["changes"]
    assert {one["what"] for one in changes} == {"clip_gradients", "edit"}
    assert any("scale" in line or "0" in line for one in changes for line in one["lines"])


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.policy = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]


def test_what_comes_from_a_record_is_never_markup(tmp_path):
    plain, hostile = (document([load(make(tmp_path / name, sites=sites))]).to_html()
                      for name, sites in (("a", ["one"]), ("<script>alert(1)<", HOSTILE)))  # fmt: skip
    tags = [Tags(), Tags()]
    for tag, text in zip(tags, (plain, hostile), strict=True):
        tag.feed(text.encode(errors="replace").decode())
    chunks = [sum(one == "script" for one in tag.tags) for tag in tags]
    assert [one for one in tags[0].tags if one != "script"] == [one for one in tags[1].tags if one != "script"]
    assert chunks[1] - chunks[0] == len(re.findall('id="chunk-', hostile)) - len(re.findall('id="chunk-', plain))
    assert "<script>alert" not in hostile


def test_only_the_script_and_the_style_of_the_package_may_do_anything(tmp_path):
    tags = Tags()
    text = document([load(make(tmp_path / "run"))]).to_html()
    assert "Leon Sorokin" in text  # the licence of uPlot asks for it
    tags.feed(text)
    rules = dict(one.strip().split(" ", 1) for one in tags.policy.split(";"))
    for name, kind in (("training.js", "script-src"), ("page.css", "style-src")):
        digest = base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "http" not in tags.policy


def test_the_script_and_the_style_are_small():
    assert max(len(asset(f"{name}.js")) for name in ("training", "tracing")) <= 140_000
    assert len(asset("page.css")) <= 16_000


def test_the_command_writes_pages_of_several_runs(tmp_path, capsys):
    runs = [str(make(tmp_path / name)) for name in ("a", "b")]
    assert main(["report", *runs, "--html", str(tmp_path / "out.html")]) == 0
    assert "it needs no network" in capsys.readouterr().out
    text = (tmp_path / "out.html").read_text()
    head = json.loads(re.search('id="head">(.*?)</script>', text).group(1))
    assert [run["name"] for run in head["runs"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "{out}", "--rank", "3"], "no rank 3 in"),
        (["--html", "{missing}/x.html"], "cannot be written"),
        (["--live", "--port", "99999999"], "port 99999999 cannot be used"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(tmp_path, capsys, arguments, message):
    run = str(make(tmp_path / "run"))
    given = [one.format(out=tmp_path / "x.html", missing=tmp_path / "missing") for one in arguments]
    assert main(["report", run, *given]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["report", "{run}", "--html", "x"], ["report", "{run}", "--live"]])
def test_without_numpy_a_page_says_what_to_install(tmp_path, capsys, monkeypatch, arguments):
    real = util.find_spec
    monkeypatch.setattr("gaff.cli.report.find_spec", lambda name: None if name == "numpy" else real(name))
    run = make(tmp_path / "run")
    assert main([one.format(run=run) for one in arguments]) == 1
    assert "pip install 'gaff[page]'" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "flip", "layouts", "events"])
def test_damaged_records_give_a_page_or_a_clear_error(tmp_path, damage):
    rng = np.random.default_rng(0)
    data = (make(tmp_path / "whole") / "rank0.gaff").read_bytes()
    for at in range(40):
        folder = tmp_path / f"{damage}{at}"
        folder.mkdir()
        bad = bytearray(data)
        if damage == "cut":
            bad = bad[: 8 + int(rng.integers(len(data) - 8))]
        elif damage == "flip":
            for place in rng.integers(8, len(data), 5):
                bad[place] ^= 1 << int(rng.integers(8))
        (folder / "rank0.gaff").write_bytes(bytes(bad))
        if damage in ("layouts", "events"):
            run = MadeRun(folder.with_name(f"{folder.name}x"))
            odd = [None, [], {}, "x", -1, 1e308, [[]], {"a": [1]}, [1, "a", None]][at % 9]
            for kind in ("model", "look", "progress", "changes", "flight", "begin", "end"):
                names = ("modules", "weights", "memory", "lines", "rows", "phase", "every", "name", "what", "seconds")
                run.log.write_json(EVENT, {"kind": kind, **dict.fromkeys(names, odd)}, at)
            run.look(at)
            run.log.close()
            folder = run.log.path.parent
        with suppress(gaff.errors.RecordError):
            assert document([load(folder)]).to_html().startswith("<!doctype html>")


def test_chunks_hold_what_was_put_in():
    chunks = Chunks()
    table = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert chunks.shares(table) == 0
    assert chunks.numbers(np.array([[1.5, math.nan]])) == 1
    assert chunks.told == [{"encoding": "u8", "shape": [3, 4]}, {"encoding": "f64", "shape": [1, 2]}]
    assert zlib.decompress(chunks.packed[0], -15) == table.tobytes()
    planes = zlib.decompress(chunks.packed[1], -15)
    assert struct.unpack("<d", planes[0::2])[0] == 1.5


class Served:
    """A server on a thread, and questions to it."""

    def __init__(self, *paths):
        self.board = Board([Path(one) for one in paths])
        self.server = Server(self.board)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.board.close()
        self.server.shutdown()
        self.server.server_close()

    def ask(self, path, token=True, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        known = {"Authorization": f"Bearer {self.board.token}"} if token else {}
        connection.request(method, path, headers={**known, **headers})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body, answer


def test_the_live_page_serves_what_the_page_of_a_file_holds(tmp_path):
    run = make(tmp_path / "run")
    page = document([load(run)])
    with Served(run) as served:
        status, body, answer = served.ask("/")
        assert status == 200
        assert "connect-src 'self'" in body.decode()
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        head = json.loads(served.ask("/head")[1])
        assert head["runs"] == json.loads(page.head_json())["runs"]
        for at, packed in enumerate(page.chunks.packed):
            assert served.ask(f"/chunk/{head['live']['version']}/{at}")[1] == packed
        assert b"".join(served.ask("/head?begin=1&end=1")[1:2]) != body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/", {"token": False}, 403),
        ("/?token=wrong", {"token": False}, 403),
        ("/?token=%F0%9F%98%80", {"token": False}, 403),
        ("/", {"Host": "example.org"}, 403),
        ("/", {"Host": "127.0.0.1"}, 403),
        ("/", {"Origin": "http://example.org"}, 403),
        ("/", {"Origin": "null"}, 403),
        ("/", {"method": "POST"}, 501),
        ("/../../etc/passwd", {}, 404),
        ("/chunk/1/../../run.json", {}, 410),
        ("/chunk/1/99999999999999999999", {}, 410),
        ("/chunk/1/-1", {}, 410),
        ("/chunk/%2e%2e/0", {}, 410),
        ("/head?begin=x&end=1", {}, 400),
        ("/run.json", {}, 404),
    ],
)
def test_the_live_server_gives_nothing_to_others_and_nothing_else_to_anybody(tmp_path, path, options, status):
    with Served(make(tmp_path / "run")) as served:
        assert served.ask(path, **options)[0] == status


def test_a_run_that_has_not_begun_is_waited_for_and_new_processes_are_found(tmp_path):
    board = Board([tmp_path / "run"])
    assert "waiting for" in board.head()
    make(tmp_path / "run")
    assert board.look()
    assert json.loads(board.head())["runs"][0]["steps"] == 3
    assert not board.look()  # nothing new
    make(tmp_path / "other", ranks=(1,))
    (tmp_path / "other" / "rank1.gaff").rename(tmp_path / "run" / "rank1.gaff")
    assert board.look()
    assert json.loads(board.head())["runs"][0]["ranks"] == [0, 1]


def test_zooming_often_never_forgets_the_latest_version(tmp_path):
    with Served(make(tmp_path / "run")) as served:
        for end in range(60):
            assert served.ask(f"/head?begin=0&end={end}")[0] == 200
        head = json.loads(served.ask("/head")[1])
        assert served.ask(f"/chunk/{head['live']['version']}/0")[0] == 200
        assert served.ask("/")[0] == 200


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, run: run.log.write_json(EVENT, {"kind": "progress", "memory": {"x": 10**400}}),
        lambda folder, run: (folder / "rank².gaff").write_bytes(b"GAFFLOG1"),
        lambda folder, run: run.log.write_json(EVENT, {"kind": "model", "replicated": True}),
        lambda folder, run: (folder / "run.json").write_text("[" * 5000),
    ],
)
def test_one_odd_record_takes_no_page_away(tmp_path, spoil):
    run = MadeRun(tmp_path / "bad")
    run.look(0)
    spoil(tmp_path / "bad", run)
    run.log.close()
    board = Board([make(tmp_path / "good"), tmp_path / "bad"])
    runs = json.loads(board.head())["runs"]
    assert runs[0]["steps"] == 3
    assert len(runs) == 2


def test_a_run_that_was_replaced_is_opened_anew(tmp_path):
    board = Board([make(tmp_path / "run")])
    assert json.loads(board.head())["runs"][0]["steps"] == 3
    (tmp_path / "run" / "rank0.gaff").unlink()
    run = MadeRun(tmp_path / "run")
    run.steps(0, [1.0])
    run.log.close()
    for _ in range(3):
        (tmp_path / "run" / "touched").write_text(str(_))  # what changes makes it look again
        board.look()
    assert json.loads(board.head())["runs"][0]["steps"] == 1


def test_requests_that_are_no_requests_get_an_answer(tmp_path, capfd):
    with Served(make(tmp_path / "run")) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as raw:
            raw.sendall(b"GET http://[x HTTP/1.1\r\nHost: x\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
        assert served.ask("/chunk/1/" + "9" * 5000)[0] == 410
    assert capfd.readouterr().err == ""


def test_a_server_that_nobody_needs_ends(tmp_path):
    board = Board([tmp_path / "never"])
    server = Server(board)
    server.follow(idle_s=0.0)
    assert board.is_closed


def test_the_terminal_takes_no_orders_from_a_record(tmp_path, capsys):
    run = MadeRun(tmp_path / "run", sites=["fc1"], model="\x1b[2J\x07m\udc00")
    run.look(0)
    run.steps(0, [1.0])
    run.finding(0, site="a\x1b[31m\x9b")
    run.log.close()
    assert main(["report", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert not any((ord(one) < 32 and one not in "\n\t") or 127 <= ord(one) < 160 for one in text)
    assert "\\x1b[31m" in text


def test_a_record_that_asks_for_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gaff.record.part._MOST_CELLS", 1 << 20)  # 1 << 27 takes long to fill
    run = MadeRun(tmp_path / "run")
    columns = {"step": [0.0] * 5000, **{f"c{at}": [0.0] * 5000 for at in range(20)}}
    run.log.write(SERIES, pack_series(columns))
    for at in range(400):
        run.log.write(SERIES, pack_series({"step": [0.0], f"d{at}": [0.0]}))
    run.log.close()
    with pytest.raises(gaff.errors.RecordError, match="series of more than"):
        load(tmp_path / "run")


def test_parameters_of_odd_and_shared_names_are_told_once(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("my-layer 1", nn.Linear(4, 4))
            self.again = self._modules["my-layer 1"]
            self.out = nn.Linear(4, 4)
            self.out.weight = self.again.weight

        def forward(self, x):
            return self.out(self.again(x))

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
    rows = document([load(tmp_path / "run")]).head["runs"][0]["gradients"]
    assert {row["path"]: row["state"] for row in rows} == {
        "`my-layer 1`.weight": "arrived", "`my-layer 1`.bias": "arrived", "out.bias": "arrived",
    }  # fmt: skip
    assert all(row["shape"] for row in rows)


def test_a_gradient_that_is_all_nan_or_gone_is_not_told_by_older_ones(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            if step == 3:
                model[0].weight.grad.fill_(float("nan"))
                model[1].bias.grad = None
            optimizer.step()
    rows = {row["path"]: row for row in document([load(tmp_path / "run")]).head["runs"][0]["gradients"]}
    assert (rows["0.weight"]["state"], rows["0.weight"]["norm"], rows["0.weight"]["step"]) == ("not finite", None, 3)
    assert (rows["1.bias"]["state"], rows["1.bias"]["step"]) == ("none", 2)
    assert rows["1.weight"]["state"] == "arrived"


def test_magnitudes_of_one_table_are_not_wiped_by_another_of_the_same_step(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.look(0, absent=(1,))
    run.look(0, absent=(0, 2))
    run.log.close()
    page = document([load(tmp_path / "run")])
    table = unpacked(page, page.head["runs"][0]["groups"][0]["magnitudes"][0])
    assert (table[:3, 42, 0] > 0).all()


def test_a_loss_that_is_not_finite_is_named_with_its_step(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.steps(0, [1.0] * 5000 + [NAN] + [1.0] * 4000 + [math.inf])
    run.log.close()
    assert document([load(tmp_path / "run")]).head["runs"][0]["scalars"]["odd"] == {
        "loss:l": {"count": 2, "steps": [5000, 9001]}
    }


def test_a_run_that_grows_is_read_on_not_anew(tmp_path, monkeypatch):
    from gaff.record import cube

    run = MadeRun(tmp_path / "run")
    for step in range(40):
        run.look(step)
    record = load(tmp_path / "run")
    cache = cube.Cache()
    read_cubes(record.part(), columns=16, marks=4, cache=cache)
    read = []
    real = cube._numbers
    monkeypatch.setattr(cube, "_numbers", lambda *given: read.append(1) or real(*given))
    for step in range(40, 45):
        run.look(step)
        record.refresh()
        grown = read_cubes(record.part(), columns=16, marks=4, cache=cache)
        anew = read_cubes(record.part(), columns=16, marks=4)
        for one, other in zip(grown, anew, strict=True):
            assert one.last.tolist() == other.last.tolist()
            for name in one.highest:
                assert np.array_equal(one.highest[name], other.highest[name], equal_nan=True)
            assert np.array_equal(one.magnitudes, other.magnitudes)
    run.log.close()
    assert len(read) - 5 * 46 < 30  # of the last columns only; the rest is what was read anew


def test_what_is_not_finite_any_more_is_not_told_by_what_it_was(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(8, 4)
            model(x * float("nan") if step >= 5 else x).pow(2).mean().backward()
            optimizer.step()
    page = document([load(tmp_path / "run")])
    for stat, site in (("rms", "0"), ("rms", "0.weight:param"), ("update_ratio", "0.weight:param")):
        row = rows_of(page, stat, "highest")["train", site][1]
        assert np.isinf(row[6:]).all(), (stat, site)
        assert np.isfinite(row[1:5]).all()
    (odd,) = page.head["runs"][0]["scalars"]["odd"].values()
    assert odd == {"count": 3, "steps": [5, 6, 7]}


def test_a_process_that_comes_later_is_not_shown_with_the_numbers_of_another(tmp_path):
    run = MadeRun(tmp_path / "run", rank=1)
    for step in range(4):
        run.look(step)
    board = Board([tmp_path / "run"])
    first = MadeRun(tmp_path / "run", rank=0)
    for step in range(4):
        first.look(step)
    run.log.close()
    first.log.close()
    board.look()
    page = document([load(tmp_path / "run")])
    head = json.loads(board.head())
    packed = [board.chunk(str(head["live"]["version"]), at) for at in range(len(head["chunks"]))]
    assert packed == page.chunks.packed


def test_batches_that_were_kept_are_shown_as_images_and_tokens(tmp_path):
    folder = tmp_path / "run"
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=folder, every=1, keep_batch=True):
        for step in range(3):
            x = torch.rand(4, 1, 8, 8)
            if step == 1:
                x[2, 0, 3, 5] = float("nan")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    chunks = Chunks()
    (kept,) = run_of(load(folder), chunks)["batches"]
    assert (kept["step"], kept["why"]) == (1, "nonfinite")
    (given,) = kept["inputs"]
    assert (given["shape"], given["type"], given["bad"]) == ([4, 1, 8, 8], "F32", [2])
    told = chunks.told[given["images"]]
    assert told == {"encoding": "u8", "shape": [4, 8, 8, 3]}
    pixels = np.frombuffer(zlib.decompress(chunks.packed[given["images"]], -15), np.uint8).reshape(4, 8, 8, 3)
    assert pixels[2, 3, 5].tolist() == [255, 0, 220]
    assert (pixels[0].min(), pixels[0].max()) == (0, 255)  # each is scaled by itself
    assert (given["checked"], given["shown"]) == (4, [0, 1, 2, 3])
    (path,) = (folder / "batches").iterdir()
    whole = path.read_bytes()
    for old, new in ((b'"step": 1', b'"step": 1e999'), (b"[4,1,8,8]", b"[4,1,8,99999999999]")):
        damaged = whole[8:].replace(
            old.replace(b'"', b'\\"') if b"step" in old else old, new.replace(b'"', b'\\"') if b"step" in new else new
        )
        assert damaged != whole[8:]
        size = int.from_bytes(whole[:8], "little") + len(new) - len(old)
        path.write_bytes(size.to_bytes(8, "little") + damaged)
        assert "cannot be read" in run_of(load(folder), Chunks())["batches"][0]["why"]
    path.write_bytes(whole)
    (folder / "batches" / "00000009-loss.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{")
    broken = run_of(load(folder), Chunks())["batches"][1]
    assert broken["why"].startswith("00000009-loss.safetensors cannot be read: ")


def test_tokens_of_a_kept_batch_are_words_where_a_tokenizer_is_given(tmp_path):
    folder = tmp_path / "run"
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=folder, every=1, keep_batch=True):
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.tensor([[1, 2, 4]])).mean() * (float("nan") if step == 1 else 1)).backward()
            optimizer.step()
    page = document([load(folder)], words=lambda row: [{1: "one", 2: "two"}.get(token) for token in row])
    assert page.head["runs"][0]["batches"][0]["inputs"][0]["tokens"] == [["one", "two", 4]]


def test_a_bad_sample_is_named_and_shown_wherever_it_is(tmp_path):
    folder = tmp_path / "run"
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=folder, every=1, keep_batch=True):
        for step in range(3):
            x = torch.rand(32, 1, 8, 8)
            if step == 1:
                x[20, 0, 3, 5] = float("inf")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    (kept,) = run_of(load(folder), Chunks())["batches"]
    (given,) = kept["inputs"]
    assert (given["bad"], given["checked"]) == ([20], 32)
    assert given["shown"] == [0, 1, 2, 3, 4, 5, 6, 20]


def test_numbers_that_are_not_finite_are_told_and_what_there_is_none_of_is_missing(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(8):
            optimizer.zero_grad()
            (model(torch.randn(16, 4)).square().mean() * (math.nan if step == 5 else 1.0)).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    [cube] = [one for one in read_cubes(record.part(), columns=512, marks=4)
              if (one.group, one.phase) == ("parameters", "train")]  # fmt: skip
    row = [site for _, site in cube.keys].index("0.weight:param")
    ratios = cube.highest["update_ratio"][row]
    assert np.isfinite(ratios[:5]).all()
    assert np.isinf(ratios[5:]).all()  # also of the step whose weights were finite yet
    assert np.isnan(cube.highest["adam_rms"][row]).all()
    assert np.isnan(cube.latest["momentum"][row]).all()
    assert document([record]).head["runs"][0]["about"]["ends"] == {"loss:loss": "nan"}


@pytest.mark.slow
def test_the_page_is_as_sure_as_the_verdict(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 3.0)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    verdict = gaff.load(tmp_path / "run").verdict
    assert (verdict.state, verdict.certainty) == ("wrong", "likely")
    told = document([gaff.load(tmp_path / "run")]).head["runs"][0]["about"]["state"]
    assert told == str(verdict).partition(":")[0] == "wrong, probably"


def test_beside_the_ends_of_buckets_the_latest_number_of_each_site_is_kept(tmp_path):
    record = long_run(tmp_path / "run", 1300)
    page = document([record])
    run = page.head["runs"][0]
    for group in run["groups"]:
        for stat in ("rms", "mean"):
            ends = group["stats"].get(stat)
            if ends is None:
                continue
            assert ("now" in ends) is ("latest" not in ends)
    latest = rows_of(page, "rms", "now")["train", "fc1.weight:grad"][1]
    assert latest == [pytest.approx(record.series("fc1.weight:grad", "rms").values[-1], rel=4e-3)]


def test_joined_steps_have_their_mean_beside_the_highest_and_the_lowest(tmp_path):
    run = MadeRun(tmp_path / "run")
    losses = [math.nan if step == 5 else float(step % 7) for step in range(9000)]
    run.log.write(SERIES, pack_series({"step": [float(step) for step in range(9000)], "loss:l": losses}))
    run.log.close()
    page = document([load(tmp_path / "run")])
    told = page.head["runs"][0]["scalars"]
    steps, high = unpacked(page, told["chunk"])
    low, mean = unpacked(page, told["low"])[1], unpacked(page, told["mean"])[1]
    assert len(steps) == 4000
    begins = [0, *(int(step) + 1 for step in steps[:-1])]
    for begin, end, *values in list(zip(begins, steps, high, low, mean, strict=True))[::97]:
        known = [one for one in losses[begin : int(end) + 1] if not math.isnan(one)]
        assert values == [max(known), min(known), pytest.approx(sum(known) / len(known))]


def test_runs_of_one_name_are_told_by_the_folders_around_them(tmp_path):
    for one in ("first", "second"):
        (tmp_path / one).mkdir()
    records = [load(make(tmp_path / one / "run")) for one in ("first", "second")]
    page = document(records)
    assert [run["name"] for run in page.head["runs"]] == ["first/run", "second/run"]
    assert page.head["title"] == "first/run, second/run"
    assert document(records[:1]).head["title"] == "run"
