"""Where parameters are swapped, a parametrisation can make a wrapper of a tensor that lies inside itself."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import gaff


def endless():
    tensor = torch.randn(2)
    torch.utils.swap_tensors(tensor, TwoTensor(tensor, tensor))
    assert tensor.a is tensor
    return tensor


def test_what_torch_cannot_read_is_refused_when_it_is_read():
    model, x = nn.Sequential(nn.Identity()), endless()
    with gaff.capture(model, "0") as got, gaff.guard(model):
        assert model(x) is x
    with pytest.raises(gaff.ExactnessError, match="0: the tensor is a wrapper that lies inside itself"):
        got["0"]


def test_watching_goes_on():
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    with gaff.watch(every=1) as watching:
        model(torch.randn(3, 2)).sum().backward()
        model[0](endless())
    assert watching.failure is None
