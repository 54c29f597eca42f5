"""The seam to torch's compiler: what is asked of it, and of Dynamo, by their private functions; what is put into its
graphs is in ``gaff.engine.compiled``.

Imports nothing of it before somebody compiles: importing Dynamo takes longer than all of gaff. What is asked before
that looks into ``sys.modules`` only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any

import torch

from gaff.compat.replacements import Announced

_LATER: set[CodeType] = set()  # code that Dynamo is to leave alone, once it is loaded
_UNCOMPILED: set[CodeType] = set()  # code of hooks that Dynamo was told to leave alone


def has_compiled() -> bool:
    """Whether this process has compiled anything since the compiler was loaded or reset."""
    return frames() > 0


def is_loaded() -> bool:
    """Whether the compiler has been imported: somebody may compile."""
    return "torch._dynamo.eval_frame" in sys.modules


def wrapper_class() -> type | None:
    """The class of what ``torch.compile`` makes of a module; None where the compiler has not been imported."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


def has_asked_to_compile() -> bool:
    """Whether ``torch.compile`` was called in this process, also where nothing has been compiled yet."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return any(backend is not None for backend in getattr(frames, "cached_backends", {}).values())


def traces_gradient_hooks() -> bool:
    """Whether ``Tensor.register_hook`` works inside compiled code: since torch 2.13."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13) and hasattr(_effects(), "_register_effectful_op")


def sets_hook(node: Any) -> bool:
    """Whether a node of a graph that Dynamo makes sets a hook on a tensor; it returns that tensor."""
    return str(node.target) == "register_hook"


def _effects() -> Any:
    """The part of torch that keeps ops with effects in order; imported when somebody compiles."""
    from torch._higher_order_ops import effects  # what compiles is imported by whoever compiles

    return effects


def keep_in_graphs(op: Any) -> None:
    """Keep an op that returns nothing in compiled graphs, in order; or it could be removed as dead code.

    It stays outside of CUDA graphs, which would not call it again: of what is kept in order Inductor does not see the
    tag that says so, and is told by its configuration.
    """
    _effects()._register_effectful_op(op, _effects()._EffectType.ORDERED)
    _pass_by_selective_checkpoints()
    if torch.accelerator.is_available():
        from torch._inductor import config  # what compiles is imported by whoever compiles

        config.custom_should_partition_ops = [*config.custom_should_partition_ops, op.name()]


def _pass_by_selective_checkpoints() -> None:
    """Let a selective checkpoint, whose modes know no such op, not see what a graph calls to write into a tensor.

    A backend that is no compiler, as ``aot_eager``, calls that in the graph; torch gives its modes no rule for it.
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
    from torch.utils import checkpoint

    for operator in (auto_functionalized, auto_functionalized_v2):
        for mode in (one for name, one in vars(checkpoint).items() if name.startswith(("_Caching", "_Cached"))):
            if mode not in operator.python_key_table:
                operator.py_impl(mode)(lambda mode, *args, _call=operator, **kwargs: _call(*args, **kwargs))


def leave_uncompiled(*functions: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling these functions on their own; inside of code that it compiles they are compiled."""
    from torch._dynamo.eval_frame import skip_code

    for code in (*(one.__code__ for one in functions), *_LATER):
        skip_code(code)
    _LATER.clear()


def leave_once_loaded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, which Dynamo does not compile on its own, also where the compiler is loaded only later.

    For one that torch calls in the middle of what somebody has compiled, as for a backward pass; what it calls in turn
    is compiled as it was.
    """
    _LATER.add(function.__code__)
    if is_loaded():
        leave_uncompiled()
    return function


def left_alone(forward: Any) -> Any:
    """``forward`` by another name where Dynamo runs it as it is when it comes upon it first, else itself.

    That is how it treats torch's own layers: ``nn.Sequential(...).compile()`` compiles only what lies in the container.
    Of those that have hooks it compiles what is called ``forward``, which a program without these hooks never sees.
    """
    from torch._dynamo import trace_rules

    names = forward.__globals__ if isinstance(forward, FunctionType) else {}
    is_torchs = str(names.get("__name__")).startswith(("torch.nn.", "torch.ao."))  # and no decorator's
    if not is_torchs or not trace_rules.check(forward.__code__):
        return forward
    code = forward.__code__.replace(co_name=f"{forward.__qualname__} as it is")
    made = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook itself, which Dynamo from now on does not compile, nor what it calls.

    A hook that autograd calls while compiled code calls ``backward`` would else be compiled, as if it belonged to that.
    Hooks that Dynamo compiles into a graph stay as they are. Does nothing where the compiler has not been loaded.
    """
    if is_loaded():
        function = hook.func if isinstance(hook, partial) else hook
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None and code not in _UNCOMPILED:
            from torch._C._dynamo.eval_frame import set_code_exec_strategy
            from torch._dynamo import types

            skip: Any = types.FrameAction.SKIP  # type: ignore[attr-defined]
            set_code_exec_strategy(code, types.FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]
            _UNCOMPILED.add(code)
    return hook


