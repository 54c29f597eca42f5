"""Batches of stored rows for training, in an order that is arithmetic: the same each time, and begun anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from gaff.compat import distributed
from gaff.errors import PlanError, whole_number

_RUN = 64  # rows that lie side by side and are read together
_POOL = 1024  # such runs that are mixed row by row


class Gathered(Protocol):
    """Where rows come from."""

    def gather(self, wanted: Tensor) -> Tensor:
        """Copies of the rows of these numbers."""

    def __len__(self) -> int: ...


class RowLoader(IterableDataset[Any]):
    """Batches of rows: tensors of ``[batch, ...]``, or dicts of them by name where there are several columns.

    With a seed the rows are shuffled in two steps, both by arithmetic: runs of 64 neighbours are put into another
    order, then 65,536 rows at a time are mixed among each other. A store of up to so many rows is mixed completely.
    ``set_epoch(n)`` gives another order, and has to be called for one; the same seed and epoch give the same one, on
    every machine.

    Batches are dealt out in turn to the ranks of a ``torchrun`` and to the workers of a ``DataLoader`` (with
    ``batch_size=None``): each gets its own, none comes twice. ``state_dict`` says how many batches this process has
    handed out of the pass that was begun last, and ``load_state_dict`` has the next pass go on there, without reading
    what came before; workers of a DataLoader count for themselves, and cannot go on in the middle. A state is of one
    number of rows, batch size, seed and number of processes: elsewhere it would be another place.
    """

    def __init__(self, columns: Mapping[str, Gathered], *, batch: int, shuffle: int | None) -> None:
        if (size := whole_number(batch, 1)) is None:
            raise PlanError(f"batch={batch!r} is no number of rows: expected 1 or more")
        seed = None if shuffle is None else whole_number(shuffle)
        if seed is None and shuffle is not None:
            raise PlanError(f"shuffle={shuffle!r} is no seed: expected a number, or None for the order of the store")
        self._columns = dict(columns)
        self._rows = len(next(iter(self._columns.values())))
        self._batch, self._seed = size, seed
        self._epoch = self._done = self._begin = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin the pass of this number, from its first batch.

        Before the workers of a DataLoader are started: those that it keeps (``persistent_workers``) do not hear of it.
        """
        self._epoch, self._done, self._begin = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: the epoch, how many batches it has handed out in it, and of what they are."""
        return {"epoch": self._epoch, "batches": self._done, **self._described()}

    def _described(self) -> dict[str, Any]:
        """What a place in the order is told by; the same in all processes."""
        return {"rows": self._rows, "batch": self._batch, "shuffle": self._seed, "ranks": _rank()[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was asked; the next iteration begins there.

        Raises PlanError for the state of a loader with other rows, another batch size, seed or number of processes.
        """
        is_state = isinstance(state, Mapping) and isinstance(state.get("epoch"), int)
        if not is_state or not isinstance(state.get("batches"), int):
            raise PlanError(f"{state!r:.60} is no state of a loader: expected what its state_dict() gave")
        for name, here in self._described().items():
            if state.get(name, here) != here:
                raise PlanError(
                    f"the state is of a loader with {name}={state[name]!r}, and this one has {here!r}: rows would come "
                    "twice or never; expected the same, or a new pass from its beginning"
                )
        self._epoch = int(state["epoch"])
        self._done = self._begin = int(state["batches"])

    def __len__(self) -> int:
        """How many batches this rank gets in a pass."""
        place, places = _rank()
        return max(0, -(-(self._all - place) // places))

    def __iter__(self) -> Iterator[Any]:
        place, places = _rank()
        worker = get_worker_info()
        if worker is not None:
            if self._begin:
                raise PlanError("a loader that goes on in the middle has no workers: expected num_workers=0")
            place, places = place + places * worker.id, places * worker.num_workers
        mine = range(place, self._all, places)
        order = _Order(self._rows, self._seed, self._epoch)
        begin, self._begin = self._begin, 0
        for done in range(begin, len(mine)):
            first = mine[done] * self._batch
            wanted = order.rows(first, min(first + self._batch, self._rows))
            self._done = done + 1
            found = {name: column.gather(wanted) for name, column in self._columns.items()}
            yield found if len(found) > 1 else next(iter(found.values()))
        self._done = 0

    @property
    def _all(self) -> int:
        return -(-self._rows // self._batch)


class _Order:
    """The numbers of rows in the order of one pass; of a pool of rows at a time, the last one remembered."""

    def __init__(self, rows: int, seed: int | None, epoch: int) -> None:
        self._rows, self._seed, self._epoch = rows, seed, epoch
        self._pool: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64, device="cpu"))
        runs = -(-rows // _RUN)
        self._runs = (
            torch.arange(runs, device="cpu")
            if seed is None
            else torch.randperm(runs, generator=self._generator(-1), device="cpu")
        )
        short = rows - (runs - 1) * _RUN  # of the last run, which is put last: then pools have known sizes
        if seed is not None and runs and short < _RUN:
            self._runs = torch.cat((self._runs[self._runs != runs - 1], torch.tensor([runs - 1], device="cpu")))

    def rows(self, first: int, last: int) -> Tensor:
        """The numbers of the rows at places ``first`` to ``last - 1`` (int64)."""
        if self._seed is None:
            return torch.arange(first, last, device="cpu")
        size, found = _RUN * _POOL, []
        while first < last:
            pool = first // size
            end = min(last, (pool + 1) * size)
            found.append(self._mixed(pool)[first - pool * size : end - pool * size])
            first = end
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")

    def _mixed(self, pool: int) -> Tensor:
        if self._pool[0] != pool:
            runs = self._runs[pool * _POOL : (pool + 1) * _POOL]
            rows = (runs.unsqueeze(1) * _RUN + torch.arange(_RUN, device="cpu")).flatten()
            rows = rows[rows < self._rows]
            self._pool = pool, rows[torch.randperm(len(rows), generator=self._generator(pool), device="cpu")]
        return self._pool[1]

    def _generator(self, stream: int) -> torch.Generator:
        text = f"{self._seed} {self._epoch} {stream}".encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "little"))


def _rank() -> tuple[int, int]:
    """This process's number among those that share the work, and how many they are."""
    return distributed.place()
