"""Ops as sites: a function mode around the own forward of the modules that are asked, and of nothing else.

One mode a thread, for all sessions, so that edits act before anybody looks, whoever came first; it is on torch's stack
only while such a module runs. Hooks on the module put it there (``_enter``) and take it away (``_leave``).

Which call an op belongs to is read from the Python stack: the nearest call of a module below it. So ops of modules
inside, asked or not, and of anybody's hooks are not mistaken for its own. See docs/decisions/0009.

Every op of a watched forward comes by here, so there are two ways: a short one for ops that are met again at the place
where they were last time and of which only outputs are asked for (or nothing), and a long one for all others.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from gaff.address.grammar import ATTENTIONS, WEIGHTS, Site, fits_op
from gaff.compat import libraries, modes
from gaff.compat.autograd import backward_task, transform_level
from gaff.compat.modes import call_frames
from gaff.engine.clock import Run, is_running
from gaff.engine.modules import Hook, Node
from gaff.engine.ops.attention import attend
from gaff.engine.ops.calls import CallShare, OpCall, OpEvent, OpNode, Written, check_place, enter_op, is_at, leave_op
from gaff.engine.ops.names import COMPOSITES, NAMES, is_tensors, name_of, opened
from gaff.engine.surroundings import SLOW_PATH, takes_fast_path
from gaff.errors import PlanError

LEFT_OUT = "ops inside torch.func transforms (vmap, grad ...) are left out, and not numbered"
_LOOKS = 4  # at how many ops of a name that nobody asked for it is found out whether the module itself runs it


_making = threading.RLock()
_numbers = itertools.count()
_getframe = sys._getframe


class Want(NamedTuple):
    """An op site that somebody asked for. ``connect`` hangs its stream on the node of one op.

    The op of ``site`` may be a glob and its index None: then the stream is asked for one for each op that is met.
    """

    site: Site  # the op may be a glob, its index None
    stream: Any
    connect: Callable[[Node, Site, Any], None]


class OpListener(NamedTuple):
    """Hears of every op of a module, whatever its values are; of recomputed ones only where ``is_again``.

    ``enter`` is called before the op, ``leave`` with the same ``OpCall`` and what the op returned after it.
    """

    enter: Callable[[OpCall], Any]
    leave: Callable[[OpCall, Any], Any]
    is_again: bool = False


class NamedOps:
    """The ops of one name in one module and session, by their number within a call; ``wants`` may be empty.

    ``nodes`` grows as higher numbers are met, None where nobody asks for that one. ``looks``: for a name that nobody
    asked for, how often it is still found out whether the module itself runs it, for the message about ops that never
    came.
    """

    __slots__ = ("has_left_out", "is_wanted", "looks", "name", "nodes", "scope", "wants")

    def __init__(self, scope: Scope, name: str, wants: list[Want], *, is_wanted: bool) -> None:
        self.scope = scope
        self.name = name
        self.wants = wants
        self.is_wanted = is_wanted
        self.nodes: list[OpNode | None] = []
        self.looks = _LOOKS
        self.has_left_out = False

    def leave_out(self) -> None:
        """Leave out an op inside a torch.func transform, unnumbered: its values are wrappers that mean nothing outside.

        Streams get a remark. Raises PlanError for an edit of all ops of this name, which would then miss some.
        """
        for want in self.wants:
            if self.scope.is_edit and want.site.op_index is None:
                raise PlanError(f"{want.site}: one of these ops runs inside a torch.func transform (vmap, grad ...), "
                                "where it cannot be edited; name the others by number, which leave it out")  # fmt: skip
            want.stream.remark(LEFT_OUT)
        self.has_left_out = True
        for node in self.nodes:
            for stream in node.streams if node is not None else ():
                stream.remark(LEFT_OUT)


class Scope:
    """What is asked of the ops of one module, in one session; hung on the module's node while the session prepares.

    ``owner`` is that node, ``path`` the module's. It holds what was asked (``wants``, ``listeners``), and what was
    found out: the rows of ops by name, and those for the short way by function (``plain``). ``known`` are the
    identities of the model's modules; what another module runs, made on the fly, belongs to its caller.
    """

    def __init__(self, owner: Node, path: str) -> None:
        self.owner = owner
        self.path = path
        self.number = next(_numbers)  # in the order in which sessions are opened
        self.wants: list[Want] = []
        self.listeners: list[OpListener] = []
        self.notes: list[str] = []  # of the session
        self.at_end: list[Callable[[], None]] = []  # of its calls
        self.rows: dict[str, NamedOps] = {}
        self.plain: dict[Any, NamedOps] = {}  # by function, where nothing but outputs is asked for
        self.ran: set[str] = set()  # names of ops that the module itself ran
        self.was_called = False
        self.repeats = False  # something must happen again in a recomputation
        self.is_edit = False
        self.is_plain = True  # nothing but outputs is looked at
        self.known: set[int] = set()  # modules of the model; what another runs, made on the fly, is its caller's

    def row(self, name: str) -> NamedOps:
        """The ops with this name, made when one is first met; patterns are matched once."""
        wants = [want for want in self.wants if fits_op(want.site.op or "", name)]
        if name not in ATTENTIONS:
            wants = [want for want in wants if want.site.port != WEIGHTS]
        return self.rows.setdefault(name, NamedOps(self, name, wants, is_wanted=bool(wants or self.listeners)))

    def node(self, row: NamedOps, index: int) -> OpNode | None:
        """What is asked of the op with this number, None for nothing; made when it is first met, under a lock."""
        with _making:  # of several threads
            while len(row.nodes) <= index:
                row.nodes.append(self._make(row, len(row.nodes)))
        return row.nodes[index]

    def nodes(self) -> Iterator[OpNode]:
        """The ops that somebody asks for, as far as they have come."""
        return (node for row in list(self.rows.values()) for node in row.nodes if node is not None)

    def _make(self, row: NamedOps, index: int) -> OpNode | None:
        """Make the node of one op and connect all streams that ask for it; equal sites share one stream."""
        self.ran.add(row.name)
        wants = [want for want in row.wants if want.site.op_index in (None, index)]
        if not wants:
            return None
        node = OpNode(self.owner.module, self.owner.clock, -1)
        made: dict[tuple[Any, ...], Any] = {}
        for want in wants:
            site = replace(want.site, op=row.name, op_index=index)
            known = made.get((site.call, site.port, site.key))
            stream = want.stream if want.site == site and known is None else want.stream.spawn(site, known)
            if stream is not known:
                made[site.call, site.port, site.key] = stream
                want.connect(node, site, stream)
                if row.has_left_out:
                    stream.remark(LEFT_OUT)
        node.streams = tuple(made.values())
        return node

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

    def let_go(self) -> None:
        """Break the circle with its owner, which would otherwise wait for a collector, when the session is over."""
        self.owner.scope = None
        self.rows.clear()
        self.plain.clear()
        self.wants.clear()
        self.listeners.clear()

    def settle(self) -> None:
        """Say of every op that was asked for and never came what the module ran instead; the session closes."""
        if not self.was_called:
            return
        where = f"the own forward of {self.path or 'the model'} <{type(self.owner.module).__name__}>"
        ran = ", ".join(self._numbered(name) for name in sorted(self.ran)) or "none"
        for want in self.wants:
            rows = [row for row in self.rows.values() if want in row.wants]
            if not any(len(row.nodes) > (want.site.op_index or 0) for row in rows):
                is_plain = want.site.port == WEIGHTS and "softmax" in self.ran
                hint = f"; it writes attention out: ask {Site(self.path, 'softmax')}" if is_plain else ""
                want.stream.skip(f"there is no such op in {where}, which ran {ran}{hint}")

    def _numbered(self, name: str) -> str:
        """The name of an op with its numbers, ``add#0 to #2``, where it is known how many there were."""
        row = self.rows.get(name)
        count = len(row.nodes) if row is not None else 0
        return name if not count else f"{name}#0" if count == 1 else f"{name}#0 to #{count - 1}"


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
        here: FrameType | None = frame
        while here is not None and here.f_code not in call_frames().codes:
            here = here.f_back
        block = None if here is None else here.f_locals.get("self")
        if block is not None and takes_fast_path([block]):
            for part in self.parts:
                part.scope.notes.append(SLOW_PATH) if SLOW_PATH not in part.scope.notes else None


