"""Inside torch.func.grad and vmap values are wrappers: refused before anything is kept."""

import pytest
import torch
from torch import nn

import gaff


def test_vmap_and_grad_are_refused_with_the_reason():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    for transform in (torch.func.vmap(model), torch.func.grad(lambda x: model(x).sum())):
        with pytest.raises(gaff.PlanError, match="Linear runs inside a torch.func transform"):
            with gaff.capture(model, ":output"):
                transform(x)
    assert not model._forward_hooks
