"""The verbs by which kept values are read: those of an open capture, of one run of it, and of one that was saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import STATE_PORTS, Site, parse
from gaff.address.nested import describe
from gaff.compat import distributed
from gaff.compat.placements import UNKNOWN_PART, is_equal_everywhere, placement_of, whole_of
from gaff.errors import PlanError, SiteError, whole_number
from gaff.sessions.exact import Kept, Refused
from gaff.sessions.reading import Reading, Wanted
from gaff.sessions.receipt import Receipt
from gaff.sessions.thumbnails import thumbnail
from gaff.views.notebook import Shown, cell, table_html
from gaff.views.text import table

_HEAD = ("site", "value", "events", "none", "reason")
_MOST_PICTURES = 60
_MOST_ROWS = 200  # in a notebook


class Readable(Mapping[str, Any]):
    """Kept values by address: a mapping of the sites that have an event, in the order in which they were asked for.

    Its keys are addresses as they were written; of what a pattern, a predicate or a module found those of ``Site``.
    Values are read by every way to write an address, and by a module of the model. A key with several events cannot be
    read alone: ``values()`` and ``items()`` then raise as ``got[address]`` does, and those of one run do not. Equal is
    only itself.
    """

    @abstractmethod
    def _reading(self) -> Reading:
        """What looks addresses up, made anew for each question."""

    def __getitem__(self, address: Wanted) -> Any:
        """The value of a site that fired once.

        The reader may write into it, unless it was captured with ``reference`` or ``graph``. Raises SiteError when
        nothing or several events fit, ExactnessError when the value cannot be trusted.
        """
        return self._reading().one(address)

    def __contains__(self, address: object) -> bool:
        """Whether the site has an event, of a pattern any of its sites; never raises."""
        return self._reading().has(address)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reading().keys())

    def __len__(self) -> int:
        return len(self._reading().keys())

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # a mapping has none

    def get(self, address: Wanted, default: Any = None, /) -> Any:
        """The value as ``got[address]`` gives it, ``default`` where there is no event; else raises like it."""
        return self[address] if self._reading().has(address) else default

    def run(self, index: int | None) -> RunView:
        """The events of the run with this number, from 0; None for all that are here.

        Nothing is looked up yet: a number without a run raises SiteError when a value is read. Raises SiteError where
        these are the events of another run already, PlanError for what is no number.
        """
        if (number := whole_number(index)) is None and index is not None:
            raise PlanError(f"run({index!r}): expected the number of a run, from 0, or None for all")
        reading = self._reading()
        if reading.index not in (None, number) and number is not None:
            raise SiteError(f"run({index}): these are the events of run {reading.index} alone: ask the capture")
        return RunView(reading if number is None else replace(reading, index=number))

    def all(self, address: Wanted) -> list[Any]:
        """Every value of a site, in order of run, call and backward pass.

        Of a pattern those of all its sites that were captured, in each call in the order of the sites. Raises SiteError
        for what was not captured.
        """
        return self._reading().all(address)

    def full(self, address: Wanted) -> Tensor:
        """The value of a site that fired once, put together of the parts that processes hold (tensor parallelism).

        For a DTensor, and for a part of which it is known where it lies. Every other tensor is returned as it is where
        no layer is tensor parallel, or all processes hold the same bits. All processes of the mesh must ask for it, and
        wait for each other. Raises SiteError where the value is no tensor, and PlanError where processes hold different
        values of which nothing tells how they make up the whole, as behind compiled code, and where a process does not
        ask within five minutes.
        """
        value = self[address]
        if not isinstance(value, Tensor):
            raise SiteError(f"got.full({str(address)!r}): its value is no tensor, and only a tensor is put together")
        placement = placement_of(value)
        meshes = [placement.mesh] if placement is not None else list(self._reading().meshes())
        if not meshes:
            return value
        ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
        distributed.agree(tuple(ranks), f"got.full({str(address)!r})")
        if placement is not None:
            return whole_of(value, placement)
        is_state = isinstance(address, str) and getattr(parse(address), "port", "") in STATE_PORTS
        if not is_equal_everywhere(value, meshes, is_state=is_state):
            raise PlanError(
                f"got.full({str(address)!r}): {UNKNOWN_PART}; of a tensor of one value, and of what reduce= has kept "
                "of parts, nothing tells how they make up the whole"
            )
        return value

    def stack(self, *addresses: Wanted | Iterable[Wanted]) -> Tensor:
        """The values of several sites as one tensor ``[sites, ...]``: ``got.stack("h.*")``, ``got.stack("a", "b")``.

        ``addresses``: patterns, addresses, modules, or lists of these; a pattern's sites come in the order of the
        model. Raises SiteError, which names the sites, where a value is no tensor, where shapes, dtypes or devices
        differ, and where a site has no event or several: ``got.run(0).stack("h.*")`` takes those of one run.
        """
        flat: list[Wanted] = []
        for one in addresses:
            is_one = isinstance(one, (str, Site, nn.Module)) or not isinstance(one, Iterable)  # else it is refused
            flat += [one] if is_one else one  # type: ignore[list-item, arg-type]
        return self._reading().stack(flat)


class RunView(Readable):
    """The events of one run of a capture (or of all its runs): ``got.run(2)["a@1"]``.

    Made by ``run`` of a capture for each question; reading an event checks that its value is still exact.
    """

    def __init__(self, reading: Reading) -> None:
        self._whole = reading

    def _reading(self) -> Reading:
        return self._whole

    def __repr__(self) -> str:
        which = "all runs" if self._whole.index is None else f"run {self._whole.index}"
        return f"<{which} of a gaff capture: {', '.join(self) or 'nothing'}>"


class Captured(Readable):
    """A whole capture, open, closed or read from a file: what it kept, run by run, and its receipt."""

    @property
    @abstractmethod
    def receipt(self) -> Receipt:
        """What happened so far: for each pattern what matched, fired, was None or skipped, and why."""

    @abstractmethod
    def _state(self) -> str:
        """What stands first in ``repr``, such as ``open``."""

    @abstractmethod
    def _about(self) -> tuple[str, Mapping[int, Sequence[str]]]:
        """The model's name; names of the classes of each site's module, bases included, by identity of its stream."""

    @abstractmethod
    def _ranks(self) -> Mapping[int, int]:
        """The place of each site's module in the model, by identity of its stream; -1 where that is not known."""

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to ``path``, a ``.safetensors`` file, which ``gaff.load`` reads back.

        Values are written detached; the file is there as a whole or not at all. Raises PlanError, before anything is
        written, for a value that no such file can hold, which is named, and without the package safetensors.
        """
        from gaff.sessions.capture_files import write

        self._reading().need_opened("save")
        write(path, self._reading(), self.receipt, *self._about(), self._ranks())

    def __repr__(self) -> str:
        return f"<gaff capture, {self._state()}>\n{self._summary()}\n{table(_HEAD, self._rows(), right=('events',))}"

    def _repr_html_(self) -> str:
        """For notebooks: a table of at most 200 sites, the first of them with a small picture of the newest value."""
        rows = self._rows()
        values = self._newest()
        seen = [
            thumbnail(values.get(row[0])) if at < _MOST_PICTURES else "" for at, row in enumerate(rows[:_MOST_ROWS])
        ]
        shown = [(row[0], drawn, *row[1:]) for row, drawn in zip(rows, seen, strict=False)]
        more = f"{len(rows) - _MOST_ROWS} more sites" if len(rows) > _MOST_ROWS else ""
        head = (_HEAD[0], "first example", *_HEAD[1:])
        return cell(
            f"gaff capture, {self._state()}: {self._summary()}", Shown(table_html(head, shown, ("events",))), more
        )

    def _summary(self) -> str:
        """How many runs and sites, and why the run was not bit by bit a bare one."""
        told = self.receipt
        notes = "".join(f"\nnot bitwise: {note}" for note in told.notes)
        return f"{told.size}{notes}"

    def _newest(self) -> dict[str, Any]:
        """The newest value that is held of each site, by its address."""
        found = {str(one.site): one.records[-1][2] for one in self._reading().streams.all if one.records}
        return {site: kept.value if isinstance(kept, Kept) else kept for site, kept in found.items()}

    def _rows(self) -> list[tuple[str, ...]]:
        """The rows of the receipt, each with the newest value that is held, in words."""
        values = self._newest()
        return [
            (row.site or row.pattern, _described(values.get(row.site)), str(row.fired), str(row.none or ""), row.reason)
            for row in self.receipt.rows
        ]


def _described(kept: Any) -> str:
    """What was kept of one event, in words: ``2x3 float32``, ``tuple of 2``; empty for None, which the row tells."""
    if isinstance(kept, Refused):
        return "refused"
    return "" if kept is None else describe(kept)
