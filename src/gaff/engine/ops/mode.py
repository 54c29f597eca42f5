"""Ops as sites: a function mode around the own forward of the modules that are asked, and of nothing else.

One mode a thread, for all sessions, so that edits act before anybody looks, whoever came first; it is on torch's stack
only while such a module runs. Hooks on the module put it there (``_enter``) and take it away (``_leave``).

Which call an op belongs to is read from the Python stack: the nearest call of a module below it. So ops of modules
inside, asked or not, and of anybody's hooks are not mistaken for its own. See docs/decisions/0009.

Every op of a watched forward comes by here, so there are two ways: a short one for ops that are met again at the place
where they were last time and of which only outputs are asked for (or nothing), and a long one for all others.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gaff.address.grammar import ATTENTIONS
from gaff.address.resolve import iter_modules
from gaff.compat import libraries, modes
from gaff.compat.autograd import backward_task, transform_level
from gaff.compat.modes import call_frames
from gaff.engine.clock import Run, is_running
from gaff.engine.modules import Hook
from gaff.engine.node import Node
from gaff.engine.ops.attention import attend
from gaff.engine.ops.calls import CallShare, OpEvent, Unseen, Written, check_place, enter_op, is_at, leave_op
from gaff.engine.ops.names import COMPOSITES, NAMES, is_tensors, name_of, opened
from gaff.engine.ops.scope import NamedOps, Scope
from gaff.engine.surroundings import SLOW_PATH, takes_fast_path
from gaff.errors import PlanError

_getframe = sys._getframe


class ModuleScope(Scope):
    """A scope with the hooks on its module, and the way in which a checkpoint's recomputation goes on with its ops."""

    def install(self, handles: list[Any]) -> None:
        """Put the two hooks on the module, after the other hooks at its entry and before them at its exit."""
        module = self.owner.module
        handles.append(module.register_forward_pre_hook(Hook(_enter, self), with_kwargs=True))
        handles.append(module.register_forward_hook(Hook(_leave, self), always_call=True))

    def follow(self, counts: dict[Any, int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """How a checkpoint recomputes that began in the middle of the module's forward, after ``counts`` ops.

        Returns a function that wraps what the checkpoint would call, so that its ops are seen and numbered on from
        there. It does nothing once the session is closed, but for edits.
        """

        def wrap(recompute: Callable[..., Any]) -> Callable[..., Any]:
            def again(*args: Any, **kwargs: Any) -> Any:
                if not self.is_edit and self.owner.clock.closed:
                    return recompute(*args, **kwargs)
                with _modes.mode.region(CallShare(self, None, -1, dict(counts)), sys._getframe(0)):
                    return recompute(*args, **kwargs)

            return again

        return wrap


class Scopes(list[Scope]):
    """The scopes of one wiring, made when the ops of a module are first asked for; they share the model's modules."""

    def __init__(self, model: nn.Module | None, notes: list[str]) -> None:
        super().__init__()
        self._model = model
        self._notes = notes
        self._known: set[int] = set()

    def of(self, node: Node, path: str | None) -> Scope:
        """The scope of the module of ``node``, which lies at ``path``; None: look it up."""
        if node.scope is None:
            if path is None and self._model is not None:
                path = next((name for name, module, _ in iter_modules(self._model) if module is node.module), "")
            path = path or ""
            node.scope = ModuleScope(node, path)
            node.has_entry = True
            node.scope.notes = self._notes
            if not self._known and self._model is not None:
                inside = (module for _, module, _ in iter_modules(self._model))
                self._known = {id(module) for module in (*self._model.modules(), *inside)}
            node.scope.known = self._known
            self.append(node.scope)
        scope: Scope = node.scope
        return scope


class ScopedCall:
    """One call of a module in progress, whose ops somebody asks for; they lie on each other as the calls do.

    ``frame`` is that of torch's function that runs the forward, at its instruction ``position`` (None: at any),
    ``outer`` that of the function around it, which calls hooks after an exception. ``parts`` are the shares of the
    sessions. ``is_over`` is found out by ``owns``.
    """

    __slots__ = ("above", "frame", "has_pushed", "is_over", "known", "outer", "parts", "plain", "position")

    def __init__(self, frame: FrameType, position: int | None, above: ScopedCall | None) -> None:
        self.frame = frame
        self.outer = frame.f_back
        self.position = position
        self.above = above
        self.parts: list[CallShare] = []
        self.plain: dict[Any, NamedOps] = {}  # by function: ops of which only outputs are asked for, by one session
        self.has_pushed = False
        self.is_over = False  # an exception that somebody caught went past its hooks
        self.known: set[int] = set()

    def owns(self, frame: FrameType) -> bool:
        """Whether what runs in ``frame`` belongs to this very call: to no module inside it, and to no hook.

        Goes up the Python stack to the nearest call of a known module. That function of torch runs hooks, too, so the
        instruction at which it stands decides. Meeting the call above first means that this one is over: an exception
        that somebody caught went past its hooks.
        """
        codes, own = call_frames().codes, self.frame
        here: FrameType | None = frame
        while here is not None:
            back = here.f_back
            if back is own or here is own:  # the latter where the forward is a function of torch itself
                return self.position is None or own.f_lasti == self.position
            if libraries.is_hook(here):
                return False
            if here.f_code in codes and id(here.f_locals.get("self")) in self.known:
                self.is_over = self.above is not None and here is self.above.frame
                return False
            here = back
        return False

    def note_slow_path(self, frame: FrameType) -> None:
        """Note the attention of a module that nobody asked about: a mode alone keeps torch from its fused fast path."""
        here = modes.nearest_call(frame)
        block = None if here is None else here.f_locals.get("self")
        if block is not None and takes_fast_path([block]):
            for part in self.parts:
                part.scope.notes.append(SLOW_PATH) if SLOW_PATH not in part.scope.notes else None


class OpMode(TorchFunctionMode):
    """Calls back at the ops of the modules that were asked, on one thread; made once for each.

    ``top`` is the innermost call in progress that somebody asks about. torch takes the mode off its stack while it is
    called, so that what it does itself is not seen; ops inside an opened composite are (``_open``).
    """

    is_gaffs = True

    def __init__(self) -> None:
        super().__init__()
        self.top: ScopedCall | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """An op is called, anywhere below a module that is asked: run it, on the short way if it is known.

        Returns what the op returns, or what an edit puts in its place.
        """
        call = self.top
        row = call.plain.get(func) if call is not None else None
        if row is None:
            return self._look_up(call, func, args, kwargs or {}, sys._getframe(1))
        if call is None or not row.is_wanted:
            return func(*args, **kwargs) if kwargs else func(*args)
        frame, own = _getframe(1), call.frame
        part: Any = call.parts[0]
        index = part.counts.get(row, 0)
        node = row.nodes[index] if index < len(row.nodes) else None
        if node is not None and own.f_lasti == call.position and is_at(node.place, frame, own):
            output = func(*args, **kwargs) if kwargs else func(*args)
            value = args[0] if output is None and row.name == "setitem" else output
            if (type(value) is Tensor or is_tensors(value)) and transform_level() is None:
                part.counts[row] = index + 1
                for tap in node.exit.taps:
                    tap(value, part.run, part.call)
            elif transform_level() is not None:
                row.leave_out()
            return output
        return self._look(call, row, frame, func, args, kwargs or {})

    def _look(self, call: ScopedCall, row: NamedOps, frame: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
        """Look at an op of the short way that comes for the first time, from another line, or from another module."""
        is_own = call.owns(frame)
        if not is_own and call.is_over:
            return self._look_up(call, func, args, kwargs, frame)
        output = func(*args, **kwargs)
        value = args[0] if output is None and row.name == "setitem" else output
        if is_own and transform_level() is not None:
            row.leave_out()
        elif is_own and is_tensors(value):
            part: Any = call.parts[0]
            index = part.counts.get(row, 0)
            part.counts[row] = index + 1
            node = row.scope.node(row, index)
            if node is not None:
                check_place(node, frame)
                for tap in node.exit.taps:
                    tap(value, part.run, part.call)
        return output

    def _look_up(self, call: ScopedCall | None, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        """The long way: find out the op's name, who asks for it and whether the innermost call runs it, and handle it.

        Drops calls that turn out to be over. Where nobody can ask for more than has been seen, the short way is taken
        from the next time on.
        """
        name = NAMES.get(func)
        if name is None:
            name = name_of(func)
        while call is not None and call.above is not None and not call.owns(frame) and call.is_over:
            self.pop(call)
            call = self.top
        if not name or call is None:
            return func(*args, **kwargs)
        rows = [part.scope.rows.get(name) or part.scope.row(name) for part in call.parts]
        if name in COMPOSITES:
            call.note_slow_path(frame)
        if not any(row.is_wanted for row in rows):
            return self._pass(call, rows, frame, func, args, kwargs)
        if len(rows) == 1 and call.parts[0].run is not None and rows[0].scope.is_plain and name not in COMPOSITES:
            rows[0].scope.plain[func] = rows[0]  # from now on the short way
        if not call.owns(frame):
            return func(*args, **kwargs)
        if transform_level() is not None:
            for row in rows:
                row.leave_out()
            return func(*args, **kwargs)
        return self._run(_events(call.parts, rows, frame), func, args, kwargs)

    def enter(self, part: CallShare, frame: FrameType, position: int | None) -> None:
        """A module begins its forward. ``part``: one session's share; the second session finds the call of the first.

        ``frame`` and ``position`` are as in ``ScopedCall``.
        """
        call = self.top
        if call is None or call.frame is not frame:
            call = self._push(ScopedCall(frame, position, call))
        call.parts.append(part)
        call.known = call.known | part.scope.known if call.known else part.scope.known
        call.plain = part.scope.plain if len(call.parts) == 1 and part.run is not None else {}

    def leave(self, scope: Scope, caller: FrameType) -> bool:
        """A module is done: whether it returned (``caller`` is what ran it), or raised (what is around that).

        Takes away the share of ``scope``, with the last one the call, and calls inside it that were left by an
        exception. Returns whether the module returned.
        """
        call = self.top
        while call is not None and call.frame is not caller and call.outer is not caller:
            call = call.above
        if call is None:
            return False
        while self.top is not None and self.top is not call:
            self.pop(self.top)  # left without a word
        call.parts = [part for part in call.parts if part.scope is not scope]
        if not call.parts:
            self.pop(call)
        elif len(call.parts) == 1 and call.parts[0].run is not None:
            call.plain = call.parts[0].scope.plain
        return call.frame is caller

    @contextmanager
    def region(self, part: CallShare, frame: FrameType) -> Iterator[None]:
        """Look at what a checkpoint recomputes of a forward, in ``frame``, without calling the module again.

        Several sessions wrap the same recomputation one in the other; the inner one takes the shares of the outer with
        it.
        """
        above = self.top
        call = ScopedCall(frame, None, above)
        call.parts.append(part)
        call.known = part.scope.known
        if above is not None and frame.f_back is above.frame and above.position is None:
            call.parts += above.parts  # other sessions' shares in the same recomputation: they act as they were opened
            call.parts.sort(key=lambda part: part.scope.number)
            call.known = call.known | above.known
        self._push(call)
        try:
            yield
        finally:
            while self.top is not None and self.top is not call:
                self.pop(self.top)
            self.pop(call)

    def _push(self, call: ScopedCall) -> ScopedCall:
        """Make ``call`` the innermost, and put the mode on torch's stack if it is not there."""
        self.top = call
        if not modes.has_mode(self):
            modes.push_mode(self)
            call.has_pushed = True
        return call

    def pop(self, call: ScopedCall) -> None:
        """Make the call around ``call`` the innermost, and take the mode away if it came with ``call``."""
        self.top = call.above
        if call.has_pushed:
            modes.remove_mode(self)

    def _pass(self, call: ScopedCall, rows: list[NamedOps], frame: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of a name that nobody asked for; a composite of the call's own is opened, to see the ops inside."""
        inside = opened(func) if rows[0].name in COMPOSITES else None
        if inside is not None and call.owns(frame):
            return self._open(inside, args, kwargs)
        for part, row in zip(call.parts, rows, strict=True):
            if row.looks:
                row.looks -= 1
                if call.owns(frame):
                    part.scope.ran.add(row.name)
                    row.looks = 0
            elif inside is None:
                part.scope.plain[func] = row  # passed on at once from now on
        return func(*args, **kwargs)

    def _run(self, events: list[OpEvent], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that is asked for: edits act as if the module had done it, before anybody looks.

        ``events`` holds one for each session that asks. Raises PlanError for an edited op that writes with ``out=``.
        """
        name = events[0].name
        if len(events) > 1:
            events.sort(key=lambda event: not event.part.scope.is_edit)
        try:
            written, given = Written(name, func, args, kwargs), (args, kwargs)
            args, kwargs, heard = enter_op(events, func, args, kwargs)
            has_values = any(event.has_values for event in events)
            target = written.target_of(args, kwargs, has_values=has_values)
            if target is not None:
                args, kwargs = written.put(args, kwargs, written.of(args, kwargs).clone())
            elif kwargs.get("out") is not None and (has_values or kwargs["out"] is not given[1]["out"]):
                raise PlanError(
                    f"op {name!r} writes with out=: what it writes to cannot be edited; edit where it is used"
                )
            is_edited = has_values or args is not given[0] or kwargs is not given[1]
            own = None if target is None else written.of(args, kwargs)
            unseen = Unseen(given, args, kwargs, own) if is_edited else None
            inside = opened(func) if name in COMPOSITES else None
            if name in ATTENTIONS:
                output = attend(name, events, func, args, kwargs)
            else:
                output = func(*args, **kwargs) if inside is None else self._open(inside, args, kwargs)
            if unseen is not None:
                unseen.check(events, output, has_values=has_values)
            return _left(events, output, written if target is not None else None, args, kwargs, heard)
        finally:
            for event in events:
                event.close()

    def _open(self, inside: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an opened composite with the mode on torch's stack again: the ops inside are the module's own."""
        modes.push_mode(self)
        try:
            return inside(*args, **kwargs)
        finally:
            modes.remove_mode(self)


def _left(events: list[OpEvent], output: Any, written: Written | None, args: Any, kwargs: Any, heard: Any) -> Any:
    """An op has returned: ``leave_op``, and then listeners. One that returns no tensor has written at most."""
    if (output is None and events[0].name == "setitem") or is_tensors(output):
        output = leave_op(events, output, written, args, kwargs)
        for listener, call in heard:
            listener.leave(call, output if output is not None else args[0] if written is None else written.target)
    elif output is None:
        for event in events:
            event.count()
            event.row.is_silent = True
    return output


def _events(parts: list[CallShare], rows: list[NamedOps], frame: FrameType) -> list[OpEvent]:
    """An op comes: an event for each session that asks for it; the others, too, know now that it ran."""
    events = []
    for part, row in zip(parts, rows, strict=True):
        row.scope.ran.add(row.name)
        if row.is_wanted:
            events.append(OpEvent(part, row, frame))
    return events


class _Modes(threading.local):
    """The mode of each thread, made when the thread first asks."""

    def __init__(self) -> None:
        self.mode = OpMode()


_modes = _Modes()


def parts_of(frame: FrameType) -> list[CallShare]:
    """For each session the call on this thread to which what runs in ``frame`` belongs; none if nobody asks for ops."""
    call = _modes.mode.top
    return list(call.parts) if call is not None and call.owns(frame) else []


def drop(scopes: list[Scope]) -> None:
    """Leave ``scopes`` alone from now on, also where a forward is in progress on this thread: their session closes."""
    mode = _modes.mode
    call = mode.top if scopes else None
    while call is not None:
        call.parts = [part for part in call.parts if not any(part.scope is scope for scope in scopes)]
        call.plain = {}
        call = call.above
    while scopes and mode.top is not None and not mode.top.parts:
        mode.pop(mode.top)


def forget(run: Run | None = None) -> None:
    """Take the mode of this thread away where an exception such as Ctrl-C left it behind, past the hooks of calls.

    Called when a run begins, and when a session closes.
    """
    mode = _modes.mode
    while mode.top is not None and not is_running(mode.top.frame):
        mode.pop(mode.top)


def _enter(scope: Scope, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """The hook at the entry of a module whose ops are asked, after the one that began its run.

    A run on a thread at which the session does not look has no ops. In a recomputation only edits, gradients and those
    who asked for it see them.
    """
    if backward_task() != -1:
        if scope.repeats and (scope.is_edit or not scope.owner.clock.closed):
            _modes.mode.enter(CallShare(scope, None, -1, {}), sys._getframe(1), call_frames().position)
        return
    run = scope.owner.open.get(get_ident())
    if run is not None and kwargs is not None and transform_level() is None:
        part = CallShare(scope, run, run.entered[scope.owner.index] - 1, {})
        scope.was_called = True
        _modes.mode.enter(part, sys._getframe(1), call_frames().position)


def _leave(scope: Scope, module: Any, args: Any, output: Any = None) -> None:
    """The hook at the exit of a module whose ops are asked, also after an exception."""
    if _modes.mode.top is not None and _modes.mode.leave(scope, sys._getframe(1)):
        for ended in scope.at_end:
            ended()
