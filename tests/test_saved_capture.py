"""A capture on disk comes back with everything that it was read by: values bit by bit, runs, None, receipt, refusals."""

import dataclasses
import enum
import json
import os
import random
import subprocess
import sys
from collections import OrderedDict, namedtuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import gaff
from gaff.errors import RecordError
from gaff.sessions.capture_files import checksum_of

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Told:
    hidden: torch.Tensor
    extra: object = None


class Gives(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def round_trip(make, tmp_path, x=None):
    """What a model returned, as the capture has it and as the file has it."""
    with gaff.capture(Gives(make), ":output") as got:
        got._model(torch.randn(4, 6) if x is None else x)
    got.save(tmp_path / "x.safetensors")
    again = gaff.load(tmp_path / "x.safetensors", "capture")
    assert list(again) == list(got)
    return got[":output"], again[":output"]


def assert_same(one, other):
    assert type(other) is torch.Tensor
    assert (one.dtype, one.shape, one.layout, one.device) == (other.dtype, other.shape, other.layout, other.device)
    assert not other.requires_grad
    if one.layout != torch.strided:
        assert one.layout is not torch.sparse_coo or one.is_coalesced() == other.is_coalesced()
        one, other = one.to_dense(), other.to_dense()
    bits = [tensor.resolve_conj().resolve_neg().flatten().contiguous().view(torch.uint8) for tensor in (one, other)]
    assert torch.equal(*bits)


ODD = {
    "plain": lambda x: x,
    "scalar": lambda x: x.sum(),
    "empty": lambda x: x[:0],
    "empty complex": lambda x: torch.fft.fft(x)[:0],
    "bool": lambda x: x > 0,
    "int64": lambda x: (x * 100).long(),
    "uint16": lambda x: (x * 100).abs().to(torch.uint16),
    "bfloat16": lambda x: x.bfloat16(),
    "float16": lambda x: x.half(),
    "float64": lambda x: x.double(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "float8 of another kind": lambda x: x.to(torch.float8_e4m3fnuz),
    "float8 of exponents": lambda x: x.abs().to(torch.float8_e8m0fnu),
    "complex64": lambda x: torch.fft.fft(x),
    "complex128": lambda x: torch.fft.fft(x.double()),
    "complex scalar": lambda x: torch.fft.fft(x).sum(),
    "conjugate": lambda x: torch.fft.fft(x).conj(),
    "negative bit": lambda x: torch.fft.fft(x).conj().imag,
    "sparse": lambda x: x.relu().to_sparse(),
    "sparse, not coalesced": lambda x: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3)),
    "sparse complex": lambda x: torch.fft.fft(x).to_sparse(),
    "sparse csr": lambda x: x.relu().to_sparse_csr(),
    "sparse csc": lambda x: x.relu().to_sparse_csc(),
    "sparse bsr": lambda x: x.relu().to_sparse_bsr((2, 3)),
    "non-finite": lambda x: torch.tensor([float("nan"), float("inf"), -0.0]),
    "parameter": lambda x: nn.Parameter(x),
    "with a graph": lambda x: x.requires_grad_() * 2,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ODD)
def test_every_odd_tensor_comes_back(name, tmp_path):
    one, other = round_trip(ODD[name], tmp_path)
    assert_same(one, other)


