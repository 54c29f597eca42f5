"""A capture that was saved, read back: ``SavedCapture``, which is read as a capture is.

Nothing is unpickled; what is read may be hostile, so that every failure becomes a RecordError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from gaff.address.grammar import PORTS, Pattern, Site, parse_site
from gaff.errors import RecordError, SiteError
from gaff.sessions.capture_files import FORMAT, checksum_of, library, write
from gaff.sessions.readable import Captured
from gaff.sessions.reading import Reading, Streams, named_sites, sites_like
from gaff.sessions.receipt import Receipt, ReceiptRow
from gaff.sessions.saved_values import unpacked

# What a file that somebody else has written may lead to.
_DAMAGES = (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, RuntimeError)


@dataclass(frozen=True, slots=True)
class SavedMoment:
    """When a value was seen: the number of its run, and the optimizer steps completed when that began."""

    index: int
    step: int


@dataclass(slots=True)
class SavedSite:
    """The events of one site, as a file holds them; of the module that was there the names of its classes."""

    site: Site
    name: str = ""
    classes: Sequence[str] = ()
    evicted: int = 0
    records: list[tuple[SavedMoment, int, Any]] = field(default_factory=list)
    inner: dict[int, SavedSite] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    rank: int = -1  # the place of its module in the model; -1 where that was not written
    is_loose = False

    @property
    def fired(self) -> int:
        """How many events there have been, those that were let go included."""
        return len(self.records) + self.evicted


class SavedCapture(Captured):
    """A capture that was saved, read back by ``gaff.load``: the same verbs, with tensors on the CPU.

    ``model``: the name of its class, or what the command line was given. Patterns are looked up among the saved sites;
    a shared module is known by the name that it was captured by, and module objects by none. Objects of other classes
    come back as dicts and named tuples.
    """

    def __init__(
        self, streams: Sequence[SavedSite], plain: Sequence[SavedSite], receipt: Receipt, told: Mapping[str, Any]
    ) -> None:
        self.model = str(told["model"])
        self._streams = Streams([*streams, *plain])
        self._by_name = {stream.name: stream for stream in plain}
        self._receipt = receipt
        self._made_by = str(told["gaff"])

    @property
    def receipt(self) -> Receipt:
        """The receipt of the capture when it was saved."""
        return self._receipt

    def _reading(self) -> Reading:
        return Reading(self._by_name, self._streams, self._streams.find, self._sites, self._receipt.runs)

    def _state(self) -> str:
        return f"saved by gaff {self._made_by}" + (f", of {self.model}" if self.model else "")

    def _about(self) -> tuple[str, dict[int, Sequence[str]]]:
        return self.model, {id(stream): stream.classes for stream in self._streams.all}

    def _ranks(self) -> dict[int, int]:
        return {id(stream): stream.rank for stream in self._streams.all}

    def _sites(self, wanted: Pattern | nn.Module) -> list[Site]:
        """The sites of a pattern among those that were saved, in the order of the model."""
        if not isinstance(wanted, Pattern):
            raise SiteError(f"a saved capture holds no modules, and got a {type(wanted).__name__}: read it by address")
        if not wanted.is_named:
            return sites_like(self._streams, wanted, lambda stream: stream.classes)
        found = named_sites(self._streams, wanted)
        if not found:
            raise SiteError(f"{wanted}: a saved capture holds addresses, and the standard names that were asked "
                            f"for: expected one of {', '.join(self)}")  # fmt: skip
        return found


def write_values(path: str | PathLike[str], values: Mapping[str, Any], receipt: Receipt, model: str) -> None:
    """Write values by address, such as features of one run, as a capture of that run. Raises as ``write`` does.

    The ``receipt`` of the run tells where a standard name lies.
    """
    moment, sites = SavedMoment(0, 0), {row.pattern: row.site for row in receipt.rows}
    streams = [
        SavedSite(parse_site(sites.get(name, name)), name, records=[(moment, 0, value)])
        for name, value in values.items()
    ]
    write(path, Reading({}, Streams(streams), lambda site: None, lambda wanted: [], 1), receipt, model, {}, {})


def read(path: Path) -> SavedCapture:
    """The capture in a file that ``write`` wrote.

    Raises RecordError for any other file, however damaged, and PlanError without safetensors.
    """
    package, failure = library()
    try:
        with package.safe_open(str(path), "pt") as file:
            told = file.metadata() or {}
            # cloned, so that they lie in memory as torch lays them: products of others are rounded differently
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # no dict
        if told["gaff_checksum"] != checksum_of(told["gaff_capture"], tensors):
            raise ValueError("its checksum is another: it was damaged")
        data = json.loads(told["gaff_capture"])
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, expected {FORMAT}")
        streams = [_site(row) for row in data["sites"]]
        for stream, row in zip(streams, data["sites"], strict=True):
            stream.inner = {int(at): streams[at] for at in row["inner"]}
            for run, step, call, value in row["events"]:
                stream.records.append((SavedMoment(int(run), int(step)), int(call), unpacked(value, tensors)))
        plain = [stream for stream, row in zip(streams, data["sites"], strict=True) if row["is_plain"]]
        others = [stream for stream, row in zip(streams, data["sites"], strict=True) if not row["is_plain"]]
        receipt = data["receipt"]
        rows = tuple(ReceiptRow(**row) for row in receipt.pop("rows"))
        notes, optional = tuple(map(str, receipt.pop("notes"))), frozenset(map(str, receipt.pop("optional")))
        return SavedCapture(others, plain, Receipt(rows, notes=notes, optional=optional, **receipt), told)
    except (*_DAMAGES, SiteError, failure) as error:
        raise RecordError(f"{str(path)!r} is no capture that gaff has saved: {type(error).__name__}: {error}") from None


def _site(row: Mapping[str, Any]) -> SavedSite:
    """A site of the file, without its events; its op may be a glob, so that no text of it could be read."""
    path, op, op_index, call, port, key = row["site"]
    if not (isinstance(path, str) and port in PORTS and isinstance(op, (str, type(None)))):
        raise ValueError(f"{row['site']!r} is no site")
    number, nth = (None if one is None else int(one) for one in (op_index, call))
    site = Site(path, op, number, nth, port, tuple(one if isinstance(one, int) else str(one) for one in key))
    also = tuple(map(str, row.get("also", ())))
    return SavedSite(site, str(row["name"]), tuple(map(str, row["classes"])), int(row["evicted"]), also=also,
                     rank=int(row.get("rank", -1)))  # fmt: skip