def never_traced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook itself, at which Dynamo from now on ends a graph, to call it as it is, and begins another after it.

    For hooks that torch calls in the middle of what somebody compiles, as a step of an optimizer: traced into it, every
    change of what they know would compile it anew. What they call is not compiled either, once the compiler is loaded.
    """
    function: Any = getattr(hook, "__func__", hook)
    function._torchdynamo_disable = True  # what torch.compiler.disable sets, which would load the compiler
    function._torchdynamo_disable_msg = "gaff looks at a step here"
    return uncompiled(hook)


@contextmanager
def without_donated_buffers() -> Iterator[None]:
    """What is compiled in it gives no buffer of its forward to its backward.

    torch refuses ``retain_graph=True`` and ``create_graph=True`` where it has given one. Not by ``config.patch``, which
    leaves an entry in the context of the thread each time.
    """
    from torch._functorch import config  # loaded by whoever compiles

    before = config.donated_buffer
    config.donated_buffer = False
    try:
        yield
    finally:
        config.donated_buffer = before


def traces_backward() -> bool:
    """Whether backward passes that are called in compiled code become part of its graph (torch 2.13)."""
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "trace_autograd_ops", False))


def on_compiling(told: Callable[[], None]) -> Callable[[], None]:
    """Call ``told()`` whenever Dynamo is about to compile, on the thread that does, until the returned one is called.

    Does nothing where the compiler has not been loaded: somebody may load it later, unheard.
    """
    if not is_loaded():
        return lambda: None
    from torch._dynamo.callback import callback_handler

    callbacks = callback_handler.start_callbacks
    callbacks.append(begins := lambda _: told())
    return lambda: callbacks.remove(begins) if begins in callbacks else None  # _dynamo.reset() empties the list


def has_compiled_autograd() -> bool:
    """Whether backward passes are compiled as a whole at this moment (compiled autograd)."""
    known = sys.modules.get("torch._dynamo.compiled_autograd")
    settings = sys.modules.get("torch._dynamo.config")
    is_on = getattr(known, "compiled_autograd_enabled", False)
    return bool(is_on or getattr(settings, "compiled_autograd", False))


def is_compiled_function(function: Any) -> bool:
    """Whether ``function`` is what ``torch.compile`` has returned for a function or method."""
    return hasattr(function, "_torchdynamo_orig_callable")


class AsBefore(threading.local):
    """Whether this thread runs compiled code in the stance that was there ``before``; None: in that of the process."""

    stance: str | None = None


as_before = AsBefore()


@contextmanager
def _before_calls(tell: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Inside, ``tell`` is called before each call of what is compiled, with its function and its arguments.

    Not where it is kept eager, as by ``torch.compiler.set_stance("force_eager")``. What is called as a part of a graph
    is no call. torch asks a function of its own for the stance there, which is another one meanwhile: on a thread where
    ``as_before`` names a stance it is that one.
    """
    from torch._dynamo import eval_frame

    place: Any = eval_frame
    before = place._callback_from_stance

    @wraps(before)
    def asked(callback: Any) -> Any:
        if as_before.stance not in (None, "force_eager") and place._stance.stance == "force_eager":
            found = callback if as_before.stance != "eager_on_recompile" else False
        else:
            found = before(callback)
        if found is not None:
            known = sys._getframe(1).f_locals
            if "fn" in known and "args" in known:
                tell(known["fn"], (*known["args"], *known["kwargs"].values()))
        return found

    place._callback_from_stance = asked
    try:
        yield
    finally:
        if place._callback_from_stance is asked:
            place._callback_from_stance = before


# Compiled code is about to be called: told with the function, and its arguments.
compiled_calls = Announced(_before_calls)


def stance() -> str:
    """How this process treats compiled code at the moment: ``default``, ``force_eager`` ..."""
    from torch._dynamo import eval_frame

    return str(eval_frame._stance.stance)


def variants() -> dict[Any, int]:
    """How often each frame of Python has been compiled in this process, by Dynamo's own number of it."""
    from torch._dynamo import convert_frame

    return dict(getattr(convert_frame, "FRAME_COMPILE_COUNTER", {}))


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


def is_region(module: Any) -> bool:
    """Whether a module's own calls were compiled, by ``module.compile()``."""
    return getattr(module, "_compiled_call_impl", None) is not None


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
