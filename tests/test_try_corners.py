"""What experiments change, called as ``gaff try`` calls it: the truth is what a script would do by hand."""

import sys
import weakref
from contextlib import ExitStack

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gaff.training.diagnosis import changes
from gaff.training.diagnosis.data import OneBatch, Scramble


def given(change, module, tensor):
    """What a call of a module is given in place of a tensor."""
    with ExitStack() as stack:
        (made,), _ = change.around(module, ((tensor,), {}), stack)
    return made


def sgd(*modules):
    return torch.optim.SGD([one for module in modules for one in module.parameters()], 0.1)


def test_each_call_of_a_step_has_its_own_first_input():
    change, module = OneBatch(), nn.Linear(2, 1)
    optimizer, other = sgd(module), sgd(nn.Linear(1, 1))
    steps = [[torch.randn(3, 2) for _ in range(2)] for _ in range(3)]
    for number, calls in enumerate(steps):
        made = [given(change, module, one) for one in calls]
        assert all(torch.equal(one, first) for one, first in zip(made, steps[0], strict=True)), number
        change.after_step(optimizer)
        change.after_step(other)  # of the same step


def test_a_step_ends_with_the_optimizer_that_was_first():
    """As of a discriminator that is called for both of two optimizers."""
    change, module = OneBatch(), nn.Linear(2, 1)
    first, second = sgd(module), sgd(nn.Linear(1, 1))
    rounds = [[torch.randn(3, 2) for _ in range(3)] for _ in range(3)]
    seen = []
    for calls in rounds:
        seen.append([given(change, module, calls[0])])
        change.after_step(first)
        seen[-1] += [given(change, module, one) for one in calls[1:]]
        change.after_step(second)
    for later in seen[2:]:
        assert all(torch.equal(one, known) for one, known in zip(later, seen[1], strict=True))


def test_a_loader_that_takes_the_place_of_another_has_its_batch():
    change, data = OneBatch(), TensorDataset(torch.arange(12.0).unsqueeze(1))
    first = None
    for _ in range(3):
        loader = DataLoader(data, 4)
        for batch in loader:
            (made,) = change.batch(loader, batch)
            first = made.clone() if first is None else first
            assert torch.equal(made, first)
        gone = weakref.ref(loader)
        del loader
        assert gone() is None
    small = DataLoader(data, 3)
    (batch,) = change.batch(small, next(iter(small)))
    assert len(batch) == 3  # another loader


def test_what_a_frozen_body_has_made_is_no_input():
    change, body, head = Scramble(), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1)
    x = torch.arange(8.0).view(4, 2)
    made = given(change, body, x)
    assert not torch.equal(made, x)
    features = body(made)
    change.returned(features)
    assert given(change, head, features) is features
    assert torch.equal(given(change, head, features.view(4, 2)), features)
    assert not torch.equal(given(change, head, x), x)


def test_unfreezing_leaves_parameters_to_the_optimizer_that_has_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    often, seldom = sgd(model[0]), sgd(model[1])
    change = changes.Unfreeze()
    given(change, model, torch.randn(1, 2))
    for _ in range(4):
        change.before_step(often)
    assert len(often.param_groups[0]["params"]) == 2
    assert change.acted == 0
    assert len(seldom.param_groups[0]["params"]) == 2


def test_unfreezing_takes_up_what_nobody_has_but_not_for_lbfgs():
    for kind, count in ((torch.optim.SGD, 4), (torch.optim.LBFGS, 2)):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = kind(model[0].parameters(), lr=0.1)
        change = changes.Unfreeze()
        given(change, model, torch.randn(1, 2))
        change.before_step(optimizer)
        change.before_step(optimizer)
        assert len(optimizer.param_groups[0]["params"]) == count


def test_gradients_can_be_looked_at_before_they_are_cleared():
    model = nn.Linear(2, 1)
    optimizer, change = sgd(model), changes.ClearGradients()
    model(torch.randn(1, 2)).sum().backward()
    optimizer.step()
    change.after_step(optimizer)
    assert model.weight.grad is not None
    given(change, model, torch.randn(1, 2))
    assert model.weight.grad is None
    assert change.acted == 1


def test_a_group_without_a_rate_keeps_none():
    model = nn.Linear(2, 1)
    optimizer, change = sgd(model), changes.learning_rate(0.1, is_factor=True)
    optimizer.param_groups[0]["lr"] = None
    change.before_step(optimizer)
    change.after_step(optimizer)
    assert (optimizer.param_groups[0]["lr"], change.acted) == (None, 0)


@pytest.mark.parametrize(
    ("seed", "other"),
    [(0, 1), (numpy.int64(7), 8), (2**32 - 1, 2**32 - 2), (2**64 - 1, 2**64 - 2), (None, None), (True, True)],
)
def test_seeds_of_any_kind_of_number_are_others(seed, other):
    assert changes.Seed(1)._other(seed) == other


def test_a_file_that_is_none_of_gaffs_stays(tmp_path):
    from gaff.cli.launch import make_folder

    (tmp_path / "try.json").write_text("mine")
    (tmp_path / "try").mkdir()
    (tmp_path / "try" / "mine.txt").write_text("mine")
    for force in (False, True):
        folder = tmp_path if not force else tmp_path / "."
        if force:
            (tmp_path / "run.json").unlink()
        make_folder(str(folder), [sys.executable], force=force)
        assert (tmp_path / "try.json").read_text() == "mine"
        assert (tmp_path / "try" / "mine.txt").exists()
