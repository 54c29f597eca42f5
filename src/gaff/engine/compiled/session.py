"""Which sessions can put their taps into compiled code, and how they do.

Asked when a session opens on a model that may run compiled. Either all its taps go inside, or all compiled code runs
eagerly until it closes, with the reason in the receipt.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.resolve import unwrap
from gaff.compat import compiler, distributed
from gaff.compat.checkpoints import is_spent
from gaff.compat.own_variants import OwnVariants, most_variants
from gaff.edits.compiled import cuts, traced
from gaff.edits.event import acts_on_parts
from gaff.engine.compiled.edits import TracedEdit, TracedGradientEdit
from gaff.engine.compiled.hooks import EntryHook, ExitHook, HookInside, LeaveHook
from gaff.engine.compiled.own_forward import OwnForward
from gaff.engine.compiled.regions import Regions
from gaff.engine.compiled.tell import Inside
from gaff.engine.compiled.tracing import OPERATED, WHY_UNSEEN, take_unfinished
from gaff.engine.force_eager import EAGER, EAGER_IF_ANY, forced_eager
from gaff.engine.modules import ended, entered, install
from gaff.engine.node import Node
from gaff.engine.process.calls import is_compiled
from gaff.engine.taps import CallTap, EditTap, Tap
from gaff.errors import ExactnessError
from gaff.views.text import counted

_SEEN = ("output", "input", "grad_output", "param", "grad")
_ONLY_OUTPUTS = "graphs tell the gradients of outputs only"
_WHY_NO_PORT = {"buffer": "a graph brings what it writes into a buffer there at its end"}
_AT = ("output", "input", "grad_output")
_EDITED = ("output", "input", "grad_output", "grad")


def why_not(taps: Sequence[Any]) -> str:
    """Why these taps cannot be in compiled code, as a text for the receipt; empty if they can.

    What a graph can tell are values at modules, gradients of outputs, parameters and buffers and their gradients.
    """
    reason = _why_not_now()
    if reason:
        return reason
    for tap in taps:
        if isinstance(tap, CallTap):
            continue
        if not isinstance(tap, (Tap, EditTap)):
            return "what it looks at is not in graphs"
        site = tap.found.site
        if site.op is not None:
            return f"ops, as {site}, are seen by Python alone"
        if isinstance(tap, EditTap):
            reason = _why_no_edit(tap)
        else:
            reason = "" if site.port in _SEEN else f"{site}: {_WHY_NO_PORT.get(site.port, _ONLY_OUTPUTS)}"
        if site.port in _AT and WHY_UNSEEN.get(tap.found.module) == OPERATED:  # it was met in compiled code before
            reason = reason or f"{site}: {OPERATED}"
        if reason:
            return reason
    return ""


def _why_not_now() -> str:
    """Why nothing can be in compiled code as this process compiles now; empty if it can."""
    if not compiler.traces_gradient_hooks():
        return f"torch {torch.__version__} knows no gradient hooks in graphs, 2.13 does"
    if compiler.has_compiled_autograd():
        return "backward passes are compiled as a whole (compiled autograd)"
    if compiler.traces_backward():
        return "backward passes become part of graphs (torch._dynamo.config.trace_autograd_ops)"
    if compiler.stance() != "default":
        return f"its stance is {compiler.stance()!r}"
    return ""


def _why_no_edit(tap: EditTap) -> str:
    """Why an edit has no form in a graph; empty if it has one."""
    site = tap.found.site
    if tap.is_skip or site.port not in _EDITED:
        return f"{site}: such an edit has no form in a graph"
    if site.call is not None:
        return f"{site}: a graph does not count calls"
    if tap.stream.is_spread and not acts_on_parts(tap.stream.edit):
        return f"{site}: the edit is of a tensor that is spread over processes, which is put together for it"
    made = "" if site.port == "grad" else _traced(tap)
    return f"{site}: {made}" if isinstance(made, str) and made else ""


def _traced(tap: EditTap) -> Any:
    """The edit as a function of the tensor that Dynamo can compile, or why there is none."""
    if tap.stream.check_finite:
        return "check_finite asks what passes"
    return traced(tap.stream.edit, is_gradient=tap.found.site.port == "grad_output")


def meet(
    opening: ExitStack, model: nn.Module, taps: Sequence[Any], notes: list[str], reason: str, *, has_marks: bool
) -> CompiledHooks | None:
    """Put hooks into compiled code where it can hold them; else, also for a ``reason``, have it run eagerly.

    Returns the hooks, entered into ``opening``, for the session to install. None if the code runs eagerly until
    ``opening`` closes, and then ``notes`` says why. ``has_marks``: somebody asks which backward pass belongs to which
    run.
    """
    reason = reason or why_not(taps) or _why_full(model, taps)
    if not reason:
        return opening.enter_context(CompiledHooks(model, taps, notes, has_marks=has_marks))
    opening.enter_context(forced_eager)
    is_known = any(getattr(one, "_compiled_call_impl", None) or unwrap(one) is not one for one in model.modules())
    notes.append(f"{EAGER if is_known else EAGER_IF_ANY}: {reason}")
    return None


_Patterns = dict[Any, set[frozenset[str]]]
_PATTERNS: _Patterns = {}  # by code that is compiled: in which ways it has been tapped
_MADE: Counter[Any] = Counter()  # by code: variants that were compiled while sessions were open


def _why_full(model: nn.Module, taps: Sequence[Any]) -> str:
    """Why another way of tapping would compile too often; empty if it would not.

    Each set of taps is one more variant of a function, or several, where the model runs with and without gradients,
    say. They take none of the program's own (``OwnVariants``), and may be as many as torch keeps of these (chosen):
    each takes seconds and memory. What was used is kept by the code, until torch is reset.
    """
    if compiler.was_reset():
        _PATTERNS.clear()
        _MADE.clear()
    most = most_variants()
    wanted = _patterns(model, taps)
    for code, patterns in wanted.items():
        known = _PATTERNS.get(code, set())
        is_full = len(known | patterns) > most or (_MADE[code] >= most and not patterns <= known)
        if is_full:
            name = f"modules of {code}" if isinstance(code, str) else code.__name__
            return (
                f"{name} in code that is compiled, here or elsewhere in this process, have been looked at or edited in "
                f"{counted(len(known), 'other way')}, and each compiles such code once more: {most} at the most"
            )
    for code, patterns in wanted.items():
        _PATTERNS[code] = _PATTERNS.get(code, set()) | patterns
    return ""


def _patterns(model: nn.Module, taps: Sequence[Any]) -> _Patterns:
    """In which ways taps change compiled code, by that code."""
    wanted: _Patterns = {}
    regions = [(path, one) for path, one in model.named_modules() if getattr(one, "_compiled_call_impl", None)]
    for path, region in regions or [("", unwrap(model))]:
        kind = type(region)
        code = "torch.nn" if kind.__module__.startswith("torch.nn.") else kind  # which torch calls by one function
        start = f"{path}." if path else ""
        inside = frozenset(_kind_of(tap, start) for tap in taps if f"{tap.found.site.path}.".startswith(start))
        if inside:
            wanted.setdefault(code, set()).add(inside)
    return wanted


def _reduction(model: nn.Module, taps: Sequence[Any]) -> Any:
    """What all taps want in the place of a tensor; None where one wants the tensor, or they do not agree.

    None also for parameters spread over processes, whose numbers must be combined.
    """
    wanted = [_in_graph(tap) for tap in taps]
    is_one = wanted and all(one == wanted[0] for one in wanted)
    return wanted[0] if is_one and not distributed.ranks_of(model.parameters()) else None


def _in_graph(tap: Any) -> Any:
    """The function whose result may be told in the place of a tensor, if the tap's stream has one."""
    return getattr(tap.stream, "in_graph", None) if isinstance(tap, Tap) else None


