"""What a session is asked for: sites, and who hears of them.

The verbs (capture, edit, take, trace ...) make these from addresses that were found in a model; ``Session`` hangs each
on the hooked modules that it needs. They are plain values: nothing is installed by making one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gaff.address.resolve import Found
from gaff.engine.ops.calls import OpCall
from gaff.engine.streams import EditStream, Look, Stream


class Tap(NamedTuple):
    """One site of a model and the stream that hears of it.

    ``is_exact``: the user named this very site, so a key that is not there is an error. Otherwise a pattern found it,
    and the stream is told of a skipped event.
    """

    found: Found
    stream: Stream
    is_exact: bool = True


class EditTap(NamedTuple):
    """One site of a model and the stream that changes what passes there. Several at a site act in their order.

    ``is_skip``: the edit takes the place of the whole module, which is not run. ``is_exact``: as of a ``Tap``.
    """

    found: Found
    stream: EditStream
    is_skip: bool = False
    is_exact: bool = True


class CallTap(NamedTuple):
    """Every call of one module, from both sides, whatever its values are.

    The port of ``found`` does not matter. Recomputations are not told.
    """

    found: Found
    enter: Look
    leave: Look


class OpTap(NamedTuple):
    """Every op in the own forward of one module, from both sides, whatever its values are.

    ``enter`` is told of the op before it runs, with its arguments, ``leave`` also of what it returned; what they
    return is ignored. ``is_again``: in recomputations, too.
    """

    found: Found
    enter: Callable[[OpCall], Any]
    leave: Callable[[OpCall, Any], Any]
    is_again: bool = False


class TensorTap(NamedTuple):
    """A plain tensor, one that the user holds, whose gradient a stream hears of. It must require grad.

    ``name`` is what messages call it. ``is_edit``: the stream puts another gradient in its place.
    """

    name: str
    tensor: Tensor
    stream: Stream
    is_edit: bool = False
