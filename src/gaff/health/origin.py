"""The first op that made a NaN or inf: one run of a step with every op and every autograd node looked at.

A tensor that holds something non-finite is marked with the op that began it, and the mark travels with what is
computed from it; so an infinite value that is healed again (a mask before a softmax) is no finding, and one that
reaches a loss, an output or a gradient is told with where it began, not with where it was seen.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gaff import compat
from gaff.address import Site, fits_op, parse
from gaff.engine.backward_nodes import Gradients, NodeWatch, Seen
from gaff.engine.opcalls import OpCall
from gaff.engine.session import CallTap, OpTap, Session
from gaff.errors import PlanError
from gaff.health.backward_causes import STEEP, backward_cause
from gaff.health.causes import UNINITIALISED, Case, cause_of
from gaff.health.ranges import can_hold, has_nonfinite, range_of
from gaff.health.report import Range, Report
from gaff.select import Found, is_container, iter_modules, join, need_module
from gaff.tools.op_log import Producers, code_at, place_of, place_text
from gaff.values import iter_deep, iter_tensors

_NOWHERE = Site(port="input")  # a tensor that nothing seen has made
STEP = "(step)"  # stands for the path of code outside the model


class Step(nn.Module):
    """What is examined, as a module around the model: its own ops are those outside the model."""

    def __init__(self, run: Callable[[], Any], model: nn.Module | None) -> None:
        super().__init__()
        self._run = run
        if model is not None:
            self.model = model

    def forward(self) -> Any:
        return self._run()


@dataclass(slots=True)
class Made:
    """An op, or something that was there before, with a non-finite value that nothing before it accounts for."""

    site: Site
    direction: str
    place: tuple[str, int] | None
    cause: str
    output: Range
    inputs: tuple[Range, ...] = ()
    is_meant: bool = False  # put in by a constant, such as a mask's -inf
    passed: dict[str, None] = field(default_factory=dict)  # modules that passed it on, in order


@dataclass(slots=True)
class Ran:
    """An op that ran, for what backward makes of it."""

    site: Site
    place: tuple[str, int]
    given: tuple[Range, ...]  # of ops with steep derivatives
    made: Made | None = None


@dataclass(slots=True)
class Passed:
    """An autograd node that ran. ``bad``: which of the gradients that it handed on are not finite."""

    seen: Seen
    is_bad: bool
    bad: frozenset[int]
    cause: tuple[Range, Range] | None  # the gradient that came, the one handed on
    is_overflow_of_scale: bool = False


class Examination:
    """Looks at one step. ``allow``: patterns of sites whose non-finite values are meant."""

    def __init__(self, model: nn.Module | None, allow: Iterable[str] = ()) -> None:
        if model is not None:
            need_module(model)
        self._model = model
        self._allow = [parse(pattern) for pattern in allow]
        self._marks: dict[int, tuple[weakref.ref[Tensor], int, Made | None]] = {}
        self._open: list[tuple[OpCall, list[tuple[Tensor, Made | None]], list[Range] | None]] = []
        self._nodes = NodeWatch(self._node_ran)
        self._passed: list[Passed] = []
        self._sinks: list[Made] = []
        self._scale: float | None = None
        self._ops = 0
        self._last: Made | None = None  # of the last op outside the model
        self.notes: list[str] = []

    def run(self, step: Callable[[], Any]) -> Report:
        """Call ``step`` once, as it is; its exceptions pass through."""
        around = Step(step, self._model)
        self._producers = Producers(around)
        session = Session(around, list(self._taps(around)))
        self._note_state(around)
        with ExitStack() as closing:
            closing.callback(self._nodes.close)
            session.open()
            try:
                output = around()
            finally:
                session.close()
            self.notes += session.notes
            self._sink(output)
            if output is None and not self._passed and self._last is not None:
                self._sinks.append(self._last)  # neither returned nor sent backward: the last that the step computed
            return self._report()

    def _taps(self, around: nn.Module) -> Iterable[OpTap | CallTap]:
        seen: set[int] = set()
        for path, module, chain in iter_modules(around):
            if id(module) in seen or is_container(module):
                continue
            seen.add(id(module))
            found = Found(Site(path), module, chain)
            yield OpTap(found, self._enter, self._leave, is_again=True)
            if path:
                yield CallTap(found, self._called, self._returned(path))

    def _note_state(self, around: nn.Module) -> None:
        """Parameters and buffers that are bad already come first."""
        for path, module, _ in iter_modules(around):
            for port, owned in (("param", module._parameters), ("buffer", module._buffers)):
                for name, tensor in owned.items():
                    if tensor is not None and has_nonfinite(tensor):
                        site = Site(join(path, name), port=port)
                        self._note_before(tensor, site, is_meant=port == "buffer" and _is_mask(tensor))

    def _note_before(self, tensor: Tensor, site: Site, *, is_meant: bool = False) -> Made:
        output = range_of(tensor, "value")
        kind = {"param": "the parameter", "buffer": "the buffer"}.get(site.port, "the input")
        cause = f"{kind} held {output.kinds} before the step; what made it lies before this"
        made = Made(site, "before", None, cause, output, is_meant=is_meant)
        self._mark(tensor, made)
        return made

    def _mark(self, tensor: Tensor, made: Made | None) -> None:
        self._marks[id(tensor)] = weakref.ref(tensor), compat.version_of(tensor), made

    def _look(self, tensor: Tensor, site: Site = _NOWHERE) -> Made | None:
        """The mark of a tensor that comes in; one that is not known yet is looked at."""
        known = self._marks.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == compat.version_of(tensor):
            return known[2]
        if not can_hold(tensor):
            return None
        made = None
        if has_nonfinite(tensor):
            base = self._marks.get(id(tensor._base)) if tensor._base is not None else None
            if base is not None and base[0]() is tensor._base:
                made = base[2]
            made = made or self._note_before(tensor, site, is_meant=_is_mask(tensor))
        self._mark(tensor, made)
        return made

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any, call: int) -> None:
        for key, tensor in iter_tensors({**dict(enumerate(args)), **kwargs}):
            self._look(tensor, Site("model" if self._model is not None else "", port="input", key=key))

    def _returned(self, path: str) -> Callable[[Any, Any, int], None]:
        def returned(output: Any, run: Any, call: int) -> None:
            for _, tensor in iter_tensors(output):
                made = self._look(tensor, Site(path))
                if made is not None:
                    made.passed[path] = None
            self._producers.note_all(output, Site(path))
            if path == "model":
                self._sink(output)

        return returned

    def _enter(self, call: OpCall) -> None:
        given = [tensor for _, tensor in iter_tensors((call.args, call.kwargs)) if can_hold(tensor)]
        marks = [(tensor, self._look(tensor)) for tensor in given]
        writes = (call.site.op or "").endswith("_") or call.site.op == "setitem" or "out" in call.kwargs
        steep = (call.site.op or "").strip("_") in STEEP
        ranges = [self._range(tensor, number) for number, tensor in enumerate(given)] if writes or steep else None
        if _is_scaling(call):
            self._note_scale(call)
        self._nodes.follow(given, self._ran_here(call, ()))
        self._open.append((call, marks, ranges))

    def _leave(self, call: OpCall, output: Any) -> None:
        while self._open[-1][0] is not call:
            self._open.pop()
        _, marks, ranges = self._open.pop()
        self._ops += 1
        tensors = [tensor for _, tensor in iter_tensors(output)]
        ran = self._ran_here(call, tuple(ranges or ()))
        for tensor in tensors:
            made = self._judge(call, tensor, marks, ranges) if has_nonfinite(tensor) else None
            ran.made = ran.made or made
            self._mark(tensor, made)
            if made is not None and made.is_meant and tensor._base is not None:
                self._mark(tensor._base, made)
        if not call.site.path:
            self._last = ran.made if ran.made is None or not ran.made.is_meant else None
        self._producers.note_all(output, Site(call.site.path, call.site.op, call.site.op_index))
        self._nodes.follow(tensors, ran)

    def _ran_here(self, call: OpCall, given: tuple[Range, ...]) -> Ran:
        return Ran(call.site, _users_place(call.place), given)

    def _judge(
        self, call: OpCall, tensor: Tensor, marks: list[tuple[Tensor, Made | None]], ranges: list[Range] | None
    ) -> Made:
        """Whose the NaN or inf in ``tensor`` is: of something that came in, meant, or of this op."""
        came = [made for _, made in marks if made is not None]
        real = [made for made in came if not made.is_meant]
        if real:
            return real[0]
        output = range_of(tensor, "output")
        op = call.site.op or ""
        is_meant = self._is_allowed(call.site) or op in UNINITIALISED or _is_deliberate(call) or _is_scaling(call)
        if came and not output.nan:
            return came[0]
        if not came and not is_meant and not output.nan and not output.positive_inf and _adds_masks(op, marks):
            is_meant = True
        given = ranges if ranges is not None else [self._range(one, number) for number, (one, _) in enumerate(marks)]
        case = Case(op, call.func, call.args, call.kwargs, tuple(given), output)
        cause = "it was put in by a constant" if is_meant else cause_of(case)
        return Made(call.site, "forward", _users_place(call.place), cause, output, tuple(given), is_meant)

    def _range(self, tensor: Tensor, number: int) -> Range:
        producer = self._producers.of(tensor)
        return range_of(tensor, f"input[{number}]" + (f" <- {shown(producer)}" if producer else ""))

    def _is_allowed(self, site: Site) -> bool:
        path = _own_path(site.path)
        for pattern in self._allow:
            is_op = pattern.op is None or fits_op(pattern.op, site.op or "")
            is_index = pattern.op_index in (None, site.op_index)
            is_path = pattern.path == path if isinstance(pattern, Site) else pattern.matches(path) or not pattern.names
            if is_op and is_index and is_path:
                return True
        return False

    def _note_scale(self, call: OpCall) -> None:
        """A GradScaler multiplies the loss: the factor is told apart from the gradients by it."""
        factors = [one for one in iter_deep(call.args) if one.numel() == 1]
        if call.site.op == "mul" and len(factors) >= 2:
            self._scale = float(factors[1])

    def _sink(self, output: Any) -> None:
        """What the step or the model returned: here something non-finite matters, if it was not meant."""
        for _, tensor in iter_tensors(output):
            made = self._look(tensor)
            if made is not None and (not made.is_meant or _has_nan(tensor)):
                self._sinks.append(made)

    def _node_ran(self, seen: Seen, incoming: Gradients, outgoing: Gradients) -> None:
        is_bad = any(one is not None and has_nonfinite(one) for one in incoming)
        bad = frozenset(at for at, one in enumerate(outgoing) if one is not None and has_nonfinite(one))
        ranges = None
        is_scale = False
        if bad and not is_bad:
            came = next((one for one in incoming if one is not None), None)
            handed = outgoing[min(bad)]
            if handed is not None:
                name = "gradient that came"
                before = range_of(came, name) if came is not None else Range(name, "", "", 0, None, None)
                ranges = before, range_of(handed, "gradient handed on")
            is_scale = self._scale is not None and self._fits_unscaled(seen, incoming)
        made = seen.owner.made if not self._passed else None
        if made is not None and (not made.is_meant or made.output.nan):
            self._sinks.append(made)  # backward began at a loss that is not finite
        self._passed.append(Passed(seen, is_bad, bad, ranges, is_scale))

    def _fits_unscaled(self, seen: Seen, incoming: Gradients) -> bool:
        """Whether the node would hand on finite gradients had the loss not been multiplied by the scaler's factor."""
        scaled = [None if one is None else one / (self._scale or 1.0) for one in incoming]
        try:
            handed = seen.node(*scaled)  # type: ignore[operator]
        except (RuntimeError, TypeError):
            return False
        handed = handed if isinstance(handed, tuple) else (handed,)
        return not any(isinstance(one, Tensor) and has_nonfinite(one) for one in handed)

    def _report(self) -> Report:
        nodes = sum(not one.seen.variable is not None for one in self._passed)
        ops = self._ops + nodes
        if self._sinks:
            return self._tell(self._sinks[0], ops)
        origin = self._backward_origin()
        if origin is None:
            return Report(False, notes=tuple(self.notes), ops=ops)
        if origin.is_overflow_of_scale:
            self.notes.append(
                f"gradients overflowed under the GradScaler's factor {self._scale:g}: it skips such a step by itself"
            )
            return Report(False, notes=tuple(self.notes), ops=ops)
        return self._tell_backward(origin, ops)

    def _tell(self, made: Made, ops: int) -> Report:
        path = _own_path(made.site.path)
        names = ("the model" if one == "model" else shown(one) for one in made.passed if one != made.site.path)
        passed = tuple(dict.fromkeys(names))
        return Report(
            found=True,
            site=shown(
                str(Site(made.site.path, made.site.op, made.site.op_index, None, made.site.port, made.site.key))
            ),
            op=made.site.op or "",
            module=path,
            direction=made.direction,
            line=place_text(made.place) if made.place else "",
            code=code_at(made.place) if made.place else "",
            cause=made.cause,
            output=made.output,
            inputs=made.inputs,
            passed=passed,
            notes=tuple(self.notes),
            ops=ops,
        )

    def _backward_origin(self) -> Passed | None:
        """From a leaf with a non-finite gradient back along what fed it, to the node that was given finite ones."""
        by_node = {id(one.seen): one for one in self._passed}
        feeding: dict[int, list[Passed]] = {}
        for one in self._passed:
            for at in one.bad:
                onward = one.seen.onward[at] if at < len(one.seen.onward) else None
                if onward is not None:
                    feeding.setdefault(id(onward[0]), []).append(one)
        waiting = [one for one in self._passed if one.seen.variable is not None and one.is_bad]
        seen: set[int] = set()
        origins = []
        while waiting:
            one = waiting.pop()
            if id(one.seen) in seen:
                continue
            seen.add(id(one.seen))
            before = feeding.get(id(one.seen), [])
            if not one.is_bad or not before:
                origins.append(by_node[id(one.seen)])
            waiting += before if one.is_bad else []
        return min(origins, key=self._passed.index, default=None)

    def _is_fed(self, origin: Passed) -> bool:
        """Whether any node that ran hands a gradient to this one."""
        onward = [one for passed in self._passed for one in passed.seen.onward]
        return any(one is not None and one[0] is origin.seen for one in onward)

    def _tell_backward(self, origin: Passed, ops: int) -> Report:
        ran = origin.seen.owner
        name = origin.seen.name
        if origin.cause is None and not self._is_fed(origin):
            where = shown(str(Site(ran.site.path, ran.site.op, ran.site.op_index)))
            cause = f"the gradient that backward began with, at {where}, is not finite: it was made outside the model"
            return Report(True, STEP, "", STEP, "backward", cause=cause, notes=tuple(self.notes), ops=ops)
        if origin.cause is None:  # what was given to it was finite piece by piece
            cause = f"the gradients that meet at {name} overflow when they are added up"
            came = handed = None
        else:
            came, handed = origin.cause
            cause = backward_cause(ran.site.op or "", name, ran.given, came, handed)
        leaves = [
            self._producers.of(one.seen.variable)
            for one in self._passed
            if one.is_bad and one.seen.variable is not None
        ]
        return Report(
            found=True,
            site=shown(str(Site(ran.site.path, ran.site.op, ran.site.op_index))),
            op=ran.site.op or "",
            module=_own_path(ran.site.path),
            direction="backward",
            line=place_text(ran.place),
            code=code_at(ran.place),
            cause=cause,
            output=handed,
            inputs=((came,) if came is not None else ()) + tuple(ran.given),
            passed=tuple(dict.fromkeys(shown(leaf) for leaf in leaves if leaf)),
            notes=tuple(self.notes),
            ops=ops,
        )


