"""What an op is called, where it stands in the user's code, and composite functions that can be looked into."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Operators by the torch function that they call; those not here keep their name: __getitem__ is getitem.
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and",
              "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not", "lshift": "bitwise_left_shift",
              "rshift": "bitwise_right_shift", "pos": "positive"}  # fmt: skip
_BINARY = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift",
           "rshift")  # fmt: skip
# Attributes that are tensors made from the tensor itself; all others are facts about it.
_TENSOR_ATTRIBUTES = ("T", "mT", "H", "mH", "real", "imag", "data")
# Functions without a tensor to see, or which only set a mark.
_NO_OPS = re.compile(
    r"size|dim|ndimension|numel|nelement|stride|storage_offset|storage|untyped_storage|element_size|data_ptr|item|"
    r"tolist|get_device|is_\w+|has_names|_?register_\w*hook|requires_grad_|retain_grad|backward|grad|_backward_\w+|"
    r"apply_|share_memory_|pin_memory|record_stream|allclose|equal|result_type|can_cast|promote_types|"
    r"broadcast_shapes|__(len|bool|float|int|index|complex|contains|repr|format|hash|iter|reversed|dir|deepcopy|"
    r"reduce\w*|setstate|array\w*|cuda_array_interface|dlpack\w*|set|delete)__"
)
_TORCH = os.path.dirname(torch.__file__)
_OWN_FILES = ("overrides.py", "functional.py", "_tensor.py", "_jit_internal.py", "_contextlib.py", "_VF.py", "_ops.py",
              "_device.py")  # fmt: skip


def is_torchs(func: Any) -> bool:
    """Whether an op is torch's own, of which the name tells what it does: no custom op, no function of a library's."""
    module = str(getattr(func, "__module__", None) or "torch")  # a method of Tensor has none
    if module.startswith("torch._ops."):
        return module in ("torch._ops.aten", "torch._ops.prims")
    return module == "torch" or module.startswith("torch.")


def is_in_place(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op writes into its first argument: ``add_``, ``x[0] = y``, ``relu(x, inplace=True)``.

    Of one that is not torch's own the name tells nothing.
    """
    if not is_torchs(func):
        return False
    code = getattr(func, "__code__", None)  # a Python function may be given ``inplace`` by its position
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    at = names.index("inplace") if "inplace" in names else len(args)
    return name.endswith("_") or name == "setitem" or bool(args[at] if at < len(args) else kwargs.get("inplace"))


COMPOSITES = ("multi_head_attention_forward",)
NAMES: dict[Any, str] = {}  # by function: what ``name_of`` has found


def name_of(func: Any) -> str:
    """The name of an op as its user wrote it, ``add`` for ``+``; empty for what is none, such as ``x.shape``.

    Operators have the names of the functions that they call, in-place ones an underscore more. Remembered in
    ``NAMES``, but of functions that were made inside another one: somebody may make them anew again and again.
    """
    found = _name(func)
    if getattr(func, "__closure__", None) is None:
        NAMES[func] = found
    return found


def _name(func: Any) -> str:
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute if attribute in _TENSOR_ATTRIBUTES else ""
    if not name or _NO_OPS.fullmatch(name):
        return ""
    if name.startswith("__") and name.endswith("__"):
        return _operator(name[2:-2])
    public = name.lstrip("_")  # F.threshold hands over as _threshold
    return re.sub(r"\W.*", "", public if hasattr(F, public) or hasattr(torch, public) else name)


def _operator(name: str) -> str:
    """The name of a Python operator, given without its underscores: ``radd`` is ``add``, ``iadd`` is ``add_``."""
    if name[:1] == "r" and name[1:] in _BINARY:
        name = name[1:]
    elif name[:1] == "i" and name[1:] in _BINARY:
        return _OPERATORS.get(name[1:], name[1:]) + "_"
    return _OPERATORS.get(name, name)


_MODE = os.path.join(os.path.dirname(__file__), "mode.py")  # whose frames stand between an op and its caller
_users: dict[int, tuple[CodeType, bool]] = {}  # by identity, since a code object's hash is slow


def find_place(frame: FrameType) -> tuple[FrameType, int]:
    """The frame of the code that called a torch function, and how many frames up it is.

    torch's own functions around an op, such as ``F.relu``, and those of ``mode`` are passed over.
    """
    depth = 0
    while True:
        code = frame.f_code
        known = _users.get(id(code))
        if known is None:
            name = code.co_filename
            is_torch = name.startswith(_TORCH) and name.endswith(_OWN_FILES)
            is_ours = name == _MODE
            known = _users[id(code)] = code, not is_torch and not is_ours
        if known[1] or frame.f_back is None:
            return frame, depth
        frame = frame.f_back
        depth += 1


def is_tensors(value: Any) -> bool:
    """Whether an op returned something to see: a tensor, or several."""
    if isinstance(value, Tensor):
        return True
    return isinstance(value, (tuple, list)) and any(is_tensors(one) for one in value)


def opened(func: Any) -> Callable[..., Any] | None:
    """A copy of a composite function of torch that runs its ops one by one, where they can be seen; bit by bit equal.

    Such a function hands itself over to a mode as a whole; the copy, made anew each time with the globals of that
    moment, does not ask whether there is one. None for functions that are no composites.
    """
    if getattr(func, "__globals__", None) is not vars(F):
        return None
    names = {name: lambda *args: False for name in func.__globals__ if name.startswith("has_torch_function")}
    copy = FunctionType(func.__code__, {**func.__globals__, **names}, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
