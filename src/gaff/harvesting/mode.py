"""A model in training or in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """With all modules in training or in evaluation mode; afterwards each is in the mode that it was in.

    A module that acts in ``train`` itself, as layers that merge low-rank factors into their weights do, is asked by it.
    """
    modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    try:
        model.train(training)
        yield
    finally:
        for module, mode in modes:  # a module before those inside, which its own ``train`` may have set
            if module.training != mode and getattr(module.train, "__func__", None) is not nn.Module.train:
                module.train(mode)
            module.training = mode