def find_nonfinite(step: Callable[[], Any], model: nn.Module | None, allow: Iterable[str]) -> Report:
    """See ``gaff.find_nonfinite``."""
    if not callable(step):
        raise PlanError(
            f"step {step!r:.60} cannot be called: expected a function, such as lambda: loss(model(x), y).backward()"
        )
    return Examination(model, allow).run(step)


def shown(name: str) -> str:
    """An address within the step as one within the model; what is outside the model is in parentheses."""
    if name.startswith("model."):
        return name[6:]
    if name.startswith("model") and (len(name) == 5 or not (name[5].isalnum() or name[5] == "_")):
        return name[5:] or ":output"
    return f"{STEP}{name}" if name else name


def _own_path(path: str) -> str:
    return "" if path == "model" else shown(path) if path else STEP


def _users_place(frame: FrameType) -> tuple[str, int]:
    """The line of the user's code: where a layer of torch runs the op, the line that calls the layer."""
    first = place_of(frame)
    here: FrameType | None = frame
    while here is not None:
        name = here.f_code.co_filename
        if not name.startswith((_TORCH, _GAFF)):
            return place_of(here)
        here = here.f_back
    return first


def _is_scaling(call: OpCall) -> bool:
    """Whether a GradScaler runs the op: what overflows there it skips by itself."""
    return call.place.f_code.co_filename.endswith("grad_scaler.py")


