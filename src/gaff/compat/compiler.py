"""The one seam to torch's compiler: each private function of it is named here once.

Imports nothing of it before somebody compiles: importing Dynamo takes longer than all of gaff. What is asked before
that looks into ``sys.modules`` only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def has_compiled() -> bool:
    """Whether this process has compiled anything since the compiler was loaded or reset."""
    return frames() > 0


def is_loaded() -> bool:
    """Whether the compiler has been imported: somebody may compile."""
    return "torch._dynamo.eval_frame" in sys.modules


def has_asked_to_compile() -> bool:
    """Whether ``torch.compile`` was called in this process, also where nothing has been compiled yet."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return any(backend is not None for backend in getattr(frames, "cached_backends", {}).values())


def traces_gradient_hooks() -> bool:
    """Whether ``Tensor.register_hook`` works inside compiled code: since torch 2.13."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13) and hasattr(_effects(), "_register_effectful_op")


def _effects() -> Any:
    """The part of torch that keeps ops with effects in order; imported when somebody compiles."""
    from torch._higher_order_ops import effects  # what compiles is imported by whoever compiles

    return effects


def keep_in_graphs(op: Any) -> None:
    """Keep an op that returns nothing in compiled graphs, in order; or it could be removed as dead code."""
    _effects()._register_effectful_op(op, _effects()._EffectType.ORDERED)


def leave_uncompiled(*functions: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling these functions on their own; inside of code that it compiles they are compiled."""
    from torch._dynamo.eval_frame import skip_code

    for function in functions:
        skip_code(function.__code__)


def stance() -> str:
    """How this process treats compiled code at the moment: ``default``, ``force_eager`` ..."""
    from torch._dynamo import eval_frame

    return str(eval_frame._stance.stance)


def most_variants() -> int:
    """How many compiled variants of one function torch keeps; beyond them it runs the function eagerly."""
    from torch._dynamo import config

    return int(getattr(config, "recompile_limit", 8))


def was_reset() -> bool:
    """Whether ``torch._dynamo.reset()`` was called since this was last asked; true at the first question.

    Told by a mark in a set of Dynamo's own, of what it has warned of: a reset clears that.
    """
    from torch._dynamo import utils

    told: Any = getattr(utils, "warn_once_cache", None)
    if not isinstance(told, set) or "gaff" in told:
        return False
    told.add("gaff")
    return True


def frames() -> int:
    """How many frames have been compiled since the compiler was loaded or reset."""
    loaded = sys.modules.get("torch._dynamo.convert_frame")
    return int(getattr(loaded, "FRAME_COUNTER", 0))


def compile_counts() -> tuple[int, int]:
    """How many compiled graphs Dynamo has made in this process, and how many graph breaks, by its own counters."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def mark_reduced(tensor: Any) -> None:
    """Mark a tensor as what is wanted of a whole one that was never there: told by a graph, or computed alone."""
    tensor.is_reduced_by_gaff = True


def is_reduced(tensor: Any) -> bool:
    """Whether a tensor is so marked: it must not be reduced again, and its shape is not that of what passed."""
    return hasattr(tensor, "is_reduced_by_gaff")
