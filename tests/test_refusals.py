"""What is given in the place of an address or an option, and is none: refused before anything is installed, in words."""

import numpy as np
import pytest
import torch
from torch import nn

import gaff
from gaff import edits, keep
from gaff.errors import GaffError, PlanError, SiteError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.act = nn.Linear(4, 4), nn.ReLU()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.act(self.blocks[0](self.inp(x)))


OPENED = {
    "capture": lambda model, pattern: gaff.capture(model, pattern),
    "edit": lambda model, pattern: gaff.edit(model, {pattern: edits.zero()}),
    "take": lambda model, pattern: gaff.take(model, pattern),
    "maybe": lambda model, pattern: gaff.capture(model, gaff.maybe(pattern)),
}


@pytest.mark.parametrize("how", OPENED)
def test_a_class_of_modules_is_no_predicate(how):
    model = Net()
    with pytest.raises(PlanError, match=r"the class ReLU given as a pattern: expected '\*\*<ReLU>'"):
        OPENED[how](model, nn.ReLU)
    with gaff.capture(model, "**<ReLU>") as got:
        model(torch.ones(2, 4))
    assert list(got) == ["act"]


@pytest.mark.parametrize("how", ["capture", "edit", "take"])
def test_a_container_given_as_an_object_is_refused_as_its_name_is(how):
    model = Net()
    with pytest.raises(SiteError, match="blocks: 'blocks' is a ModuleList, a container that is never called itself"):
        OPENED[how](model, model.blocks)


def test_what_is_allowed_is_a_list_of_patterns():
    model = nn.Sequential(*(nn.Identity() for _ in range(11)))
    for allow in ("10", "log", 3):
        with pytest.raises(PlanError, match=f"allow={allow!r} is no list of patterns"):
            gaff.guard(model, allow=allow)
    gaff.guard(model, allow=(one for one in ["1", "10"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there():
    with pytest.raises(PlanError, match="to='cuda': torch finds no such device here"):
        gaff.capture(Net(), "act", to="cuda")


def test_numbers_of_numpy_are_saved(tmp_path):
    plan = gaff.Plan.edit({"act": edits.at(keep.heads(0, np.int64(2)), edits.zero())})
    plan.save(tmp_path / "plan.json")


WRONG = {
    "slice([0, 3], 5)": lambda model: keep.rows(slice([0, 3], 5)),
    "slice([], 5)": lambda model: keep.rows(slice([], 5)),
    "pairs": lambda model: gaff.diff(_trace(model), _trace(model), pairs=[("inp", "act")]),
    "tolerance": lambda model: gaff.diff(_trace(model), _trace(model), tolerance=True),
    "only": lambda model: gaff.watch(model, only=[model.inp]),
    "no only": lambda model: gaff.watch(model, only=None),
    "depth": lambda model: _trace(model).tree(depth="1"),
    "no edits": lambda model: gaff.edit(model, {}),
    "skip": lambda model: gaff.edit(model, {"inp.weight:grad": edits.skip()}),
}


def _trace(model):
    return gaff.trace(model, torch.ones(2, 4))


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_meant_is_refused_in_words(what):
    with pytest.raises(GaffError, match="expected"):
        WRONG[what](Net())


def test_a_skip_of_a_parameter_names_its_module():
    with pytest.raises(PlanError, match="skip takes the place of a whole module: expected it at inp$"):
        gaff.edit(Net(), {"inp.weight:grad": edits.skip()})


def test_a_harvest_that_kept_no_row_says_so(tmp_path):
    model, batches = nn.Linear(4, 6), [(torch.randn(3, 4), torch.arange(3))]
    with pytest.raises(PlanError, match="the batch has no 2"):
        gaff.harvest(model, batches, ":output", out=tmp_path / "out", labels={"y": 2}, progress=False)
    with pytest.raises(PlanError, match="another out= \\(no row is kept there yet: the folder may be removed\\)"):
        gaff.harvest(model, batches, ":output", out=tmp_path / "out", labels={"y": 1}, progress=False)


def test_a_run_is_a_number():
    model = Net()
    with gaff.capture(model, "act") as got:
        model(torch.ones(2, 4))
    for wrong in ("0", True):
        with pytest.raises(PlanError, match="expected the number of a run, from 0, or None for all"):
            got.run(wrong)
    assert got.run(0)["act"].shape == (2, 4)
