"""A shard: a folder with one file for each site and each label, and ``shard.json``, which says what is in them.

It is written elsewhere and gets its place in one step, which is refused where that place is taken: so a shard is there
whole or not at all, and once, whoever else writes into the same store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gaff.errors import PlanError, RecordError
from gaff.harvesting.location import TOLD, Location, draft_in, shard_path, writing
from gaff.harvesting.tensor_file import ALIKE, TensorFile, WrittenTensor, dtype_of, file_name, sync, told


@dataclass(frozen=True, slots=True)
class Shard:
    """What one shard holds: by address the sites, by name the labels, all of the same ``rows``.

    ``batches``: the first and the one behind the last. ``inputs``: a checksum of what the model was given, ``first``:
    of its first batch alone. ``nonfinite``: by address, rows with a NaN or an infinity. ``changes``: in what the model,
    the data or the plan were others than at the beginning, where that was allowed. ``harvest``: which one
    it is of (``manifest.identity``).
    """

    number: int
    batches: tuple[int, int]
    rows: int
    sites: dict[str, WrittenTensor]
    labels: dict[str, WrittenTensor]
    nonfinite: dict[str, int]
    inputs: int
    first: int
    changes: tuple[str, ...] = ()
    harvest: str = ""

    def columns(self) -> Iterator[tuple[str, str, WrittenTensor]]:
        """Sites and labels, each with its kind and name."""
        yield from (("site", name, one) for name, one in self.sites.items())
        yield from (("label", name, one) for name, one in self.labels.items())

    def to_json(self) -> str:
        """A text without anything that differs from one run of the same harvest to the next, such as the time."""
        told = {
            "shard": self.number,
            "batches": list(self.batches),
            "rows": self.rows,
            "sites": {name: one.to_dict() for name, one in self.sites.items()},
            "labels": {name: one.to_dict() for name, one in self.labels.items()},
            "nonfinite": self.nonfinite,
            "inputs": self.inputs,
            "first": self.first,
            "changes": list(self.changes),
            "harvest": self.harvest,
        }
        return json.dumps(told, indent=1)


def read_shard(out: Location, number: int) -> Shard:
    """What a shard says of itself. Raises RecordError, with the file, for what is none."""
    return parse_shard(out.read(shard_path(number, TOLD)), number, f"{out}/{shard_path(number, TOLD)}")


def parse_shard(content: str | bytes, number: int, path: str) -> Shard:
    """The shard of that number, from what ``to_json`` has told. Raises RecordError, with ``path``, for all else."""
    try:
        told = json.loads(content)
        first, last = told["batches"]
        shard = Shard(
            int(told["shard"]), (int(first), int(last)), int(told["rows"]),
            {str(name): WrittenTensor.from_dict(one) for name, one in told["sites"].items()},
            {str(name): WrittenTensor.from_dict(one) for name, one in told["labels"].items()},
            {str(name): int(count) for name, count in told["nonfinite"].items()},
            int(told["inputs"]), int(told["first"]), tuple(map(str, told["changes"])),
            str(told.get("harvest", "")),
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise RecordError(f"{path}: is damaged, or none that gaff has written") from None
    if shard.number != number or any(one.rows != shard.rows for one in (*shard.sites.values(), *shard.labels.values())):
        raise RecordError(f"{path}: its numbers do not fit each other: damaged, or moved from another place")
    return shard


class ShardWriter:
    """Writes one shard, block by block; ``commit`` puts it in its place. What is left without that is taken away.

    A context manager. The files are made with the first block. ``like``: by kind
    and name, the rows that other shards hold, with which those of this one must agree; filled in where it is empty.
    """

    def __init__(self, out: Location, number: int, like: dict[tuple[str, str], WrittenTensor] | None = None) -> None:
        self._like = {} if like is None else like
        self.number = number
        self._out = out
        self._stack = ExitStack()
        self._folder: Path
        self._files: dict[tuple[str, str], TensorFile] = {}
        self._rows = 0

    def __enter__(self) -> ShardWriter:
        with writing(self._out):
            self._folder = self._stack.enter_context(draft_in(self._out.drafts(), self.number))
        return self

    def __exit__(self, *_: object) -> None:
        with writing(self._out):
            self._stack.close()

    @property
    def rows(self) -> int:
        """How many were written so far."""
        return self._rows

    def append(self, sites: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> None:
        """Write the rows of a batch: the same number of each site and each label, on the CPU.

        Raises RecordError where a site or a label is missing that earlier batches had, or is new.
        """
        blocks = {**{("site", name): one for name, one in sites.items()},
                  **{("label", name): one for name, one in labels.items()}}  # fmt: skip
        if self._files and blocks.keys() != self._files.keys():
            odd = ", ".join(sorted(name for _, name in blocks.keys() ^ self._files.keys()))
            raise RecordError(f"{odd}: in some batches only: expected the same sites and labels in each")
        for (kind, name), rows in blocks.items():
            known = self._like.get((kind, name))
            if known is not None and (dtype_of(known), known.shape) != (rows.dtype, tuple(rows.shape[1:])):
                raise PlanError(
                    f"{name}: a row was {told(dtype_of(known), known.shape)} and is {told(rows.dtype, rows.shape[1:])} "
                    f"in shard {self.number}: {ALIKE}"
                )
            with writing(self._out):
                if (kind, name) not in self._files:
                    path = self._folder / file_name(name if kind == "site" else f"label {name}", ".safetensors")
                    self._files[kind, name] = self._stack.enter_context(TensorFile(path, name, rows))
                self._files[kind, name].append(rows)
        self._rows += len(next(iter(blocks.values())))

    def commit(self, batches: tuple[int, int], inputs: int, first: int, nonfinite: dict[str, int],
               changes: tuple[str, ...], harvest: str) -> Shard:  # fmt: skip
        """Close the files, say what is in them, and have all of it in its place; returns what it says.

        Where another process was first its shard stays. Raises RecordError where that holds other rows: the model does
        not give the same ones twice.
        """
        with writing(self._out):
            closed = {key: file.close() for key, file in self._files.items()}
        written = {key: self._out.named(one) for key, one in closed.items()}
        self._like.update(written)
        sites = {name: one for (kind, name), one in written.items() if kind == "site"}
        labels = {name: one for (kind, name), one in written.items() if kind == "label"}
        shard = Shard(self.number, batches, self._rows, sites, labels, nonfinite, inputs, first, changes, harvest)
        names = {one.file: written[key].file for key, one in closed.items()}
        with writing(self._out):
            with (self._folder / TOLD).open("w", encoding="utf-8") as file:
                file.write(shard.to_json())
                file.flush()
                sync(file)
            if self._out.commit(self._folder, self.number, {**names, TOLD: TOLD}):
                return shard
        other = read_shard(self._out, self.number)
        if (other.sites, other.labels) != (sites, labels):
            raise RecordError(
                f"{self._out}/{shard_path(self.number)}: another process has written other rows into this shard: the "
                "model or the data do not give the same twice"
            )
        return other
