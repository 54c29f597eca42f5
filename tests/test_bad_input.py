"""What is asked for in a wrong way is told in gaff's own words, and nothing is done."""

import pytest
import torch
from torch import nn

import gaff
from gaff import keep


@pytest.fixture
def captured():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with gaff.capture(model, "0", "1") as got:
        model(torch.ones(2, 4))
    return got


@pytest.mark.parametrize("wanted", [None, 5, lambda site: True])
def test_what_is_no_address_cannot_be_stacked(captured, wanted):
    with pytest.raises(gaff.SiteError, match="expected an address as text"):
        captured.stack(wanted)
    assert captured.stack(["0", "1"]).shape == captured.stack(iter(("0", "1"))).shape == (2, 2, 3)


def test_runs_are_not_counted_from_the_end(captured):
    with pytest.raises(gaff.SiteError, match="runs are counted from 0, and not from the end"):
        captured.run(-1)["0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 2e9}, "budget=2000000000.0: expected a whole number of bytes"),
        ({"last": 1.5}, "last=1.5: expected a whole number of events"),
        ({"clone": True, "reference": True}, "clone=True copies every tensor, reference=True no parameter"),
        ({"reduce": keep.norm}, r"this was not called: expected \(\), as in keep.norm"),
    ],
)
def test_options_of_captures(options, message):
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(gaff.PlanError, match=message), gaff.capture(model, "0", **options):
        model(torch.ones(2, 4))


def test_dimensions_come_one_by_one_or_in_a_list():
    assert keep.mean([0, 1]) == keep.mean(0, 1) == keep.mean((0, 1))
    assert keep.norm() == keep.norm([])
    with pytest.raises(gaff.PlanError, match="expected a step of 1 or more"):
        keep.rows(slice(0, 2, 0))


def test_a_watch_is_good_once():
    model = nn.Linear(4, 3)
    handle = gaff.watch(model)
    with handle:
        pass
    with pytest.raises(gaff.PlanError, match="this watch is over"), handle:
        pass
    removed = gaff.watch(model)
    removed.remove()
    with pytest.raises(gaff.PlanError, match="this watch is over"), removed:
        pass


@pytest.mark.parametrize("loader", [None, torch.ones(4, 4)])
def test_a_loader_gives_batches(loader):
    with pytest.raises(gaff.PlanError, match="was given for a loader: expected batches"):
        gaff.take(nn.Sequential(nn.Linear(4, 3)), "0").over(loader)


def test_a_device_that_is_none_is_told_before_the_model_runs():
    ran = []
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(RuntimeError, match="gpu"):
        gaff.take(model, "0").over([torch.ones(4, 4)], to="gpu")
    assert not ran


def test_norms_that_were_never_asked_for():
    norms = gaff.sample_norms(nn.Linear(4, 3))
    with pytest.raises(gaff.SiteError, match="no run had a backward pass while this was open"):
        norms.total()


@pytest.mark.parametrize("state", [None, {"a": 1}, {"epoch": 1}])
def test_what_is_no_state_of_a_loader(tmp_path, state):
    store = gaff.harvest(nn.Sequential(nn.Linear(4, 3)), [torch.ones(8, 4)], "0", out=tmp_path / "h", progress=False)
    with pytest.raises(gaff.PlanError, match="is no state of a loader"):
        store.loader("0", batch=2).load_state_dict(state)


def test_the_port_that_is_meant_where_none_is_said_may_be_said(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert record.series("0:output", "rms") == record.series("0", "rms")
    assert len(record.series(":output", "rms")) == 3
    with pytest.raises(gaff.RecordError, match="None is no name of a site"):
        record.series(None, "rms")


def test_a_patch_from_several_runs_says_which():
    model = nn.Sequential(nn.Linear(4, 3))
    with gaff.capture(model, "0") as got:
        model(torch.ones(2, 4))
        model(torch.zeros(2, 4))
    with pytest.raises(gaff.PlanError, match=r"fired 2 times in what is patched from: expected patch\(..., run=0\)"):
        with gaff.edit(model, {"0": gaff.edits.patch(got)}):
            model(torch.ones(2, 4))
    with gaff.edit(model, {"0": gaff.edits.patch(got, run=1)}):
        assert torch.equal(model(torch.ones(2, 4)), model(torch.zeros(2, 4)))


@pytest.mark.parametrize("path", [None, 5])
def test_what_is_no_path(path):
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(gaff.PlanError, match="is no path: expected the name of a file"):
        gaff.trace(model, torch.ones(2, 4)).save(path)


@pytest.mark.parametrize("index", ["0", 1.0, {"a": 1}])
def test_what_is_no_row(tmp_path, index):
    store = gaff.harvest(nn.Sequential(nn.Linear(4, 3)), [torch.ones(8, 4)], "0", out=tmp_path / "h", progress=False)
    with pytest.raises(IndexError, match="expected"):
        store["0"][index]
    with pytest.raises(gaff.SiteError, match="is not in"):
        store[[]]


class TakesAny(nn.Module):
    """As models of transformers do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, scale=1.0, **more):
        return self.fc(x) * scale


class HandsOn(TakesAny):
    """A wrapper, of which nobody can tell what it takes."""

    def forward(self, *args, **kwargs):
        return self.fc(*args)


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (gaff.trace, {"backwards": 1}, "backwards= is no option here, .*: expected backward=, or a keyword"),
        (gaff.trace, {"picture": True}, "picture= is no option here, .*: expected pictures=, or a keyword"),
        (gaff.sites, {"op": True}, "op= is no option here, .*: expected ops=, or a keyword"),
    ],
)
def test_an_option_with_a_slip_does_not_get_lost_in_a_model_that_takes_any_keyword(function, given, message):
    with pytest.raises(gaff.PlanError, match=message):
        function(TakesAny(), torch.ones(2, 4), **given)
    function(TakesAny(), torch.ones(2, 4), scale=2.0, output_attentions=True, depth=1)
    function(HandsOn(), torch.ones(2, 4), **given)
