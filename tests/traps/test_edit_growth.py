"""Edits that stay for thousands of steps keep nothing of the steps that are over."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits


def test_a_leaf_that_comes_in_at_every_step():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3, requires_grad=True)
    handle = gaff.edit(model, {"0:input_grad": edits.scale(0.5)}).attach()
    for _ in range(600):
        x.grad = None
        model(x).sum().backward()
    gradients = handle._session._wiring.gradients
    assert torch.allclose(x.grad, 0.5 * model[0].weight.sum(0))
    assert handle.receipt.rows[0].hits == 600
    assert len(gradients._armed) < 600
    assert max(len(chain.rows) for _, chain in gradients._chains._known.values()) < 20
    handle.remove()


def test_checkpointed_forwards_whose_loss_is_dropped():
    lin = nn.Linear(3, 3)
    model = nn.Sequential(lin)
    model.forward = lambda x: checkpoint(lin, x, use_reentrant=True)
    handle = gaff.edit(model, {"0": edits.scale(2.0)}).attach()
    for _ in range(50):
        model(torch.randn(2, 3, requires_grad=True))
    [node] = [node for node in handle._session._wiring.nodes.values() if node.exit.acts]
    assert len(node.exit.replay._waiting) <= 1  # the last one is noticed when the next run ends
    assert not list(node.exit.regions())
    handle.remove()
