"""Code that runs an edited module again in backward, and cannot be tied to its forward, raises; that of others is let be."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits


class TurnsGradOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def region(self, x):
        with torch.enable_grad():
            return torch.tanh(self.lin(x))

    def forward(self, x):
        return checkpoint(self.region, x, use_reentrant=True)


class NewStyle(torch.autograd.Function):
    """A checkpoint written in the style without ``ctx`` in forward."""

    @staticmethod
    def forward(function, x):
        with torch.no_grad():
            return function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function = inputs[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class ByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return NewStyle.apply(lambda z: torch.tanh(self.lin(z)), x)


CHANGES = [{"lin": edits.scale(0.1)}, {"lin:input": edits.scale(0.1)}, {"lin": edits.skip()}]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_checkpoint_that_turns_grad_mode_on_inside_repeats_its_edits(changes):
    model, x = TurnsGradOn(), torch.randn(2, 3, requires_grad=True)
    with gaff.edit(model, changes):
        model(x).sum().backward()
    true, lin = x.detach().clone().requires_grad_(), model.lin
    [(address, change)] = changes.items()
    made = true if isinstance(change, type(edits.skip())) else lin(true * 0.1) if ":" in address else lin(true) * 0.1
    torch.tanh(made).sum().backward()
    torch.testing.assert_close(x.grad, true.grad)


@pytest.mark.parametrize("changes", CHANGES)
def test_an_edit_that_cannot_be_repeated_raises(changes):
    model, x = ByFunction(), torch.randn(2, 3, requires_grad=True)
    with (
        pytest.raises(gaff.PlanError, match="its edits belong to a forward that cannot be told"),
        gaff.edit(model, changes),
    ):
        model(x).sum().backward()


@pytest.mark.parametrize("build", [TurnsGradOn, ByFunction])
def test_a_forward_from_before_the_session_stays_bare(build):
    model, x = build(), torch.randn(2, 3, requires_grad=True)
    loss = model(x).sum()
    with gaff.edit(model, {gaff.maybe("lin"): edits.scale(0.1)}):
        loss.backward()
    true = x.detach().clone().requires_grad_()
    torch.tanh(model.lin(true)).sum().backward()
    assert torch.equal(x.grad, true.grad)


class Aux(nn.Module):
    """A loss that is put aside, not returned."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.lin, self.use_reentrant = nn.Linear(2, 2), use_reentrant

    def forward(self, x):
        y = checkpoint(lambda z: torch.sin(self.lin(z)).cos(), x, use_reentrant=self.use_reentrant)
        self.aux = y.sum()
        return y.detach()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_released_edits_raise_also_for_a_loss_that_was_put_aside(use_reentrant):
    model, x = Aux(use_reentrant), torch.ones(1, 2, requires_grad=True)
    with gaff.edit(model, {"lin": edits.scale(3.0)}) as changed:
        model(x)
    changed.release()
    with pytest.raises(gaff.ExactnessError, match="were released"):
        model.aux.backward()
