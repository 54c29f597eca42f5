"""Tensors that an edit holds: never handed to the model, never taken from a mode, watched in a recomputation."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gaff
from gaff import edits


@pytest.mark.parametrize("make", [edits.replace, edits.skip, lambda v: edits.patch(v)])
def test_in_place_code_behind_an_edit_does_not_write_into_its_tensor(make):
    model, value = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), -torch.ones(2, 3)
    with gaff.edit(model, {"0": make(value)}), torch.no_grad():
        model(torch.randn(2, 3))
    assert torch.equal(value, -torch.ones(2, 3))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_tensor_that_changes_before_the_recomputation_raises(use_reentrant):
    direction, lin = torch.ones(3), nn.Linear(3, 3)
    model = nn.Sequential(lin)
    model.forward = lambda x: checkpoint(lambda z: torch.tanh(lin(z)), x, use_reentrant=use_reentrant)
    x = torch.randn(2, 3, requires_grad=True)
    with gaff.edit(model, {"0": edits.chain(edits.add(direction), edits.scale(2.0))}):
        y = model(x).sum()
    direction.fill_(5.0)
    with pytest.raises(gaff.ExactnessError, match="a tensor of the edit was written to"):
        y.backward()


@pytest.mark.parametrize(
    "edit",
    [
        edits.project(torch.ones(3)),
        edits.scale(torch.ones(3, dtype=torch.float64)),
        edits.add(torch.ones(3).double()),
    ],
)
def test_inference_first_and_training_later(edit):
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    handle = gaff.edit(model, {"0": edit}).attach()
    with torch.inference_mode():
        model(x)
    model(x).pow(2).sum().backward()
    handle.remove()


@pytest.mark.parametrize(
    "edit", [edits.scale(torch.ones(3).double() * 2), edits.project(torch.ones(3)), edits.add(torch.ones(3).double())]
)
def test_a_selective_checkpoint_that_counts_conversions(edit):
    def policy(context, op, *args, **kwargs):
        is_saved = op is torch.ops.aten._to_copy.default
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    lin, x = nn.Linear(3, 3), torch.randn(2, 3)
    model = nn.Sequential(lin)
    grads = []
    for is_selective in (False, True):
        context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        region = lambda z: torch.tanh(lin(z)).double().float()  # noqa: E731
        model.forward = (
            (lambda z: checkpoint(region, z, use_reentrant=False, context_fn=context)) if is_selective else region
        )
        leaf = x.clone().requires_grad_()
        with gaff.edit(model, {"0": edit}):
            model(leaf).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("edit", "value"),
    [
        (edits.fill(0.7), torch.arange(3)),
        (edits.add(torch.tensor([1j])), torch.ones(3)),
        (edits.scale(torch.tensor(0.5)), torch.arange(3)),
    ],
)
def test_a_constant_that_would_lose_something_is_refused(edit, value):
    with pytest.raises(gaff.PlanError, match="would lose"), gaff.edit(nn.Identity(), {":output": edit}) as changed:
        changed._model(value)


def test_projections_keep_the_precision_of_what_passes_under_autocast():
    model, direction = nn.Sequential(nn.LayerNorm(8)), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16), gaff.edit(model, {"0": edits.project(direction)}):
        y = model(torch.randn(4, 8))
    assert y.dtype == torch.float32
    assert (y @ direction / direction.norm()).abs().max() < 1e-6


def test_strength_is_mixed_or_refused():
    integers, lin = nn.Identity(), nn.Embedding(4, 2, sparse=True)
    with (
        pytest.raises(gaff.PlanError, match="cannot be mixed"),
        gaff.edit(integers, {":output": edits.scale(2)}) as changed,
    ):
        changed.strength(0.5)
        integers(torch.arange(3))
    with (
        pytest.raises(gaff.PlanError, match="a module is skipped or not"),
        gaff.edit(nn.Sequential(nn.Linear(2, 2)), {"0": edits.skip()}) as changed,
    ):
        changed.strength(0.5)
    with gaff.edit(lin, {"weight:grad": edits.scale(3.0)}) as changed:
        changed.strength(0.5)
        lin(torch.tensor([1, 1])).sum().backward()
    assert torch.equal(lin.weight.grad.to_dense()[1], torch.full((2,), 4.0))


def test_an_empty_batch_is_rounded():
    model = nn.Sequential(nn.Linear(3, 3))
    with gaff.edit(model, {"0": edits.quantize("float8_e5m2", scaled=True)}):
        assert model(torch.randn(0, 3)).shape == (0, 3)
    with gaff.edit(nn.Identity(), {":output": edits.scale(0.5)}) as changed:
        changed._model(torch.full((3,), 1e-25))
    assert changed.receipt.rows[0].delta == pytest.approx(0.5)
