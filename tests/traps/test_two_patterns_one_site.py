"""A site that two patterns name is kept once, counts for both, and cannot be kept in two ways."""

import pytest
import torch
from torch import nn

import gaff


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.a(x)


def test_a_pattern_does_not_swallow_the_error_of_an_address():
    model, x = Skips(), torch.randn(1, 2)
    with pytest.raises(gaff.NeverFiredError, match="'unused' never fired"):
        with gaff.capture(model, "*", "unused"):
            model(x)
    with pytest.raises(gaff.NeverFiredError, match="'a' never fired"):
        with gaff.capture(model, gaff.maybe("*"), "a"):
            pass
    with gaff.capture(model, "*", "a") as got:
        model(x)
    assert [(row.pattern, row.site, row.fired) for row in got.receipt.rows] == [
        ("*", "a", 1),
        ("a", "a", 1),
        ("*", "unused", 0),
    ]


def test_two_reductions_are_refused():
    with pytest.raises(gaff.PlanError, match="a: '\\*' and 'a' both name it, with different reductions"):
        gaff.capture(Skips(), {"*": gaff.keep.mean()}, "a")
    gaff.capture(Skips(), {"*": gaff.keep.mean()}, {"a": gaff.keep.mean()})


@pytest.mark.parametrize("first", ["/relu*:grad_output", "/relu#0:grad_output"])
def test_gradient_edits_of_two_patterns_at_one_op_act_in_the_order_given(first):
    class Net(nn.Module):
        def forward(self, x):
            return torch.relu(x) * 2

    model, x = Net(), torch.ones(2, requires_grad=True)
    with gaff.edit(model, {first: gaff.edits.scale(10.0), "/rel*:grad_output": lambda t: t + 1}):
        model(x).sum().backward()
    assert x.grad.tolist() == [21.0, 21.0]
