"""Trap: in inference mode torch counts no writes, so what is told by the version of a tensor is told of nothing there."""

import pytest
import torch
from torch import Tensor, nn

import gaff
from gaff.edits import add, at, project, scale


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
            along.data = along.data.roll(-1)
            new = model(x)
    assert new[:, 3].abs().max() < 1e-6
    assert torch.allclose(new[:, :3], bare[:, :3])


@MODES
@pytest.mark.parametrize("place", [None, gaff.keep.rows(0), torch.tensor([[True], [False]])], ids=str)
def test_several_directions_that_are_written_to_between_runs(mode, place):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    change = project if place is None else lambda directions: at(place, project(directions))
    with mode():
        bare, along = model(x), torch.eye(4)[:2]
        with gaff.edit(model, {"0": change(along)}):
            model(x)
            along.data.copy_(torch.eye(4)[2:])  # past the version counter
            new = model(x)
    true = bare.clone()
    true[: 2 if place is None else 1, 2:] = 0
    assert torch.allclose(new, true, atol=1e-6)


def test_one_direction_of_any_size_spans_a_line():
    for size in (1e-300, 5e-324, 1.0, 1e300):
        model, x = nn.Identity(), torch.tensor([[3.0, 4.0]], dtype=torch.float64)
        with gaff.edit(model, {":output": project(torch.tensor([size, 0.0], dtype=torch.float64))}):
            assert model(x).tolist() == [[0.0, 4.0]]


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
