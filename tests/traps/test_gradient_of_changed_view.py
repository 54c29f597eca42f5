"""A view changed in place later gets no gradient of its own in torch: refused, not None."""

import pytest
import torch
from torch import nn

import gaff


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.cut = Cut()

    def forward(self, x):
        y = self.lin(x)
        view = self.cut(y)
        view.mul_(5)
        return y


class Cut(nn.Module):
    def forward(self, y):
        return y[:, :2]


def test_reading_it_is_refused_with_the_reason():
    model, x = Views(), torch.randn(3, 4)
    with gaff.capture(model, "cut:grad_output") as got:
        model(x).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="cut:grad_output: it is a view that was changed in place later"):
        got["cut:grad_output"]
    assert "view" in str(got.receipt)


@pytest.mark.parametrize("runs", [1, 400])
def test_an_edit_of_it_raises_where_the_loss_is_on_what_a_hook_collected(runs):
    model, x, kept = Views(), torch.randn(3, 4), []
    model.lin.register_forward_hook(lambda module, given, output: kept.append(output))
    with gaff.edit(model, {gaff.maybe("cut:grad_output"): gaff.edits.zero()}):
        for _ in range(runs):  # of many, whose hooks are gone one by one
            model(x)
        with pytest.raises(gaff.ExactnessError, match="cannot be made: it is a view that was changed in place later"):
            kept[0].sum().backward()


def test_an_edit_of_a_view_that_nothing_comes_to_does_not_raise():
    class Apart(Views):
        def forward(self, x):
            super().forward(x)
            return self.lin(x)

    model, x = Apart(), torch.randn(3, 4)
    with gaff.edit(model, {gaff.maybe("cut:grad_output"): gaff.edits.zero()}) as edited:
        model(x).sum().backward()
    assert "no gradient reached this tensor" in str(edited.receipt)
    assert torch.equal(model.lin.weight.grad, x.sum(0).expand(4, 4))


def test_a_view_of_one_of_several_outputs_is_followed_at_its_own_place():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.pick = Pick()

        def forward(self, x):
            low, high = Both.apply(x)
            view = self.pick(high)
            view.mul_(5)
            return low.sum() + high.sum()

    class Pick(nn.Module):
        def forward(self, y):
            return y.view(-1)

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x - 1.0, x + 1.0

        @staticmethod
        def backward(ctx, low, high):
            return low + high

    model, x = Split(), torch.randn(3, 4, requires_grad=True)
    with gaff.capture(model, "pick:grad_output") as got:
        model(x).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="changed in place later"):
        got["pick:grad_output"]
