"""The suite is no mirror: other tools fall into its traps, and gaff into none."""

import json
from pathlib import Path

import pytest

from traps.against.run import TOOLS, tool, traps, verdict

TRAPS = traps()
ANSWERS = json.loads((Path(__file__).parent / "against" / "answers.json").read_text(encoding="utf-8"))["tools"]
REFUSED = {"gradients.gradient_of_a_view_that_is_written_to": "it is a view that was changed in place later"}


def slow_where_it_compiles(name):
    return pytest.param(name, marks=[pytest.mark.slow] if name.endswith("compiled_already") else [])


@pytest.mark.parametrize("name", [slow_where_it_compiles(name) for name in TRAPS])
def test_gaff_is_right_or_says_why_not(name):
    kind, told = verdict(TRAPS[name], tool("gaff"))
    assert (kind, REFUSED.get(name, "") in told) == ("refuses" if name in REFUSED else "right", True), told


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("values.value_before_an_in_place_op", "wrong"),
        ("values.view_whose_base_changes_later", "wrong"),
        ("values.somebodys_training_step_under_a_checkpoint", "wrong"),
        ("edits.backward_after_the_edit_was_closed", "wrong"),
        ("edits.edit_with_a_state_of_its_own_under_a_checkpoint", "wrong"),
        ("edits.edit_that_touches_nothing", "missing"),
    ],
)
def test_hooks_written_by_hand_are_caught(name, kind):
    assert verdict(TRAPS[name], tool("raw"))[0] == kind


def test_the_answers_that_the_documentation_shows_are_of_these_traps():
    """``make compare`` writes them."""
    assert list(ANSWERS) == list(TOOLS)
    for name, answer in ANSWERS.items():
        assert list(answer["traps"]) == list(TRAPS), name
    assert {name for name, (kind, _) in ANSWERS["gaff"]["traps"].items() if kind != "right"} == set(REFUSED)
