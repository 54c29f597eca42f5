"""Trap: in inference mode torch counts no writes, so what is told by the version of a tensor is told of nothing there."""

import pytest
import torch
from torch import Tensor, nn

import gaff
from gaff.edits import add, project, scale


@torch.library.custom_op("gaff_traps::bump", mutates_args={"a"})
def bump(a: Tensor) -> Tensor:
    a.add_(1)
    return a * 1


class Bumps(nn.Module):
    def forward(self, x):
        h = x * 1
        torch.ops.gaff_traps.bump(h)
        return h * 1


class AddsToAList(nn.Module):
    def forward(self, x):
        h = x * 1
        torch._foreach_add_([h], 1.0)
        return h * 1


MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@MODES
@pytest.mark.parametrize("site", ["0", "0:input"])
def test_an_edit_that_writes_into_what_it_was_given_is_refused(mode, site):
    model = nn.Sequential(nn.Linear(4, 4))
    with mode():
        x = torch.randn(2, 4)
        for change in (lambda t: t.mul_(2), lambda t: t.view(-1)[0].zero_(), lambda t: t.detach().add_(1)):
            with (
                pytest.raises(gaff.PlanError, match=r"wrote into what it was given"),
                gaff.edit(model, {site: change}),
            ):
                model(x)
        with gaff.edit(model, {site: lambda t: t * 2}) as edited:
            model(x)
    assert edited.receipt.rows[0].changed == 8


@MODES
def test_constants_that_are_written_to_between_runs(mode):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    with mode():
        bare, added, along = model(x), torch.ones(4, dtype=torch.float64), torch.tensor([1.0, 0, 0, 0])
        with gaff.edit(model, {"0": add(added)}):
            model(x)
            added.fill_(10.0)
            assert torch.equal(model(x), bare + 10)
        with gaff.edit(model, {"0": project(along)}):
            model(x)
            along.copy_(torch.tensor([0.0, 0, 0, 1]))
            new = model(x)
    assert new[:, 3].abs().max() < 1e-6
    assert torch.allclose(new[:, :3], bare[:, :3])


@MODES
@pytest.mark.parametrize(
    ("model", "address", "message"),
    [(Bumps(), "/bump:input[0]", "writes into an argument"), (AddsToAList(), "/_foreach_add_", "into several tensors")],
)
def test_an_op_that_writes_where_an_edit_would_be_lost_is_refused(mode, model, address, message):
    with pytest.raises(gaff.PlanError, match=message), mode(), gaff.edit(model, {address: scale(10.0)}):
        model(torch.ones(2, 2))


@MODES
def test_an_op_that_writes_into_what_it_returns_is_edited(mode):
    class Adds(nn.Module):
        def forward(self, x):
            h = x * 1
            h.add_(1)
            return h * 1

    model = Adds()
    with mode(), gaff.edit(model, {"/add_": scale(10.0)}):
        assert torch.equal(model(torch.ones(2)), torch.full((2,), 20.0))