def _kind_of(tap: Any, start: str) -> str:
    """What of a tap makes other compiled code: its place below ``start``, its port, and what is done there."""
    kind = _kind_of_edit(tap.stream.edit) if isinstance(tap, EditTap) else f"{_in_graph(tap)}"
    site = tap.found.site
    return f"{f'{site.path}.'.removeprefix(start)}:{site.port} {kind}"


def _kind_of_edit(edit: Any) -> str:
    """What of an edit makes other compiled code: its class, and what of it is a constant there.

    Of a function that is its code, and numbers that it closes over; of an edit places, dimensions, the shapes of its
    tensors and the same of edits inside it, but no strength: graphs read numbers from tensors.
    """
    function: Any = getattr(edit, "function", None)
    if hasattr(function, "__code__"):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        known = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        plain = [one if isinstance(one, (int, float, str, NoneType)) else type(one).__name__ for one in known]
        return f"{id(function.__code__)} {plain}"
    if isinstance(edit, (tuple, list)):
        return f"{type(edit).__name__} {list(map(_kind_of_edit, edit))}"
    if is_dataclass(edit):
        held = [(one, getattr(edit, one.name)) for one in fields(edit) if one.init]
        parts = [value for one, value in held if not ("float" in str(one.type) and isinstance(value, (int, float)))]
        told = [_kind_of_edit(value) for value in parts]
        return f"{type(edit).__name__} {told}"
    if isinstance(edit, Tensor):
        return f"{edit.dtype} {tuple(edit.shape)}"
    return repr(edit) if isinstance(edit, (int, str, slice, NoneType)) else type(edit).__name__


