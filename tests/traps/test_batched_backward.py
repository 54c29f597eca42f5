"""A batched backward pass is not broken; its gradients are wrappers, and refused."""

import pytest
import torch
from torch import nn

import gaff


def test_the_users_backward_goes_through():
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), torch.ones(2, requires_grad=True)
    bare = torch.autograd.grad(model(x), x, grad_outputs=torch.eye(3), is_grads_batched=True)
    with gaff.capture(model, "0:grad_output", "1:grad_input", "0.weight:grad") as got:
        watched = torch.autograd.grad(model(x), x, grad_outputs=torch.eye(3), is_grads_batched=True)
        model(x).sum().backward()
    assert torch.equal(bare[0], watched[0])
    with pytest.raises(gaff.ExactnessError, match="this backward pass was batched"):
        got.run(0)["0:grad_output"]
    assert got.run(1)["0:grad_output"].shape == (3,)


@pytest.mark.parametrize("way", ["batched", "jacobian"])
def test_of_a_view_that_was_changed_in_place_it_goes_through_too(way):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return torch.relu_(self.lin(x))

    model, x = Net(), torch.randn(2, 4, 3, requires_grad=True)
    directions = torch.randn(5, 2, 4, 3)

    def found():
        if way == "batched":
            return torch.autograd.grad(model(x), x, directions, is_grads_batched=True)[0]
        return torch.autograd.functional.jacobian(lambda t: model(t).sum((0, 1)), x.detach(), vectorize=True)

    bare = found()
    with gaff.capture(model, "lin:grad_output") as got:
        watched = found()
    assert torch.equal(bare, watched)
    with pytest.raises(gaff.ExactnessError, match="this backward pass was batched"):
        got["lin:grad_output"]
