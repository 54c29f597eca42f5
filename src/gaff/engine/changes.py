"""Where edits take hold: values at the entry and exit of a module, gradients at its outputs and inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from gaff import compat
from gaff.address import Key, Site
from gaff.engine.armed import ArmedShare
from gaff.engine.clock import Frame
from gaff.engine.gradients import GradientArm, ambiguous
from gaff.engine.replay import Passage
from gaff.engine.shares import find_feeding, roots_of
from gaff.engine.stream import EditStream, EntryArm, EntryChange, ExitArm, ExitChange
from gaff.errors import PlanError, SiteError
from gaff.values import dig, dig_argument, first_tensor, iter_tensors, put, put_argument

RETURNED = "the module returned its input itself: who ignores what it returns misses the edit"
TWINS = "the output holds one tensor several times: only the one at this key is edited"


class OutputChange(ExitChange):
    """Puts an edited tensor in the place of a module's output, or of one tensor inside it."""

    is_gradient = False
    _has_looked = False

    def __init__(self, site: Site, stream: EditStream) -> None:
        self._site = site
        self._stream = stream
        self.direct = stream.direct if site.call is None and not site.key else None

    def __call__(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool) -> Any:
        site = self._site
        if site.call is not None and site.call != passage.call:
            return output
        if isinstance(output, Tensor) and not site.key:
            if not self._has_looked:
                self._has_looked = True
                if any(output is one for one in given[0]):
                    self._stream.remark(RETURNED)
            return self._stream.change(output, passage, is_again)
        if not self._has_looked:
            self._look_for_twins(output)
        try:
            key, tensor = single(site, dig(output, site.key), site.key)
        except KeyError as error:
            raise _missing(site, error) from None
        if tensor is None:
            self._stream.absent(passage.run, passage.call, "there is no tensor in this output")
            return output
        new = self._stream.change(tensor, passage, is_again)
        try:
            return put(output, key, new)
        except PlanError as error:
            raise PlanError(f"{site}: {error}") from None

    def _look_for_twins(self, output: Any) -> None:
        self._has_looked = True
        found = [tensor for _, tensor in iter_tensors(output)]
        if len({id(tensor) for tensor in found}) < len(found):
            self._stream.remark(TWINS)


class InputChange(EntryChange):
    """Puts an edited tensor in the place of an argument, or of one tensor inside it."""

    is_gradient = False

    def __init__(self, site: Site, stream: EditStream) -> None:
        self._site = site
        self._stream = stream

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._site.call is not None and self._site.call != passage.call:
            return None
        found = find_argument(args, kwargs, self._site)
        if found is None:
            self._stream.absent(passage.run, passage.call, "there is no tensor in this input")
            return None
        new = self._stream.change(found[1], passage, is_again)
        try:
            return put_argument(args, kwargs, found[0], new)
        except PlanError as error:
            raise PlanError(f"{self._site}: {error}") from None


class EntryGradient:
    """Arms the gradient edit of an input, where a graph is made."""

    is_gradient = True

    def __init__(self, arm: EntryArm) -> None:
        self._arm = arm
        self.give_up = arm.give_up
        self.before_graph = arm.before_graph

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool) -> None:
        self._arm(args, kwargs, passage.run, passage.call)


class ExitGradient:
    """Arms the gradient edit of an output, where a graph is made."""

    is_gradient = True

    def __init__(self, arm: ExitArm) -> None:
        self._arm = arm
        self.give_up = arm.give_up

    def __call__(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool) -> Any:
        self._arm(output, given, passage.run, passage.call)
        return output


class ShareChange(GradientArm):
    """Edits a module's own share of the gradient at its input.

    The module is given a view of its input, at which its own uses of it meet. A module that writes into its input
    cuts that view out of the graph; the one node that then stands before the input is hooked instead.
    """

    is_gradient = True

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._wants(passage.call):
            return None
        found = find_argument(args, kwargs, self._site)
        if found is None or not found[1].requires_grad:
            self._stream.absent(passage.run, passage.call, "the input does not require grad")
            return None
        tensor = found[1]
        edge, since = compat.grad_edge_node(tensor), compat.next_sequence()
        alias = tensor.view_as(tensor)
        share = ArmedShare(self._stream, passage.run, passage.call, alias)
        self._frame(passage).notes[self] = (tensor, edge, since, compat.version_of(tensor), share)
        self._gradients.arm_share(alias, share)
        for key, other in list(iter_tensors((args, kwargs))):  # given several times: one view for all of them
            if other is tensor:
                args, kwargs = put_argument(args, kwargs, key[1:], alias)
        return args, kwargs

    def leave(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool) -> Any:
        """The module returned: see whether it wrote into its input."""
        noted = self._frame(passage).notes.pop(self, None)
        if noted is None:
            return output
        tensor, edge, since, version, share = noted
        if compat.version_of(tensor) != version:
            roots = [tensor, *roots_of(output, given, self._node.module)]
            feeding = find_feeding(roots, edge, since)
            if len(feeding) != 1 or tensor._is_view():
                share.refuse(
                    "the module writes into its input and uses it in other ways, too: edit :input_grad instead"
                )
            node, position = feeding[0]
            share.follow(node.register_hook(partial(self._gradients.share_arrived, share, position)))
        return output

    def exit_half(self) -> ShareLeave:
        """The half that runs when the module returns."""
        return ShareLeave(self.leave)

    def _frame(self, passage: Passage) -> Frame:
        frames = passage.run.frames if compat.backward_task() == -1 else self._node.clock.replay_frames()
        return next(frame for frame in reversed(frames) if frame.owner is self._node)


class ShareLeave(ExitChange):
    """The second half of a ``ShareChange``; what never came is told by the first."""

    is_gradient = True

    def __init__(self, leave: Callable[[Any, tuple[Any, Any], Passage, bool], Any]) -> None:
        self._leave = leave

    def __call__(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool) -> Any:
        return self._leave(output, given, passage, is_again)


def find_argument(args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> tuple[Key, Tensor] | None:
    """The tensor that an input address means, with its key; None where there is none."""
    if not site.key:
        return first_tensor(args, kwargs)
    try:
        key, tensor = single(site, dig_argument(args, kwargs, site.key), site.key)
    except KeyError as error:
        raise _missing(site, error) from None
    return None if tensor is None else (key, tensor)


def single(site: Site, value: Any, key: Key) -> tuple[Key, Tensor | None]:
    """The one tensor in ``value``. Raises SiteError where there are several: an edit must say which."""
    found = list(iter_tensors(value))
    if len(found) > 1:
        raise ambiguous(site, key, found)
    return ((*key, *found[0][0]), found[0][1]) if found else (key, None)


def _missing(site: Site, error: KeyError) -> SiteError:
    return SiteError(f"{site}: {error.args[0]}")
