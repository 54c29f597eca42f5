"""One sampled step: the numbers of every activation and gradient that passes while it lasts."""

from __future__ import annotations

import math
import weakref
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.nested import iter_tensors
from gaff.compat import autograd, memory, modes
from gaff.engine.gradients.nodes import keep_gradient
from gaff.record.sample import Key
from gaff.record.statistics import NAN, NEGATIVE
from gaff.training.watch.accumulator import Accumulator, readable
from gaff.training.watch.models import Models, Place, WatchedModule, units_of

_LEAST_ROWS = 2  # of an attention matrix that is looked at
_MOST_INPUTS = 8


class SampledStep:
    """Hooks call ``left`` for modules; gradients come by themselves. All in the thread that trains.

    A module that returns what the last one returned is not read twice. What a checkpoint recomputes is not counted
    twice; gradients that only the recomputation can bring are taken from it.
    """

    def __init__(self, step: int, phase: str, models: Models) -> None:
        self.step = step
        self.phase = phase
        self.numbers = Accumulator()
        self.cost_s = 0.0
        self.runs = 0
        self.calls: dict[Key, int] = {}
        self.shares: dict[tuple[str, Key], tuple[Any, int]] = {}  # sums and what to divide them by
        self.notes: set[str] = set()
        self.facts: dict[str, Any] = {}
        self.modules_called: set[Key] = set()
        self.is_open = True
        self.scale: Any = 1.0  # of the loss whose gradients come; a tensor where it is on a device
        self._models = models
        self._latest: weakref.ref[Tensor] | None = None  # the last tensor that was looked at
        self._latest_version = 0
        self._latest_key: Key | None = None
        self._aliases: dict[Key, Key | None] = {}  # None: not always
        self._gradient_keys: dict[Key, Key] = {}
        self._graded: set[Key] = set()
        self._channels_at = -1
        self._stands: dict[int, Tensor] | None = None

    def close(self) -> None:
        self.is_open = False
        for key, known in self._aliases.items():
            if known is not None and self.calls.get(key) == self.calls.get(known):
                self.numbers.alias(key, known)
                self.numbers.alias(self._gradient_keys[key], self._gradient_keys[known])

    def nonfinite_gradient(self) -> Key | None:
        """A parameter's gradient that holds NaN or inf. Only of those on the CPU: never waits for a device."""
        pairs = [(key, row) for key, row in self.numbers.rows(":grad") if row.device.type == "cpu"]
        if not pairs:
            return None
        bad = torch.stack([row for _, row in pairs])[:, NAN : NEGATIVE + 1].any(1)
        return pairs[int(bad.int().argmax())][0] if bool(bad.any()) else None

    def left(self, module: nn.Module, args: Any, output: Any, stands: dict[int, Tensor] | None = None) -> None:
        """A module has returned. ``stands``: in compiled code, by identity of a tensor what hears of its gradient."""
        began = perf_counter()
        self._stands = stands
        entry = self._models.entries.get(module)
        if entry is not None and self.is_open:
            if autograd.backward_task() != -1:
                self._recomputed(entry, output)
            else:
                self._called(entry, module, args, output)
        self.cost_s += perf_counter() - began

    def root_given(self, model: str, args: Any, kwargs: Any) -> None:
        """The outermost module is about to be called."""
        began = perf_counter()
        self.runs += 1
        for at, (key, tensor) in enumerate(iter_tensors((args, kwargs))):
            value = readable(tensor) if tensor.is_floating_point() else None
            if value is not None and at < _MOST_INPUTS:
                place = () if key == (0, 0) else key[1:]
                self.numbers.observe((model, str(Site(port="input", key=place))), value)
                self._remember(tensor, None)
        self.cost_s += perf_counter() - began

    def _called(self, entry: WatchedModule, module: nn.Module, args: Any, output: Any) -> None:
        self.modules_called.add((entry.model, entry.path))
        if entry.channels_at is not None:
            self._channels_at = entry.channels_at
        if not entry.is_wanted:
            return
        if entry.kind == "mixing" and args and type(args[0]) is Tensor and self._stands is None:
            self._given(entry, args[0])
        if entry.kind in ("dropout", "softmax", "attention"):
            self._attended(entry, args, output)
        if isinstance(output, Tensor):
            self._returned(entry, (), output)
        else:
            for key, tensor in iter_tensors(output):
                self._returned(entry, key, tensor)

    def _given(self, entry: WatchedModule, tensor: Tensor) -> None:
        """What a layer was given, where no module returned it: the result of a functional op."""
        if self._is_latest(tensor) or not entry.path:
            return
        value = readable(tensor)
        if value is not None:
            self._observe(entry.key("input"), value, entry.channels_at or -1)

    def _returned(self, entry: WatchedModule, place: tuple[int | str, ...], tensor: Tensor) -> None:
        key = entry.key("output", place)
        calls = self.calls[key] = self.calls.get(key, 0) + 1
        self._gradient_keys[key] = entry.key("grad_output", place)
        if calls > 1 and key in self._aliases:  # of its first call only the tensor's other name was looked at
            self._aliases[key] = self._aliases[key] if self._is_latest(tensor) else None
            self._models.called_often.add(key)
            return
        is_known = self._is_latest(tensor) and self._latest_key is not None
        if is_known and calls == 1 and key not in self._models.called_often:
            self._aliases[key] = self._latest_key
            return
        value = readable(tensor)
        if value is None:
            if tensor.is_floating_point():
                self.notes.add(f"{key[1]}: a {type(tensor).__name__} of {tensor.layout} is not looked at")
            return
        has_units = entry.kind in ("rectifier", "tanh", "sigmoid") or not entry.path
        self._observe(key, value, self._channels_at if has_units else None)
        if entry.kind in ("tanh", "sigmoid"):
            self._count_saturated(key, value, entry.kind)
        self._remember(tensor, key)
        self._follow(entry, place, tensor)

    def _remember(self, tensor: Tensor, key: Key | None) -> None:
        if self._stands is not None:
            self._latest = None
            return
        self._latest, self._latest_version, self._latest_key = weakref.ref(tensor), memory.version_of(tensor), key

    def _is_latest(self, tensor: Tensor) -> bool:
        """Whether it is the tensor that was looked at last, and nobody has written to it since.

        Compiled code uses a tensor again for other values, and counts no writes: of its tensors nobody can tell.
        """
        if self._stands is not None:
            return False
        known = self._latest
        return known is not None and known() is tensor and memory.version_of(tensor) == self._latest_version

    def _recomputed(self, entry: WatchedModule, output: Any) -> None:
        """A checkpoint runs the module again: its gradients come from here if the first pass had no graph.

        Those of compiled code do in any case: backward is given what the second pass has saved.
        """
        if entry.is_wanted:
            for place, tensor in iter_tensors(output):
                if self._stands is not None or entry.key("grad_output", place) not in self._graded:
                    self._follow(entry, place, tensor, is_again=True)

    def _follow(self, entry: WatchedModule, place: Place, tensor: Tensor, *, is_again: bool = False) -> None:
        if self._stands is not None:
            tensor = self._stands.get(id(tensor), tensor)
        elif not torch.is_grad_enabled():
            return
        if self.phase != "train" or not tensor.requires_grad or tensor.is_leaf:
            return
        if getattr(tensor, "stands_for_view", False):
            self.notes.add(f"{entry.path}: a view inside compiled code, whose gradient is not looked at")
            return
        if tensor._is_view():
            _ = tensor.grad_fn  # else a stale one is hooked: torch 2.13 crashes
        key = entry.key("grad_output", place)
        if not is_again:
            self._graded.add(key)
        keep_gradient(tensor, partial(self._arrived, key))

    def _arrived(self, key: Key, gradient: Tensor) -> None:
        if not self.is_open:
            return
        began = perf_counter()
        value = readable(gradient)
        if value is not None:
            self.numbers.observe(key, value)
        self.cost_s += perf_counter() - began

    def _observe(self, key: Key, value: Tensor, channels_at: int | None) -> None:
        self.numbers.observe(key, value)
        units = units_of(value, channels_at) if channels_at is not None and self.phase == "train" else None
        if units is not None:
            self.numbers.observe_units(key, value, *units)

    def _count_saturated(self, key: Key, value: Tensor, kind: str) -> None:
        """Tanh beyond 0.97 in magnitude; sigmoid nearer to 0 or 1 than 0.015, which has the same slope of 6 %."""
        with torch.no_grad(), modes.outside_modes():
            far = value.abs() > 0.97 if kind == "tanh" else (value - 0.5).abs() > 0.485
            self._add("saturated", key, far.sum(), value.numel())

    def _attended(self, entry: WatchedModule, args: Any, output: Any) -> None:
        """Attention probabilities: what a softmax returned, a dropout was given, or MultiheadAttention's weights."""
        found: Any
        if entry.kind == "attention":
            found = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        else:
            found = output if entry.kind == "softmax" else args[0] if args else None
        if not isinstance(found, Tensor) or found.dim() < (3 if entry.kind == "attention" else 4):
            return
        value = readable(found)
        if value is None or value.shape[-1] < _LEAST_ROWS or value.shape[-2] < _LEAST_ROWS:
            return
        with torch.no_grad(), modes.outside_modes():
            some = value[:1].float()
            if entry.kind == "dropout" and not _are_probabilities(some):
                return
            self.add_entropy(entry.key("output"), some)

    def add_entropy(self, key: Key, probabilities: Tensor) -> None:
        """Shannon's entropy of the rows of attention over that of uniform ones, which a causal mask makes smaller."""
        queries, keys = probabilities.shape[-2:]
        behind = torch.arange(queries, device=probabilities.device) + keys - queries + 1.0
        is_causal = (probabilities.triu(keys - queries + 1) == 0).all()
        largest = torch.where(is_causal & (behind > 0), behind, float(keys)).log()
        rows = torch.special.entr(probabilities).sum(-1)
        mean = rows.mean(tuple(range(rows.dim() - 1)))
        self._add("entropy", key, mean.sum() / largest.sum().clamp(min=1e-9), 1)

    def _add(self, name: str, key: Key, value: Tensor, count: int) -> None:
        known, number = self.shares.get((name, key), (0.0, 0))
        self.shares[name, key] = known + value.double(), number + count


def _are_probabilities(value: Tensor) -> bool:
    """Waits for the device; only asked of four-dimensional inputs of a dropout."""
    return bool(((value.sum(-1) - 1).abs().max() < 1e-2) & (value.min() >= 0))


def unscaled(row: Tensor, scale: float) -> Tensor:
    """A row of gradients of ``scale`` times the loss, as those of the loss; the powers of two stay as they were."""
    if scale == 1.0 or not math.isfinite(scale) or not scale:
        return row
    row = row.clone()
    row[1] /= scale
    row[2] /= scale * scale
    row[3:5] /= scale
    return row