class OpMode(TorchFunctionMode):
    """Calls back at the ops of the modules that were asked, on one thread; made once for each.

    ``top`` is the innermost call in progress that somebody asks about. torch takes the mode off its stack while it is
    called, so that what it does itself is not seen; ops inside an opened composite are (``_open``).
    """

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
                for tap in node.exits:
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
                for tap in node.exits:
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
            self._pop(call)
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
        events = [OpEvent(part, row, frame) for part, row in zip(call.parts, rows, strict=True) if row.is_wanted]
        return self._run(events, func, args, kwargs)

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
            self._pop(self.top)  # left without a word
        call.parts = [part for part in call.parts if part.scope is not scope]
        if not call.parts:
            self._pop(call)
        elif len(call.parts) == 1 and call.parts[0].run is not None:
            call.plain = call.parts[0].scope.plain
        return call.frame is caller

    def forget(self) -> None:
        """Drop calls that are over: an exception such as Ctrl-C went past their hooks."""
        while self.top is not None and not is_running(self.top.frame):
            self._pop(self.top)

    def drop(self, scopes: list[Scope]) -> None:
        """Leave out the shares of ``scopes`` in the calls in progress on this thread: their session closes."""
        call = self.top
        while call is not None:
            call.parts = [part for part in call.parts if not any(part.scope is scope for scope in scopes)]
            call.plain = {}
            call = call.above
        while self.top is not None and not self.top.parts:
            self._pop(self.top)

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
                self._pop(self.top)
            self._pop(call)

    def _push(self, call: ScopedCall) -> ScopedCall:
        """Make ``call`` the innermost, and put the mode on torch's stack if it is not there."""
        self.top = call
        if not modes.has_mode(self):
            modes.push_mode(self)
            call.has_pushed = True
        return call

    def _pop(self, call: ScopedCall) -> None:
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
            written = Written(name, args, kwargs)
            args, kwargs, heard = enter_op(events, func, args, kwargs)
            has_values = any(event.has_values for event in events)
            target = written.target_of(args, kwargs, has_values=has_values)
            if target is not None:
                args, kwargs = written.put(args, kwargs, written.of(args, kwargs).clone())
            elif has_values and kwargs.get("out") is not None:
                raise PlanError(f"op {name!r} writes with out=: its output cannot be edited; edit where it is used")
            inside = opened(func) if name in COMPOSITES else None
            if name in ATTENTIONS:
                output = attend(name, events, func, args, kwargs)
            else:
                output = func(*args, **kwargs) if inside is None else self._open(inside, args, kwargs)
            if (output is None and name == "setitem") or is_tensors(output):
                output = leave_op(events, output, written if target is not None else None, args, kwargs)
                for listener, call in heard:
                    listener.leave(call, output if output is not None else args[0] if target is None else target)
            return output
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


class _Modes(threading.local):
    """The mode of each thread, made when the thread first asks."""

    def __init__(self) -> None:
        self.mode = OpMode()


_modes = _Modes()


def scopes_of(frame: FrameType) -> list[Scope]:
    """The scopes of the call on this thread to which what runs in ``frame`` belongs; none if nobody asks for ops."""
    call = _modes.mode.top
    return [part.scope for part in call.parts] if call is not None and call.owns(frame) else []


def drop(scopes: list[Scope]) -> None:
    """Leave ``scopes`` alone from now on, also where a forward is in progress: their session closes."""
    if scopes:
        _modes.mode.drop(scopes)


def forget(run: Run | None = None) -> None:
    """Take the mode of this thread away where an exception such as Ctrl-C left it behind.

    Called when a run begins, and when a session closes.
    """
    if _modes.mode.top is not None:
        _modes.mode.forget()


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
