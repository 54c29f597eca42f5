"""Exporting or tracing a model while a session is open on it is refused, not polluted."""

import pytest
import torch
from torch import nn

import gaff


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_is_refused():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    with gaff.capture(model, gaff.maybe("0")):
        with pytest.raises(gaff.PlanError, match="torch exports or traces the model while a gaff session is open"):
            torch.jit.trace(model, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_export_is_refused():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    with gaff.capture(model, gaff.maybe("0")):
        with pytest.raises(Exception, match="a gaff session is open"):
            torch.export.export(model, (x,))
