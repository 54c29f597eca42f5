"""The total gradient of a tensor that comes into a reentrant checkpoint, and is also used outside of it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits


class Around(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.lin, self.kind = nn.Linear(3, 3), kind

    def forward(self, x):
        hidden = x * 1.0
        inner = self.lin(hidden) if self.kind is None else checkpoint(self.lin, hidden, use_reentrant=self.kind)
        return hidden + inner


@pytest.mark.parametrize("kind", [None, False, True])
def test_all_uses_of_it_count(kind):
    torch.manual_seed(0)
    model, x = Around(kind), torch.zeros(2, 3, requires_grad=True)
    total = torch.ones(2, 3) + torch.ones(2, 3) @ model.lin.weight.detach()
    with gaff.capture(model, "lin:input_grad") as got:
        model(x).sum().backward()
    torch.testing.assert_close(got["lin:input_grad"], total)
    x.grad = None
    with gaff.edit(model, {"lin:input_grad": edits.clamp(-0.1, 0.1)}):
        model(x).sum().backward()
    assert torch.equal(x.grad, total.clamp(-0.1, 0.1))
