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
