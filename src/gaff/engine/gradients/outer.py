"""The part of the gradient at an output that comes from outside of the module: ``grad_output`` of torch's full hook."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import Key
from gaff.address.nested import Arguments, children, dig, map_tensors, put
from gaff.compat import autograd, distributed
from gaff.compat.replacements import Replacements
from gaff.engine.crossing import Crossing
from gaff.engine.gradients import tensor_hooks
from gaff.engine.gradients.ports import GradientArm
from gaff.errors import PlanError

ASIDE = (
    "the caller of the module was given a view of what it returned, at which the uses outside meet; where the module "
    "uses it, too, sums of gradients may be in another order, and what the caller reads there by itself (h.grad, a "
    "hook, autograd.grad) is the part from outside"
)
HANDED_BACK = "the module returned a tensor that it was given: what its caller does with that itself is no part of it"


class OuterGradient(GradientArm):
    """The gradient that the code outside of a module hands back for a tensor that it returned.

    The module itself may go on using that tensor (``return y, y * 2``), or may not have made it, and nothing tells who
    else holds it. So the caller is given a view, as torch's full backward hook gives one: what arrives there comes from
    outside. Nothing is added up in another order unless the module uses the tensor, too. Who asks for a total further
    on is told that of the tensor itself (``tensor_hooks.OUTER``).
    """

    gives_view = True

    def __call__(self, output: Any, given: Arguments, crossing: Crossing) -> Any:
        site, run, call = self._site, crossing.run, crossing.call
        if not self._wants(call):
            return None
        for key, tensor in self._found_in(output, crossing):
            stream = self._stream.at(key) if key else self._stream
            if not autograd.takes_gradient(tensor):
                self._arm_late(tensor, stream, crossing)
                continue
            if refused := _why_no_view(output, (*site.key, *key), tensor, given, self._node.module):
                stream.refuse(run, call, refused)
                continue
            place = *tensor_hooks.place_of(site, self._node.module, call), site.key, key
            alias = tensor_hooks.view_for(tensor_hooks.OUTER, tensor, place, self)
            try:
                output = _with_alias(output, (*site.key, *key), alias)
            except PlanError as error:
                stream.refuse(run, call, f"{error}; ask for :grad_output, the total gradient")
                continue
            stream.remark(ASIDE)
            if any(tensor is one for one in given.args):
                stream.remark(HANDED_BACK)
            self._gradients.arm(alias, stream, run, call, is_part=True)
        return output


def _with_alias(output: Any, key: Key, alias: Tensor) -> Any:
    """``output`` with ``alias`` at ``key`` alone: a tensor that is returned at two places has uses of its own at each.

    Raises PlanError where a container cannot be made anew, or is an object into which gaff does not look.
    """
    output = put(output, key, alias)
    if dig(output, key) is not alias:
        raise PlanError(f"it is an attribute of a {type(output).__name__}, which cannot be made anew for the caller")
    return output


_UNITS: list[Replacements] = []  # one for the process, made when FSDP2 is first met


def spare_units(model: nn.Module, opening: ExitStack) -> None:
    """Let FSDP2 hear of backward at what a unit of ``model`` returned, not at a view of it, until ``opening`` closes.

    It gathers the unit's parameters then. Torch loses a hook on a view that the caller writes into.
    """
    state = distributed.class_of_state(model)
    if state is not None and not _UNITS:
        _UNITS.append(Replacements((state, "_register_pre_backward_hook", _at_originals)))
    if state is not None:
        opening.enter_context(_UNITS[0])


def _at_originals(register: Any) -> Any:
    """FSDP2's method that sets hooks on what a unit returns, set on the tensors behind the views of ours among it."""

    @wraps(register)
    def registered(state: Any, output: Any) -> Any:
        originals = map_tensors(output, tensor_hooks.original, lambda value: value)
        found = register(state, originals)
        return output if found is originals else found

    return registered


def _why_no_view(output: Any, key: Key, tensor: Tensor, given: Arguments, module: nn.Module) -> str:
    """Why the caller cannot be given a view of ``tensor`` at ``key`` of ``output``; empty where it can."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return "torch makes no view of a sparse or nested tensor: ask for :grad_output, the total gradient"
    on_the_way = [dig(output, key[:depth]) for depth in range(len(key))]
    written = {id(one) for one in on_the_way if isinstance(one, (list, MutableMapping))}
    if written and any(id(one) in written for one in _containers_of(given, module)):
        return (
            "the module keeps, or was given, the list or dict that it returns: its caller would get another; ask for "
            ":grad_output, the total gradient"
        )
    return ""


def _containers_of(given: Arguments, module: nn.Module) -> Iterator[Any]:
    """The containers among the arguments of a call and the attributes of its module, at any depth up to 6."""
    own = ("_parameters", "_buffers", "_modules")
    kept = [value for one in module.modules() for name, value in vars(one).items() if name not in own]
    waiting = [(value, 6) for value in (*given.args, *given.kwargs.values(), *kept)]
    while waiting:
        value, depth = waiting.pop()
        inside = children(value) if depth else None
        if inside is not None:
            yield value
            waiting += [(child, depth - 1) for _, child in inside]
