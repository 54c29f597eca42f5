"""What ends a cell of a notebook shows itself: plain HTML without script, some kilobytes, everything escaped."""

import html.parser
import itertools
import re
import sys
import types
import zlib
from base64 import b64decode

import pytest
import torch
from torch import nn

import gaff
from gaff.sessions.thumbnails import thumbnail
from gaff.training.watch.live_cell import LiveCell
from gaff.views.notebook import cell, picture, sparkline_image, table_html
from gaff.views.run_html import run_cell
from gaff.views.run_text import site_table

EMPTY = {"br", "img", "circle", "polyline"}


class Outline(html.parser.HTMLParser):
    """The tags of a text; raises where one is not closed, or closed by another."""

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.add_module("<b>x", nn.ReLU())
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self._modules["<b>x"](self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "one"
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=folder, every=1) as watch:
        for step in range(30):
            optimizer.zero_grad()
            x = torch.rand(2, 1, 8, 8)
            if step == 20:
                x[0] = float("nan")
            model(x).square().mean().backward()
            optimizer.step()
    return folder, watch


def shown(value):
    """The HTML of a cell, checked as all cells are."""
    text = value._repr_html_()
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert not {"script", "iframe", "link"} & set(outline.tags)
    assert "<b>x" not in text
    assert len(text) < 60_000
    return text


def test_sites_fold(run):
    text = shown(gaff.sites(Net()))
    assert "<details open><summary>" in text
    assert "&lt;b&gt;x" in text
    deep = gaff.sites(nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2)))))
    assert [str(deep.view(depth)).count("<details open>") for depth in (0, 1, 2, 9)] == [0, 1, 2, 3]
    assert "<td>fc</td>" in shown(gaff.sites(Net(), "fc"))


def test_a_capture_and_its_receipt(run):
    model = Net()
    with gaff.capture(model, "conv", "fc", ":output") as got:
        model(torch.rand(2, 1, 8, 8))
    text = shown(got)
    assert text.count("<img ") == 3  # feature maps, and two tables of numbers
    assert "2x4x6x6 float32" in text
    assert "fired" in shown(got.receipt)
    with gaff.edit(model, {"conv": gaff.edits.zero()}) as edit:
        model(torch.rand(2, 1, 8, 8))
    assert "delta" in shown(edit.receipt)


def test_a_trace_and_what_is_more_on_its_page():
    trace = gaff.trace(Net(), torch.rand(1, 1, 8, 8), backward=lambda y: y[0, 1], pictures=True)
    text = shown(trace)
    assert "Net on cpu: 4 calls" in text
    assert "class activation map of class 1" in text
    assert str(trace.page(height=321)).startswith('<iframe sandbox="allow-scripts" width="100%" height="321"')


def test_a_run_its_findings_and_a_difference(run):
    folder, watch = run
    record = gaff.load(folder)
    text = shown(record)
    assert 'class="error">wrong</span>' in text
    assert "data:image/svg+xml" in text
    assert "nonfinite" in shown(record.findings)
    assert "nonfinite" in shown(watch.findings)
    assert "no findings" in shown(type(record.findings)())
    assert "step 30" in shown(watch)
    assert str(record.page()).startswith("<iframe")
    other = gaff.trace(Net(), torch.rand(1, 1, 8, 8))
    difference = gaff.diff(gaff.trace(Net(), torch.rand(1, 1, 8, 8)), other)
    assert difference.verdict[:20] in shown(difference).replace("&#x27;", "'")
    assert str(difference.page()).startswith("<iframe")


def test_a_watched_training_is_one_output_that_changes(tmp_path, monkeypatch):
    """As IPython calls it, by a stand-in that takes down what is displayed."""
    displayed = []

    class Handle:
        def update(self, value):
            displayed.append(value)

    fake = types.ModuleType("IPython.display")
    fake.HTML = str
    fake.display = lambda value, display_id: displayed.append(value) or Handle()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = gaff.watch(model, optimizer, every=1)
    watch._ipython_display_()
    for _ in range(25):
        optimizer.zero_grad()
        model(torch.rand(3, 4)).square().mean().backward()
        optimizer.step()
    watch.remove()
    assert "step 0" in displayed[0]
    assert "step 25" in displayed[-1]
    assert "nothing wrong was found so far" in displayed[-1]


