"""One sampled step: the numbers of every activation and gradient that passes while it lasts.

``Looks`` makes a ``SampledStep`` when a look begins, and hands it what hooks tell. It decides what is counted, and
under which address; the counting itself is done by an ``Accumulator``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.nested import iter_tensors
from gaff.compat import autograd, compiler, memory
from gaff.compat.checkpoints import repeats_without_graph
from gaff.engine.gradients.tensor_hooks import EDGE, is_at_edge, keep_gradient
from gaff.engine.process.functions import ATTENTION
from gaff.record.sample import Key, port_of
from gaff.record.statistics import NAN, NEGATIVE
from gaff.training.watch import attention
from gaff.training.watch.accumulator import Accumulator, readable
from gaff.training.watch.models import Models, Place, WatchedModule, units_of
from gaff.training.watch.ownership import Stray, has_drawn
from gaff.training.watch.routers import Routes
from gaff.training.watch.shield import Shield

_MOST_INPUTS = 8
_OVER_SEQUENCES = (nn.RNNBase, nn.MultiheadAttention)


class LatestTensor:
    """The tensor that was looked at last, held weakly.

    ``key``: under which address its numbers are, if under one; ``channels_at``: the dimension of the units of the last
    layer that has some.

    What a module passes on as it is need not be read twice. Once somebody has written to the tensor it is another one.
    It is forgotten with the end of a run, since torch swaps no tensor to which anybody refers weakly.
    """

    __slots__ = ("_tensor", "_version", "channels_at", "key")

    def __init__(self) -> None:
        self.key: Key | None = None
        self.channels_at = -1
        self._tensor: weakref.ref[Tensor] | None = None
        self._version = 0

    def set(self, tensor: Tensor, key: Key | None, *, is_inside: bool) -> None:
        """A tensor has been looked at. ``is_inside``: by compiled code, so that none is known from now on.

        Compiled code uses a tensor again for other values, and counts no writes: of its tensors nobody can tell.
        """
        if is_inside:
            self._tensor = None
        else:
            self._tensor, self._version, self.key = weakref.ref(tensor), memory.version_of(tensor), key

    def forget(self) -> None:
        """Refer to no tensor any more."""
        self._tensor = None

    def is_same(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is that one, and nobody has written to it since."""
        known = self._tensor
        return known is not None and known() is tensor and self._is_untouched(tensor)

    def is_shown_by(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is that one or shows its very elements, and nobody has written to them since.

        FSDP2 gives the module of a unit such an alias of each input.
        """
        known = self._tensor() if self._tensor is not None else None
        return known is not None and self._is_untouched(tensor) and memory.is_alias(known, tensor)

    def _is_untouched(self, tensor: Tensor) -> bool:
        """Whether nobody has written to it; where torch does not count writes (inference mode) somebody may have."""
        return self._version == memory.version_of(tensor) != -1


@dataclass(eq=False, slots=True)
class SampledOutput:
    """One tensor among what a module returns, in one sampled step: how often it came, and whose numbers are its own.

    A module that returns the very tensor that another one has just returned gives it a second address (``is_alias``).
    It is looked at under the first address alone, which is ``known`` as long as each call has done so.
    """

    gradient: Key  # the address of its gradient
    calls: int = 0
    is_alias: bool = False
    known: Key | None = None
    is_followed: bool = False  # a hook of the first pass brings its gradient


@dataclass(slots=True)
class RunCount:
    """Runs of models in a step: all of them, and those that were looked at.

    ``inside``: the model that runs now, empty between runs; ``strays``: modules that were called meanwhile, and are no
    part of any model that is known.
    """

    all: int = 0
    looked: int = 0
    inside: str = ""
    strays: dict[int, Stray] = field(default_factory=dict)

    def passed_by(self, module: nn.Module, models: Models) -> None:
        """A module has returned that is part of no model: note one that has parameters and was called inside a run."""
        known = self.strays.get(id(module))
        if self.inside and module._parameters and (known is None or known.module() is not module):
            is_drawn = torch.is_grad_enabled() and has_drawn(module, models.named(self.inside))
            self.strays[id(module)] = Stray(weakref.ref(module), self.inside, type(module), is_drawn)


def _share(outputs: Mapping[Key, SampledOutput], numbers: Accumulator) -> list[Key]:
    """Give tensors with several addresses their numbers under each of them, where that was so in each call.

    Returns the addresses of which it was not, as of a block that ends in an activation which it calls before: they have
    no numbers this time, and are looked at by themselves from now on.
    """
    others = []
    for key, one in outputs.items():
        if one.known is None:
            continue
        if one.calls == (other := outputs[one.known]).calls:
            numbers.alias(key, one.known)
            numbers.alias(one.gradient, other.gradient)
        else:
            others.append(key)
    return others


def _unread(tensor: Tensor) -> str:
    """What a tensor is whose numbers cannot be read, in words."""
    if autograd.is_wrapper(tensor):
        return "what passes inside a torch.func transform (vmap, grad ...)"
    return f"a {type(tensor).__name__} of {tensor.layout}"


class SampledStep:
    """What is seen of one step of training (``phase`` "train"), or of one run of an evaluation ("eval").

    Hooks call ``left`` for modules; gradients come by themselves, through the ``shield``. All in the thread that
    trains. A module that returns what the last one returned is not read twice. What a checkpoint recomputes is not
    counted twice; gradients that only the recomputation can bring are taken from it. ``modules_called`` are
    models and paths, ``notes`` what could not be looked at.
    """

    def __init__(self, step: int, phase: str, models: Models, shield: Shield) -> None:
        self.step = step
        self.phase = phase
        self.numbers = Accumulator()
        self.routes = Routes(self.numbers)
        self.runs = RunCount()
        self.notes: set[str] = set()
        self.facts: dict[str, Any] = {}
        self.modules_called: set[Key] = set()
        self.is_open = True
        self.scale: Any = 1.0  # of all gradients that were counted; a tensor where it is on a device
        self.models = models
        self._shield = shield
        self._latest = LatestTensor()
        self._outputs: dict[Key, SampledOutput] = {}
        self._stands: dict[int, Tensor] | None = None

    def close(self) -> None:
        """Look at nothing from now on; tensors with several addresses have their numbers under each of them."""
        self.is_open = False
        self.notes |= self.numbers.notes
        self.models.called_often.update(_share(self._outputs, self.numbers))

    def gradients_come(self, scale: Any) -> None:
        """A backward pass begins whose loss was multiplied by ``scale``; what was counted before is told as if its was.

        So all gradients of a look have one scale, also where some of its losses go through a GradScaler, or two do.
        Waits for no device.
        """
        if isinstance(scale, Tensor) or isinstance(self.scale, Tensor) or scale != self.scale:
            self.numbers.rescale(":grad_output", scale / self.scale)
        self.scale = scale

    @property
    def size_bytes(self) -> int:
        """About how much memory the numbers take that were counted."""
        return self.numbers.size_bytes

    def nonfinite_gradient(self) -> Key | None:
        """A parameter's gradient that holds NaN or inf. Only of those on the CPU: never waits for a device."""
        return _first(self.numbers.rows(":grad"), NEGATIVE)

    def first_nan(self) -> Key | None:
        """The first tensor that came by in a forward and holds a NaN. Only of those on the CPU, as above."""
        rows = self.numbers.rows("")
        return _first(((key, row) for key, row in rows if port_of(key[1]) in ("input", "output")), NAN)

    def left(self, module: nn.Module, args: Any, output: Any, stands: dict[int, Tensor] | None = None) -> None:
        """A module has returned, in an ordinary forward or in a recomputation: look at its output.

        ``stands``: in compiled code, by identity of a tensor what hears of its gradient; None outside of it.
        """
        self._stands = stands
        entry = self.models.entries.get(module)
        if entry is None and self.is_open:
            self.runs.passed_by(module, self.models)
        elif entry is not None and self.is_open:
            if entry.kind == "dropout" and module.training:  # functions are heard, too, where no code is compiled
                self.facts.setdefault("dropouts", {})[entry.model, entry.path] = float(getattr(module, "p", 0.0))
            if isinstance(module, _OVER_SEQUENCES) and args and _is_of_three(args[0]):
                told = {"batch_first": module.batch_first, "shape": tuple(args[0].shape)}
                self.facts.setdefault("sequences", {}).setdefault((entry.model, entry.path), told)
            if autograd.backward_task() != -1:
                self._recomputed(entry, output)
            else:
                self._called(entry, args, output)

    def root_given(self, model: str, path: str, args: Any, kwargs: Any) -> None:
        """The outermost module is about to be called: the first of its floating tensors are looked at.

        ``path``: of the part of the model that it is, where a program calls parts by themselves. What the first part
        is given is what the model is given, for rules (``given``).
        """
        self.runs.all += 1
        self.runs.looked += 1
        self.runs.inside = model
        self.routes.run_begins()
        for at, (key, tensor) in enumerate(iter_tensors((args, kwargs))):
            value = readable(tensor) if tensor.is_floating_point() else None
            if value is None:
                self.facts["given_others"] = True  # that are no numbers, or cannot be read
            if value is not None and at < _MOST_INPUTS:
                site = str(Site(path, port="input", key=() if key == (0, 0) else key[1:]))
                made = site if tensor.is_leaf else ""  # by another model, no data
                self.facts.setdefault("given", {}).setdefault(model, made)
                self.numbers.observe((model, site), value)
                self._latest.set(tensor, None, is_inside=self._stands is not None)

    def run_ends(self) -> None:
        """The outermost module has returned, or raised: what it returned is the program's alone."""
        self.runs.inside = ""
        self._latest.forget()

    def _called(self, entry: WatchedModule, args: Any, output: Any) -> None:
        """A module has returned in an ordinary forward: look at what it was given and at each tensor that it returned.

        Units of one that has none of its own, as an activation, lie where those of the layer before it do.
        """
        self.modules_called.add((entry.model, entry.path))
        if entry.channels_at is not None:
            self._latest.channels_at = entry.channels_at
        if not entry.is_wanted:
            return
        if entry.kind == "mixing" and args and type(args[0]) is Tensor and self._stands is None:
            self._given(entry, args[0])
        places = [((), output)] if isinstance(output, Tensor) else list(iter_tensors(output))
        if entry.kind in ("dropout", "softmax", "attention") and places:
            at = entry.key("output", places[0][0])
            self._shield.attempt("attention", attention.observe_shown, self.numbers, at, entry.kind, args, output)
        if entry.routing is not None and self._stands is None:
            place = next((key for key, tensor in places if tensor.is_floating_point()), ())
            told = entry.model, entry.routing, entry.key("output", place), output
            self._shield.attempt("mixtures of experts", self.routes.returned, *told)
        for key, tensor in places:
            self._returned(entry, key, tensor)

    def attended(self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A fused attention has run in the forward of ``module``: look at some of its weights, which it does not show.

        Not in a recomputation, in which the first pass's come once more.
        """
        entry = self.models.entries.get(module) if module is not None else None
        if entry is None or not entry.is_wanted or not self.is_open or autograd.backward_task() != -1:
            return
        key = entry.model, str(Site(entry.path, op=ATTENTION, port="weights"))
        untold = self._shield.attempt("attention", attention.observe_fused, self.numbers, key, args, kwargs)
        if untold:
            self.notes.add(f"{key[1]}: {untold}")

    def _given(self, entry: WatchedModule, tensor: Tensor) -> None:
        """What a layer outside of compiled code was given, where no module returned it: what a functional op made."""
        if self._latest.is_shown_by(tensor) or not entry.path:
            return
        value = readable(tensor)
        if value is not None:
            self._observe(entry.key("input"), *_real(tensor, value, entry.channels_at or -1))

    def _returned(self, entry: WatchedModule, place: Place, tensor: Tensor) -> None:
        """One tensor was returned: look at it, unless it has just been looked at under another address.

        Whether that is so in each call is seen too late, so outputs of modules that are called several times in a step
        are looked at in any case in later steps.
        """
        key = entry.key("output", place)
        one = self._outputs.get(key)
        if one is None:
            one = self._outputs[key] = SampledOutput(entry.key("grad_output", place))
        one.calls += 1
        is_latest = self._stands is None and self._latest.is_same(tensor)
        if one.is_alias:  # of its first call only the tensor's other address was looked at
            one.known = one.known if is_latest and self._latest.key == one.known else None
            self.models.called_often.add(key)
            return
        if is_latest and self._latest.key is not None and one.calls == 1 and key not in self.models.called_often:
            one.is_alias, one.known = True, self._latest.key
            if not entry.path:
                self._observe_units(key, tensor)
            return
        value = readable(tensor)
        if value is None:
            if tensor.is_floating_point():
                self.notes.add(f"{key[1]}: {_unread(tensor)} is not looked at")
            return
        has_units = entry.kind in ("rectifier", "bounded") or not entry.path
        self._observe(key, *(_real(tensor, value, self._latest.channels_at) if has_units else (value, None)))
        if entry.flat_beyond is not None and entry.kind == "bounded":
            _count_saturated(self.numbers, key, value, entry.flat_beyond)
        self._latest.set(tensor, key, is_inside=self._stands is not None)
        one.is_followed = self._follow(entry, place, tensor) or one.is_followed

    def _recomputed(self, entry: WatchedModule, output: Any) -> None:
        """A checkpoint runs the module again: its gradients come from here if the first pass had no autograd graph.

        A module that was called outside of it, too, has been followed there alone. Those of compiled code come from
        here in any case.
        """
        if entry.is_wanted:
            for place, tensor in iter_tensors(output):
                one = self._outputs.get(entry.key("output", place))
                if self._stands is not None or one is None or not one.is_followed or repeats_without_graph():
                    self._follow(entry, place, tensor)

    def _follow(self, entry: WatchedModule, place: Place, tensor: Tensor) -> bool:
        """Look at the gradient of a tensor when it comes; whether it will. Of compiled code its stand-in hears of it.

        Leaves are left out, as what needs no gradient is: those of parameters are looked at before the step.
        """
        if self._stands is not None:
            tensor = self._stands.get(id(tensor), tensor)
        has_graph = (self._stands is not None or torch.is_grad_enabled()) and tensor.requires_grad
        if self.phase != "train" or not has_graph:
            return False
        if getattr(tensor, "why_untold", ""):  # such a stand-in is a leaf itself
            self.notes.add(f"{entry.path}: a view, or a tensor that is written to, inside compiled code: its gradient "
                           "is not looked at")  # fmt: skip
            return False
        if tensor.is_leaf:
            return False
        if tensor._is_view():
            _ = tensor.grad_fn  # else a stale one is hooked: torch 2.13 crashes
        arrived = partial(self._shield.run_on_any_thread, self._arrived, entry.key("grad_output", place))
        keep_gradient(tensor, arrived)
        return True

    def _arrived(self, key: Key, gradient: Tensor) -> None:
        """A gradient has come by, inside backward.

        Not told is one of a pass with ``create_graph`` that the model's own forward runs, as for forces from an energy:
        it is what the model computes, and no gradient of the loss.
        """
        if not self.is_open:
            self.models.missed.late.add(key)
            return
        if self.runs.inside and torch.is_grad_enabled():
            self.notes.add(f"{key[1]}: gradients of a pass that the forward itself runs are not looked at")
            return
        if compiler.is_loaded() and is_at_edge():
            self.notes.add(f"{key[1]}: {EDGE}")
            return
        value = readable(gradient)
        if value is not None:
            self.numbers.observe(key, value)
        elif autograd.is_wrapper(gradient):
            self.notes.add("a backward pass was batched (is_grads_batched): its gradients are not looked at")

    def _observe(self, key: Key, value: Tensor, channels_at: int | None) -> None:
        """Add a tensor's numbers, and in training those of its units in the dimension ``channels_at``."""
        self.numbers.observe(key, value)
        if channels_at is not None:
            self._observe_units(key, value, channels_at)

    def _observe_units(self, key: Key, tensor: Tensor, channels_at: int | None = None) -> None:
        """In training, add the numbers of a tensor's units in a dimension; None: that of the module before it."""
        value, at = readable(tensor), channels_at
        if value is not None and at is None:
            value, at = _real(tensor, value, self._latest.channels_at)
        units = units_of(value, at) if value is not None and at is not None and self.phase == "train" else None
        if value is not None and units is not None:
            self.numbers.observe_units(key, value, *units)


def _real(tensor: Tensor, value: Tensor, channels_at: int | None) -> tuple[Tensor, int | None]:
    """What ``readable`` has made of a tensor, and the dimension of the units in it: complex numbers became pairs, which
    are two units of the last dimension, or lie in each unit of another one."""
    if channels_at is None or channels_at >= 0 or not tensor.is_complex():
        return value, channels_at
    return (value.flatten(-2), -1) if channels_at == -1 and value.dim() > 1 else (value, channels_at - 1)


def _is_of_three(value: Any) -> bool:
    """Whether a value is an ordinary tensor of three dimensions."""
    return isinstance(value, Tensor) and value.dim() == 3 and not value.is_nested


def _count_saturated(numbers: Accumulator, key: Key, value: Tensor, flat_beyond: tuple[float, float]) -> None:
    """Count the elements at which the function is nearly flat: where its slope is below 6 % of the largest.

    That is beyond 0.97 in magnitude for tanh, nearer to 0 or 1 than 0.015 for sigmoid, and at the ends of those with
    corners. No synchronisation.
    """
    low, high = flat_beyond
    with torch.no_grad():
        far = (value <= low) | (value >= high)
        numbers.add_share("saturated", key, far.sum(), value.numel())


def _first(rows: Iterable[tuple[Key, Tensor]], last: int) -> Key | None:
    """The first key whose row, on the CPU, counts anything in the columns from that of NaN to ``last``."""
    pairs = [(key, row) for key, row in rows if row.device.type == "cpu"]
    if not pairs:
        return None
    bad = torch.stack([row for _, row in pairs])[:, NAN : last + 1].any(1)
    return pairs[int(bad.int().argmax())][0] if bool(bad.any()) else None
