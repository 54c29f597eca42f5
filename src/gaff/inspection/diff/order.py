"""What the order and the depths of a trace's rows tell."""

from __future__ import annotations

from itertools import pairwise

from gaff.inspection.trace import Trace


def when_made(trace: Trace) -> list[int]:
    """When the output of each row was there, as a number: a module's after those of the modules inside it.

    Rows are in the order of entry, in which a module comes before what spoils its output.
    """
    order: list[int] = []
    inside: list[int] = []
    for at, row in enumerate(trace.rows):
        while inside and trace.rows[inside[-1]].depth >= row.depth:
            order.append(inside.pop())
        inside.append(at)
    order += reversed(inside)
    place = {at: number for number, at in enumerate(order)}
    return [place[at] for at in range(len(trace.rows))]


def has_no_calls(trace: Trace) -> list[bool]:
    """For each call whether no other was made inside it."""
    depths = [*(row.depth for row in trace.rows), 0]
    return [inner <= outer for outer, inner in pairwise(depths)]
