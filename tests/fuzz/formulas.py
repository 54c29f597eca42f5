"""Edits of gaff, each with what it is to do, written out by hand: for a value, and for a gradient on its way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class EditKind:
    """An edit as gaff writes it, and its formula for a value and for a gradient. ``width``: of its last dimension.

    One that ``is_skip`` takes the place of a whole module: its formula makes the output of the first input.
    """

    text: str
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]
    width: int | None = None
    is_skip: bool = False


def same(formula: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    return formula, formula


def clipped(t: Tensor) -> Tensor:
    return t * (0.1 / (t.norm() + 1e-6)).clamp(max=1.0)


def turned(t: Tensor) -> Tensor:
    return 1.3 * t.detach() - 0.3 * t


def rounded(t: Tensor) -> Tensor:
    return t + (t.detach().half().to(t.dtype) - t.detach())


def first_row(t: Tensor) -> Tensor:
    is_first = torch.zeros_like(t, dtype=torch.bool)
    is_first[:1] = True
    return t.masked_fill(is_first, 0)


def second(t: Tensor, factor: float) -> Tensor:
    """Index 1 of dimension 1 times a factor."""
    factors = torch.ones_like(t)
    factors[:, 1] = factor
    return t * factors


def clipped_rows(t: Tensor) -> Tensor:
    return t * (0.1 / (t.flatten(1).norm(dim=1) + 1e-6)).clamp(max=1.0).view(-1, *[1] * (t.dim() - 1))


EDITS = [
    EditKind("gaff.edits.scale(0.5)", *same(lambda t: t * 0.5)),
    EditKind("gaff.edits.add(1.0, 0.25)", *same(lambda t: t + 0.25)),
    EditKind("gaff.edits.zero()", *same(torch.zeros_like)),
    EditKind("gaff.edits.fill(0.3)", *same(lambda t: torch.full_like(t, 0.3))),
    EditKind("gaff.edits.clamp(-0.2, 0.2)", *same(lambda t: t.clamp(-0.2, 0.2))),
    EditKind("gaff.edits.clip(0.1)", *same(clipped)),
    EditKind("gaff.edits.reverse(0.3)", turned, lambda t: t * -0.3),
    EditKind("gaff.edits.stop()", lambda t: t.detach(), torch.zeros_like),
    EditKind("gaff.edits.quantize('float16')", *same(rounded)),
    EditKind("gaff.edits.at(gaff.keep.rows(0), gaff.edits.zero())", *same(first_row)),
    EditKind("[gaff.edits.scale(0.5), gaff.edits.add(1.0)]", *same(lambda t: t * 0.5 + 1.0)),
    EditKind("lambda t: t.tanh() * 2.0", *same(lambda t: t.tanh() * 2.0)),
    EditKind("gaff.edits.ablate('zero')", *same(torch.zeros_like)),
    EditKind("gaff.edits.when(gaff.edits.scale(0.5), calls=range(100))", *same(lambda t: t * 0.5)),
]
EDITS += [
    EditKind("gaff.edits.project(torch.ones(1, 4))", *same(lambda t: t - t.mean(-1, keepdim=True)), 4),
    EditKind(
        "gaff.edits.project(torch.ones(1, 4), keep=True)",
        *same(lambda t: t.mean(-1, keepdim=True).expand_as(t).clone()),
        4,
    ),
    EditKind("gaff.edits.at(gaff.keep.channels(1), gaff.edits.scale(2.0))", *same(lambda t: second(t, 2.0)), 4),
    EditKind(
        "gaff.edits.at(torch.tensor([True, False, True, False]), gaff.edits.fill(0.1))",
        *same(lambda t: torch.where(torch.tensor([True, False, True, False]), 0.1, t).to(t.dtype)),
        4,
    ),
    EditKind("gaff.edits.clip(0.1, per='row')", *same(lambda t: clipped_rows(t)), 4),
    EditKind(
        "gaff.edits.chain(gaff.edits.reverse(0.5), gaff.edits.scale(2.0))",
        lambda t: 2.0 * (1.5 * t.detach() - 0.5 * t),
        lambda t: t * -1.0,
    ),
    EditKind("gaff.edits.with_event(lambda t, event: t * 0.5)", *same(lambda t: t * 0.5)),
    EditKind("gaff.edits.replace(lambda t: t + 0.5)", *same(lambda t: t + 0.5)),
    EditKind(
        "gaff.edits.add(torch.tensor([1.0, 0.0, -1.0, 0.5]), 0.5)",
        *same(lambda t: t + torch.tensor([0.5, 0.0, -0.5, 0.25]).to(t.dtype)),
        4,
    ),
    EditKind(
        "gaff.edits.scale(torch.tensor([1.0, 0.0, -1.0, 0.5]))",
        *same(lambda t: t * torch.tensor([1.0, 0.0, -1.0, 0.5]).to(t.dtype)),
        4,
    ),
]
EDITS += [
    EditKind(
        "gaff.edits.patch(torch.full((2, 4), 0.5), rows=[0])",
        *same(lambda t: torch.cat([torch.full_like(t[:1], 0.5), t[1:]])),
        4,
    ),
]
EDITS += [
    EditKind("gaff.edits.skip()", *same(lambda t: t), is_skip=True),
    EditKind("gaff.edits.skip(lambda x, *rest, **more: x * 2.0)", *same(lambda t: t * 2.0), is_skip=True),
]
