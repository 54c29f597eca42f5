"""Hooks on tensors: the one way in which this engine hears of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# The tensor behind a view that a module's caller was given in its place (``outer``): totals are those of the tensor.
ORIGINALS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def on_gradient(tensor: Tensor, callback: Callable[[Any], Any]) -> Any:
    """Call ``callback`` with every gradient that arrives at ``tensor`` while its graph lives; the handle removes it.

    ``tensor`` must require grad. What the callback returns takes the gradient's place, None leaves it. It may be called
    with None: a custom Function hands that to what it does not need.
    """
    if tensor._is_view():
        _ = tensor.grad_fn  # torch 2.13 can crash when a hook is set on a stale view
    return tensor.register_hook(callback)


def alias_of(tensor: Tensor) -> Tensor:
    """A view of all of ``tensor``, in its autograd graph whatever grad mode says, with its attributes."""
    with torch.enable_grad():  # a module without grad mode may return what it was given
        alias = tensor.view_as(tensor)
    alias.__dict__.update(tensor.__dict__)
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
