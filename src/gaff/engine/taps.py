"""What a session is asked for: sites and who hears of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gaff.address.resolve import Found
from gaff.engine.ops.calls import OpCall
from gaff.engine.streams import EditStream, EntryTap, ExitTap, Stream


class Tap(NamedTuple):
    """One site of a model and the stream that hears of it. ``is_exact``: a miss is an error, not a skip."""

    found: Found
    stream: Stream
    is_exact: bool = True


class EditTap(NamedTuple):
    """One site of a model and the stream that changes what passes there. Several at a site act in their order."""

    found: Found
    stream: EditStream
    is_skip: bool = False


class CallTap(NamedTuple):
    """Every call of one module, from both sides, whatever its values are."""

    found: Found
    enter: EntryTap
    leave: ExitTap


class OpTap(NamedTuple):
    """Every op in the own forward of one module, from both sides, whatever its values are.

    ``is_again``: in recomputations, too.
    """

    found: Found
    enter: Callable[[OpCall], Any]
    leave: Callable[[OpCall, Any], Any]
    is_again: bool = False


class TensorTap(NamedTuple):
    """A plain tensor whose gradient a stream hears of."""

    name: str
    tensor: Tensor
    stream: Stream
    is_edit: bool = False
