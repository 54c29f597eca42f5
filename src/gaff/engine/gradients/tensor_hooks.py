"""Hooks on tensors: the one way in which this engine hears of a gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gaff.compat import autograd, compiler
from gaff.compat.placements import ANY_PARTS, PARTS

EDGE = (
    "it comes out of compiled code that returns other tensors, too, and what its uses inside bring is not heard here: "
    "ask for it at the module that makes it, or open the session under torch.compiler.set_stance('force_eager')"
)

# The tensor behind a view that a module's caller was given in its place (``outer``): totals are those of the tensor.
ORIGINALS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


_TOLD = threading.local()  # ``is_edge``, while a compiled graph tells a gradient: whether it is one at its edge


@contextmanager
def told_by_graph(*, is_edge: bool) -> Iterator[None]:
    """While a compiled graph tells a gradient, to hooks on what stands for the tensor: whether that is at its edge."""
    before = getattr(_TOLD, "is_edge", None)
    _TOLD.is_edge = is_edge
    try:
        yield
    finally:
        _TOLD.is_edge = before


def is_at_edge() -> bool:
    """Whether the gradient that a hook is called with may be a part, as at an output of compiled code."""
    told: bool | None = getattr(_TOLD, "is_edge", None)
    return autograd.is_edge_of_compiled() if told is None else told


def on_gradient(tensor: Tensor, callback: Callable[[Any], Any]) -> Any:
    """Call ``callback`` with every gradient that arrives at ``tensor`` while its graph lives; the handle removes it.

    ``tensor`` must require grad. What the callback returns takes the gradient's place, None leaves it. It may be called
    with None: a custom Function hands that to what it does not need.
    """
    if tensor._is_view():
        _ = tensor.grad_fn  # torch 2.13 can crash when a hook is set on a stale view
    return tensor.register_hook(compiler.uncompiled(callback))


def alias_of(tensor: Tensor) -> Tensor:
    """A view of all of ``tensor``, in its autograd graph whatever grad mode says, with its attributes and placement."""
    with torch.enable_grad():  # a module without grad mode may return what it was given
        alias = tensor.view_as(tensor)
    alias.__dict__.update(tensor.__dict__)
    if ANY_PARTS and tensor in PARTS:
        PARTS[alias] = PARTS[tensor]
    return alias


def original(tensor: Tensor) -> Tensor:
    """The tensor that a module returned, where its caller was given a view of it; else ``tensor`` itself."""
    while ORIGINALS and tensor in ORIGINALS:
        tensor = ORIGINALS[tensor]
    return tensor


def keep_gradient(tensor: Tensor, keep: Callable[[Tensor], None]) -> Any:
    """Call ``keep`` with every gradient that arrives at ``tensor`` while its graph lives; returns the handle.

    ``tensor`` must require grad. The gradient itself is handed over, not a copy, and goes on unchanged.
    """

    def arrived(gradient: Tensor | None) -> None:
        if gradient is not None:  # a custom Function hands None to what it does not need
            keep(gradient)

    return on_gradient(tensor, arrived)
