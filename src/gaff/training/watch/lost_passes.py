"""Which backward passes a step makes use of: of some the gradients are cleared before, others are used twice.

They are for nothing where gradients are meant to be accumulated and ``zero_grad`` stands in the inner loop, or where
``step`` stands outside of the loop over batches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.address.nested import iter_tensors
from gaff.compat import elements, memory
from gaff.compat.autograd import nodes_behind, nodes_of
from gaff.inspection.nonfinite.rerun import Batch
from gaff.training.watch.accumulator import readable
from gaff.training.watch.updates import parameters_of, some_of

_PROBES = 64  # parameters of an optimizer that are asked for a gradient that a pass has changed
_TRIED = 4  # of them are remembered: the first whose gradient is not zero is asked
_MOST = 1 << 18  # elements of which all are copied; of larger tensors some
_ALIKE = 1 - 1e-5  # cosine of two gradients that are one but for a factor
_NODES = 2000  # of a graph that is searched for a leaf that is no parameter
_Mark = tuple[int, int]  # which tensor, and how often it was written to


class _Pulled(NamedTuple):
    """The gradient that a backward pass has left at a parameter, and a copy of it."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    copy: Tensor


class _Left(NamedTuple):
    """What a backward pass of the loss ``name`` has left at some parameters of an optimizer.

    ``weights``: the norms of its parameters then, which tell whether somebody has changed them since. ``factor``: by
    what a GradScaler had multiplied the loss, if it had; ``is_plain``: none had, for certain. ``batch``: what the
    latest run before it was given. ``is_alone``: the pass has brought gradients to no other optimizer, so that they
    were meant for this one.
    """

    name: str
    factor: Any
    is_plain: bool
    batch: Batch | None
    pulled: list[_Pulled]
    weights: list[Tensor]
    is_alone: bool

    def first(self) -> _Pulled | None:
        """The first that is not zero. Waits for the device."""
        return next((one for one in self.pulled if bool(one.copy.any())), None)


