"""Routers of mixtures of experts in a sampled step: which experts tokens go to. Found by structure, not by name.

A mixture is a module that holds several experts, alike in shape (modules in a list, or slices of weights of three
dimensions), and a weight of shape [experts, features] whose product scores them: its module is the *gate*. What the
gate returns tells first choices; where it, or a module around it, returns integers (indices, or a mask), or experts are
called with some of the tokens each, that tells where tokens really go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gaff.address.nested import iter_tensors
from gaff.address.resolve import join
from gaff.compat import elements
from gaff.record.sample import Key, Load
from gaff.training.watch.accumulator import Accumulator, readable


@dataclass(frozen=True, slots=True)
class Routing:
    """What a module is to a mixture of ``experts``: one of them, or part of what chooses.

    ``gate``: the path of the module whose weight scores the experts, by which the mixture is known; ``number``: which
    of the experts it is.
    """

    gate: str
    experts: int
    number: int | None = None


def routings_of(root: nn.Module) -> dict[nn.Module, Routing]:
    """Each module of ``root`` that is part of a mixture of experts, as a gate, around one, or as an expert."""
    found: dict[nn.Module, Routing] = {}
    for path, parent in root.named_modules():
        for holder, several in _experts_in(parent):
            count, features = several[0], several[1]
            inside = set(holder.modules()) if holder is not parent else {parent}
            ways = _ways_to(parent, inside)
            way = next((way for way in ways if _scores(way[-1][1], count, features)), None)
            if way is None:
                continue
            gate = join(path, way[-1][0])
            found.update((module, Routing(gate, count)) for _, module in way if module not in found)
            found.update((one, Routing(gate, count, number)) for number, one in enumerate(several[2]))
    return found


@dataclass(slots=True)
class _Tally:
    """Where the tokens of one gate went: by first choices until integers tell more. Counts lie on the device.

    ``called``: how many rows each expert that was called has returned; ``shape``: that of the tokens which were scored
    last, None before.
    """

    key: Key
    first: Tensor | None = None
    exact: Tensor | None = None
    dropped: Any = 0
    tokens: int = 0
    tokens_exact: int = 0
    called: Counter[int] = field(default_factory=Counter)
    shape: torch.Size | None = None


@dataclass(slots=True)
class Routes:
    """Adds up where tokens go in a sampled step. Waits for no device."""

    _numbers: Accumulator
    _tallies: dict[tuple[str, str], _Tally] = field(default_factory=dict)  # by model and path of the gate
    _begun: set[tuple[str, str]] = field(default_factory=set)  # mixtures whose experts have run already in this run

    def run_begins(self) -> None:
        """A model's run begins: what scores experts must come before these."""
        self._begun.clear()

    def returned(self, model: str, routing: Routing, key: Key, output: Any) -> None:
        """A module of a mixture has returned; ``key``: the address of its first floating output.

        A weight of the right shape whose product comes after the experts have run chooses none of them: a classifier
        behind as many layers as it has classes.
        """
        which = model, routing.gate
        if routing.number is not None:
            self._begun.add(which)
            if which in self._tallies:
                rows = next((one for _, one in iter_tensors(output) if one.dim()), None)
                self._tallies[which].called[routing.number] += 0 if rows is None else rows.shape[:-1].numel()
            return
        if which in self._begun:
            return
        tensors = [one for _, one in iter_tensors(output) if elements.is_plain(one) and elements.is_readable(one)]
        scores = (one for one in tensors if one.is_floating_point() and one.shape[-1:] == (routing.experts,))
        value = next((found for one in scores if (found := readable(one)) is not None), None)
        if value is not None:
            self._scored(self._tallies.setdefault(which, _Tally(key)), value, routing.experts)
        chosen = next((one for one in tensors if not one.is_floating_point()), None)
        if chosen is not None:
            self._chosen(self._tallies.setdefault(which, _Tally(key)), chosen, routing.experts)

    def take(self) -> dict[Key, tuple[Tensor, bool, int, Any]]:
        """Of each gate the tokens by expert, whether that is where they went, how many there were, and were dropped.

        The gates whose scores chose nobody are left out. Nothing is kept afterwards.
        """
        told: dict[Key, tuple[Tensor, bool, int, Any]] = {}
        for one in self._tallies.values():
            if one.exact is not None:
                told[one.key] = one.exact, True, one.tokens_exact, one.dropped
            elif one.first is not None:
                counts = one.first.new_tensor([one.called[at] for at in range(len(one.first))])
                is_sparse = 0 < one.called.total() < len(one.first) * one.tokens  # else each expert is given all
                told[one.key] = counts if is_sparse else one.first, is_sparse, one.tokens, 0
        self._tallies = {}
        return told

    def _scored(self, tally: _Tally, scores: Tensor, experts: int) -> None:
        """Scores of all tokens, [..., experts]: count first choices, and note how spread the probabilities are."""
        tally.shape = scores.shape[:-1]
        with torch.no_grad():
            flat = scores.reshape(-1, experts).float()
            if not flat.shape[0]:
                return
            chosen = _count(flat.argmax(-1), experts)
            tally.first = chosen if tally.first is None else tally.first + chosen
            tally.tokens += flat.shape[0]
            sums = flat.sum(-1)
            is_probability = (flat >= 0).all() & ((sums - 1).abs() < 1e-2).all()
            shares = torch.where(is_probability, flat, flat.softmax(-1))
            entropy = torch.special.entr(shares).sum(-1).mean() / math.log(experts)
            self._numbers.add_share("choice", tally.key, entropy, 1)

    def _chosen(self, tally: _Tally, chosen: Tensor, experts: int) -> None:
        """A mask over the experts, of truth values or zeros and ones, or their indices: one for each token, or several
        in a last dimension, as the shape of the tokens tells. Tokens without any are those that were dropped.

        Of integers that may be either, all at most 1, over as many as there are experts, a mask is taken for granted.
        """
        is_one_each = chosen.dim() == 1 or chosen.shape == tally.shape or chosen.shape[-1] > experts
        is_mask = chosen.dtype == torch.bool or (not is_one_each and chosen.shape[-1] == experts)
        with torch.no_grad():
            rows = chosen.reshape(-1, 1 if is_one_each and not is_mask else chosen.shape[-1])
            is_one = (rows >= 0) & (rows < experts)
            counts, has_any = _count(rows.clamp(0, experts - 1), experts, is_one), is_one.any(-1)
            if is_mask:
                mask = rows != 0
                told = (rows <= 1).all()  # else these are indices, of as many as there are experts
                counts = torch.where(told, mask.sum(0).to(counts.dtype), counts)
                has_any = torch.where(told, mask.any(-1), has_any)
            tally.exact = counts if tally.exact is None else tally.exact + counts
            tally.dropped = tally.dropped + (~has_any).sum()
            tally.tokens_exact += len(rows)


