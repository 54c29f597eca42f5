"""What happens at one op that somebody asks for: before it runs and after, in a forward and in its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from gaff.address.grammar import Site
from gaff.compat import checkpoints
from gaff.compat.autograd import is_grad_enabled
from gaff.compat.checkpoints import has_saved_hooks
from gaff.compat.memory import version_of
from gaff.engine.clock import Frame, Run
from gaff.engine.modules import (
    Node,
    arm_after,
    arm_after_again,
    arm_before,
    arm_before_again,
    change_entry,
    change_exit,
    find_match,
)
from gaff.engine.ops.names import find_place
from gaff.engine.recomputation import Passage
from gaff.errors import PlanError

MOVED = "another line of the code ran as this op in a later call: which op has which number depends on the path taken"


class OpCall(NamedTuple):
    """One op that runs, as listeners see it. ``place``: the frame of the user's code, while it runs."""

    site: Site
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: FrameType
    run: Run | None  # None in a recomputation


class CallShare:
    """One session's share in one call of a module. ``counts``: ops so far, by row."""

    __slots__ = ("call", "counts", "known", "run", "scope")

    def __init__(self, scope: Any, run: Run | None, call: int, counts: dict[Any, int]) -> None:
        self.scope = scope
        self.run = run  # None in a recomputation
        self.call = call
        self.counts = counts
        self.known = _regions() if scope.repeats else []  # checkpoints that repeat the whole call, or know of it


