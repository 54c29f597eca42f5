"""Which rows of two lists are the same thing: by address, then by what else is asked, in order.

A model that was written anew names its modules differently and keeps their order: the second way relies on that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Generic, NamedTuple, TypeVar

from gaff.address.grammar import nearest, parse_site
from gaff.errors import PlanError

Item = TypeVar("Item")


class Pair(NamedTuple):
    """Two rows that are the same thing: their places in both lists, and what they were matched by."""

    a: int
    b: int
    how: str


class Pairing(Generic[Item]):
    """The pairs of two lists, found one way after the other; ``pairs`` are in the order of ``a``."""

    def __init__(self, a: Sequence[Item], b: Sequence[Item]) -> None:
        self.a = a
        self.b = b
        self.pairs: list[Pair] = []

    def by_name(
        self, name: Callable[[Item], str], renamed: Callable[[str], str | None] = str, how: str = "address"
    ) -> None:
        """Pair those that are left and have one name; ``renamed`` tells what one of ``a`` is in ``b``, if anything."""
        left_a, left_b = self.left()
        places = {name(self.b[at]): at for at in left_b}
        names = [(at, renamed(name(self.a[at]))) for at in left_a]
        self.pairs += [Pair(at, places[one], how) for at, one in names if one is not None and one in places]
        self.pairs.sort()

    def by_likeness(self, how: str, a: Sequence[Hashable], b: Sequence[Hashable], *, is_between: bool = False) -> None:
        """Pair those that are left and have equal keys: the longest runs of them, as a diff of two texts pairs lines.

        (Ratcliff & Metzener, 1988.) ``a``, ``b``: the keys of all rows; one whose key is None is left. ``is_between``:
        both must lie between the same two of the pairs found so far.
        """
        left_a, left_b = self.left()
        between = self._between() if is_between else ([0] * len(self.a), [0] * len(self.b))
        keys: list[list[Hashable]] = [
            [object() if row[at] is None else (row[at], places[at]) for at in left]
            for row, left, places in ((a, left_a, between[0]), (b, left_b, between[1]))
        ]
        for block in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks():
            self.pairs += [Pair(left_a[block.a + at], left_b[block.b + at], how) for at in range(block.size)]
        self.pairs.sort()

    def left(self) -> tuple[list[int], list[int]]:
        """The places in either list that have no partner yet."""
        taken_a, taken_b = {pair.a for pair in self.pairs}, {pair.b for pair in self.pairs}
        return ([at for at in range(len(self.a)) if at not in taken_a],
                [at for at in range(len(self.b)) if at not in taken_b])  # fmt: skip

    def _between(self) -> tuple[list[int], list[int]]:
        """For each place of either list, which pair is the last before it."""
        numbers = {pair.a: at for at, pair in enumerate(self.pairs)}, {pair.b: at for at, pair in enumerate(self.pairs)}
        found: tuple[list[int], list[int]] = [], []
        for known, places, rows in zip(numbers, found, (self.a, self.b), strict=True):
            last = -1
            for at in range(len(rows)):
                last = known.get(at, last)
                places.append(last)
        return found


def renaming(pairs: Mapping[str, str], paths: tuple[set[str], set[str]]) -> Callable[[str], str | None]:
    """What an address of A is called in B, of modules that go by other names there, or whose parents do: ``pairs``.

    ``paths``: those of the modules of both. The longest path counts. Raises PlanError for one that none of them has.
    """
    for path, known, name in (
        (path, known, name) for pair in pairs.items() for path, known, name in zip(pair, paths, "AB", strict=True)
    ):
        if path not in known:
            raise PlanError(
                f"pairs names {path!r}, which is no module of {name}; nearest: "
                f"{', '.join(nearest(path, sorted(known))) or 'none'}"
            )

    def renamed(address: str) -> str | None:
        site = parse_site(address)
        parents = [path for path in pairs if site.path == path or site.path.startswith(f"{path}.") or not path]
        if not parents:
            return None
        longest = max(parents, key=len)
        rest = site.path[len(longest) :].lstrip(".")
        return str(replace(site, path=".".join(part for part in (pairs[longest], rest) if part)))

    return renamed


def moves(found: Iterable[tuple[str, str]], paths: tuple[set[str], set[str]]) -> dict[str, str]:
    """What the members of a list of modules are called in B, where some of them have another number there.

    ``found``: paths of modules that are known to be the same. A member is moved as far as those before and after it
    that are known; one between two that have moved by other distances is not told.
    """
    lists: dict[tuple[str, str], dict[int, int]] = {}
    for both in found:
        parts = both[0].split("."), both[1].split(".")
        for at, (one, other) in enumerate(zip(*parts, strict=False)):
            if one.isdecimal() and other.isdecimal():
                around = ".".join(parts[0][:at]), ".".join(parts[1][:at])
                lists.setdefault(around, {})[int(one)] = int(other)
            elif one != other:
                break
    told = {}
    for (here, there), numbers in lists.items():
        if all(one == other for one, other in numbers.items()):
            continue
        inside = {path.removeprefix(f"{here}." if here else "") for path in paths[0] if path.startswith(here)}
        for number in sorted(int(name) for name in inside if name.isdecimal()):
            before = max((one for one in numbers if one <= number), default=None)
            after = min((one for one in numbers if one >= number), default=before)
            far = {0} if before is None else {numbers[before] - before}
            far |= {numbers[after] - after} if after is not None else set()
            path = ".".join(part for part in (there, str(number + min(far))) if part)
            if len(far) == 1 and path in paths[1]:
                told[".".join(part for part in (here, str(number)) if part)] = path
    return told


def is_in_lists(address: str, members: Iterable[str]) -> bool:
    """Whether what an address names lies in one of the lists of which ``members`` are."""
    path = parse_site(address).path
    lists = {member.rpartition(".")[0] for member in members}
    inside = (path[len(one) :].lstrip(".") for one in lists if path.startswith(f"{one}." if one else ""))
    return any(rest[:1].isdecimal() for rest in inside)