class LostPasses:
    """Counts them from one step of an optimizer to the next, in a sampled step, by the name of the loss.

    One counts if what it left at a parameter is gone, or zero, when the next pass begins, while all parameters are what
    they were (else it was a step by hand, or a perturbation of them), if the next one is of another batch of about
    the same size (else gradients were measured, of one loss among several or of a part of the batch), and if the step
    then uses what the last pass has left, but for a factor: one of the same loss, or of any where the first was meant
    for this optimizer alone. Passes that reach a leaf which is no parameter are for that leaf. Made when an optimizer
    has stepped. Holds gradients weakly, and batches until the step; waits for the device where a step has several
    passes.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        self.facts: list[dict[str, Any]] = []
        known = list(optimizers)
        found = (next(_gradients(optimizer), None) for optimizer in known)
        self._used = [(weakref.ref(one[1]), _copy_of(one[1])) for one in found if one is not None]  # by the step before
        self.has_passed = False  # a backward pass has begun since
        self.has_brought = not known  # one has left a gradient at a parameter of them since, as far as is known
        self._before: dict[int, dict[int, _Mark]] = {}  # by optimizer and parameter, as a pass begins
        self._left: dict[int, _Left] = {}  # by optimizer: by the last pass that has changed a gradient of it
        self._lost: Counter[tuple[int, str, bool]] = Counter()  # by optimizer, loss, and whether it was meant alone
        self._is_aside = False  # the pass in progress reaches a leaf that is no parameter
        self._batch: Batch | None = None  # what the latest run before that pass was given

    def is_stale(self, optimizers: Iterable[Any]) -> bool:
        """Whether all optimizers still have the very gradients that they have used in their last steps."""
        now = [found[1] for one in optimizers if (found := next(_gradients(one), None)) is not None]
        return bool(now) and all(any(known() is gradient for known, _ in self._used) for gradient in now)

    def repeats(self, optimizer: Any) -> bool:
        """Whether an optimizer is about to use what it has used before: no pass has begun, nobody has changed it.

        Waits for the device where none has begun.
        """
        found = next(_gradients(optimizer), None)
        copy = next((one for known, one in self._used if found is not None and known() is found[1]), None)
        if self.has_passed or found is None or copy is None:
            return False
        now = _copy_of(found[1])
        return now is not None and torch.equal(now, copy)

    def factor_left(self, optimizer: Any) -> Any:
        """By what the gradients are too large that an optimizer is about to use; None where they are not.

        They are where they are exactly what the last backward pass has left, from a loss that a GradScaler had
        multiplied. Waits for the device.
        """
        left = self._left.get(id(optimizer))
        first = left.first() if left is not None and left.factor is not None else None
        parameter = first.parameter() if first is not None else None
        if left is None or first is None or parameter is None or parameter.grad is None:
            return None
        now = _copy_of(parameter.grad)
        return left.factor if now is not None and torch.equal(now, first.copy) else None

    def plain_loss(self, optimizer: Any) -> str | None:
        """The loss of the last pass that has left gradients for an optimizer, if no GradScaler had multiplied it."""
        left = self._left.get(id(optimizer))
        return left.name if left is not None and left.is_plain and left.first() is not None else None

    def begins(self, optimizers: Iterable[Any], losses: Any, batch: Batch | None) -> None:
        """A backward pass is about to begin from ``losses``, a tensor or several; ``batch``: of the latest run."""
        self.has_passed = True
        self._batch = batch
        self._is_aside = any(_has_other_leaf(one) for _, one in iter_tensors(losses))
        for optimizer in optimizers:
            left = self._left.pop(id(optimizer), None)
            if (
                left is not None
                and _are_others(left.batch, batch)
                and _is_lost(left)
                and _are_alike(_norms(optimizer), left.weights)
            ):
                self._lost[id(optimizer), left.name, left.is_alone] += 1
            self._before[id(optimizer)] = {id(one): _mark(gradient) for one, gradient in _gradients(optimizer)}

    @property
    def are_awaited(self) -> bool:
        """Whether the end of a backward pass is to be told: its beginning was."""
        return bool(self._before)

    def ended(self, optimizers: Iterable[Any], name: str, factor: Any, *, is_plain: bool) -> None:
        """A backward pass from the loss ``name`` has ended; of one whose beginning was not told nothing is noted.

        ``factor``: by what a GradScaler has multiplied the loss, None where it has not; ``is_plain``: see ``_Left``.
        """
        reached = []
        for optimizer in optimizers if self._before else ():
            before = self._before.pop(id(optimizer), {})
            changed = [pair for pair in _gradients(optimizer) if before.get(id(pair[0])) != _mark(pair[1])]
            self.has_brought |= bool(changed)
            found = [
                _Pulled(weakref.ref(parameter), weakref.ref(gradient), copy)
                for parameter, gradient in changed[: 0 if self._is_aside else _TRIED]
                if (copy := _copy_of(gradient)) is not None
            ]
            if found:
                reached.append((optimizer, found))
        for optimizer, found in reached:
            left = _Left(name, factor, is_plain, self._batch, found, _norms(optimizer), len(reached) == 1)
            self._left[id(optimizer)] = left

    def used(self, optimizer: Any) -> None:
        """An optimizer is about to step: what was lost before is a fact, if it uses what the last pass has left."""
        left = self._left.get(id(optimizer))
        lost: Counter[str] = Counter()
        for key in [key for key in self._lost if key[0] == id(optimizer)]:
            _, name, is_alone = key
            if left is not None and (is_alone or name == left.name):
                lost[name] += self._lost[key]
            del self._lost[key]
        self._left.clear()  # what that pass has left at others was not meant for them
        if left is not None and lost and _is_used(left):
            kept = {"kept": left.name, "optimizer": type(optimizer).__name__}
            self.facts += [{"loss": name, "lost": count, **kept} for name, count in lost.items()]


def _gradients(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The first parameters of an optimizer that have a gradient, with it."""
    found = ((one, one.grad) for _, one in islice(parameters_of(optimizer), _PROBES))
    return ((one, gradient) for one, gradient in found if gradient is not None)


