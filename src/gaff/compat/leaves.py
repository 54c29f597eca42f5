"""Leaves of autograd, which a backward pass of gaff's own must leave as they are: what they hold, and ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gaff.compat import elements
from gaff.compat.autograd import leaves_of
from gaff.errors import PlanError


def need_no_updates(named: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise PlanError where a parameter is updated as soon as backward has brought its gradient: by an optimizer in a
    post-accumulate hook, or by torch's own (``_apply_optimizer_in_backward``). ``what`` would have it step."""
    for name, one in named:
        if getattr(one, "_post_accumulate_grad_hooks", None) or hasattr(one, "_in_backward_optimizers"):
            raise PlanError(
                f"{name}: has post-accumulate hooks, or an optimizer in backward, which may change weights and its own "
                f"state: {what}, or remove them first"
            )


def hooked(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those with a hook on their gradient, which may update them as backward brings it."""
    return [one for one in parameters if one.is_leaf and one._backward_hooks and not is_lazy(one)]


@contextmanager
def kept_weights(parameters: Iterable[Tensor]) -> Iterator[None]:
    """What these parameters hold is at the end what it was; each is copied."""
    before = [(one, one.detach().clone()) for one in parameters]
    try:
        yield
    finally:
        for one, copy in before:
            write_back(one, copy)


@contextmanager
def kept_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """``.grad`` of these leaves is at the end what it was, the same objects; inside it is None."""
    before = [(one, one.grad) for one in leaves]
    try:
        for one, _ in before:
            one.grad = None
        yield
    finally:
        for one, gradient in before:
            put_gradient(one, gradient)


def put_gradient(leaf: Tensor, gradient: Tensor | None) -> None:
    """Let ``leaf`` have a gradient that it had before: torch refuses one of another dtype, as where its ``.data`` was
    cast since, so it is given while the leaf holds nothing of its own."""
    if gradient is None or gradient.dtype == leaf.dtype:
        leaf.grad = gradient
        return
    held = leaf.data
    leaf.data = gradient.new_empty(()).expand(leaf.shape)
    try:
        leaf.grad = gradient
    finally:
        leaf.data = held


def others(roots: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """The leaves behind ``roots`` that are none of those ``known``: a criterion's, a prompt."""
    ours = {id(one) for one in known}
    found = {id(leaf): leaf for root in roots for leaf in leaves_of(root)}
    return [leaf for which, leaf in found.items() if which not in ours]


def write_back(tensor: Tensor, saved: Tensor) -> None:
    """Let ``tensor`` hold again what it held when it was ``saved``; not written to where it does.

    Its version counter stays: a backward pass of the program that waits may have saved it as it was.
    """
    kept = nullcontext() if tensor.is_inference() else torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor)
    with torch.no_grad(), kept:
        if tensor.dtype != saved.dtype:  # its ``.data`` was cast meanwhile
            tensor.data = saved.clone()
        elif not tensor.is_nested and tensor.shape != saved.shape:
            tensor.resize_(saved.shape)
        if not (tensor.is_meta or elements.has_bits(tensor, saved)):
            tensor.copy_(saved)
