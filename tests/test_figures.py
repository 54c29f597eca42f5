"""Figures for papers hold the numbers of the record."""

import numpy as np
import pytest
import torch
from torch import nn

import gaff
from gaff.compat import extras
from gaff.errors import PlanError, RecordError
from gaff.views import figures
from made_records import make


def test_the_signal_by_depth_is_that_of_the_record(tmp_path):
    record = gaff.load(make(tmp_path / "run"))
    axes = figures.signal_by_depth(record, stat="rms", port="output").axes[0]
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert set(lines) == {"step 0", "step 1", "step 2"}
    series = dict(record.series("fc1", "rms"))
    assert lines["step 2"][0] == pytest.approx(series[2])
    assert axes.get_yscale() == "log"


def test_a_heat_map_is_that_of_the_record_also_with_odd_names(tmp_path):
    record = gaff.load(make(tmp_path / "run", sites=["fc", "`$x$`", "`[Ünï] <b>`"]))
    figure = figures.heat_map(record, stat="max")
    (mesh,) = figure.axes[0].collections
    table = np.asarray(mesh.get_array().filled(np.nan)).reshape(-1, 3)
    assert table[0, 2] == pytest.approx(dict(record.series(record.sites[0], "max"))[2])
    figure.canvas.draw()


def test_curves_of_several_runs(tmp_path):
    records = [gaff.load(make(tmp_path / name)) for name in ("a", "b")]
    axes = figures.curves(records, "lr").axes[0]
    assert [line.get_label() for line in axes.get_lines()] == ["a", "b"]
    assert figures.curves(records[0]).axes[0].get_lines()[0].get_ydata()[0] == 0.25


def test_pictures_of_a_trace(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 2))
    x = torch.rand(1, 3, 8, 8)
    trace = gaff.trace(model, x, backward=lambda y: y[0, 0], pictures=True)
    figure = figures.picture(trace, "0", "feature maps")
    shown = [axes.get_images()[0].get_array() for axes in figure.axes]
    assert len(shown) == 5
    wanted = model[0](x)[0, 3].detach().numpy()
    assert np.abs(shown[3] - wanted).max() < 0.02
    over = figures.picture(trace, "0", "class activation")
    assert len(over.axes[0].get_images()) == 2
    figures.picture(trace, ":input[0]").savefig(tmp_path / "x.svg")
    with pytest.raises(RecordError, match="the trace has no picture at .00.; nearest: 0"):
        figures.picture(trace, "00")


def test_what_is_not_there_is_told(tmp_path, monkeypatch):
    record = gaff.load(make(tmp_path / "run"))
    with pytest.raises(RecordError, match="no site has 'entropy' of 'output'"):
        figures.heat_map(record, stat="entropy")

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(PlanError, match="pip install 'gaff\\[figures\\]'"):
        figures.curves(record)
