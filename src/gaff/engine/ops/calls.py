"""What happens at one op that somebody asks for: before it runs and after, in a forward and in its recomputation.

An op is counted by its name within one call of its module, and the nth has a ``Node`` of its own where it is asked
for. From there on it goes the way of a module: what it is given and what it returns pass the sides of its node.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.nested import Arguments, iter_tensors
from gaff.compat import checkpoints
from gaff.compat.autograd import is_grad_enabled
from gaff.compat.checkpoints import may_repeat
from gaff.compat.memory import Mark
from gaff.engine.clock import Clock, Frame, Run, end_call
from gaff.engine.crossing import Crossing
from gaff.engine.node import Node
from gaff.engine.ops.names import find_place, is_in_place
from gaff.errors import PlanError

MOVED = "another line of the code ran as this op in a later call: which op has which number depends on the path taken"


class OpCall(NamedTuple):
    """One op that runs, as listeners see it. ``place``: the frame of the user's code, while it runs.

    ``site`` tells its path, name, number and call, the last -1 in a recomputation; ``func`` is torch's function,
    ``args`` and ``kwargs`` are its arguments as edits left them. The frame must not be kept.
    """

    site: Site
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: FrameType
    run: Run | None  # None in a recomputation

    @property
    def writes(self) -> bool:
        """Whether the op writes into a tensor that it is given: its first argument, or ``out``."""
        is_in = is_in_place(self.site.op or "", self.func, self.args, self.kwargs)
        return is_in or self.kwargs.get("out") is not None


class CallShare:
    """One session's share in one call of a module, or in the recomputation of a part of it.

    ``counts``: ops so far, by the row of their name (``NamedOps``). ``known``: the checkpoints around the call itself,
    which call the module again, and those inside it that have been told how to go on.
    """

    __slots__ = ("call", "counts", "hidden", "known", "run", "scope")

    def __init__(self, scope: Any, run: Run | None, call: int, counts: dict[Any, int]) -> None:
        self.scope = scope
        self.run = run  # None in a recomputation
        self.call = call
        self.counts = counts
        self.known = _regions() if scope.repeats else []  # checkpoints that repeat the whole call, or know of it
        self.hidden: list[Any] = []  # custom Functions that began inside it, of which nothing tells what they repeat


class OpEvent:
    """One op, in one session; made when it is about to run, and over with ``close``.

    The order is ``before``, the op itself, ``change``, ``after``; an op that fails goes from ``before`` to ``close``,
    one that returns nothing by ``count``. Only that and ``change`` count it. ``node`` is None where nobody asks for it.
    ``is_rewritten``: its value is edited, and is an argument into which it has written, though neither its name nor
    ``inplace=True`` may tell: a copy is edited, and written back.
    """

    __slots__ = ("_crossing", "_frames", "_is_met", "_place", "index", "is_rewritten", "name", "node", "part", "row")

    def __init__(self, part: CallShare, row: Any, place: FrameType) -> None:
        self.part = part
        self.name: str = row.name
        self.row = row
        self.index = part.counts.get(row, 0)
        self.node: OpNode | None = part.scope.node(row, self.index)
        self._place = place
        self._frames: list[Frame] | None = None
        self._is_met = False
        self._crossing: Crossing | None = None  # of its exit, once it is met
        self.is_rewritten = False

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the op is called with: the arguments, edited. Taps at its entry are told, gradient hooks set there."""
        node, run = self.node, self.part.run
        if self.part.scope.repeats and may_repeat():
            self._follow_regions()
        if node is None:
            return args, kwargs
        check_place(node, self._place)
        side, given = node.entry, Arguments(args, kwargs)
        if run is not None:
            for tap in side.taps:
                tap(given, run, self.part.call)
        if side.acts:
            self._frames = run.frames if run is not None else node.clock.replay_frames()
            self._frames.append(Frame(node))
            new = side.again(given, given) if run is None else side.cross(given, given, run, self.part.call)
            args, kwargs = new.args, new.kwargs
        return args, kwargs

    @property
    def has_values(self) -> bool:
        """Whether an edit changes what this op returns."""
        return self.node is not None and any(not act.needs_graph for act in self.node.exit.acts)

    def count(self) -> None:
        """Note that the op is over: the next one of its name has the next number."""
        self.part.counts[self.row] = self.index + 1

    def change(self, value: Any, given: Arguments) -> Any:
        """Count the op, and return what its caller gets instead, by the edits of its value.

        What asks for gradients comes in ``after``: it hooks the tensor that the model really goes on with.
        """
        self.count()
        return self._act(value, given, needs_graph=False)

    def after(self, value: Any, given: Arguments) -> None:
        """Tell who looks at the output, and set gradient hooks: ``value`` is what the model goes on with."""
        if self.node is not None:
            run = self.part.run
            if run is not None:
                for tap in self.node.exit.taps:
                    tap(value, run, self.part.call)
            self._act(value, given, needs_graph=True)

    def _act(self, value: Any, given: Arguments, *, needs_graph: bool) -> Any:
        """Let those acts at the exit act that need an autograd graph, or those that need none; what passes on."""
        acts = [act for act in self.node.exit.acts if act.needs_graph is needs_graph] if self.node is not None else []
        crossing = self.crossing(value) if acts else None
        if self.node is None or crossing is None:
            return value
        return self.node.exit.act(value, given, crossing, acts)

    @property
    def listeners(self) -> list[Any]:
        """Who hears of this op; in a recomputation, those who asked for that."""
        return [one for one in self.part.scope.listeners if one.is_again or self.part.run is not None]

    def heard(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpCall:
        """What listeners are told of the op, before it runs."""
        part: Any = self.part
        site = Site(part.scope.path, self.name, self.index, part.call)
        return OpCall(site, func, args, kwargs, find_place(self._place)[0], part.run)

    def close(self) -> None:
        """The op is done, or has failed: drop its frame, with those of calls inside it that failed."""
        if self._frames is not None:
            end_call(self._frames, self.node)

    def crossing(self, value: Any = None) -> Crossing | None:
        """That of the op's exit, made once, by ``value`` if known; None in a recomputation that nobody waits for.

        Not for an op that nobody asks for.
        """
        if not self._is_met and self.node is not None:
            self._is_met, side, run = True, self.node.exit, self.part.run
            has_graph = is_grad_enabled()
            self._crossing = (
                side.met_again(has_graph, value) if run is None else side.meet(run, self.part.call, has_graph, value)
            )
        return self._crossing

    def _follow_regions(self) -> None:
        """Let checkpoints that began inside the module's forward be seen again when they recompute.

        Such a checkpoint calls no module again, only the function that it was given, so no hook of the module fires.
        Raises PlanError for an edited op inside a custom Function, in which nothing tells what it will compute again.
        """
        part = self.part
        for region in _regions():
            if not any(region is known for known in part.known):
                part.known.append(region)
                follow: Callable[..., Any] = part.scope.follow(dict(part.counts))
                if not checkpoints.wrap_recomputation(region, follow):
                    part.hidden.append(region)
            is_edited = self.node is not None and (self.node.entry.is_edited or self.node.exit.is_edited)
            if is_edited and any(region is one for one in part.hidden):
                raise PlanError(
                    f"the edited op {self.name} of {type(part.scope.owner.module).__name__} runs inside "
                    f"{type(region).__name__}, a custom autograd Function: its backward may compute it again without "
                    "the edit; edit what the Function returns"
                )


# Ops that change what a tensor is, not what is in it.
_RESHAPING = ("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_",
              "as_strided_", "detach_", "set_", "rename_")  # fmt: skip


class Written:
    """The argument into which an op writes: of ``add_``, of ``x[0] = y``, of ``relu(x, inplace=True)``.

    ``target`` is that tensor; None for an op that writes into none. An edited op works on a copy of it: backward may
    keep what the op itself made, and the edit must not write over it. The edited value is copied into ``target`` at
    the end. Of an op that is not torch's own the name tells nothing: see ``Unseen``.
    """

    def __init__(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_reshaped = name in _RESHAPING
        self.key: int | str = 0 if args else "self" if "self" in kwargs else "input"
        found = self.of(args, kwargs) if is_in_place(name, func, args, kwargs) else None
        self.target = found if isinstance(found, Tensor) else None

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is now in the place of the target among the arguments."""
        if isinstance(self.key, str):
            return kwargs.get(self.key)
        return args[0] if args else None

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], new: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``new`` in the place of the target; the given ones stay as they are."""
        if isinstance(self.key, str):
            return args, {**kwargs, self.key: new}
        return (new, *args[1:]), kwargs

    def target_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_values: bool) -> Tensor | None:
        """What an edited op must write to in the end; None where it can do so itself.

        The arguments are as edits left them; ``has_values``: whether an edit changes what the op returns. Raises
        PlanError where an edit gave another input to an op that changes the shape of its input itself.
        """
        is_changed = self.target is not None and self.of(args, kwargs) is not self.target
        if is_changed and self.is_reshaped:
            raise PlanError("an op that changes the shape of its input itself cannot be given another: edit its output")
        return self.target if (is_changed or has_values) and not self.is_reshaped else None


class Unseen:
    """Whether an edited op writes where an edit cannot be handed on: known by what they hold, when the op has run.

    ``given``: the arguments before edits; ``args`` and ``kwargs`` what the op is called with. ``own``: the copy of a
    ``Written`` target, which is handed on.
    """

    def __init__(self, given: Any, args: Any, kwargs: Any, own: Any) -> None:
        self._theirs = {id(one) for _, one in iter_tensors(given)}
        self._marks = [(one, Mark(one)) for _, one in iter_tensors((args, kwargs)) if one is not own]

    def check(self, events: list[OpEvent], output: Any, *, has_values: bool) -> None:
        """Raises PlanError for a write into an argument that an edit has made, or into a list whose edit is asked for.

        ``has_values``: whether an edit changes what the op returns. Events are told where that is what it wrote into.
        """
        try:
            name = events[0].name
            is_output = self._check(name, output, has_values=has_values) or name == "detach_"  # which counts no write
            for event in events:
                event.is_rewritten = is_output and event.has_values
        except PlanError as error:
            _fail(events, error)
            raise

    def _check(self, name: str, output: Any, *, has_values: bool) -> bool:
        written = [one for one, mark in self._marks if mark.is_written(one)]
        if any(id(one) not in self._theirs for one in written):
            raise PlanError(
                f"op {name!r} writes into an argument that was edited, and its name does not tell: what it wrote would "
                "be lost; edit what it is made of, or where it is used"
            )
        inside = [] if isinstance(output, Tensor) or not has_values else [one for _, one in iter_tensors(output)]
        if any(one is other for one in written for other in inside):
            raise PlanError(
                f"op {name!r} writes into several tensors: its output cannot be edited; edit where it is used"
            )
        return any(one is output for one in written)


def _fail(events: list[OpEvent], error: Exception) -> None:
    """Note in the runs of these events that something was raised which is for the user, should the model catch it."""
    for event in events:
        if event.part.run is not None:
            event.part.run.fail(error)


def enter_op(events: list[OpEvent], func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, list[Any]]:
    """An op is about to run: let edits change what comes in, then tell listeners, then whoever looks.

    ``events``: one for each session that asks, edits first. Returns the arguments for the op, and the listeners with
    what they were told.
    """
    try:
        edits = [event for event in events if event.part.scope.is_edit]
        for event in edits:
            args, kwargs = event.before(args, kwargs)
        heard = [(listener, event.heard(func, args, kwargs)) for event in events for listener in event.listeners]
        for listener, call in heard:
            listener.enter(call)
        for event in events[len(edits) :]:
            event.before(args, kwargs)
        return args, kwargs, heard
    except Exception as error:
        _fail(events, error)
        raise


def leave_op(events: list[OpEvent], output: Any, written: Written | None, args: Any, kwargs: Any) -> Any:
    """An op has run: make the edits of its value, then set gradient hooks and tell whoever looks.

    Returns what the caller of the op gets. ``written``: of an op that worked on a copy; the edited value is copied into
    what it should have written to.
    """
    try:
        value = args[0] if output is None else output
        for event in events:
            fresh = value.clone() if event.is_rewritten and written is None else None
            is_plain = written is None and fresh is None  # else what it returned is no mere input
            new = event.change(value if fresh is None else fresh, Arguments(args if is_plain else (), kwargs))
            if fresh is None:
                value = new
            elif new is not fresh:
                value.copy_(new)
        if written is not None and written.target is not None:
            value = written.target.copy_(value)
            args, kwargs = written.put(args, kwargs, value)
        given = Arguments(args, kwargs)
        for event in events:
            event.after(value, given)
        return None if output is None else value
    except Exception as error:
        _fail(events, error)
        raise


def is_at(place: tuple[int, Any, int] | None, frame: FrameType, own: FrameType) -> bool:
    """Whether an op is called from ``place`` again, in the very function that the call ``own`` runs.

    ``place`` is how many frames up the user's code is, its code object and the instruction in it. Then the op needs no
    search of the stack: it is the call's own.
    """
    if place is None:
        return False
    depth, code, at = place
    here: FrameType | None = frame
    while depth and here is not None:
        here = here.f_back
        depth -= 1
    return here is not None and here.f_lasti == at and here.f_code is code and here.f_back is own


class OpNode(Node):
    """One op of a module, handled as a small module: what is asked of it hangs here.

    ``place``: how many frames up the code is that called it first, that code, and where in it; None before it has run.
    ``streams``: who asked.
    """

    __slots__ = ("place", "streams")

    def __init__(self, module: nn.Module, clock: Clock) -> None:
        super().__init__(module, clock, -1)
        self.place: tuple[int, Any, int] | None = None
        self.streams: tuple[Any, ...] = ()


def check_place(node: OpNode, frame: FrameType) -> None:
    """Tell who asked for an op that another line of code has become this op. ``frame``: where it was called.

    Ops are numbered in the order in which they run, so a branch taken in one call and not in another shifts the
    numbers.
    """
    place, depth = find_place(frame)
    known = node.place
    if known is None:
        node.place = depth, place.f_code, place.f_lasti
    elif known[2] != place.f_lasti or (known[1] is not place.f_code and known[1] != place.f_code):
        for stream in node.streams:
            stream.remark(MOVED)


def _regions() -> list[Any]:
    """What may recompute the code that runs now: checkpoints of both kinds, other custom Functions."""
    functions = checkpoints.enclosing_functions() if may_repeat() else []
    return [*(found.frame for found in checkpoints.enclosing() if not found.is_again), *functions]
