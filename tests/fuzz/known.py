"""What gaff gets wrong today, by finding. The table is to become empty: take an entry out when it is mended.

A failure of a program is known if the program has one of the productions, and the failure is of one of the sorts.
"""

from __future__ import annotations

from itertools import product

from fuzz.program import Program
from fuzz.tally import Failure


def sorts(kinds: str, *ports: str) -> set[tuple[str, str]]:
    """Pairs of a kind of failure and a port."""
    return set(product(kinds.split(), ports))


KNOWN: dict[str, tuple[set[str], set[tuple[str, str]]]] = {}


def known(program: Program, failure: Failure) -> str | None:
    """The finding that a failure belongs to, if it is a known one."""
    for finding, (productions, alike) in KNOWN.items():
        if productions & program.has and (failure.kind, failure.port) in alike:
            return finding
    return None
