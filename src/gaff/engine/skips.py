"""Modules that are not run: their forward is stood in for, call by call.

A hook cannot keep torch from running a forward. So the entry hook decides, and a ``StandIn`` on the module does as was
decided; the hooks at the entry and exit see the skipped call like any other.
"""

from __future__ import annotations

from typing import Any

from gaff.compat.autograd import backward_task
from gaff.engine.crossing import Crossing
from gaff.engine.forwards import StandIn
from gaff.engine.node import Node
from gaff.engine.streams import Act, EditStream

_OTHER_SKIP = "another session skips the module, too, and its skip was made instead"
_OTHER_FORWARD = (
    "another forward was put on the module while the session was open (module.forward = ...), and ran without asking "
    "the one that was there: expected the edit to be opened after that"
)


class SkipChange(Act):
    """Decides at the entry of a module whether this call of it is skipped, and remembers it for a recomputation.

    The decision goes to ``around`` in the frame of the call, so that calls inside one another do not mix. A call on a
    thread at which the session does not look is run.
    """

    def __init__(self, node: Node, stream: EditStream, call: int | None) -> None:
        self._node = node
        self._stream = stream
        self._call = call

    def __call__(self, value: Any, given: Any, crossing: Crossing) -> None:
        if self._call is not None and self._call != crossing.call:
            return
        if crossing.is_again:
            is_skipped = crossing.memo is not None and self in crossing.memo
        else:
            is_skipped = self._stream.wants(crossing.run, crossing.call)
            if is_skipped and crossing.memo is not None:
                crossing.memo[self] = True
        frame = self._node.frame()
        if is_skipped and frame is not None:
            frame.notes[self] = True

    def around(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns: the original's output, unless this call is skipped.

        Stands as the module's ``forward``; ``original`` is what was there before.
        """
        frame = self._node.frame()
        if frame is None or not frame.notes.pop(self, False):
            return original(*args, **kwargs)
        try:
            return self._stream.stand_in(args, kwargs, is_again=backward_task() != -1)
        except Exception as error:
            self._node.clock.fail(error)
            raise

    def leave(self, noted: Any, output: Any, given: Any, crossing: Crossing) -> None:
        """The call returns: see whether ``around`` was asked, where it was to be skipped.

        It was not where another session's skip came first, which is told; raises ExactnessError for other code.
        """
        if isinstance(vars(self._node.module).get("forward"), StandIn):
            self._stream.skip(_OTHER_SKIP)
        else:
            self._stream.refuse(crossing.run, crossing.call, _OTHER_FORWARD)
