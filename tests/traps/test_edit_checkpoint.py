"""Edits under activation checkpointing: repeated in the recomputation, so that gradients are those of the edited model."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gaff
from gaff import edits
from zoo import Checkpointed


class Regions(nn.Module):
    """One module in two checkpointed regions, another one in both, twice in the second."""

    def __init__(self, kind):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.kind = kind

    def first(self, x):
        return torch.tanh(self.twice(torch.tanh(self.shared(x))))

    def second(self, x):
        return torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.shared(x))))))

    def region(self, function, x):
        if self.kind == "none":
            return function(x)
        if self.kind == "selective":
            context = lambda: create_selective_checkpoint_contexts(  # noqa: E731
                lambda ctx, op, *args, **kwargs: (
                    CheckpointPolicy.MUST_SAVE
                    if op is torch.ops.aten.tanh.default
                    else CheckpointPolicy.PREFER_RECOMPUTE
                )
            )
            return checkpoint(function, x, use_reentrant=False, context_fn=context)
        return checkpoint(function, x, use_reentrant=self.kind == "reentrant")

    def forward(self, x):
        return self.region(self.second, self.region(self.first, x))


KINDS = ["reentrant", "frames", "selective"]
CHANGES = {
    "one call": lambda: {"shared@1": edits.scale(3.0)},
    "every call": lambda: {"shared": lambda t: t * t},
    "middle call": lambda: {"twice@1": edits.noise(0.5), "shared@0:input": edits.add(torch.arange(4.0))},
    "gradients": lambda: {"twice@1:grad_output": edits.clamp(-0.1, 0.1), "shared@1:grad_input": edits.scale(5.0)},
    "weights": lambda: {"shared.weight:param": lambda w: w.tanh() * 2, "twice": edits.scale(2.0)},
    "skipped": lambda: {"twice@1": edits.skip(), "shared@1": edits.skip(lambda x: x * 2)},
    "another order": lambda: {
        "twice": [edits.scale(2.0), edits.clamp(-0.5, 0.5)],
        "shared:input_grad": edits.scale(3.0),
    },
}


def step(model, x, changes, when):
    """Loss and all gradients of one edited step; backward inside or after the session."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with gaff.edit(model, changes) as changed:
        loss = model(x).pow(2).sum()
        if when == "inside":
            loss.backward()
    if when == "after":
        loss.backward()
    found = [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    return changed, found


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_edited_model_without_checkpointing(kind, when, name):
    changes = CHANGES[name]()
    if when == "after" and name in ("gradients", "another order"):
        pytest.skip("gradient edits act while the session is open")
    if kind == "selective" and name == "skipped":
        pytest.skip("torch caches the saved outputs of a selective policy by their order")
    model = Regions(kind)
    plain = copy.deepcopy(model)
    plain.kind = "none"
    x = torch.randn(3, 4)
    _, true = step(plain, x, changes, when)
    _, found = step(model, x, changes, when)
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


class Nested(nn.Module):
    def __init__(self, outer, inner):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kinds = outer, inner

    def region(self, kind, function, x):
        return function(x) if kind is None else checkpoint(function, x, use_reentrant=kind)

    def inner(self, x):
        return torch.tanh(self.two(torch.tanh(self.two(x))))

    def outer(self, x):
        return self.region(self.kinds[1], self.inner, torch.tanh(self.one(x)))

    def forward(self, x):
        return self.region(self.kinds[0], self.outer, self.region(self.kinds[0], self.outer, x))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, in the first pass of the outer
@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_checkpoints_inside_checkpoints(outer, inner, when):
    model = Nested(outer, inner)
    plain = copy.deepcopy(model)
    plain.kinds = None, None
    x = torch.randn(3, 4)
    changes = {"two@1": edits.scale(3.0), "two@2": edits.noise(0.3), "one": lambda t: t * t}
    _, true = step(plain, x, changes, when)
    _, found = step(model, x, changes, when)
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_whole_model_under_one_checkpoint(use_reentrant):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    true, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    with gaff.edit(model, {"0": edits.scale(3.0)}):
        loss = checkpoint(model, found, use_reentrant=use_reentrant).pow(2).sum()
    loss.backward()
    model[2](torch.tanh(model[0](true) * 3.0)).pow(2).sum().backward()
    assert torch.equal(found.grad, true.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_bare_forward_after_the_session_stays_bare_while_the_first_loss_is_alive(use_reentrant):
    model = Checkpointed(use_reentrant)
    x = torch.randn(2, 4)
    bare_before = x.clone().requires_grad_()
    loss_before = model(bare_before).pow(2).sum()  # its recomputation runs while the edit is open
    with gaff.edit(model, {"first.0": edits.scale(3.0)}) as changed:
        edited = x.clone().requires_grad_()
        loss = model(edited).pow(2).sum()
        loss_before.backward()
    assert changed.receipt.armed == 1
    bare = x.clone().requires_grad_()
    loss_bare = model(bare).pow(2).sum()
    loss_bare.backward()
    loss.backward()
    true = x.clone().requires_grad_()
    model.second(model.first(true)).pow(2).sum().backward()
    assert torch.equal(bare.grad, true.grad)
    assert torch.equal(bare_before.grad, true.grad)
    true_edited = x.clone().requires_grad_()
    model.second(torch.tanh(model.first[0](true_edited) * 3.0)).pow(2).sum().backward()
    assert torch.equal(edited.grad, true_edited.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_nothing_stays_once_the_graph_is_freed(use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    with gaff.edit(model, {"first.0": edits.scale(3.0), "second": lambda t: t * 2}) as changed:
        loss = model(x).sum()
    assert changed.receipt.armed == 2
    assert "armed for recomputation" in str(changed.receipt)
    loss.backward()
    del loss
    gc.collect()
    assert changed.receipt.armed == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with gaff.edit(model, {"first.0": edits.scale(3.0)}) as changed:
        model(x).sum()  # its graph is freed inside the session
    assert changed.receipt.armed == 0


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_that_is_held_keeps_no_hook_once_nothing_can_be_recomputed(use_reentrant, retain_graph):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    with gaff.edit(model, {"first.0": edits.scale(3.0)}) as changed:
        loss = model(x).sum()
        loss.backward(retain_graph=retain_graph)
    assert changed.receipt.armed == retain_graph
    if changed.receipt.armed:
        once, x.grad = x.grad, None
        loss.backward()
        assert torch.equal(x.grad, once)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_released_edits_raise_in_backward(use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    with gaff.edit(model, {"first.0": edits.scale(3.0)}) as changed:
        loss = model(x).sum()
        with pytest.raises(gaff.PlanError, match="still open"):
            changed.release()
    changed.release()
    assert changed.receipt.armed == 0
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(gaff.ExactnessError, match="released"):
        loss.backward()
    model(x).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("when", ["inside", "after"])
def test_an_edit_that_differs_in_the_recomputation_raises(use_reentrant, when):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    factors = iter([2.0, 3.0, 4.0])
    with gaff.edit(model, {"first.0": lambda t: t * next(factors)}):
        loss = model(x).sum()
        if when == "inside":
            with pytest.raises(gaff.ExactnessError, match=r"first\.0: the edit returned another value in the recomp"):
                loss.backward()
    if when == "after":
        with pytest.raises(gaff.ExactnessError, match=r"first\.0: the edit returned another value in the recomp"):
            loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_in_an_edit_is_the_same_in_the_recomputation(use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    with gaff.edit(model, {"first.0": nn.Dropout(0.5)}):
        model(x).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_strength_and_switch_of_the_forward_hold_in_its_recomputation(use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4)
    found = [x.clone().requires_grad_() for _ in range(2)]
    with gaff.edit(model, {"first.0": edits.scale(3.0)}) as changed:
        changed.strength(0.5)
        half = model(found[0]).pow(2).sum()
        changed.off()
        bare = model(found[1]).pow(2).sum()
        changed.on()
        changed.strength(1.0)
        half.backward()
        bare.backward()
    for factor, leaf in zip((2.0, 1.0), found, strict=True):
        true = x.clone().requires_grad_()
        model.second(torch.tanh(model.first[0](true) * factor)).pow(2).sum().backward()
        torch.testing.assert_close(leaf.grad, true.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_retained_graphs_and_several_backwards(use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    with gaff.edit(model, {"first.0": edits.scale(3.0), "second": edits.noise(0.1)}):
        loss = model(x).pow(2).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)


def test_a_trainable_edit_trains_through_a_checkpoint():
    grads = []
    for kind in (None, False, True):
        torch.manual_seed(0)
        model, extra = Checkpointed(bool(kind)), nn.Linear(4, 4)
        if kind is None:
            model.forward = lambda x, model=model: model.second(model.first(x))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        x = torch.ones(2, 4, requires_grad=True)
        with gaff.edit(model, {"first.0": extra}):
            loss = model(x).pow(2).sum()
        loss.backward()
        grads.append([parameter.grad for parameter in extra.parameters()])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_saving_on_the_cpu_inside_and_around_a_checkpoint_changes_nothing():
    model, x = Regions("frames"), torch.randn(2, 4)
    _, true = step(model, x, {"shared@1": edits.scale(3.0)}, "after")
    with torch.autograd.graph.save_on_cpu():
        _, found = step(model, x, {"shared@1": edits.scale(3.0)}, "after")
    assert all(torch.equal(one, other) for one, other in zip(found, true, strict=True))
    bare = model.first
    model.first = lambda x: _on_cpu(bare, x)
    _, found = step(model, x, {"shared@1": edits.scale(3.0)}, "after")
    assert all(torch.equal(one, other) for one, other in zip(found, true, strict=True))


def _on_cpu(function, x):
    with torch.autograd.graph.save_on_cpu():
        return function(x)


def test_gradients_in_parts_are_refused():
    model, x = Regions("reentrant"), torch.randn(2, 4, requires_grad=True)
    with (
        pytest.raises(gaff.ExactnessError, match="comes in parts"),
        gaff.edit(model, {"shared.weight:grad": edits.clamp(-0.1, 0.1)}),
    ):
        model(x).sum().backward()


def test_a_module_called_inside_a_backward_pass_is_refused():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)
    x.register_hook(lambda gradient: model(gradient))
    with (
        pytest.raises(gaff.PlanError, match="inside a backward pass"),
        gaff.edit(model, {"0": edits.scale(2.0)}),
    ):
        model(x).sum().backward()