def load_of(told: tuple[Tensor, bool, int, Any]) -> Load:
    """What ``Routes.take`` tells of a gate, as plain numbers. Waits for the device."""
    counts, is_exact, tokens, dropped = told
    return Load(tuple(int(one) for one in counts.tolist()), is_exact, tokens, int(dropped))


def _count(indices: Tensor, experts: int, is_one: Tensor | None = None) -> Tensor:
    """How often each expert comes among ``indices``, as real numbers; without waiting, as bincount would."""
    flat, wide = indices.reshape(-1).long(), elements.wide_type(indices)
    weights = torch.ones_like(flat, dtype=wide) if is_one is None else is_one.reshape(-1).to(wide)
    return torch.zeros(experts, dtype=wide, device=flat.device).scatter_add_(0, flat, weights)


_Several = tuple[int, frozenset[int], list[nn.Module]]  # how many experts, their sizes, themselves if they are modules


def _experts_in(parent: nn.Module) -> Iterator[tuple[nn.Module, _Several]]:
    """What holds experts: the module itself, or one of its children."""
    for holder in (parent, *parent.children()):
        shapes = [shape for shape in _shapes(holder._parameters.values()) if len(shape) == 3]
        if len(shapes) > 1 and len({shape[0] for shape in shapes}) == 1 and shapes[0][0] > 1:
            yield holder, (shapes[0][0], frozenset(size for shape in shapes for size in shape[1:]), [])
        children = list(holder.children()) if holder is not parent else []
        alike = {(type(one), tuple(_shapes(one.parameters()))) for one in children}
        if len(children) > 1 and len(alike) == 1:
            sizes = frozenset(size for shape in _shapes(children[0].parameters()) if len(shape) == 2 for size in shape)
            if sizes:
                yield holder, (len(children), sizes, children)


def _ways_to(parent: nn.Module, without: set[nn.Module]) -> Iterator[list[tuple[str, nn.Module]]]:
    """Each module inside ``parent`` but those in ``without``, as the way to it: all around it, with their paths."""
    waiting: list[list[tuple[str, nn.Module]]] = [[(name, one)] for name, one in parent.named_children()]
    while waiting:
        way = waiting.pop(0)
        path, module = way[-1]
        if module not in without:
            yield way
            waiting += [[*way, (join(path, name), one)] for name, one in module.named_children()]


def _scores(module: nn.Module, experts: int, features: frozenset[int]) -> bool:
    """Whether a module has a weight of its own by which so many experts can be scored."""
    if isinstance(module, nn.Embedding):
        return False
    shapes = [shape for shape in _shapes(module._parameters.values()) if len(shape) == 2]
    return any(shape[0] == experts and shape[1] in features for shape in shapes)


def _shapes(parameters: Iterable[nn.Parameter | None]) -> list[tuple[int, ...]]:
    """The shapes of those parameters that have one: a lazy module's have none before its first run."""
    return [tuple(one.shape) for one in parameters if one is not None and not is_lazy(one)]
