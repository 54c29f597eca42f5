"""load_state_dict(assign=True) puts new parameters in place: the site follows them."""

import torch
from torch import nn

import gaff


def test_the_gradient_is_that_of_the_new_parameter():
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    with gaff.capture(model, "weight:grad", "weight:param") as got:
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
        model(x).sum().backward()
    assert torch.equal(got["weight:grad"], model.weight.grad)
    assert torch.equal(got["weight:param"], model.weight)
    assert "replaced" in str(got.receipt)