STRIDED = {
    "expanded": lambda x: x[:1].expand(1000, -1),
    "expanded scalar": lambda x: x.sum().expand(5, 7),
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda x: x[:, ::2],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_come_back_where_there_are_no_gaps(name, tmp_path):
    one, other = round_trip(STRIDED[name], tmp_path)
    assert_same(one, other)
    if name != "with gaps":
        assert one.stride() == other.stride()
    assert os.path.getsize(tmp_path / "x.safetensors") < 4000  # an expanded one is written once


def test_structures_come_back_by_what_they_are_read_by(tmp_path):
    def make(x):
        return {
            "pair": Pair(x, x * 2),
            "told": Told(x + 1, extra=[None, True, 3, 2.5, float("inf"), "a\ud800", 1 + 2j, b"\x00", x.dtype]),
            "max": x.max(0),
            3: (x, [x.shape, x.device, range(3)], ()),
            ("a", 1): OrderedDict(last=x),
            "other": object(),
        }

    one, other = round_trip(make, tmp_path)
    assert list(other) == list(one)
    assert type(other["pair"]).__name__ == "Pair"
    assert_same(other["pair"].second, one["pair"][1])
    assert_same(other["told"].hidden, one["told"].hidden)
    assert other["told"].extra == one["told"].extra
    assert_same(other["max"].values, one["max"][0])
    assert_same(other["max"][1], one["max"].indices)
    assert other[3][1:] == ([torch.Size([4, 6]), torch.device("cpu"), range(3)], ())
    assert type(other[3][1][0]) is torch.Size
    assert_same(other["a", 1]["last"], one["a", 1]["last"])
    assert repr(other["other"]) == "<not captured: object>"
    again = gaff.load(tmp_path / "x.safetensors")
    assert_same(again[":output[told][hidden]"], one["told"].hidden)
    assert_same(again[":output[max][values]"], one["max"].values)
    with pytest.raises(gaff.SiteError, match=r"\[pair\] has no \[third\]: it is a Pair with \[first\], \[second\]"):
        again[":output[pair][third]"]
    assert ":output[pair][first]" in load_file(tmp_path / "x.safetensors")


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: (x, Color.RED), r":output\[1\]: holds a Color <Color.RED: 1>, which no file can hold"),
        (lambda x: {"a": [slice(3)]}, r":output\[a\]\[0\]: holds a slice"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r":output: is a Tensor \(quantized\), which no"),
        (lambda x: (torch.nested.nested_tensor([x, x[:1]]),), r":output\[0\]: is a Tensor \(nested\)"),
        (lambda x: x.to("meta"), r":output: is a Tensor \(meta\)"),
        (lambda x: dataclasses.make_dataclass("Odd", ["_x"])(x), "holds a Odd, which no file can hold: Field names"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*uantize", "ignore:The PyTorch API of nested")
def test_what_no_file_can_hold_is_refused_by_name_before_anything_is_written(make, message, tmp_path):
    with gaff.capture(Gives(make), ":output") as got:
        got._model(torch.randn(4, 6))
    (tmp_path / "x.safetensors").write_text("old")
    with pytest.raises(gaff.PlanError, match=message):
        got.save(tmp_path / "x.safetensors")
    assert [one.name for one in tmp_path.iterdir()] == ["x.safetensors"]
    assert (tmp_path / "x.safetensors").read_text() == "old"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        for layer in self.h:
            x = layer(torch.relu(x))
        return self.lstm(x)[0]


@pytest.fixture
def kept(tmp_path):
    model, x = Net(), torch.randn(2, 3, 4)
    b = torch.ones(2, requires_grad=True)
    with gaff.capture(
        model,
        "h.*",
        "lstm@0:output",
        gaff.maybe("h.*/relu"),
        "/relu",
        "*.*:grad_output",
        "h.0.weight:param",
        gaff.maybe("zz*"),
        b=b,
    ) as got:
        model(x)
        (model(2 * x).sum() + (b * b).sum()).backward()
        with torch.no_grad():
            model(x)
    got.save(tmp_path / "x.safetensors")
    return model, got, tmp_path / "x.safetensors"


def test_every_way_of_reading_gives_what_the_capture_gives(kept):
    model, got, path = kept
    again = gaff.load(path, "capture")
    assert list(again) == list(got)
    for run in (0, 1, 2, 3, None):
        assert list(again.run(run)) == list(got.run(run))
        for name in (
            *got,
            "h.0",
            "lstm@0:output[0]",
            "lstm@0:output[1][0]",
            "/relu",
            "/relu#1",
            "**<Linear>",
            "h.*",
            "b",
        ):
            one, other = got.run(run).all(name), again.run(run).all(name)
            assert len(one) == len(other)
            for left, right in zip(one, other, strict=True):
                if isinstance(left, torch.Tensor):
                    assert_same(left, right)
                else:
                    assert (left is None) == (right is None)
    assert torch.equal(again.run(1).stack("h.*"), got.run(1).stack("h.*"))
    assert again.run(2)["h.0:grad_output"] is None
    assert "zz*" not in again
    assert again.receipt == got.receipt
    assert str(again.receipt) == str(got.receipt)
    assert repr(again).splitlines()[0] == f"<gaff capture, saved by gaff {gaff.__version__}, of Net>"
    assert repr(again).splitlines()[1:] == repr(got).splitlines()[1:]
    assert again._repr_html_().count("<tr>") == got._repr_html_().count("<tr>")
    for ask, message in (
        ("h.0", "'h.0' fired 3 times, in runs 0 to 2: say got.run"),
        ("h.9", "'h.9' was not captured: expected one of"),
        ("h.*", "is a pattern: expected one exact site"),
        (model.h[0], "a saved capture holds no modules, and got a Linear: read it by address"),
    ):
        with pytest.raises(gaff.SiteError, match=message):
            again[ask]


class Sums(nn.Module):
    def forward(self, x):
        return torch.relu(x + 1) + 2


def test_ops_are_read_by_every_pattern_that_fits_them(tmp_path):
    model = nn.Sequential(Sums())
    for asked in ("0/*", "**/*"):
        with gaff.capture(model, asked, "0/add:input") as got:
            model(torch.randn(3))
        got.save(tmp_path / "x.safetensors")
        again = gaff.load(tmp_path / "x.safetensors")
        assert list(again) == list(got)
        for one in (got, again):
            assert [len(one.all(name)) for name in ("0/*", "0/add", "*/a*", "0/relu#0", "0/add#1:input")] == [
                3,
                2,
                2,
                1,
                1,
            ]
            assert torch.equal(one.stack("*/add")[1], one["0/add#1"])
            with pytest.raises(gaff.SiteError, match="'0/add' names 2 ops: say which, 0/add#0, 0/add#1"):
                one["0/add"]


def test_a_saved_capture_can_be_saved_again_and_patched_from(kept, tmp_path):
    model, got, path = kept
    again = gaff.load(path)
    again.save(tmp_path / "y.safetensors")
    second = gaff.load(tmp_path / "y.safetensors")
    assert torch.equal(second.run(1)["h.1"], got.run(1)["h.1"])
    assert second.all("**<Linear>") != []  # the classes were saved again, too
    with gaff.edit(model, {"h.1": gaff.edits.patch(again, run=1)}), gaff.capture(model, "h.1") as seen:
        model(torch.randn(2, 3, 4))
    assert torch.equal(seen["h.1"], got.run(1)["h.1"])


def test_what_is_read_can_be_written_into(kept):
    again = gaff.load(kept[2])
    again.run(0)["h.0"].zero_()
    assert again.run(0)["h.0"].abs().sum() > 0


def test_memory_of_two_sites_is_written_once(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 100)))
    with gaff.capture(model, "0", "0.0", ":output") as got:
        model(torch.randn(50, 4))
    got.save(tmp_path / "x.safetensors")
    assert list(load_file(tmp_path / "x.safetensors")) == ["0"]
    again = gaff.load(tmp_path / "x.safetensors")
    again["0"].zero_()
    assert torch.equal(again["0.0"], got["0.0"])
    assert torch.equal(again[":output"], got["0"])


