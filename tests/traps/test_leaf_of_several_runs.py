"""A leaf that serves several runs: each backward's gradient belongs to its own run."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Keeping(nn.Module):
    """Keeps an auxiliary loss as an attribute, as for the balance of experts, which goes backward later."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.auxiliary = None

    def forward(self, x):
        made = self.first(x)
        self.auxiliary = made.pow(2).mean()
        return self.last(made.tanh())


def auxiliary_passes(model, x):
    """The gradient of the auxiliary loss of each of two runs, brought after the next run has had its own pass."""
    x.grad, before, found = None, None, []
    for _ in range(3):
        model(x).sum().backward(retain_graph=True)
        if before is not None:
            so_far = x.grad.clone()
            before.backward()
            found.append(x.grad - so_far)
        before = model.auxiliary
    return found


def test_what_a_run_has_kept_and_not_returned_is_its_own_after_others_have_begun():
    model, x = Keeping(), torch.randn(3, 4, requires_grad=True)
    truth = auxiliary_passes(model, x)
    with gaff.capture(model, ":input_grad") as got:
        auxiliary_passes(model, x)
    for run, expected in enumerate(truth):
        torch.testing.assert_close(got.run(run).all(":input_grad")[1], expected)
    assert [len(got.run(run).all(":input_grad")) for run in range(3)] == [2, 2, 1]
    with gaff.edit(model, {":input_grad": gaff.edits.when(gaff.edits.zero(), runs=[1])}):
        edited = auxiliary_passes(model, x)
    torch.testing.assert_close(edited, [truth[0], torch.zeros(3, 4)])


def test_a_run_too_long_over_is_refused_and_never_told_as_another():
    model, x = Keeping(), torch.randn(3, 4, requires_grad=True)
    with gaff.capture(model, ":input_grad") as got:
        model(x).sum().backward(retain_graph=True)
        kept = model.auxiliary
        for _ in range(40):
            model(x).sum().backward()
        kept.backward()
    with pytest.raises(gaff.ExactnessError, match="runs used this leaf, and nothing tells whose pass it was"):
        got.run(40).all(":input_grad")
    edit = gaff.edit(model, {":input_grad": gaff.edits.when(gaff.edits.zero(), runs=[0])})
    with edit, pytest.raises(gaff.ExactnessError, match="nothing tells whose pass it was"):
        model(x).sum().backward(retain_graph=True)
        kept = model.auxiliary
        for _ in range(40):
            model(x).sum().backward()
        kept.backward()


class Prompt(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(3, 4))

    def forward(self):
        return self.prompt


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt, self.last = Prompt(), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.prompt() + x)


@pytest.mark.parametrize("is_edit", [True, False])
@pytest.mark.parametrize("address", ["prompt:grad_output", "last:input_grad"])
def test_a_long_session_at_a_leaf_does_not_grow_and_leaves_no_hook(address, is_edit):
    model = Prompted()
    leaf = model.prompt.prompt if address.startswith("prompt") else torch.randn(3, 4, requires_grad=True)
    root = model if address.startswith("prompt") else model.last
    optimizer = torch.optim.SGD([leaf], 0.01)
    edit = gaff.edit(model, {address: gaff.edits.scale(0.5)})
    session = edit if is_edit else gaff.capture(model, address, last=1)
    with session:
        for _ in range(200):
            root(leaf if root is model.last else torch.randn(3, 4)).sum().backward()
            optimizer.step()
        assert len(leaf._backward_hooks) < 20
    assert not leaf._backward_hooks


def test_many_passes_inside_one_do_not_make_its_run_forgotten():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, state):
            for _ in range(300):
                state = checkpoint(lambda one: one + 0.01 * self.cell(one).tanh(), state, use_reentrant=True)
            return state

    model, x = Recurrent(), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, ":input_grad", "cell:grad_output") as got:
        first, second = model(x), model(x)
        first.sum().backward()
        (2 * second).sum().backward()
    torch.testing.assert_close(got.run(1)[":input_grad"], 2 * got.run(0)[":input_grad"])


def test_an_image_whose_features_a_hook_collects_gets_the_total_of_each_step():
    """As for the transfer of a style: no loss goes by what the model has returned, and one part of it by no model."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(3, 4, requires_grad=True)
    features, truth = [], []
    handle = model[1].register_forward_hook(lambda module, args, output: features.append(output))
    with gaff.capture(model, ":input_grad") as got:
        for _ in range(40):
            x.grad = None
            features.clear()
            model(x)
            (features[0].pow(2).mean() + x.diff().abs().sum()).backward()
            truth.append(x.grad.clone())
            with torch.no_grad():
                x -= 0.1 * x.grad
    handle.remove()
    assert all(torch.equal(got.run(run)[":input_grad"], expected) for run, expected in enumerate(truth))


class Memory(nn.Module):
    """Makes something of a leaf once, and uses it in each later run, too, as autocast does with its copies."""

    def __init__(self):
        super().__init__()
        self.kept = self.auxiliary = None

    def forward(self, x):
        self.kept = x * 3.0 if self.kept is None else self.kept
        self.auxiliary = self.kept.pow(2).sum()
        return x * 2.0


def test_what_a_run_makes_of_what_another_has_kept_is_told_to_none_of_them():
    model, x = Memory(), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, ":input_grad") as got:
        first = model(x)
        second = model(x)
        model.auxiliary.backward()
    assert first.requires_grad
    assert second.requires_grad
    for run in range(2):
        with pytest.raises(gaff.ExactnessError, match="2 runs used this leaf"):
            got.run(run)[":input_grad"]
