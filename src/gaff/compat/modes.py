"""Function and dispatch modes, autocast, and how torch's own call of a module looks on the Python stack."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from gaff.compat import distributed

T = TypeVar("T")


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Operations inside keep the precision of what they are given on ``device``; does nothing where autocast is off."""
    is_on = torch.is_autocast_enabled(device.type) if torch.amp.is_autocast_available(device.type) else False
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def autocasts() -> list[tuple[str, torch.dtype]]:
    """The kinds of device for which autocast is on, each with the type that it casts to."""
    found = [("cpu", torch.get_autocast_dtype("cpu"))] if torch.is_autocast_enabled("cpu") else []
    if torch.cuda.is_initialized() and torch.is_autocast_enabled("cuda"):
        found.append(("cuda", torch.get_autocast_dtype("cuda")))
    return found


# How many dispatch modes are at work on this thread.
dispatch_depth: Callable[[], int] = torch._C._len_torch_dispatch_stack

# The dispatch modes at work on this thread, the innermost last.
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack


_RECORDING = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


def is_recording() -> bool:
    """Whether what runs on this thread is made into a graph, by ``make_fx`` or autograd ahead of time (functorch)."""
    return dispatch_depth() > 0 and any(torch._C._get_dispatch_mode(one) is not None for one in _RECORDING)


def is_traced() -> bool:
    """Whether what runs on this thread is made into a program: by ``torch.jit.trace``, ``torch.export``, ``make_fx`` or
    ``torch.fx.symbolic_trace``, which calls with proxies."""
    is_exported = bool(torch._C._get_tracing_state()) or torch.compiler.is_exporting()
    return is_exported or is_recording() or is_fx_symbolic_tracing()


def has_function_mode() -> bool:
    """Whether a function mode is at work on this thread that is not one of gaff's own (``is_gaffs``)."""
    depth = torch._C._len_torch_function_stack()
    return depth > 0 and not all(getattr(torch._C._get_function_stack_at(at), "is_gaffs", False) for at in range(depth))


def outside_modes() -> AbstractContextManager[Any]:
    """Run what is inside unseen by modes: dispatch modes, such as that of a selective checkpoint, which counts
    operations, and function modes, such as that of ``torch.set_default_device``."""
    if torch.compiler.is_compiling() or not has_function_mode():
        return _disable_current_modes() if dispatch_depth() else nullcontext()
    outside = ExitStack()
    if dispatch_depth():
        outside.enter_context(_disable_current_modes())
    outside.enter_context(_outside_functions())
    return outside


@contextmanager
def _outside_functions() -> Iterator[None]:
    """Take all function modes off this thread's stack, and put them back in their order."""
    taken = [pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(taken):
            push_mode(mode)


def unseen(function: Callable[..., T], *args: Any) -> T:
    """What ``function`` of gaff's own returns, unseen by the program's function modes."""
    if not torch._C._len_torch_function_stack() or not has_function_mode():
        return function(*args)
    with _outside_functions():
        return function(*args)


def is_simple() -> bool:
    """Whether an operation is no more than that: no mode is at work, and no tensor may carry a tangent."""
    return not dispatch_depth() and not has_function_mode() and forward_ad._current_level < 0


def decomposed(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation as the smaller ones that it is made of, for the mode that is on; NotImplemented if it is not."""
    if isinstance(operation, HigherOrderOperator):
        return plainly(operation, args, kwargs)
    return operation.decompose(*args, **kwargs)


def plainly(operation: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that calls functions (``torch.cond``, ``while_loop``) as the Python code that it stands for.

    What autograd and the dispatch modes that are on see is what the functions do. NotImplemented for an operator
    that torch cannot run in this way.
    """
    plain = operation.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if not callable(plain):
        return NotImplemented
    around = dispatch_modes()
    own = [_within(around, value) if callable(value) and not isinstance(value, Tensor) else value for value in args]
    with outside_modes():
        return plain(*own, **kwargs)


def _within(around: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with these dispatch modes on, the innermost last."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as modes:
            for mode in around:
                modes.enter_context(mode)
            return function(*args, **kwargs)

    return run if around else function


def beside(tensor: Tensor, constant: Tensor) -> Tensor:
    """``constant`` as an operation with ``tensor`` takes it: fake, or in all processes where the tensor is spread."""
    if distributed.is_spread(tensor):
        return distributed.whole_beside(constant, tensor)
    return tensor.fake_mode.from_tensor(constant) if isinstance(tensor, FakeTensor) else constant


# The stack of function modes of this thread: the lowest pushed first.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack


def remove_mode(mode: Any) -> None:
    """Take ``mode`` from this thread's stack of function modes, wherever it is; what lies above it stays."""
    above = []
    while torch._C._len_torch_function_stack():
        top = pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push_mode(other)


def has_mode(mode: Any) -> bool:
    """Whether ``mode`` is somewhere on this thread's stack of function modes."""
    return any(torch._C._get_function_stack_at(at) is mode for at in range(torch._C._len_torch_function_stack()))


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a Python stack from ``frame`` outwards, itself first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


_ASKING = frozenset(("locals", "vars", "eval", "exec", "dir"))


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables, which leaves nothing behind; empty for a function that asks for its own.

    Before Python 3.13 a function's frame has one dict, which is brought up to date when it is asked for, and keeps
    every object in it until the function returns. Such a function has it from ``locals()``, and would find new keys in
    it; of any other it is emptied again, unless somebody else holds it.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if _asks_for_its_own(frame.f_code):
        return {}
    found = frame.f_locals
    copied = dict(found)
    if sys.getrefcount(found) <= _ALONE and sys.gettrace() is None:
        found.clear()
    return copied


@lru_cache(maxsize=1000)
def _asks_for_its_own(code: CodeType) -> bool:
    """Whether a function may ask for its own variables, by one of Python's functions that read them."""
    if _ASKING.isdisjoint(code.co_names):
        return False
    return any(one.opname == "LOAD_GLOBAL" and one.argval in _ASKING for one in dis.get_instructions(code))


def _references() -> int:
    """How often a dict that its frame alone has is referred to, where ``variables_of`` asks."""
    found = sys._getframe().f_locals
    return sys.getrefcount(found)


_ALONE = _references()


class CallFrames(NamedTuple):
    """How a module's call looks on the Python stack.

    ``codes``: of torch's functions below a forward. ``position``: the instruction of the one with hooks at which it
    runs the forward, and not a hook; None where that cannot be told.
    """

    codes: frozenset[CodeType]
    position: int | None


@cache
def call_frames() -> CallFrames:
    """How a module's call looks on the Python stack, read from the code of torch itself, once a process.

    Calling a module to see it would call other people's global hooks.
    """
    outer = torch.nn.Module._call_impl.__code__
    inner = next((one for one in outer.co_consts if isinstance(one, CodeType) and one.co_name == "inner"), outer)
    is_next = False
    found = []
    for instruction in dis.get_instructions(inner):
        is_next = is_next or instruction.argval == "forward_call"
        if is_next and instruction.opname.startswith("CALL"):
            found.append(instruction.offset)
            is_next = False
    return CallFrames(frozenset((outer, inner)), found[0] if len(found) == 1 and inner is not outer else None)


def nearest_call(frame: FrameType | None) -> FrameType | None:
    """The nearest call that torch makes of a module, at ``frame`` or around it; None if there is none."""
    codes = call_frames().codes
    while frame is not None and frame.f_code not in codes:  # asked at every op: no generator
        frame = frame.f_back
    return frame