def test_views_of_one_memory_stay_two_values(tmp_path):
    one, other = round_trip(lambda x: (x[:2], x[2:], x.t(), x.view(torch.int32)), tmp_path)
    for left, right in zip(one, other, strict=True):
        assert_same(left, right)


def test_a_value_that_cannot_be_trusted_stays_one(tmp_path):
    model, x = nn.Sequential(nn.ReLU(inplace=True)), torch.randn(3)
    with gaff.capture(model, "0:input", "0") as got:
        model(x)
    x.zero_()
    got.save(tmp_path / "x.safetensors")
    again = gaff.load(tmp_path / "x.safetensors")
    assert "0:input" in again
    for capture in (got, again):
        with pytest.raises(gaff.ExactnessError, match="^0:input: its memory was changed in place after the capture"):
            capture["0:input"]


def test_events_that_were_let_go_are_told(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    with gaff.capture(model, "0", last=1) as got:
        for _ in range(3):
            model(torch.ones(2))
    got.save(tmp_path / "x.safetensors")
    again = gaff.load(tmp_path / "x.safetensors")
    assert torch.equal(again["0"], got["0"])
    with pytest.raises(gaff.SiteError, match="'0' has no event in run 0; 2 older events were let go"):
        again.run(0)["0"]


def test_module_names_may_be_anything(tmp_path):
    model = nn.Sequential()
    for name in ("__metadata__", "a b", "0 run 0 call 0", "ü`"):
        model.add_module(name, nn.Identity())
    with gaff.capture(model, "*") as got:
        model(torch.randn(2))
        model(torch.randn(2))
    got.save(tmp_path / "x.safetensors")
    again = gaff.load(tmp_path / "x.safetensors")
    assert list(again) == list(got)
    assert all(torch.equal(again.run(1)[name], got.run(1)[name]) for name in got)


def test_names_and_endings(kept, tmp_path, monkeypatch):
    _, got, path = kept
    with pytest.raises(gaff.PlanError, match=r"'x.pt' has another ending: expected a file name ending in .safetensors"):
        got.save("x.pt")
    with pytest.raises(RecordError, match="none/x.safetensors' cannot be written"):
        got.save(tmp_path / "none" / "x.safetensors")
    with pytest.raises(RecordError, match=r"x.safetensors' is of kind 'capture': expected one of kind 'trace'"):
        gaff.load(path, "trace")
    with safe_open(str(path), "pt") as file:
        assert set(file.metadata()) == {"gaff", "model", "gaff_capture", "gaff_checksum"}
        assert "h.0 run 1 call 0" in set(file.keys())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for ask in (lambda: got.save(tmp_path / "z.safetensors"), lambda: gaff.load(path)):
        with pytest.raises(
            gaff.PlanError, match="a saved capture needs the package 'safetensors', .*'gaff\\[files\\]'"
        ):
            ask()


def test_an_interrupted_save_leaves_what_was_there(kept, monkeypatch):
    _, got, path = kept
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(RecordError, match="cannot be written: no space"):
        got.save(path)
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 1


def _told(path):
    with safe_open(str(path), "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


DAMAGES = [
    lambda told: told.update(format=2),
    lambda told: told.pop("sites"),
    lambda told: told["sites"][0].update(site=["h.0", None, None, None, "nope", []]),
    lambda told: told["sites"][0].update(inner=[99]),
    lambda told: told["sites"][0].update(events=[[0, 0, 0, ["tensor", {"name": "no"}]]]),
    lambda told: told["sites"][0].update(events=[[0, 0, 0, ["tensor", {"name": "b", "expand": [7, 5]}]]]),
    lambda told: told["sites"][0].update(events=[[0, 0, 0, ["tensor", {"name": "b", "bytes": ["Tensor", [2]]}]]]),
    lambda told: told["sites"][0].update(events=[[0, 0, 0, ["tensor", {"name": "b", "order": [5]}]]]),
    lambda told: told["sites"][0].update(
        events=[
            [0, 0, 0, ["tensor", {"sparse_coo": [{"name": "b"}, {"name": "b"}], "size": [2], "is_coalesced": True}]]
        ]
    ),
    lambda told: told["sites"][0].update(events=[[0, 0, 0, ["named", "x=1", ["a b"], [["plain", 1]]]]]),
    lambda told: told["sites"][0].update(events=[[0, 0, 0, ["plain", [1]]]]),
    lambda told: told["sites"][0].update(events=[[0, 0, 0, ["__import__", "os"]]]),
    lambda told: told["sites"][0].update(events=3),
    lambda told: told["receipt"].update(rows=[{"x": 1}]),
    lambda told: told["receipt"].update(more=1),
]


@pytest.mark.parametrize("damage", range(len(DAMAGES)))
def test_hostile_files_are_refused(kept, tmp_path, damage):
    metadata, tensors = _told(kept[2])
    told = json.loads(metadata["gaff_capture"])
    DAMAGES[damage](told)
    text = json.dumps(told)
    told_as = {**metadata, "gaff_capture": text, "gaff_checksum": checksum_of(text, tensors)}
    save_file(tensors, tmp_path / "y.safetensors", told_as)
    with pytest.raises(RecordError, match="y.safetensors' is no capture that gaff has saved: (?!.*checksum)"):
        gaff.load(tmp_path / "y.safetensors")


def test_one_bit_that_is_another_is_noticed(kept, tmp_path):
    whole, made = bytearray(kept[2].read_bytes()), random.Random(0)
    changed = tmp_path / "y.safetensors"
    for _ in range(60):
        place, bit = made.randrange(len(whole)), 1 << made.randrange(8)
        whole[place] ^= bit
        changed.write_bytes(whole)
        whole[place] ^= bit
        try:
            again = gaff.load(changed)
        except RecordError:
            continue
        assert list(again) == list(gaff.load(kept[2]))  # what stands beside the values, as the name of the model


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_strided_values_of_types_that_torch_copies_no_parts_of(dtype, tmp_path):
    values = torch.arange(24).view(4, 6).to(dtype)
    for one, again in zip(*round_trip(lambda x: (values[:, 0], values[:, ::2]), tmp_path), strict=True):
        assert again.dtype == dtype
        assert again.tolist() == one.tolist()


def test_other_files_of_tensors_and_torn_ones_are_told_for_what_they_are(kept, tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "y.safetensors")
    with pytest.raises(
        RecordError, match="is a file of tensors: expected a run, a trace, an anatomy, a capture or a harvest; read"
    ):
        gaff.load(tmp_path / "y.safetensors")
    whole = kept[2].read_bytes()
    (tmp_path / "z.safetensors").write_bytes(whole[:-10])
    with pytest.raises(RecordError, match="is no capture that gaff has saved: SafetensorError"):
        gaff.load(tmp_path / "z.safetensors")
    (tmp_path / "z.safetensors").write_bytes(whole[:100])
    with pytest.raises(RecordError, match="is a file of tensors"):
        gaff.load(tmp_path / "z.safetensors")


@pytest.mark.slow
def test_what_the_command_line_takes_is_a_capture(tmp_path):
    out = tmp_path / "f.safetensors"
    (tmp_path / "net.py").write_text("import torch\nlstm = torch.nn.LSTM(3, 4)\nx = torch.ones(2, 1, 3)\n")
    command = ["take", f"{tmp_path}/net.py:lstm", ":output", ":output[1]", "--input", f"{tmp_path}/net.py:x"]
    subprocess.run([sys.executable, "-m", "gaff", *command, "--out", str(out)], check=True, stdout=subprocess.PIPE)
    assert set(load_file(out)) == {":output[0]", ":output[1][0]", ":output[1][1]"}
    found = gaff.load(out, "capture")
    assert list(found) == [":output", ":output[1]"]
    assert found[":output"][0].shape == (2, 1, 4)
    assert torch.equal(found[":output[1][1]"], found[":output"][1][1])
    assert found.receipt.rows[0].fired == 1
    assert found.model.endswith("net.py:lstm")
