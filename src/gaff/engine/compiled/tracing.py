"""What can be asked about a tensor while Dynamo compiles: its own hooks for code that runs at that time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gaff.compat import compiler
from gaff.compat.autograd import transform_level

_ANSWER: list[Any] = ["", False, None, ""]  # what is odd; whether written to; what tells that later; why untellable
TRANSFORMED = "it ran in a transform of torch.func (vmap, grad ...), whose values mean nothing outside"
OPERATED = "it ran in an operator such as torch.cond or with a wrapper such as a DTensor: compiled code tells nothing"
_UNFINISHED: set[int] = set()  # places in traced code at which an edit has begun
_WRITES: list[Any] = []  # Dynamo's record of writes to objects, before a hook that is being set
LOOKS = ""  # the turn of a hook that only looks at a gradient
WHY_UNSEEN: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by module whose values graphs cannot tell: one of these
# By this name a node of a graph that sets a hook holds its turn: the version of the tensor, how long the turn of the
# session is (0: it only looks), and the call, the last one first.
_TURN = "gaff_turn"
_OTHERS = (-1, -1, 0)  # the turn of a hook that is not ours
WRITTEN, LEAF, GIVEN, CALLER = "written", "leaf", "given", "caller"


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
    ``WRITTEN`` to it does not hear of what the graph made of it, of a ``LEAF`` also of the passes of other runs. What
    was ``GIVEN`` otherwise may have hooks in another graph, too, which has made it: they come after all that are here.
    """
    comptime(_examine)
    return str(_answer(0))


def is_untold(module: Any, values: Iterable[Tensor] = ()) -> bool:
    """While Dynamo compiles: whether what passes ``module`` cannot be told, which is noted in ``WHY_UNSEEN``.

    It cannot in the body of an operator (``torch.cond``, a nested region; not a checkpoint's) or a transform, nor where
    one of ``values``, whose gradients are to be told, is a wrapper (DTensor, jagged): ops of ours mean nothing there.
    """
    comptime(_examine_place)
    for value in values:
        _examine_type_of(value, module)
    return bool(_answer(3))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_edit(place: int, *, is_done: bool) -> None:
    """As Dynamo traces: an edit begins at this place, or has become part of the graph: see ``take_unfinished``."""
    (_UNFINISHED.discard if is_done else _UNFINISHED.add)(place)


def take_unfinished() -> bool:
    """Whether there were edits since this was last asked that Dynamo could not make part of a graph."""
    found = bool(_UNFINISHED)
    _UNFINISHED.clear()
    return found


def _examine_type_of(value: Tensor, module: Any) -> None:
    comptime(_examine_type)


def when_written(note: Callable[[], None]) -> None:
    """As Dynamo traces: ``note()`` at the end, if the graph writes into what was asked about last, and was given to it.

    The hook of such a tensor is set after the graph has run, and hears of what the graph has made of it.
    """
    later, _ANSWER[2] = _ANSWER[2], None
    if later is not None:
        later[0].add_cleanup_hook(lambda: note() if later[1]._version > 0 else None)


def hang(value: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """While Dynamo compiles: ``value.register_hook(hook)``, without the loss of what the traced code writes after it.

    To trace a hook, torch 2.13 sets its record of writes to objects aside, and goes on with a copy. What keeps the
    attributes of an object that is known by then would still write into the record that was set aside: compiled code
    would compute with the values of before.
    """
    comptime(_hold_writes)
    value.register_hook(hook)
    comptime(_restore_writes)


def _hold_writes(context: Any) -> None:
    """Run by Dynamo: remember its record of writes."""
    _WRITES[:] = [context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects]


def _restore_writes(context: Any) -> None:
    """Run by Dynamo: put its record of writes back in place of the copy, with what the copy holds."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    record, copy = _WRITES.pop(), output.side_effects
    if copy is not record:
        for name in signature(type(record)).parameters:
            if hasattr(copy, name):  # all but the graph that it is of
                setattr(record, name, getattr(copy, name))
        output.side_effects = record


def take_turn(value: Tensor, turn: str = LOOKS, *, is_first: bool = True) -> None:
    """While Dynamo compiles, after a hook has been set on ``value``: put the hooks that the graph sets on it in order.

    As outside (``gradients.tensor_hooks.take_turn``): edits in the order of their sessions, those of one session as
    backward meets the calls, the last first, and looks last. ``turn`` is longer the later the session was opened: a
    text, of which Dynamo makes a constant. ``is_first``: of the edits of a call.
    """
    comptime(_order)


def _order(context: Any) -> None:
    """Run by Dynamo: each hook is a node that returns the tensor for the next one; the last is that of ``value``.

    All come to be where the last one is, since only there all that they need is known, and what had been given the
    tensor by an earlier one in between is given it as it was: it is one tensor, as long as nobody writes into it.
    """
    found = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().symbolic_locals
    last = node = found["value"].as_proxy().node
    if not compiler.sets_hook(last):
        return  # what came into the graph: its hook is set after the graph has run
    version = last.meta["example_value"]._version
    nodes = [last]
    while compiler.sets_hook(node := node.args[0]) and node.meta.get(_TURN, (version,))[0] == version:
        nodes.insert(0, node)
    hooks = [(one.args[1:], one.meta.get(_TURN, _OTHERS)) for one in nodes]
    session = len(found["turn"].as_python_constant())
    calls = max((-turn[2] for _, turn in hooks[:-1] if turn[1] == session), default=0)
    mine = version, session, -(calls + found["is_first"].as_python_constant()) if session else 0
    hooks[-1] = hooks[-1][0], mine
    wanted = _in_turn(hooks)
    if wanted != hooks:
        for one in nodes[:-1]:
            one.replace_all_uses_with(node)
            last.prepend(one)
    for one, (given, turn) in zip(nodes, wanted, strict=True):
        one.args, one.meta[_TURN] = (node, *given), turn
        node = one


def _in_turn(hooks: list[Any]) -> list[Any]:
    """The hooks of one tensor, the last of which is new, in the order in which they act, each with its turn."""
    *before, new = hooks
    edits = [one for one in before if one[1][1]] if new[1][1] else []
    later = sorted((one for one in edits if one[1] > new[1]), key=itemgetter(1))
    ordered = [*(one for one in before if one not in later), new, *later]
    return sorted(ordered, key=lambda one: one[1][1] == len(LOOKS))


def _examine(context: Any) -> None:
    """Run by Dynamo as it compiles one of these, with its variables."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    node = translator.symbolic_locals["value"].as_proxy().node
    fake = node.meta["example_value"]
    of_input = WRITTEN if fake._version > 0 else LEAF if fake.is_leaf else GIVEN
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
        WHY_UNSEEN[module] = _ANSWER[3]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _answer(number: int) -> Any:
    """A part of what was found: a constant of the graph."""
    return _ANSWER[number]
