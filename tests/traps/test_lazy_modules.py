"""Modules that are not initialised yet are refused before anything is installed."""

import pytest
import torch
from torch import nn

import gaff


@pytest.mark.filterwarnings("ignore")
def test_lazy_is_refused_with_the_way_out():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(gaff.PlanError, match="0: LazyLinear is not initialised yet .*run the model once first"):
        gaff.capture(model, "0.weight:grad")
    with pytest.raises(gaff.PlanError, match="not initialised yet"):
        gaff.trace(model, torch.randn(1, 3))
