"""Where edits of gradients take hold: at the outputs and inputs of a module, and at its own share.

A change hung on a ``Node`` arms a tensor hook; the stream behind that hook returns the gradient that backward goes on
with. Only for the own share something is put into the autograd graph: a view of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gaff.address.nested import iter_tensors, put_argument
from gaff.compat import autograd, memory
from gaff.engine.gradients.armed import ArmedShare
from gaff.engine.gradients.ports import GradientArm
from gaff.engine.gradients.share import find_feeding, roots_of
from gaff.engine.recomputation import Passage
from gaff.engine.streams import EntryArm, ExitArm, ExitChange
from gaff.engine.value_edits import find_argument


class EntryGradient:
    """Arms the gradient edit of an input, where an autograd graph is made: an ``EntryArm`` in the place of a change.

    It never changes the arguments. ``give_up`` and ``before_graph`` are those of the arm.
    """

    is_gradient = True

    def __init__(self, arm: EntryArm) -> None:
        self._arm = arm
        self.give_up = arm.give_up
        self.before_graph = arm.before_graph

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool) -> None:
        self._arm(args, kwargs, passage.run, passage.call)


class ExitGradient:
    """Arms the gradient edit of an output, where an autograd graph is made: an ``ExitArm`` in the place of a change.

    It returns the output as it is. ``give_up`` is that of the arm.
    """

    is_gradient = True

    def __init__(self, arm: ExitArm) -> None:
        self._arm = arm
        self.give_up = arm.give_up

    def __call__(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool) -> Any:
        self._arm(output, given, passage.run, passage.call)
        return output


class ShareChange(GradientArm):
    """Edits a module's own share of the gradient at its input.

    The module is given a view of its input, at which its own uses of it meet, while other uses of the same tensor stay
    outside: what arrives at the view is the share. A module that writes into its input cuts that view out of the
    autograd graph; the one node that then stands before the input is hooked instead.

    Begins at the entry of the module and is ended by its ``exit_half``; between them the frame of the call keeps what
    is noted, so that one object serves all calls.
    """

    is_gradient = True

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._wants(passage.call):
            return None
        found = find_argument(args, kwargs, self._site)
        if found is None or not autograd.takes_gradient(found[1]):
            self._stream.absent(passage.run, passage.call, "the input does not require grad")
            return None
        tensor = found[1]
        edge, since = autograd.grad_edge_node(tensor), autograd.next_sequence()
        alias = tensor.view_as(tensor)
        share = ArmedShare(self._stream, passage.run, passage.call, alias)
        self._frame(passage.run).notes[self] = (tensor, edge, since, memory.version_of(tensor), share)
        self._gradients.arm_share(alias, share)
        for key, other in list(iter_tensors((args, kwargs))):  # given several times: one view for all of them
            if other is tensor:
                args, kwargs = put_argument(args, kwargs, key[1:], alias)
        return args, kwargs

    def leave(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool) -> Any:
        """See, when the module returned, whether it wrote into its input, and hook the node before the input if so.

        Raises ExactnessError, by its stream, where several nodes hand gradients to the input or the input is a view
        itself: the share then passes no one place. Returns the output as it is.
        """
        noted = self._frame(passage.run).notes.pop(self, None)
        if noted is None:
            return output
        tensor, edge, since, version, share = noted
        if memory.version_of(tensor) != version:
            roots = [tensor, *roots_of(output, given, self._node.module)]
            feeding, _ = find_feeding(roots, edge, since)
            if len(feeding) != 1 or tensor._is_view():
                share.refuse(
                    "the module writes into its input and uses it in other ways, too: edit :input_grad instead"
                )
            node, position = feeding[0]
            share.follow(node.register_hook(partial(self._gradients.share_arrived, share, position)))
        return output

    def exit_half(self) -> ShareLeave:
        """The half that runs when the module returns, to be hung on the same node."""
        return ShareLeave(self.leave)


class ShareLeave(ExitChange):
    """The second half of a ``ShareChange``, at the exit of the module; what never came is told by the first."""

    is_gradient = True

    def __init__(self, leave: Callable[[Any, tuple[Any, Any], Passage, bool], Any]) -> None:
        self._leave = leave

    def __call__(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool) -> Any:
        return self._leave(output, given, passage, is_again)
