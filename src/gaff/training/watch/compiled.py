"""Hooks inside compiled models, on while a step is looked at.

torch's global module hooks are of no use there: code that is compiled while they are on is compiled with them, and
compiled once more when they are gone. ``ModelCalls`` therefore leaves them off as soon as one model is compiled, and
asks ``InsideCompiled`` for hooks that compiled code is made for once and that are switched on and off without compiling
again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from gaff.compat import compiler, own_variants
from gaff.training.watch.models import Model, Models, WatchedModule

if TYPE_CHECKING:
    from gaff.engine.compiled.hooks import LookHooks


_MOST_OWN = 64  # variants of one function with hooks inside
_STRICT = ("fail_on_recompile", "eager_on_recompile", "eager_then_compile", "aot_eager_then_compile")


class InsideCompiled:
    """Hooks in the compiled code of watched models; ``listener`` is told of every module in it that returns.

    Made and closed by ``ModelCalls``. The hooks of a model are made when it is first looked at, for all its modules,
    and kept until ``close``. Does nothing in a process without a compiled model, and with a torch before 2.13, whose
    compiled code takes no gradient hooks: there only parameters and their gradients are looked at, which the notes of
    the record say.
    """

    def __init__(self, models: Models, listener: Any) -> None:
        self._models = models
        self._listener = listener
        self._looks: dict[str, LookHooks] = {}  # by name of the model

    def _is_forbidden(self) -> bool:
        """Whether the program forbids that code is compiled anew, or leaves it eager then; noted."""
        stance = compiler.stance()
        is_strict = stance in _STRICT
        note = f"compiled code was not looked at while the program's stance to compile was {stance!r}"
        if is_strict:
            self._models.missed.note(note)
        return is_strict

    def _has_room(self, model: Model) -> bool:
        """Whether code may be compiled once more with hooks in it; noted where it may not.

        It may not where the program has compiled as many variants of its own as torch keeps: others run eagerly there,
        and would be compiled with hooks. Of more compiled modules of one class than that nobody knows whether they
        share their code before they have run.
        """
        root = model.root()
        regions = Counter(type(one) for one in root.modules() if compiler.is_region(one)) if root is not None else {}
        is_unknown = max(regions.values(), default=0) > own_variants.most_variants() and own_variants.most_any() == 0
        if own_variants.is_full():
            note = (
                f"compiled code of which torch keeps no more variants ({own_variants.most_variants()}) is not looked at"
            )
        elif own_variants.most_own() >= _MOST_OWN:
            note = f"compiled code is not looked at any more: {_MOST_OWN} variants of it were compiled for that"
        else:
            return not is_unknown
        self._models.missed.note(note)
        return False

    def is_needed(self) -> bool:
        """Whether a model is compiled: then global hooks must stay off, or its code would be compiled with them."""
        return any(model.is_compiled for model in self._models.all)

    def look(self, model: Model, *, is_on: bool) -> None:
        """Switch the hooks inside one model on or off; they are made when they are first needed.

        They stay on for as long as a step is looked at, and not for a forward alone: a checkpoint runs the same code
        again in the backward pass, and needs the same compiled graph for it.
        """
        if not self.is_needed() or not compiler.traces_gradient_hooks() or (is_on and self._is_forbidden()):
            return
        looks = self._looks.get(model.name)
        if looks is None:
            from gaff.engine.compiled.hooks import LookHooks  # imports what only processes that compile need

            entries = [(one, entry) for one, entry in self._models.entries.items() if entry.model == model.name]
            inside = [(one, _needs_args(entry)) for one, entry in entries]
            looks = self._looks[model.name] = LookHooks(inside, self._listener)
        if is_on and self._has_room(model):
            looks.switch_on()
        elif not is_on:
            looks.switch_off()
            self._note_unseen()

    def _note_unseen(self) -> None:
        """Note the classes of modules that graphs could tell nothing of."""
        from gaff.engine.compiled.tracing import WHY_UNSEEN

        unseen = {(type(module).__name__, why) for module, why in WHY_UNSEEN.items() if module in self._models.entries}
        for name, why in sorted(unseen):
            self._models.missed.note(f"{name} in compiled code is not looked at: {why}")

    def close(self) -> None:
        """Take the hooks of all models away, so that nothing of gaff's stays on a module."""
        for looks in self._looks.values():
            looks.close()
        self._looks.clear()


def _needs_args(entry: WatchedModule) -> bool:
    """Whether compiled code is asked what this module was given, too: of a dropout, for it may be given attention."""
    return entry.is_wanted and entry.kind == "dropout"
