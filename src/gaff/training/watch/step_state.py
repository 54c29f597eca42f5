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

    OPEN = auto()  # in a step, or before one
    CLOSURE = auto()  # an optimizer makes a step, and runs the model and backward passes in it
    ENDED = auto()  # the leading optimizer has made its step; others may follow
    LATE_CLOSURE = auto()  # one that follows makes a step with a closure


class LoopEvent(IntEnum):
    """What the hooks of a process tell."""

    RUN_BEGINS = auto()  # of a model, in training or not
    BACKWARD_BEGINS = auto()
    STEP_BEGINS = auto()
    CLOSURE_BEGINS = auto()  # a step with a closure
    STEP_ENDS = auto()  # of the leading optimizer
    OTHER_STEP_ENDS = auto()  # of another one
    STEP_SKIPPED = auto()  # by a GradScaler


_WORK = (LoopEvent.RUN_BEGINS, LoopEvent.BACKWARD_BEGINS, LoopEvent.STEP_SKIPPED)
_STEPS = {
    LoopEvent.STEP_BEGINS: State.OPEN,
    LoopEvent.OTHER_STEP_ENDS: State.OPEN,
    LoopEvent.CLOSURE_BEGINS: State.CLOSURE,
    LoopEvent.STEP_ENDS: State.ENDED,
}
_LATE_STEPS = {event: State.LATE_CLOSURE if state is State.CLOSURE else State.ENDED for event, state in _STEPS.items()}

# State and event -> the state that follows, and whether the step before is over by the event. An exception of the
# script's may leave out any ending: every beginning is therefore possible in every state.
TABLE: dict[tuple[State, LoopEvent], tuple[State, bool]] = {
    (state, event): (following, is_over)
    for state, work, is_over, steps in (
        (State.OPEN, State.OPEN, False, _STEPS),
        (State.CLOSURE, State.CLOSURE, False, _STEPS),
        (State.ENDED, State.OPEN, True, _LATE_STEPS),
        (State.LATE_CLOSURE, State.LATE_CLOSURE, False, _LATE_STEPS),
    )
    for event, (following, is_over) in (
        *((event, (work, is_over)) for event in _WORK),
        *((event, (ended, False)) for event, ended in steps.items()),
    )
}


class StepState:
    """Where the training loop is, as an automaton over ``TABLE``; the watcher tells it each event.

    ``began``: when the step in progress did, in seconds of ``time.perf_counter``. ``ended_at``: when the leading
    optimizer made its step, until something else begins and tells that no other optimizer follows; None in between.
    ``is_left_out``: a GradScaler has left a step out, and no optimizer has made one since. ``survived``: the identity
    of the last exception that nobody had caught when the latest step was complete: a console goes on after it.
    """

    def __init__(self) -> None:
        self.state = State.OPEN
        self.began = 0.0
        self.ended_at: float | None = None
        self.is_left_out = False
        self.survived = 0

    @property
    def is_in_closure(self) -> bool:
        """Whether what runs is called by an optimizer, inside its step."""
        return self.state in (State.CLOSURE, State.LATE_CLOSURE)

    def enter(self, event: LoopEvent) -> bool:
        """Go on to the state that ``event`` leads to; whether the step before is over by it, and to be completed."""
        self.state, is_over = TABLE[self.state, event]
        return is_over

    def complete(self) -> float:
        """Note that the step is over and the next one began when it ended; returns its seconds.

        To be called once, where ``ended_at`` is not None.
        """
        self.survived = id(getattr(sys, "last_value", None))
        assert self.ended_at is not None
        seconds, self.began, self.ended_at = self.ended_at - self.began, self.ended_at, None
        self.state = State.CLOSURE if self.is_in_closure else State.OPEN
        return seconds
