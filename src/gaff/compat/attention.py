"""The one seam to torch's attention: what its functions do with their arguments, where no public function tells.

Nothing here is compiled, and nothing of the compiler is imported before ``flex_attention`` has been called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gaff.compat.modes import frames_from

# The softmax over the last dimension that torch takes for attention: zeros where all is -inf, and not NaN.
safe_softmax: Callable[[Tensor, int], Tensor] = torch._safe_softmax


def cast_to(tensor: Tensor) -> torch.dtype:
    """The dtype in which torch's attention gets ``tensor``: that of autocast where it is on, else its own.

    As torch's autocast does it: masks of truth values and float64 stay as they are.
    """
    kind = tensor.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    is_cast = is_on and tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else tensor.dtype


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's own plain attention computes with inputs of ``dtype``."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() else dtype


def is_plain(tensor: Any) -> bool:
    """Whether attention over ``tensor`` is what the plain formula says: it is no nested tensor, and of no odd class."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    kind = type(tensor)
    is_own = kind is torch.nn.Parameter or _function(kind) is _function(Tensor)
    return is_own and (kind is Tensor or not is_traceable_wrapper_subclass(tensor))


def _function(kind: type[Tensor]) -> Any:
    """What handles torch's functions for tensors of a class, without the class that it is bound to."""
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


def opened_mask(mask: Any, device: torch.device) -> Any:
    """The truth values of a ``torch.nn.attention.bias.CausalBias``, which holds none; every other mask as it is."""
    materialize = getattr(mask, "_materialize", None)
    return mask if materialize is None else materialize(device)


def heads_in_rows(query: Tensor) -> int:
    """How many heads, which share keys, lie in the rows of one of the ``query``; 1 where each has rows of its own.

    So transformers calls attention for a single token; how many rows there were is in the frame of its function.
    """
    frames = (frame for frame in frames_from(sys._getframe(1)) if frame.f_code.co_name == "sdpa_attention_forward")
    rows = next((frame.f_locals.get("q_length") for frame in frames), None)
    return query.shape[-2] if rows == 1 and query.dim() == 4 else 1


def flex_scores(scores: Tensor, at: Sequence[Tensor], mods: tuple[Any, Any], buffers: tuple[Any, Any]) -> Tensor:
    """Scores of ``flex_attention`` with its functions at work: [batch, heads, queries, keys] as ``scores`` are.

    ``at`` are the indices of these four, ``mods`` its ``score_mod`` and ``mask_mod``, ``buffers`` what torch found
    both to use. What the latter masks is -inf.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    score_mod, mask_mod = (
        _over_all(mod, first, len(more)) for mod, first, more in zip(mods, (1, 0), buffers, strict=True)
    )
    with TransformGetItemToIndex():  # lets the functions look something up by an index
        seen = mask_mod(*at, *buffers[1])
        return torch.where(seen, score_mod(scores, *at, *buffers[0]), -torch.inf)


def _over_all(function: Callable[..., Tensor], first: int, more: int) -> Callable[..., Tensor]:
    """``function`` of single numbers, for all of them; ``first`` arguments before the indices, ``more`` after them."""
    for dimension in (3, 2, 1, 0):
        at = tuple(0 if number == dimension else None for number in range(4))
        function = torch.vmap(function, in_dims=(0,) * first + at + (None,) * more)
    return function
