"""Where the modules hung that a session looks at, when it was opened: what hangs there later may be another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import nn

from gaff.address.resolve import Found, is_there, place_of

_Site = TypeVar("_Site")


class Whereabouts(Generic[_Site]):
    """The places of all modules that ``taps`` are at, each with the site that is asked there, in one order.

    ``model``: whose other modules are to stay where they are, too, in ``is_as_it_was``.
    """

    def __init__(self, model: nn.Module | None, taps: Sequence[Any], sites: Sequence[_Site]) -> None:
        pairs = zip(taps, sites, strict=True)
        self._places: list[Any] = [(*place_of(tap.found), site) for tap, site in pairs if tap.found.chain]
        # a site for each chain of modules that leads to some
        self._around: list[Found] = list({tuple(map(id, tap.found.chain)): tap.found for tap in taps}.values())
        tables = [one._modules for one in model.modules()] if model is not None else []
        self._inside = [(table, list(map(id, table.values()))) for table in tables if table]
        self._empty = [table for table in tables if not table]

    def is_as_it_was(self) -> bool:
        """Whether every module of the model hangs where it hung."""
        is_same = all(list(map(id, table.values())) == known for table, known in self._inside) and not any(self._empty)
        return is_same and self.is_all_there()

    def is_all_there(self) -> bool:
        """Whether every module that was found is at its place, and all those around it are, too."""
        hangs = all(inside.get(name) is child for inside, name, child, _ in self._places)
        return hangs and all(is_there(found) for found in self._around)

    def replaced(self) -> Iterator[_Site]:
        """The sites whose module is not the one that was there."""
        for inside, name, child, site in self._places:
            if inside.get(name) is not child:
                yield site
