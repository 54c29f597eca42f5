"""The states of a training step, and what leads from one to the next: written down as a table.

A step of the run begins where the one before ended, and ends with the leading optimizer's step. Other optimizers may
follow at once and belong to the same step; only when something else begins is it over. What an optimizer runs inside a
closure belongs to its step.
"""

from __future__ import annotations

import sys
from enum import IntEnum, auto


class State(IntEnum):
    """Where a training loop is."""

    IDLE = auto()  # between runs; nothing in progress
    FORWARD = auto()  # a model runs in training mode
    EVALUATING = auto()  # a model runs in another mode, or without gradients
    BACKWARD = auto()  # a backward pass has begun, and nothing else since
    STEPPING = auto()  # an optimizer makes a step
    CLOSURE = auto()  # an optimizer makes a step, and runs the model and backward passes in it
    ENDED = auto()  # the leading optimizer has made its step; others may follow


class LoopEvent(IntEnum):
    """What the hooks of a process tell."""

    RUN_BEGINS = auto()
    EVALUATION_BEGINS = auto()
    RUN_ENDS = auto()
    BACKWARD_BEGINS = auto()
    STEP_BEGINS = auto()
    CLOSURE_BEGINS = auto()  # a step with a closure
    STEP_ENDS = auto()  # of the leading optimizer
    OTHER_STEP_ENDS = auto()  # of another one
    STEP_SKIPPED = auto()  # by a GradScaler


_BEGINNINGS = {
    LoopEvent.RUN_BEGINS: State.FORWARD,
    LoopEvent.EVALUATION_BEGINS: State.EVALUATING,
    LoopEvent.BACKWARD_BEGINS: State.BACKWARD,
    LoopEvent.STEP_BEGINS: State.STEPPING,
    LoopEvent.CLOSURE_BEGINS: State.CLOSURE,
}
_ENDINGS = {
    LoopEvent.RUN_ENDS: State.IDLE,
    LoopEvent.STEP_ENDS: State.ENDED,
    LoopEvent.OTHER_STEP_ENDS: State.IDLE,
    LoopEvent.STEP_SKIPPED: State.IDLE,
}
# What a closure may do inside its optimizer's step, and what still belongs to a step that has ended.
_INSIDE = (LoopEvent.RUN_BEGINS, LoopEvent.EVALUATION_BEGINS, LoopEvent.RUN_ENDS, LoopEvent.BACKWARD_BEGINS)
_FOLLOWING = frozenset(LoopEvent) - {*_INSIDE[:2], LoopEvent.BACKWARD_BEGINS, LoopEvent.STEP_SKIPPED}

# State and event -> the state that follows. An exception of the script's may leave out any ending: every beginning is
# therefore possible in every state.
TABLE: dict[tuple[State, LoopEvent], State] = {
    **{(state, event): following for state in State for event, following in (_BEGINNINGS | _ENDINGS).items()},
    **{(State.CLOSURE, event): State.CLOSURE for event in (*_INSIDE, LoopEvent.STEP_SKIPPED)},
}


class StepState:
    """Where the training loop is, as an automaton over ``TABLE``; the watcher tells it each event.

    ``began``: when the step in progress did, in seconds of ``time.perf_counter``. ``ended_at``: when the leading
    optimizer made its step, until something else begins and tells that no other optimizer follows; None in between.
    ``is_left_out``: a GradScaler has left a step out, and no optimizer has made one since. ``survived``: the identity
    of the last exception that nobody had caught when the latest step was complete: a console goes on after it.
    """

    def __init__(self) -> None:
        self.state = State.IDLE
        self.began = 0.0
        self.ended_at: float | None = None
        self.is_left_out = False
        self.survived = 0

    def enter(self, event: LoopEvent) -> bool:
        """Go on to the state that ``event`` leads to; whether the step before is over by it, and to be completed.

        It is where it has ended and ``event`` is none that may follow within it, as steps of other optimizers may.
        """
        has_ended = self.ended_at is not None
        is_over = has_ended and self.state is not State.CLOSURE and event not in _FOLLOWING
        following = TABLE[self.state, event]
        self.state = State.ENDED if has_ended and following is State.IDLE else following
        return is_over

    def complete(self) -> float:
        """Note that the step is over and the next one began when it ended; returns its seconds.

        To be called once, where ``ended_at`` is not None.
        """
        self.survived = id(getattr(sys, "last_value", None))
        assert self.ended_at is not None
        seconds, self.began, self.ended_at = self.ended_at - self.began, self.ended_at, None
        if self.state is State.ENDED:
            self.state = State.IDLE
        return seconds
