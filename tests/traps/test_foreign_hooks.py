"""Other people's hooks are kept, in their order, and see the same values."""

import torch
from torch import nn

import gaff


def test_their_hooks_fire_as_before_and_stay():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append("first") or output + 1)
    model[0].register_forward_pre_hook(lambda module, args: seen.append("pre"))
    model[0].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    before = [list(model[0]._forward_hooks), list(model[0]._forward_pre_hooks), list(model[0]._backward_hooks)]
    bare = model(x)
    with gaff.capture(model, "0", "0:grad_output") as got:
        y = model(x)
        y.sum().backward()
    assert torch.equal(bare, y)
    assert torch.equal(got["0"], nn.functional.linear(x, model[0].weight, model[0].bias) + 1)
    assert seen == ["pre", "first", "pre", "first", "backward"]
    assert before == [list(model[0]._forward_hooks), list(model[0]._forward_pre_hooks), list(model[0]._backward_hooks)]