class CompiledHooks(AbstractContextManager["CompiledHooks"]):
    """The taps of one session inside compiled code, while open.

    Made by ``meet``, entered for the session, which calls ``install`` for each node. Closing tells the receipt how
    much was compiled, and refuses edits whose backward has not run: hooks inside a graph cannot be taken out of it.

    What sets hooks is never compiled itself: a session that code opens while it is compiled ends the graph there.
    """

    @compiler.never_traced
    def __init__(self, model: nn.Module, taps: Sequence[Any], notes: list[str], *, has_marks: bool) -> None:
        self._root = unwrap(model)
        self._is_inside = is_compiled(model)  # else a compiled function calls it, or parts of it
        self._inside = Inside(has_marks=has_marks, reduce=_reduction(model, taps))
        self._notes = notes
        self._edits = [tap for tap in taps if isinstance(tap, EditTap) and tap.found.site.port != "grad"]
        if number := sum(tap.found.site.port == "grad_output" for tap in self._edits):
            self._inside.take_turn(number)
        self._taps = [tap for tap in taps if isinstance(tap, (Tap, EditTap))]
        self._nodes: list[Node] = []
        self._made: list[TracedEdit] = []
        self._own = OwnVariants()
        self._regions = Regions()
        self._counts = compiler.compile_counts()
        self._variants = compiler.variants()
        self._codes = tuple(_patterns(model, taps))

    def __enter__(self) -> CompiledHooks:
        self._own.open()
        self._regions.__enter__()
        return self

    @compiler.never_traced
    def install(self, node: Node, handles: list[Any]) -> None:
        """Put hooks on the module that act inside compiled code, and outside of it as others do.

        Code may begin at a module that is compiled itself, at the root, and if a function around it is compiled at any
        module whose calls are followed.
        """
        is_region = node.module is self._root or getattr(node.module, "_compiled_call_impl", None) is not None
        is_followed = node.has_entry or bool(node.exit.taps or node.exit.acts)
        is_bound = is_region or (is_followed and not self._is_inside)
        node.has_entry = node.has_entry or is_bound
        self._nodes.append(node)
        self._regions.modules.add(node.module)
        edits = [self._make_edit(tap, node) for tap in self._edits if tap.found.module is node.module]
        for later in [one for one in edits if isinstance(one, TracedGradientEdit)][1:]:
            later.is_first = False

        def make(func: Any, node: Node) -> HookInside:
            if func is ended:
                return LeaveHook(self._inside, func, node, is_bound=is_bound)
            ports = ("input",) if func is entered else ("output", "grad_output")  # gradients of what is edited
            own = tuple(edit for port in ports for edit in edits if edit.site.port == port)
            if func is entered:
                return EntryHook(self._inside, func, node, own, is_bound=is_bound)
            made = ExitHook(self._inside, func, node, own)
            if not made.changes_output:
                made.with_forward(self._inside)
            return made

        # not always called: compiled code guards the numbers of such hooks, and would be compiled anew each time
        install(node, handles, make, always=False)
        handles.append(OwnForward(node.module))

    @compiler.never_traced
    def __exit__(self, *exc: object) -> None:
        """Let nobody hear of the graphs any more, and note what was compiled.

        Raises ExactnessError for edits that would still have to act, in a backward or in a recomputation, unless
        another exception is on its way.
        """
        self._regions.__exit__(*exc)
        is_broken = take_unfinished()
        graphs, breaks = (now - then for now, then in zip(compiler.compile_counts(), self._counts, strict=True))
        made = (count - self._variants.get(frame, 0) for frame, count in compiler.variants().items())
        _MADE.update(dict.fromkeys(self._codes, max(made, default=0)))
        is_to_come = self._has_gradients_to_come()
        if is_to_come:
            gc.collect()  # of graphs that nobody but a cycle holds
            is_to_come = self._has_gradients_to_come()
        self._own.close(drops=is_broken)
        has_run = any(receiver.tellers for receiver in self._inside.receivers)  # frames with our hooks
        self._inside.close()
        for edit in self._made:
            if isinstance(edit, TracedGradientEdit):
                edit.is_over = True
        for tap in self._taps if self._nodes and exc[0] is None else ():
            why = WHY_UNSEEN.get(tap.found.module)
            if why is not None and tap.found.site.port in _AT:
                way = "; the next session on it lets compiled code run eagerly" if why == OPERATED else ""
                tap.stream.refuse(self._nodes[0].clock.latest, 0, why + way)
        if has_run:
            self._notes.append(
                f"hooks were inside compiled code: {counted(graphs, 'graph')} compiled while the session was open, "
                f"and torch counted {counted(breaks, 'graph break')}"
            )
        if is_broken:
            self._notes.append(
                "compiled code ended its graphs at an edit that could not be compiled (it reads a value, prints): "
                "it ran as Python, and what was compiled for it was thrown away when the session closed"
            )
        if is_to_come and exc[0] is None:
            raise ExactnessError(
                "a gradient edit in compiled code whose backward has not run: it would act after the session; call "
                "backward() before it is closed, or let go of what the model has returned"
            )
        if any(not is_spent(one) for edit in self._made for one in edit.repeats) and exc[0] is None:
            raise ExactnessError(
                "edits in compiled code inside a checkpoint whose backward has not run: it would recompute without "
                "them; call backward() before the session is closed"
            )

    def _has_gradients_to_come(self) -> bool:
        return any(isinstance(one, TracedGradientEdit) and one.has_living_graph() for one in self._made)

    def _make_edit(self, tap: EditTap, node: Node) -> TracedEdit:
        """Make the form that an edit has in a graph, and give its switch a gate that the graph reads."""
        kind: Any = TracedGradientEdit if tap.found.site.port == "grad_output" else TracedEdit
        switch = tap.stream.switch
        with torch.inference_mode(False):
            switch.gate = torch.zeros(1, dtype=torch.float64, device="cpu")
        switch.set()
        made: TracedEdit = kind(self._inside, tap.found.site, tap.stream, _traced(tap), is_cut=cuts(tap.stream.edit))
        made.clock = node.clock
        self._made.append(made)
        return made
