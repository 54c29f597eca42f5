"""The suite is no mirror: tools as they are usually written fall into its traps, and gaff into none."""

import importlib
import pkgutil

import pytest

import traps
from traps.__main__ import falls
from traps.tools import Gaff, LastCallWins, RawHooks

NAMES = [info.name for info in pkgutil.iter_modules(traps.__path__) if info.name.startswith("test_")]
TRAPS = {
    name: module.trap
    for name in NAMES
    if name != "test_the_suite_catches"
    if hasattr(module := importlib.import_module(f"traps.{name}"), "trap")
}


@pytest.mark.parametrize("name", TRAPS)
@pytest.mark.filterwarnings("ignore")
def test_gaff_falls_into_none(name):
    assert falls(TRAPS[name], Gaff) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tool", "caught"),
    [
        (
            RawHooks,
            [
                "value_before_in_place",
                "gradient_before_in_place",
                "view_changed_later",
                "checkpoint",
                "keywords_only",
                "pickle",
                "edit_checkpoint",
                "edit_draws_noise",
            ],
        ),
        (
            LastCallWins,
            [
                "value_before_in_place",
                "loop",
                "shared_module",
                "share_or_total",
                "several_backwards",
                "shared_module_gradients",
            ],
        ),
    ],
)
def test_usual_tools_are_caught(tool, caught):
    fallen = {name.removeprefix("test_") for name, trap in TRAPS.items() if falls(trap, tool) is not None}
    assert fallen >= set(caught), set(caught) - fallen