def _is_deliberate(call: OpCall) -> bool:
    """Whether a constant among the arguments is itself infinite or NaN: it was put there on purpose."""
    constants = [*call.args, *call.kwargs.values()]
    flat = [one for value in constants for one in (value if isinstance(value, (list, tuple)) else (value,))]
    return any(isinstance(one, float) and not math.isfinite(one) for one in flat)


def _adds_masks(op: str, marks: list[tuple[Tensor, Made | None]]) -> bool:
    """Adding to the lowest number of a type, as masks do, may give -inf: that is meant as well."""
    if op.strip("_") not in ("add", "sub", "mul"):
        return False
    return any(
        float(one.detach().min()) <= torch.finfo(one.dtype).min / 2 for one, _ in marks if one.is_floating_point()
    )


def _is_mask(tensor: Tensor) -> bool:
    """Whether a tensor from outside holds -inf, 0 and nothing else that is not finite: an additive mask."""
    value = tensor.detach()
    if value.is_complex() or not bool((value == -math.inf).any()):
        return False
    rest = value[value != -math.inf]
    return bool(torch.isfinite(rest).all()) and bool((rest == 0).all())


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.detach().isnan().any())


_TORCH = torch.__file__.rpartition("__init__")[0]
_GAFF = __file__.rpartition("health")[0]
