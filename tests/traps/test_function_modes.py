"""Function modes and tangents of others: what is kept is what passed, and they never meet gaff's own operations."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import gaff
from gaff import edits, keep


class Offset(TorchFunctionMode):
    """Every function of torch gives a little too much, and draws a random number."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if type(found) is torch.Tensor and found.is_floating_point() and found.dim():
            with torch._C.DisableTorchFunction():
                found = found + torch.rand(())
        return found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.seen = self.a(x)
        return self.b(torch.tanh(self.seen))


SITES = ["a", "a:input", "a.weight:param", "/tanh", "a:grad_output"]


@pytest.mark.parametrize("site", SITES, ids=[site.strip("/") for site in SITES])
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("options", [{}, {"reduce": keep.rows(0)}, {"clone": True}])
def test_what_is_kept_is_what_passed(site, is_inside, options):
    model, x = Net(), torch.randn(2, 4)
    with Offset():
        torch.manual_seed(1)
        bare = model(x)
    torch.manual_seed(1)
    if is_inside:
        with gaff.capture(model, site, **options) as got:
            with Offset():
                y = model(x)
            y.sum().backward()
    else:
        with Offset(), gaff.capture(model, site, **options) as got:
            y = model(x)
            with torch._C.DisableTorchFunction():
                y.sum().backward()
    assert torch.equal(y, bare)
    with torch._C.DisableTorchFunction():
        truth = {"a": model.seen, "a:input": x, "a.weight:param": model.a.weight}.get(site)
        if truth is not None:
            assert torch.equal(got[site], truth.detach()[: 1 if "reduce" in options else None])


def test_a_default_device_changes_nothing(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    rows = torch.randn(3, 4)
    with torch.device("meta"):
        with gaff.edit(model, {"0": edits.ablate("resample", rows)}) as editing:
            found = model(x)
        assert "8/8" in str(editing.receipt)
        trace = gaff.trace(model, x)
    assert all(any(torch.equal(row, one) for one in rows) for row in found)
    assert trace.rows[1].statistics.nonfinite == 0


def test_kept_values_have_no_tangent():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)
    with forward_ad.dual_level():
        with gaff.capture(model, "0") as got:
            model(forward_ad.make_dual(x, torch.ones(2, 4)))
        assert forward_ad.unpack_dual(got["0"]).tangent is None
        with gaff.edit(model, {"0": edits.patch(got)}):
            assert forward_ad.unpack_dual(model(x)).tangent is None
