"""A leaf that serves several runs: each backward's gradient belongs to its own run."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import gaff


def test_one_gradient_for_each_run():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, ":input_grad") as got:
        for factor in (1, 2, 3):
            (model(x) * factor).sum().backward()
    base = model[0].weight.sum(0)
    for run in range(3):
        assert torch.allclose(got.run(run)[":input_grad"], base * (run + 1))


def test_backwards_in_another_order():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, ":input_grad") as got:
        losses = [(model(x) * factor).sum() for factor in (1, 2)]
        for loss in reversed(losses):
            loss.backward()
    base = model[0].weight.sum(0)
    assert [torch.allclose(got.run(run)[":input_grad"], base * (run + 1)) for run in range(2)] == [True, True]


def test_one_backward_for_two_runs_is_told_to_both():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, ":input_grad") as got:
        (model(x).sum() + model(x).sum()).backward()
    assert all(torch.allclose(got.run(run)[":input_grad"], 2 * model[0].weight.sum(0)) for run in range(2))


@pytest.mark.parametrize("is_leaf", [True, False])
def test_an_edit_acts_once_for_each_run_whatever_the_input_is(is_leaf):
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    given = x if is_leaf else x * 1.0
    with gaff.edit(model, {":input_grad": gaff.edits.scale(0.5)}):
        (model(given).sum() + model(given).sum()).backward()
    assert torch.allclose(x.grad, 0.5 * 0.5 * 2 * model[0].weight.sum(0))


class ThrowsAway(nn.Module):
    """Calls its layer for nothing: the leaf's gradient comes by another use of it in the same run."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        self.layer(x)
        return x * 3


def test_a_call_whose_output_was_thrown_away_is_told_what_comes_by_another_way():
    model, x = ThrowsAway(), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, "layer:input_grad", ":input_grad") as got:
        kept = [model(x) for _ in range(2)]
        kept[0].sum().backward()
    assert [one.tolist() for one in got.all(":input_grad") if one is not None] == [[[3.0, 3.0]]]
    assert torch.equal(got.run(0)["layer:input_grad"], torch.full((1, 2), 3.0))


class OnWorker(nn.Module):
    """Calls its layer on a new thread, whose autograd nodes are numbered from zero and so run last."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.layer, x).result() + x


def test_a_leaf_that_another_run_met_does_not_take_a_pass_from_its_run():
    model, x = OnWorker(), torch.ones(1, 2, requires_grad=True)
    for _ in range(64):
        x * 1.0  # the numbers of this thread are higher than those of the worker
    with gaff.capture(model, "layer.weight:grad", ":input_grad") as got:
        kept = model(x)
        model(x * 1.0).sum().backward()
    assert kept.requires_grad
    assert [len(got.run(run).all("layer.weight:grad")) for run in range(2)] == [0, 1]
    assert torch.equal(got.run(0)[":input_grad"], x.grad)  # the total of what came in, by whichever pass


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_runs_whose_calls_were_thrown_away_are_told_their_own_passes_only(order):
    model, x = ThrowsAway(), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, "layer:input_grad") as got:
        kept = [model(x) for _ in range(3)]
        for run in order:
            (kept[run] * (run + 1)).sum().backward()
    assert [len(got.run(run).all("layer:input_grad")) for run in range(2)] == [1, 1]
    assert [got.run(run)["layer:input_grad"].tolist() for run in range(2)] == [[[3.0, 3.0]], [[6.0, 6.0]]]
    assert not [one for one in got.run(2).all("layer:input_grad") if one is not None]


def test_a_pass_that_no_run_is_known_of_is_refused_where_several_met_the_leaf():
    model, x, seen = ThrowsAway(), torch.ones(1, 2, requires_grad=True), []
    with gaff.capture(model, "layer:input_grad") as got:
        for _ in range(2):
            model(x)
            seen.append(x * 3)  # what a user's own hook would have collected
        seen[0].sum().backward()
    with pytest.raises(gaff.ExactnessError, match="2 runs used this leaf"):
        got.run(0)["layer:input_grad"]


def test_hooks_on_a_leaf_of_many_runs_stay_few():
    model, x = ThrowsAway(), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, gaff.maybe("layer:input_grad")):
        for _ in range(300):
            model(x)
        assert len(x._backward_hooks) < 70
    assert not x._backward_hooks


@pytest.mark.parametrize("passes", [3, 70])
def test_passes_beyond_the_first_sixty_are_still_known(passes):
    model, kept = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()), []
    nn.init.eye_(model[0].weight)
    model[0].register_forward_hook(lambda module, given, output: kept.append(output))
    x, found = torch.ones(1, 2, requires_grad=True), []
    with gaff.edit(model, {"0:input_grad": gaff.edits.scale(2.0)}):
        for _ in range(passes):
            kept.clear()
            x.grad = None
            model(x)
            model(x)
            (kept[0].sum() + kept[1].sum()).backward()
            found.append(x.grad[0, 0].item())
    assert set(found) == {8.0}


def test_a_run_whose_feature_was_collected_is_not_told_none_for_another_one():
    kept = []

    class Collects(nn.Module):
        def forward(self, x):
            kept.append(x * 7)
            return x * 2.0

    model, x = nn.Sequential(Collects()), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, "0:input_grad") as got:
        first, second = model(x), model(x)
        (kept[0].sum() + second.sum()).backward()
    assert first.requires_grad
    assert got.run(1)["0:input_grad"].tolist() == [[9.0, 9.0]]
    with pytest.raises(gaff.ExactnessError, match="2 runs used this leaf"):
        got.run(0)["0:input_grad"]


def test_calls_without_grad_mode_leave_no_hook_and_edit_nothing():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    for given in (x, x * 1.0):
        x.grad = None
        with gaff.edit(model, {"0:input_grad": gaff.edits.scale(2.0)}):
            with torch.no_grad():
                for _ in range(5):
                    model(given)
            assert not given._backward_hooks
            model(given).sum().backward()
        assert torch.allclose(x.grad, 2 * model[0].weight.sum(0))


def test_a_run_before_any_autograd_node_claims_none():
    model = nn.Sequential(nn.Linear(2, 2))
    with gaff.capture(model, "0:output") as got:
        with torch.no_grad():
            model(torch.ones(1, 2))
        run = got._session.clock.latest
        first = torch._C._autograd._get_sequence_nr()
        model(torch.ones(1, 2))
    assert run.made == range(first, first)
