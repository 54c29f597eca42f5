"""Two ranks: clipping sees what DDP has averaged, and an edit of a wrapped model acts on each rank's own batch."""

import math

import pytest
import torch
from torch import nn

import gaff
from ranks import of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) * 10


def train(model, x, *, spoil):
    """Three steps, of which the second has a NaN where ``spoil``; audit and weights."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    edit = gaff.edit(model, {"1": gaff.edits.scale(0.5)}).attach()
    with gaff.clip_gradients(optimizer, norm=0.1, nonfinite="skip", model=model) as handle:
        for step in range(3):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            (loss * math.nan if spoil and step == 1 else loss).backward()
            optimizer.step()
    edit.remove()
    norms = [row.norm for row in handle.audit.rows]
    return norms, handle.audit.skipped, [one.detach().clone() for one in model.parameters()]


def found_by(rank):
    model = nn.parallel.DistributedDataParallel(build())
    return train(model, batch()[4 * rank : 4 * rank + 4], spoil=rank == 0)


def test_both_ranks_clip_and_skip_as_one_process_on_the_whole_batch():
    found = of_ranks(found_by, 2)
    norms, skipped, weights = train(build(), batch(), spoil=True)
    for rank_norms, rank_skipped, rank_weights in found:
        assert rank_skipped == skipped == 1
        assert rank_norms[0] == pytest.approx(norms[0], rel=1e-5)
        assert math.isnan(rank_norms[1])
        for one, other in zip(rank_weights, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
