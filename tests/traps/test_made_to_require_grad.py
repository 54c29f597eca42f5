"""What comes to require grad only after the run, or in the middle of a session, has its gradient told all the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff import edits


def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh()).requires_grad_(False), nn.Linear(4, 2), torch.randn(2, 3)


@pytest.mark.parametrize("has_grad_mode", [True, False])
def test_features_of_a_frozen_backbone_that_are_made_a_leaf(has_grad_mode):
    back, head, x = backbone()
    with gaff.capture(back, "1:grad_output", "0:grad_output") as got:
        for _ in range(2):
            with torch.set_grad_enabled(has_grad_mode):
                features = back(x)
            features.requires_grad_()
            head(features).sum().backward()
    torch.testing.assert_close(got.all("1:grad_output"), [features.grad, features.grad])
    assert got.all("0:grad_output") == [None, None]
    bare = features.grad
    with gaff.edit(back, {"1:grad_output": edits.scale(2.0)}):
        features = back(x)
        features.requires_grad_()
        head(features).sum().backward()
    torch.testing.assert_close(features.grad, 2 * bare)


def test_features_that_never_require_grad_are_told_as_none():
    back, _, x = backbone()
    kept = []
    with gaff.capture(back, "1:grad_output") as got:
        for _ in range(300):  # more than are waited for
            kept.append(back(x))
    assert got.all("1:grad_output") == [None] * 300


def used(model, x):
    return F.linear(F.linear(x, model[0].weight), model[1].weight).sum()


def test_a_parameter_that_is_unfrozen_or_replaced_between_runs():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)), torch.randn(2, 3)
    model[0].requires_grad_(False)
    with gaff.capture(model, "*.weight:grad") as got:
        model[0].requires_grad_(True)
        used(model, x).backward()
    torch.testing.assert_close(got["0.weight:grad"], model[0].weight.grad)
    with gaff.edit(model, {"*.weight:grad": edits.zero()}):
        model(x).sum().backward()
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        used(model, x).backward()
    assert not model[0].weight.grad.any()


class InTiles(torch.autograd.Function):
    """Recomputes in two tiles, and runs backward through each: as DeepSpeed's TiledMLP."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return torch.cat([module(tile) for tile in x.chunk(2)])

    @staticmethod
    def backward(ctx, gradient):
        found = []
        for tile, part in zip(ctx.saved_tensors[0].chunk(2), gradient.chunk(2), strict=True):
            leaf = tile.detach().requires_grad_()
            with torch.enable_grad():
                made = ctx.module(leaf)
            torch.autograd.backward(made, part)
            found.append(leaf.grad)
        return torch.cat(found), None


class Tiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return InTiles.apply(x, self.f)


def test_an_edit_of_a_gradient_that_comes_in_tiles_is_refused():
    model, x = Tiled(), torch.ones(4, 3, requires_grad=True)
    with (
        pytest.raises(gaff.ExactnessError, match="the gradient comes in parts"),
        gaff.edit(model, {"f.weight:grad": edits.clamp(-1, 1)}),
    ):
        model(x).sum().backward()


def test_a_hook_that_sees_what_a_linear_layer_made_leaves_no_total_to_be_told():
    model, aside = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), []

    def reshape(_module, _given, output):
        flat = output.flatten(0, 1)
        aside.append(100 * flat.sum())
        return flat.unflatten(0, (2, 5))

    model[0].register_forward_hook(reshape)
    with gaff.capture(model, "0:grad_output") as got:
        (model(torch.ones(2, 5, 3)).sum() + aside[0]).backward()
    with pytest.raises(gaff.ExactnessError, match="a view that was changed in place later"):
        _ = got["0:grad_output"]


class Rows(nn.Module):
    def __init__(self, has_dense):
        super().__init__()
        self.has_dense = has_dense

    def forward(self, table):
        rows = F.embedding(torch.tensor([0, 1, 1, 3]), table, sparse=True).pow(2).sum()
        return rows + (table * 3).sum() if self.has_dense else rows


class Making(nn.Module):
    def __init__(self, has_dense):
        super().__init__()
        self.make, self.f, self.w = nn.Identity(), Rows(has_dense), nn.Parameter(torch.arange(8.0).view(4, 2))

    def forward(self):
        return self.f(self.make(self.w * 1.0))


@pytest.mark.parametrize("has_dense", [True, False])
@pytest.mark.parametrize("port", ["f:grad_input", "make:outer_grad", "make:grad_output"])
def test_sparse_gradients_inside_a_graph(has_dense, port):
    model = Making(has_dense)
    model().backward()
    bare, model.w.grad = model.w.grad, None
    with gaff.capture(model, port) as got:
        model().backward()
    torch.testing.assert_close(got[port].to_dense(), bare.to_dense())
    model.w.grad = None
    with gaff.edit(model, {port: edits.scale(2.0)}):
        model().backward()
    torch.testing.assert_close(model.w.grad.to_dense(), 2 * bare.to_dense())
