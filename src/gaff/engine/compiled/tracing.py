"""What can be asked about a tensor while Dynamo compiles: its own hooks for code that runs at that time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime

_ANSWER = [False]


def was_written(copied: Tensor) -> bool:
    """While Dynamo compiles: whether the traced code has written into ``copied`` or a view of it so far.

    Told by the version counter of what stands for the tensor then. ``copied`` must have been made by traced code.
    """
    comptime(_look)
    return bool(_answer())


def is_of_caller(value: Tensor) -> bool:
    """While Dynamo compiles: whether ``value`` belongs to the code around the region that is traced, a checkpoint's.

    A module in such a region that returns what the region was given returns it as the caller's own. No hook can be set
    on it there: what it needs of the region is not in the caller's graph.
    """
    comptime(_compare)
    return bool(_answer())


def belongs_to_caller(context: Any) -> bool:
    """The same of the variable ``value`` of what Dynamo traces, for code that runs at that time."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    node = translator.symbolic_locals["value"].as_proxy().node
    return node.graph is not translator.output.current_tracer.graph


def _compare(context: Any) -> None:
    """Run by Dynamo as it compiles ``is_of_caller``, with its variables."""
    _ANSWER[0] = belongs_to_caller(context)


def _look(context: Any) -> None:
    """Run by Dynamo as it compiles ``was_written``, with its variables."""
    variables = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().symbolic_locals
    _ANSWER[0] = variables["copied"].as_proxy().node.meta["example_value"]._version > 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _answer() -> bool:
    """What ``_look`` has found: a constant of the graph."""
    return _ANSWER[0]
