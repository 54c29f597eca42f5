"""Following the parts of tensors that a model spreads over processes (tensor parallelism), while a session is open.

A module that hands out this process's part does so by ``DTensor.to_local``. While a session is open something stands
there that notes the placement of what it returns (``compat.placements.PARTS``). Modules without parameters and children
that return a tensor as large as their input, activations and dropout, pass it on, but for a sum that is still due.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from gaff.compat import distributed
from gaff.compat.placements import PARTS, Placement, placement_of
from gaff.engine.replacements import Replacements


def _noting(to_local: Any) -> Any:
    """``DTensor.to_local`` that notes where its result lies."""

    @wraps(to_local)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = to_local(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return found
        placement = placement_of(self)
        if placement is not None and not distributed.is_spread(found):
            PARTS[found] = placement
        return found

    return noted


_HANDED_OUT: list[Replacements] = []  # one for the process, made when DTensor is first met


def follow(model: nn.Module, opening: ExitStack) -> None:
    """Know the placements of parts that ``model`` hands out, until ``opening`` closes."""
    from torch.distributed.tensor import DTensor

    if not _HANDED_OUT:
        _HANDED_OUT.append(Replacements((DTensor, "to_local", _noting)))
    opening.enter_context(_HANDED_OUT[0])
    for module in model.modules():
        if not module._parameters and not module._modules and not module._buffers:
            opening.callback(module.register_forward_hook(_PassOn(), prepend=True).remove)


class _PassOn:
    """The hook of an activation: what it returns lies where what it was given does.

    A copy or a pickle of the module gets one that does nothing.
    """

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # of the standard library: a pickle must not need gaff

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is None or not isinstance(output, Tensor) or distributed.is_spread(given):
            return
        placement: Placement | None = PARTS.get(given)
        if placement is None or placement.is_sum:  # what it makes of a summand is none of what it makes of the sum
            return
        if output is not given and output.shape == given.shape:
            PARTS[output] = placement
