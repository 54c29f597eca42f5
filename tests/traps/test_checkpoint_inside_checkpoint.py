"""A reentrant checkpoint around another, with grad mode turned on inside: what arrives is told once, and nothing false."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff


class Nested(nn.Module):
    def __init__(self, use_reentrant, times):
        super().__init__()
        self.layer, self.use_reentrant, self.times = nn.Linear(1, 1), use_reentrant, times
        nn.init.ones_(self.layer.weight)

    def inner(self, x):
        with torch.enable_grad():
            for _ in range(self.times):
                x = self.layer(x)
            return x

    def body(self, x):
        return checkpoint(self.inner, x * 2, use_reentrant=self.use_reentrant)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("port", ["grad_output", "grad_input", "input_grad"])
@pytest.mark.parametrize("times", [1, 2])
def test_each_call_is_told_once(use_reentrant, port, times):
    model, x = Nested(use_reentrant, times), torch.ones(1, 1, requires_grad=True)
    with gaff.capture(model, f"layer:{port}") as got:
        (model(x) * 3).sum().backward()
    assert [got.all(f"layer@{call}:{port}") for call in range(times)] == [[torch.tensor([[3.0]])]] * times


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_comes_in_from_outside_of_both_is_told_once(use_reentrant):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=use_reentrant)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=True)

    model, x = Outer(), torch.ones(1, 1, requires_grad=True)
    with gaff.capture(model, "inner.layer:input_grad") as got:
        (model(x * 1) * 3).sum().backward()
    assert torch.equal(got["inner.layer:input_grad"], 3 * model.inner.layer.weight)


def test_hooks_on_a_leaf_that_serves_many_runs_go_with_their_graphs():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=True)

    for model, address in ((Checkpointed(), "layer:input_grad"), (nn.Sequential(nn.Linear(2, 2)), "0:input_grad")):
        x = torch.ones(1, 2, requires_grad=True)
        with gaff.capture(model, address, last=1) as got:
            for _ in range(40):
                model(x).sum().backward()
            assert len(x._backward_hooks) < 20  # the last ones may bring more
        assert got[address] is not None
