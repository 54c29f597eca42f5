"""Every rule that gaff brings, registered: import rules from here where all of them are meant."""

from __future__ import annotations

from collections.abc import Iterable

from gaff.training.rules import evaluations, large, layout, loop, losses, setup, slips, steps, values
from gaff.training.rules.registry import Rule, select

# Importing them registers what they hold.
FILES = (steps, values, evaluations, losses, setup, large, loop, layout, slips)


def known(off: Iterable[str] = ()) -> tuple[Rule, ...]:
    """All registered rules but those named in ``off``, in the order in which they were registered.

    Raises PlanError for a name that is none, with those that there are.
    """
    return tuple(select(off))
