"""Following the parts of tensors that a model spreads over processes (tensor parallelism), while a session is open.

A module that hands out this process's part does so by ``DTensor.to_local``. While a session is open something stands
there that notes the placement of what it returns (``compat.placements.PARTS``). Torch's activations of single elements
and its dropout pass it on, but for a sum that is still due; of other modules without parameters nobody knows whether
they turn or mix what they are given.

Code of a model that takes the local part of a parameter, or of a sum, goes on by hand: what becomes of it is not known.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, nullcontext
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gaff.compat import distributed
from gaff.compat.modes import nearest_call
from gaff.compat.placements import BY_HAND, PARTS, Placement, placement_of
from gaff.compat.replacements import Replacements


def _noting(to_local: Any) -> Any:
    """``DTensor.to_local`` that notes where its result lies."""

    @wraps(to_local)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = to_local(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return found
        placement = placement_of(self)
        if placement is None or distributed.is_spread(found):
            return found
        if (placement.is_sum or isinstance(self, nn.Parameter)) and _is_of_a_model(sys._getframe(1)):
            BY_HAND.add(placement.mesh)
            return found
        given = kwargs.get("grad_placements", args[0] if args else None)
        PARTS[found] = placement._replace(gradients=None if given is None else tuple(given))
        return found

    return noted


def _is_of_a_model(frame: FrameType | None) -> bool:
    """Whether code that is not torch's asks, in the call of a module: a model's own."""
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return False
    return nearest_call(frame) is not None


_TORCH = f"{os.path.dirname(torch.__file__)}{os.sep}"
_ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.AlphaDropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Hardshrink,
    nn.Softshrink, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
_HANDED_OUT: list[Replacements] = []  # one for the process, made when DTensor is first met


def follow(model: nn.Module, opening: ExitStack) -> None:
    """Know the placements of parts that ``model`` hands out, until ``opening`` closes."""
    from torch.distributed.tensor import DTensor

    if not _HANDED_OUT:
        _HANDED_OUT.append(Replacements((DTensor, "to_local", _noting)))
    opening.enter_context(_HANDED_OUT[0])
    for module in model.modules():
        if isinstance(module, _ELEMENTWISE):
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
