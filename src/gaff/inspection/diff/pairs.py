"""Which rows of two lists are the same thing: by address, then by order and shape.

A model that was written anew names its modules differently and keeps their order: the second way relies on that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class Pair(NamedTuple):
    """Two rows that are the same thing: their places in both lists, and what they were matched by."""

    a: int
    b: int
    how: str


def pair_up(
    a: Sequence[Item],
    b: Sequence[Item],
    name: Callable[[Item], str],
    likeness: Sequence[tuple[str, Callable[[Item], Hashable]]],
) -> tuple[list[Pair], list[int], list[int]]:
    """Pairs in the order of ``a``, and what is left of each.

    ``likeness``: what else is asked of those without a namesake, one after the other, such as ("shape", shape_of):
    the longest runs of equal ones are paired, as a diff of two texts pairs lines (Ratcliff & Metzener, 1988).
    """
    places = {name(item): at for at, item in enumerate(b)}
    pairs = [Pair(at, places[name(item)], "address") for at, item in enumerate(a) if name(item) in places]
    for how, key in likeness:
        taken_a, taken_b = {pair.a for pair in pairs}, {pair.b for pair in pairs}
        left_a = [at for at in range(len(a)) if at not in taken_a]
        left_b = [at for at in range(len(b)) if at not in taken_b]
        matcher = SequenceMatcher(None, [key(a[at]) for at in left_a], [key(b[at]) for at in left_b], autojunk=False)
        for block in matcher.get_matching_blocks():
            pairs += [Pair(left_a[block.a + at], left_b[block.b + at], how) for at in range(block.size)]
    pairs.sort()
    taken_a, taken_b = {pair.a for pair in pairs}, {pair.b for pair in pairs}
    return pairs, [at for at in range(len(a)) if at not in taken_a], [at for at in range(len(b)) if at not in taken_b]