def _mark(gradient: Tensor) -> _Mark:
    return id(gradient), memory.version_of(gradient)


def _copy_of(tensor: Tensor) -> Tensor | None:
    """The elements of a tensor, or of a very large one some, as they are now; None where they cannot be read."""
    value = readable(tensor)
    with torch.no_grad():
        return None if value is None else (value if value.numel() <= _MOST else some_of(value)).clone()


def _is_lost(left: _Left) -> bool:
    """Whether what a pass has left is cleared by now. Waits for the device."""
    first = left.first()
    parameter = first.parameter() if first is not None else None
    if first is None or parameter is None:
        return False
    gradient, known = parameter.grad, first.gradient()
    now = None if gradient is None else _copy_of(gradient)
    return gradient is None or (gradient is known and now is not None and not bool(now.any()))


def _are_others(one: Batch | None, other: Batch | None) -> bool:
    """Whether two runs were given other numbers, and about as many, within a factor of two. Waits for the device.

    Without any tensors they are told apart by nothing, and taken for others if they are two.
    """
    if one is None or other is None or one is other or len(one.versions) != len(other.versions):
        return False
    pairs = list(zip(one.versions, other.versions, strict=True))
    sizes = [sorted((before.numel(), now.numel())) for (before, _), (now, _) in pairs]
    if any(least < most and 2 * least <= most for least, most in sizes):
        return False
    return not pairs or any(_is_rewritten(before, now) for before, now in pairs)


def _is_rewritten(before: tuple[Tensor, int], now: tuple[Tensor, int]) -> bool:
    """Whether a tensor has other elements than one had before, which may be the same tensor, written to since."""
    (one, version), (other, later) = before, now
    if one is other:
        return version != later
    kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (one, other)]
    if version != memory.version_of(one) or kinds[0] != kinds[1]:
        return True
    is_known = all(elements.is_plain(tensor) and elements.is_readable(tensor) for tensor in (one, other))
    return not (is_known and torch.equal(one.detach(), other.detach()))


def _norms(optimizer: Any) -> list[Tensor]:
    """The norms of the first parameters of an optimizer, on their devices."""
    values = [value for _, one in islice(parameters_of(optimizer), _PROBES) if (value := readable(one)) is not None]
    with torch.no_grad():
        return list(torch._foreach_norm(values)) if values else []


def _are_alike(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Whether norms are the same numbers. Waits for the device."""
    return len(ones) == len(others) and all(float(one) == float(other) for one, other in zip(ones, others, strict=True))


def _is_used(left: _Left) -> bool:
    """Whether a step is given what the last pass has left, but for a factor, as of clipping or a GradScaler. Waits."""
    first = left.first()
    parameter = first.parameter() if first is not None else None
    if first is None or parameter is None or parameter.grad is None or parameter.grad is not first.gradient():
        return False
    now = _copy_of(parameter.grad)
    if now is None or now.shape != first.copy.shape or now.is_complex():
        return False
    wide = elements.wide_type(now)
    one, other = now.flatten().to(wide), first.copy.flatten().to(wide)
    return bool(torch.dot(one, other) > _ALIKE * one.norm() * other.norm())


def _has_other_leaf(loss: Tensor) -> bool:
    """Whether a loss depends on a leaf that is no parameter, such as an image that is to be changed."""
    behind: Iterable[Any] = nodes_behind(nodes_of([loss]))
    leaves = (getattr(node, "variable", None) for node in islice(behind, _NODES))
    return any(one is not None and not isinstance(one, nn.Parameter) for one in leaves)
