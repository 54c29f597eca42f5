"""Every backward pass of the thread that trains, told before it begins: also those of ``torch.autograd.grad``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gaff.compat.autograd import backward_task
from gaff.engine.gradients.derivatives import backward_passes
from gaff.training.watch.shield import Shield


class PassListener:
    """Tells ``begins`` what each outermost backward pass of the thread that trains begins from, while it is on."""

    def __init__(self, begins: Callable[[Any], None], shield: Shield) -> None:
        self._begins = begins
        self._shield = shield
        self._listening = ExitStack()
        self._is_on = False

    def switch(self, *, is_on: bool) -> None:
        """Listen, or leave torch as it was; a signal handler of the program's may raise in the middle."""
        if is_on and not self._is_on:
            self._listening.enter_context(backward_passes.at_each(self._ahead))
        self._is_on = is_on
        if not is_on:
            self._listening.close()

    def _ahead(self, outputs: Any) -> None:
        if backward_task() == -1 and self._shield.is_mine():
            self._shield.run(self._begins, outputs)
