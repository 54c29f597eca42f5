"""Every backward pass of the thread that trains, told before it begins: also those of ``torch.autograd.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gaff.compat.autograd import backward_task
from gaff.engine.gradients.derivatives import AHEAD, pass_watch
from gaff.training.watch.shield import Shield


class PassListener:
    """Tells ``begins`` what each outermost backward pass of the thread that trains begins from, while it is on."""

    def __init__(self, begins: Callable[[Any], None], shield: Shield) -> None:
        self._begins = begins
        self._shield = shield
        self._is_on = False

    def switch(self, *, is_on: bool) -> None:
        """Listen, or leave torch as it was."""
        if is_on and not self._is_on:
            pass_watch.__enter__()
            AHEAD.append(self._ahead)
        elif self._is_on and not is_on:
            AHEAD.remove(self._ahead)
            pass_watch.__exit__()
        self._is_on = is_on

    def _ahead(self, outputs: Any) -> None:
        if backward_task() == -1 and self._shield.is_mine():
            self._shield.run(self._begins, outputs)
