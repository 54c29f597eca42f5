"""Which process makes which shard: this one, the ranks of a launcher, or (``on_ray``) workers of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from gaff.compat import distributed, libraries
from gaff.errors import PlanError
from gaff.harvesting.batches import BatchSource, Numbered, first_with_rows
from gaff.harvesting.making import Job, ShardMaker
from gaff.harvesting.progress import Progress
from gaff.harvesting.shard import Shard


class Engine(Protocol):
    """Has the shards made that are not there yet. What there is is known from the store alone, never from an engine."""

    def run(self, job: Job, source: BatchSource, there: Mapping[int, Shard], progress: Progress) -> None:
        """Make all shards of ``source`` but those of ``there``."""


def engine_of(engine: Any) -> Engine:
    """The engine of that name, or the one that is given. Raises PlanError for what is none."""
    if engine == "ranks":
        return Ranks()
    if engine == "ray":
        from gaff.harvesting.on_ray import OnRay

        return OnRay()
    if isinstance(engine, str) or not hasattr(engine, "run"):
        raise PlanError(f"engine={engine!r} is not known: expected 'ranks', 'ray', or gaff.integrations.ray.OnRay(...)")
    found: Engine = engine
    return found


class Ranks:
    """This process makes its part of the shards: all of them, or those whose number leaves its rank.

    A model whose weights lie on several processes only runs where all of them run it. Processes with parts of the same
    layers (tensor parallelism) are given the same batches, and the first of them writes; a process that has no more
    batches runs some other again, for the others.
    """

    def run(self, job: Job, source: BatchSource, there: Mapping[int, Shard], progress: Progress) -> None:
        """Make the shards of this process."""
        maker, size = ShardMaker(job), job.options.shard
        place = _Place(job.model)
        if not place.is_spread and not job.options.training and there:
            source.ask = lambda given: maker.compare(given, there[first_with_rows(there)])
        mine = source.after(there, size, place.has, None if job.changes else job.differs)
        batches = _together(maker, source, mine, libraries.device_of(job.model).type) if place.is_spread else mine

        def tell(number: int, rows: int) -> None:
            progress(number, source.expected, rows)

        for first in batches:
            number, of_shard = first.number // size, _of_shard(first, batches, size)
            if place.writes:
                maker.make(number, of_shard, tell)
            else:
                for given in of_shard:
                    maker.read(maker.moved(given))


def _of_shard(first: Numbered, batches: Iterator[Numbered], size: int) -> Iterator[Numbered]:
    """The batches of one shard, of which ``first`` has come already; what follows its last one is not asked for."""
    given: Numbered | None = first
    while given is not None:
        yield given
        given = next(batches, None) if (given.number + 1) % size else None


class _Place:
    """Which shards this process makes, and whether it writes them."""

    def __init__(self, model: nn.Module) -> None:
        rank, ranks = distributed.place()
        self.is_spread = bool(distributed.meshes_of(model))
        self.writes = True
        self._group, self._groups = rank, ranks
        if self.is_spread:
            meshes = distributed.meshes_of_rows(model)
            partners = tuple(sorted({one for mesh in meshes for one in mesh.mesh.flatten().tolist()} or {rank}))
            groups = sorted(set(distributed.told_by_all(partners)))
            self._group, self._groups = groups.index(partners), len(groups)
            self.writes = partners[0] == rank

    def has(self, shard: int) -> bool:
        """Whether the batches of this shard are for this process."""
        return shard % self._groups == self._group


def _together(maker: ShardMaker, source: BatchSource, mine: Iterator[Numbered], device: str) -> Iterator[Numbered]:
    """The batches of this process, each given out when all processes run one; it has ended when all have."""
    for given in mine:
        distributed.any_of(True, None, device)
        yield given
    while distributed.any_of(False, None, device):
        maker.read(maker.moved(source.spare()))
