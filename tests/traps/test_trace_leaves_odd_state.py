"""trace restores buffers to the bit, forgets new ones, and stops generators where they were."""

import numpy
import pytest
import torch
from torch import nn

import gaff


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.zeros(1))
        self.register_buffer("sized", torch.ones(2))
        self.draws = torch.Generator().manual_seed(1)

    def forward(self, x):
        self.zero.neg_()
        self.sized.resize_(3)
        self.register_buffer("new", torch.ones(1), persistent=False)
        return x + torch.rand(1, generator=self.draws)


def test_everything_is_as_before():
    model = Odd()
    state = model.draws.get_state()
    gaff.trace(model, torch.ones(2))
    assert list(model.state_dict()) == ["zero", "sized"]
    assert not hasattr(model, "new")
    assert model._non_persistent_buffers_set == set()
    assert not torch.signbit(model.zero).item()
    assert model.sized.tolist() == [1, 1]
    assert torch.equal(model.draws.get_state(), state)


def test_odd_outputs_and_gradients_do_not_break_it():
    class Returns(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            return self.value

    for value in (
        numpy.ones(2),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64),
    ):
        assert len(gaff.trace(Returns(value), torch.ones(1)).rows) == 1
    model = nn.Embedding(10, 2, sparse=True)
    trace = gaff.trace(model, torch.tensor([1, 1]), backward=lambda y: y.sum())
    assert trace.parameters[0].grad.norm == pytest.approx(8**0.5)
    assert trace.parameters[0].grad.zeros == pytest.approx(0.9)
