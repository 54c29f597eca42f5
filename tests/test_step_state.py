"""Where a training loop is, told by what happens in it: the table of states, and when a step is over."""

import pytest

from gaff.training.watch.step_state import TABLE, LoopEvent, State, StepState


def loop(*events):
    """The state after some events, with the number of steps that were over by them."""
    at, over = StepState(), 0
    for event in events:
        if event is LoopEvent.STEP_ENDS:
            at.ended_at = 1.0
        if at.enter(event):
            at.complete()
            over += 1
    return at.state, over


def test_every_event_leads_somewhere_from_every_state():
    assert set(TABLE) == {(state, event) for state in State for event in LoopEvent}


def test_a_step_that_has_ended_stays_so_until_it_is_over():
    ended = (State.ENDED, State.LATE_CLOSURE)
    for (state, _), (following, is_over) in TABLE.items():
        assert state not in ended or following in ended or is_over
        assert state in ended or not is_over


E = LoopEvent
STEP = (E.RUN_BEGINS, E.BACKWARD_BEGINS, E.STEP_BEGINS, E.STEP_ENDS)


@pytest.mark.parametrize(
    ("events", "state", "over"),
    [
        ((), State.OPEN, 0),
        ((E.RUN_BEGINS,), State.OPEN, 0),
        (STEP, State.ENDED, 0),
        ((*STEP, E.RUN_BEGINS), State.OPEN, 1),
        ((*STEP, E.STEP_BEGINS, E.OTHER_STEP_ENDS), State.ENDED, 0),  # of the same step
        ((*STEP, E.STEP_BEGINS, E.OTHER_STEP_ENDS, E.BACKWARD_BEGINS), State.OPEN, 1),
        ((E.STEP_BEGINS, E.OTHER_STEP_ENDS), State.OPEN, 0),
        ((*STEP, E.STEP_SKIPPED), State.OPEN, 1),
        ((*STEP, E.STEP_BEGINS, E.RUN_BEGINS), State.OPEN, 1),  # an exception ended the other optimizer's
        ((*STEP, *STEP), State.ENDED, 1),
    ],
)
def test_a_step_is_over_when_something_else_begins(events, state, over):
    assert loop(*events) == (state, over)


def test_what_a_closure_runs_belongs_to_its_step():
    inside = (E.RUN_BEGINS, E.BACKWARD_BEGINS)
    assert loop(E.CLOSURE_BEGINS, *inside, *inside) == (State.CLOSURE, 0)
    assert loop(E.CLOSURE_BEGINS, *inside, E.STEP_ENDS) == (State.ENDED, 0)
    assert loop(*STEP, E.CLOSURE_BEGINS, *inside) == (State.LATE_CLOSURE, 0)
    assert loop(*STEP, E.CLOSURE_BEGINS, *inside, E.OTHER_STEP_ENDS) == (State.ENDED, 0)
    assert loop(*STEP, E.CLOSURE_BEGINS, *inside, E.OTHER_STEP_ENDS, E.RUN_BEGINS) == (State.OPEN, 1)