class OpEvent:
    """One op, in one session."""

    __slots__ = ("_found", "_frames", "_place", "_versions", "index", "name", "node", "part", "row")

    def __init__(self, part: CallShare, row: Any, place: FrameType) -> None:
        self.part = part
        self.name: str = row.name
        self.row = row
        self.index = part.counts.get(row, 0)
        self.node: Node | None = part.scope.node(row, self.index)
        self._place = place
        self._frames: list[Frame] | None = None
        self._found: tuple[Passage, bool, bool] | None = None
        self._versions: list[tuple[Tensor, int]] = []

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the op is called with."""
        node, run = self.node, self.part.run
        if self.part.scope.repeats and (not is_grad_enabled() or has_saved_hooks()):
            self._follow_regions()
        if node is None:
            return args, kwargs
        check_place(node, self._place)
        if node.entry_arms or node.entry_changes:
            self._frames = run.frames if run is not None else node.clock.replay_frames()
            self._frames.append(Frame(node))
        if run is None:
            arm_before_again(node, args, kwargs)
            found = find_match(node, node.module, node.replay) if node.entry_changes else None
            if found is not None:
                args, kwargs = change_entry(node, args, kwargs, found.passage, found.is_first_graph, is_again=True)
        else:
            for tap in node.entries:
                tap(args, kwargs, run, self.part.call)
            if node.entry_arms:
                arm_before(node, args, kwargs, run, self.part.call)
            if node.entry_changes:
                passage = _passage(node.replay, run, self.part.call)
                args, kwargs = change_entry(node, args, kwargs, passage, True, is_again=False)
        if self.has_values:
            given = (*args, *kwargs.values())
            self._versions = [(one, version_of(one)) for one in given if isinstance(one, Tensor)]
        return args, kwargs

    @property
    def has_values(self) -> bool:
        """Whether an edit changes what this op returns."""
        return self.node is not None and any(not change.is_gradient for change in self.node.exit_changes)

    def change(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the op returns instead, by the edits of its value."""
        node = self.node
        self.part.counts[self.row] = self.index + 1
        if node is None or not node.exit_changes:
            return value
        found = self._passage(node)
        if found is None:
            return value
        passage, has_graph, is_again = found
        values = [change for change in node.exit_changes if not change.is_gradient]
        return change_exit(node, value, (args, kwargs), passage, has_graph, is_again=is_again, changes=values)

    def is_rewritten(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A copy for the edit of an op that wrote into the argument that it returned, though nothing says so."""
        if self._versions and isinstance(value, Tensor):
            for given, version in self._versions:
                if given is value and version_of(given) != version:
                    return value.clone()
        return None

    def after(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The op is done, and this is what the model goes on with."""
        node, run, given = self.node, self.part.run, (args, kwargs)
        if node is None:
            return
        if run is None:
            arm_after_again(node, value, given)
        else:
            for tap in node.exits:
                tap(value, run, self.part.call)
            if node.arms:
                arm_after(node, value, given, run, self.part.call)
        if self._found is not None:
            passage, has_graph, is_again = self._found
            rest = [change for change in node.exit_changes if change.is_gradient]
            change_exit(node, value, given, passage, has_graph, is_again=is_again, changes=rest)

    @property
    def listeners(self) -> list[Any]:
        """Who hears of this op."""
        return [one for one in self.part.scope.listeners if one.is_again or self.part.run is not None]

    def heard(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpCall:
        """What listeners are told."""
        part: Any = self.part
        site = Site(part.scope.path, self.name, self.index, part.call)
        return OpCall(site, func, args, kwargs, find_place(self._place)[0], part.run)

    def close(self) -> None:
        """The op is done, or has failed."""
        if self._frames is not None:
            while self._frames and self._frames.pop().owner is not self.node:
                pass

    def _passage(self, node: Node) -> tuple[Passage, bool, bool] | None:
        """The call that edits at the exit belong to, whether gradient hooks are due, whether it is a recomputation."""
        if self.part.run is not None:
            self._found = _passage(node.exit_replay, self.part.run, self.part.call), True, False
        else:
            match = find_match(node, node.module, node.exit_replay)
            self._found = None if match is None else (match.passage, match.is_first_graph, True)
        return self._found

    def _follow_regions(self) -> None:
        """A checkpoint that began inside the module's forward recomputes it without calling the module."""
        part = self.part
        for region in _regions():
            if not any(region is known for known in part.known):
                part.known.append(region)
                _follow(region, part)


# Ops that change what a tensor is, not what is in it.
_RESHAPING = ("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_",
              "as_strided_", "detach_", "set_", "rename_")  # fmt: skip


class Written:
    """The argument into which an op writes: of ``add_``, of ``x[0] = y``, of ``relu(x, inplace=True)``.

    An edited op works on a copy of it: backward may keep what the op itself made, and the edit must not write over it.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_reshaped = name in _RESHAPING
        writes = name.endswith("_") or name == "setitem" or bool(kwargs.get("inplace"))
        names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        self.key: int | str = 0 if args else next(iter(names), 0)
        found = self.of(args, kwargs) if writes else None
        self.target = found if isinstance(found, Tensor) else None

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is now at its place among the arguments."""
        if isinstance(self.key, str):
            return kwargs.get(self.key)
        return args[0] if args else None

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], new: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``new`` in its place."""
        if isinstance(self.key, str):
            return args, {**kwargs, self.key: new}
        return (new, *args[1:]), kwargs


def is_at(place: tuple[int, Any, int] | None, frame: FrameType, own: FrameType) -> bool:
    """Whether an op is called from ``place`` again, in the very function that the call ``own`` runs."""
    if place is None:
        return False
    depth, code, at = place
    here: FrameType | None = frame
    while depth and here is not None:
        here = here.f_back
        depth -= 1
    return here is not None and here.f_lasti == at and here.f_code is code and here.f_back is own


def check_place(node: Node, frame: FrameType) -> None:
    """Tell who asked for an op that another line of code has become this op. ``frame``: where it was called."""
    place, depth = find_place(frame)
    known = node.place
    if known is None:
        node.place = depth, place.f_code, place.f_lasti
    elif known[2] != place.f_lasti or (known[1] is not place.f_code and known[1] != place.f_code):
        for stream in node.streams:
            stream.remark(MOVED)


def _passage(replay: Any, run: Run, call: int) -> Passage:
    passage = Passage(run, call)
    if not is_grad_enabled() or has_saved_hooks():
        replay.remember(passage)
    return passage


def _regions() -> list[Any]:
    """What may recompute the code that runs now: checkpoints of both kinds, other custom Functions."""
    functions = [] if is_grad_enabled() else checkpoints.enclosing_functions()
    return [*(found.frame for found in checkpoints.enclosing() if not found.is_again), *functions]


def _follow(region: Any, part: CallShare) -> None:
    """Let the recomputation of ``region`` go by the ops of this module, from the counts that it began with."""
    scope, counts = part.scope, dict(part.counts)
    follow: Callable[..., Any] = scope.follow(counts)
    if not checkpoints.wrap_recomputation(region, follow) and scope.is_edit:
        raise PlanError(
            f"an edited op of {type(scope.owner.module).__name__} runs inside {type(region).__name__}, a custom "
            "autograd Function: its backward may compute it again without the edit; edit what the Function returns"
        )
