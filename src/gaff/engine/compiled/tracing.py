"""What can be asked about a tensor while Dynamo compiles: its own hooks for code that runs at that time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gaff.compat.autograd import transform_level

_ANSWER: list[Any] = ["", False, None, ""]  # what is odd; whether written to; what tells that later; why untellable
TRANSFORMED = "it ran in a transform of torch.func (vmap, grad ...), whose values mean nothing outside"
OPERATED = "it ran in an operator such as torch.cond or with a wrapper such as a DTensor: compiled code tells nothing"
UNSEEN: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by module whose values graphs cannot tell: which of these
WRITTEN, LEAF, CALLER = "written", "leaf", "caller"


def was_written(value: Tensor) -> bool:
    """While Dynamo compiles: whether the traced code has written into ``value`` or a view of it so far.

    Told by the version counter of what stands for the tensor then. ``value`` must have been made by traced code.
    """
    comptime(_examine)
    return bool(_answer(1))


def oddity(value: Tensor) -> str:
    """While Dynamo compiles: what keeps a hook on ``value`` from telling its gradient; empty for an ordinary tensor.

    ``CALLER``: it belongs to the code around the region that is traced, a checkpoint's, and no hook can be set on it
    there. The hook of what came into the graph is set on that tensor after the graph has run: of one that the graph has
    ``WRITTEN`` to it does not hear of what the graph made of it, of a ``LEAF`` also of the passes of other runs.
    """
    comptime(_examine)
    return str(_answer(0))


def is_untold(module: Any, values: Iterable[Tensor] = ()) -> bool:
    """While Dynamo compiles: whether what passes ``module`` cannot be told, which is noted in ``UNSEEN``.

    It cannot in the body of an operator (``torch.cond``, a nested region; not a checkpoint's) or a transform, nor where
    one of ``values``, whose gradients are to be told, is a wrapper (DTensor, jagged): ops of ours mean nothing there.
    """
    comptime(_examine_place)
    for value in values:
        _examine_type_of(value, module)
    return bool(_answer(3))


def _examine_type_of(value: Tensor, module: Any) -> None:
    comptime(_examine_type)


def when_written(note: Callable[[], None]) -> None:
    """As Dynamo traces: ``note()`` at the end, if the graph writes into what was asked about last, and was given to it.

    The hook of such a tensor is set after the graph has run, and hears of what the graph has made of it.
    """
    later, _ANSWER[2] = _ANSWER[2], None
    if later is not None:
        later[0].add_cleanup_hook(lambda: note() if later[1]._version > 0 else None)


def _examine(context: Any) -> None:
    """Run by Dynamo as it compiles one of these, with its variables."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    node = translator.symbolic_locals["value"].as_proxy().node
    fake = node.meta["example_value"]
    of_input = WRITTEN if fake._version > 0 else LEAF if fake.is_leaf else ""
    is_ours, is_input = node.graph is translator.output.current_tracer.graph, node.op == "placeholder"
    odd = (of_input if is_input else "") if is_ours else CALLER
    _ANSWER[:3] = odd, fake._version > 0, (translator.output, fake) if is_ours and is_input else None


def _examine_place(context: Any) -> None:
    """Run by Dynamo: the tracers around the code that is compiled, each the body of an operator."""
    tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.current_tracer
    operators = []
    while tracer.parent is not None:
        operators.append(str(tracer.source_target))
        tracer = tracer.parent
    is_operated = any("checkpoint" not in one for one in operators)
    _ANSWER[3] = TRANSFORMED if transform_level() is not None else OPERATED if is_operated else ""
    _note_unseen(context)


def _examine_type(context: Any) -> None:
    """Run by Dynamo: what stands for ``value`` while it compiles."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    fake = translator.symbolic_locals["value"].as_proxy().node.meta["example_value"]
    _ANSWER[3] = _ANSWER[3] or (OPERATED if is_traceable_wrapper_subclass(fake) else "")
    _note_unseen(context)


def _note_unseen(context: Any) -> None:
    """Note the module that Dynamo's function is about, if nothing of it can be told."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    module = getattr(translator.symbolic_locals["module"], "value", None)
    if _ANSWER[3] and module is not None:
        UNSEEN[module] = _ANSWER[3]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _answer(number: int) -> Any:
    """A part of what was found: a constant of the graph."""
    return _ANSWER[number]
