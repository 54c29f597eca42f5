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


def test_the_loss_is_drawn_with_its_evaluations_and_what_was_found(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.rand(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(45):
            model.train()
            loss = nn.functional.mse_loss(model(x), torch.zeros(8, 2)) * (float("nan") if step == 40 else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 19:
                torch.save(model.state_dict(), tmp_path / f"{step}.pt")
            if step % 15 == 14:
                model.eval()
                with torch.no_grad():
                    nn.functional.mse_loss(model(x), torch.zeros(8, 2))
    record = gaff.load(tmp_path / "run")
    axes = figures.loss(record).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["loss"].get_ydata())[:40] == record.scalar("loss").values[:40]
    assert list(lines["evaluated (mse_loss)"].get_xdata()) == [step for step, _ in record.evaluated()["mse_loss"]]
    assert list(lines["saved"].get_xdata()) == [19, 39]
    assert "nonfinite" in {text.get_text() for text in axes.texts}
    plain = figures.loss([record], events=False, smoothing=0.5).axes[0]
    assert not plain.texts
    assert len(plain.get_lines()) == 3  # as it was, smoothed, evaluated
    with pytest.raises(PlanError, match="smoothing=1: expected a weight from 0 to below 1"):
        figures.loss(record, smoothing=1)
    assert figures.smoothed([0.0, 1.0, float("nan")], 0.5)[1] == pytest.approx(2 / 3)


def test_attention_is_drawn_head_by_head_with_its_tokens():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 8)

        def forward(self, ids):
            x = self.table(ids).unflatten(-1, (2, 4)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model, ids = Net(), torch.tensor([[1, 2, 3, 4, 5]])
    trace = gaff.trace(model, ids, pictures=True).with_tokens(lambda known: [f"w{one}" for one in known])
    site = next(one.site for one in trace.pictures if one.kind == "attention")
    figure = figures.attention(trace, site)
    shown = np.stack([np.asarray(axes.get_images()[0].get_array()) for axes in figure.axes])
    x = model.table(ids).unflatten(-1, (2, 4)).transpose(1, 2)[0]
    wanted = (x @ x.mT / 2).softmax(-1).detach().numpy()
    assert np.abs(shown - wanted).max() < 0.01
    assert [one.get_text() for one in figure.axes[0].get_yticklabels()] == ["w1", "w2", "w3", "w4", "w5"]
    assert len(figures.attention(trace, site, heads=[1]).axes) == 1
    for heads in ([2], [0.5], ["a"], 5, []):
        with pytest.raises(PlanError, match="expected numbers from 0 to 1"):
            figures.attention(trace, site, heads=heads)
    with pytest.raises(RecordError, match="the trace has no picture of attention at 'table'"):
        figures.attention(trace, "table")
    with pytest.raises(RecordError, match="no picture of feature maps at 'table'"):
        figures.features(trace, "table")


def test_a_map_leaves_a_pause_empty():
    edges, table = figures._with_gaps([0, 1, 2, 20, 21], [0, 1, 2, 20, 21], np.ones((2, 5)))
    assert edges == [0, 1, 2, 3, 20, 21, 22]
    assert np.isnan(table[0]).tolist() == [False, False, False, True, False, False]
