"""A call without grad mode beside a checkpointed call of the same module: each keeps what is its own."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return self.lin(x * 1).tanh()


class Model(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.block = Block()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for _ in range(2):
            with torch.no_grad():
                teacher = self.block(x)
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant) + teacher * 0.1
        return x.sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_calls_zero_and_two_have_none_but_the_total_of_what_came_in(use_reentrant):
    model, x = Model(use_reentrant), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, "block:grad_output", "block:input_grad") as got:
        model(x).backward()
    for without, beside in ((0, 1), (2, 3)):
        assert got[f"block@{without}:grad_output"] is None
        assert got[f"block@{beside}:grad_output"] is not None
        assert torch.equal(got[f"block@{without}:input_grad"], got[f"block@{beside}:input_grad"])
    assert torch.equal(got["block@0:input_grad"], x.grad)
    assert torch.equal(got["block@3:grad_output"], torch.ones(2, 3))


def test_calls_that_wait_are_forgotten_with_their_graph():
    model, x = Model(False), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, "block:grad_output", last=1) as got:
        for _ in range(50):
            model(x).backward()
        nodes = got._session._wiring.nodes.values()
        assert max(len(node.exit.replay._waiting) for node in nodes if node.exit.acts) < 10
        stream = next(iter(got._by_object.values()))
        assert len(stream.records) == 1


def test_of_many_calls_with_two_graphs_each_is_told_of_once():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            with torch.enable_grad():
                return self.lin(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=True)

    model, x = Outer(), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, "inner.lin:grad_output") as got:
        for _ in range(300):
            model(x).sum().backward()
    told = got.all("inner.lin:grad_output")
    assert len(told) == 300
    assert all(one is not None for one in told)
