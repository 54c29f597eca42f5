"""Hooks inside compiled models, on while a step is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gaff.compat import compiler
from gaff.training.watch.models import Model, Models, WatchedModule

if TYPE_CHECKING:
    from gaff.engine.compiled.hooks import LookHooks


class InsideCompiled:
    """``listener`` is told of every module of ``models`` that returns, once one of them is compiled."""

    def __init__(self, models: Models, listener: Any) -> None:
        self._models = models
        self._listener = listener
        self._looks: dict[str, LookHooks] = {}  # by name of the model

    def is_needed(self) -> bool:
        """Whether a model is compiled: then hooks on all modules, which its graphs would meet, are not for it."""
        return any(model.is_compiled for model in self._models.all)

    def look(self, model: Model, *, is_on: bool) -> None:
        """On as long as a step is looked at: a checkpoint runs the same code again, and needs the same graph."""
        if not self.is_needed() or not compiler.traces_gradient_hooks():
            return
        looks = self._looks.get(model.name)
        if looks is None:
            from gaff.engine.compiled.hooks import LookHooks  # imports what only processes that compile need

            entries = [(one, entry) for one, entry in self._models.entries.items() if entry.model == model.name]
            inside = [(one, _needs_args(entry)) for one, entry in entries]
            looks = self._looks[model.name] = LookHooks(inside, self._listener)
        if is_on:
            looks.switch_on()
        else:
            looks.switch_off()

    def close(self) -> None:
        """Nothing of ours stays on a module."""
        for looks in self._looks.values():
            looks.close()
        self._looks.clear()


def _needs_args(entry: WatchedModule) -> bool:
    """Whether a window asks compiled code what the module was given."""
    return entry.is_wanted and entry.kind == "dropout"
