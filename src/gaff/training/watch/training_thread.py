"""Which thread trains: only what happens there is watched."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from threading import get_ident

from gaff.engine.process.calls import OWN_THREADS


class _Mark:
    """Lies in the local memory of a thread, and ends with it: the numbers of threads are used again."""

    __slots__ = ("__weakref__",)


class TrainingThread:
    """The thread that trains, as far as is known: the first that is seen, until another one is seen to train.

    A thread may call a model, load data or save before another one trains. A thread that has run a model in training
    mode, a backward pass or an optimizer's step keeps its place for as long as it lives: of two that train side by side
    only the first is watched, and what belongs to the other is never touched, which may free it at any moment.
    """

    def __init__(self) -> None:
        self._here = threading.local()  # holds the mark of the thread that trains, and ends with it
        self._number = 0  # of the one that trains; 0 before any is known
        self._mark: Callable[[], _Mark | None] = lambda: None  # what is left of its mark
        self.has_trained = False  # run a model in training mode, a backward pass, or an optimizer's step
        self._steps_elsewhere = 0

    def is_this(self) -> bool:
        """Whether this is the thread that trains; the first one that asks is, for now."""
        here = get_ident()
        if here in OWN_THREADS:
            return False
        if not self._number:
            self._put_mark()
        return here == self._number and self._mark() is not None  # by hand: asked before whatever is done

    def may_be_this(self) -> bool:
        """As ``is_this``, for what does not train, such as saving: it makes no thread the one that trains."""
        return get_ident() not in OWN_THREADS and (not self._number or self._is_marked())

    def moves_here(self, *, is_step: bool = False) -> bool:
        """Whether this thread, which is not the one that trains, becomes it: it is about to run a model in training
        mode, or an optimizer is about to step on it (``is_step``)."""
        if not self._number or self._is_marked() or get_ident() in OWN_THREADS:
            return False
        if self._mark() is None or not self.has_trained:
            self._put_mark()
            return True
        self._steps_elsewhere += is_step
        return False

    def _put_mark(self) -> None:
        self._here.mark = mark = _Mark()
        self._number, self._mark, self.has_trained = get_ident(), weakref.ref(mark), False

    def _is_marked(self) -> bool:
        return get_ident() == self._number and self._mark() is not None

    def notes(self) -> list[str]:
        """What the end of the record says of steps on other threads, if there were any."""
        count = self._steps_elsewhere
        what = "steps that optimizers made on other threads than the one that trains are not counted"
        return [f"{what}: {count}"] if count else []