def test_pictures_are_png_of_the_right_colours():
    text = str(picture(bytes([0, 255, 128, 127]), 2, 2, is_signed=True, title='a "b"'))
    data = b64decode(re.search(r"base64,([^\"]+)", text)[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at = data.index(b"IDAT")
    pixels = zlib.decompress(data[at + 4 : at + 4 + int.from_bytes(data[at - 4 : at], "big")])
    assert pixels[:7] == bytes([0, 38, 110, 190, 205, 72, 48])  # no filter, blue, red
    assert 'alt="a &quot;b&quot;"' in text


def drawing(curve):
    """The SVG inside the picture of a small curve."""
    return b64decode(re.search(r"base64,([^\"]+)", str(curve))[1]).decode()


def test_small_curves_show_what_is_not_finite():
    curve = sparkline_image([1.0, 2.0, float("nan"), 3.0, 1.0], "a < b")
    assert drawing(curve).count("polyline") == 2
    assert "#d64545" in drawing(curve)
    assert 'alt="a &lt; b"' in str(curve)
    assert str(sparkline_image([])) == ""
    assert "circle" in drawing(sparkline_image([5.0]))
    assert "nan" not in drawing(sparkline_image([float("inf")] * 3))


def test_cells_escape_and_leave_empty_columns_out():
    assert table_html(("a", "b"), [("<x>", "")]) == (
        "<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;x&gt;</td></tr></tbody></table>"
    )
    assert cell("<x>").endswith("<p>&lt;x&gt;</p></div>")


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_thumbnails_tell_what_is_not_finite_and_the_range_of_the_first_example():
    bad = str(thumbnail(torch.full((4, 8), float("nan"))))
    assert "no finite value" in bad
    assert "32 of 32 not finite" in bad
    row = torch.zeros(1, 20)
    row[0, 3] = float("inf")
    assert "1 of 20 not finite" in str(thumbnail(row))
    assert str(thumbnail(row)) != str(thumbnail(torch.zeros(1, 20)))
    assert "1e+300 to 1e+300" in str(thumbnail(torch.full((3, 4), 1e300, dtype=torch.float64)))
    assert "3e+38 to 3e+38" in str(thumbnail(torch.full((1, 3, 64, 64), 3e38)))
    pooled = torch.rand(2, 16, 1, 1)
    other = pooled.clone()
    other[1] += 1
    assert str(thumbnail(pooled)) == str(thumbnail(other))  # of the first example alone
    spike = torch.zeros(1, 500)
    spike[0, 400] = 1e6
    assert str(thumbnail(spike)) != str(thumbnail(torch.zeros(1, 500)))
    assert str(thumbnail(torch.masked.masked_tensor(torch.rand(2, 3, 4, 4), torch.ones(2, 3, 4, 4) > 0))) == ""


def test_a_display_that_raises_costs_no_look(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = gaff.watch(model, optimizer, every=1, out=tmp_path / "run")
    calls = []

    def gone(*told):
        calls.append(told)
        raise Exception("the kernel is gone")

    progress = watch._watcher.reporter.progress
    progress.viewers.append(gone)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.rand(3, 4)).square().mean().backward()
        optimizer.step()
    watch.remove()
    assert len(calls) == 1
    assert progress.viewers == []
    assert watch.failure is None


@pytest.mark.slow
def test_a_long_curve_keeps_its_time_even():
    live = LiveCell()
    for at in range(9001):
        live.update(at, {"loss:loss": float(at)}, (), 0.01)
    values = live._curves["loss:loss"]
    assert len(values) <= 2000
    assert len({b - a for a, b in itertools.pairwise(values)}) == 1


def test_a_cell_of_many_calls_holds_the_outer_ones():
    model = nn.Sequential(*(nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(450)))
    text = gaff.trace(model, torch.rand(1, 2), flops=False)._repr_html_()
    assert "900 calls further inside: .page() shows all" in text


def test_what_is_not_to_be_seen_is_escaped():
    assert "\\u202e" in cell("a\u202eb")
    assert "\x1b" not in cell("\x1b[31m")


def test_an_rms_beside_values_that_are_not_finite_is_marked(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].bias[1] = float("nan")
    with gaff.watch(model, out=tmp_path / "run"):
        model(torch.ones(5, 4))
        (model(torch.ones(5, 4)).sum()).backward()
    record = gaff.load(tmp_path / "run")
    kept = record.series("0", "rms").values[-1]
    table = site_table(record, [], plain=True)
    assert f"{kept:.4g}!" in table, table
    assert "nan!" in table, table
    assert table.endswith("! NaN or inf among the values; an rms is that of the finite ones")
    shown = run_cell(record)
    assert f">{kept:.4g}!<" in shown
    assert "an rms is that of the finite ones" in shown
