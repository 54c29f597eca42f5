"""A harvest by the workers of a Ray cluster, or of this machine: shards are tasks, and the store says what is done.

Ray is asked to run functions and nothing else: a worker that is killed is started again with the shard that it had, a
driver that is killed is begun again by the same call, and what was written stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from pickle import PicklingError
from typing import Any, NamedTuple

import torch

from gaff.compat import distributed
from gaff.compat.extras import need
from gaff.errors import GaffError, PlanError, RecordError, whole_number
from gaff.harvesting import manifest
from gaff.harvesting.batches import BatchSource, LoaderSource, Numbered
from gaff.harvesting.folder import Folder
from gaff.harvesting.making import Job, ShardMaker
from gaff.harvesting.progress import Progress
from gaff.harvesting.shard import Shard

_ATTEMPTS = 3  # how often a shard may lose its worker


@dataclass(frozen=True)
class OnRay:
    """``gaff.harvest(..., engine=OnRay(workers=2))``: each of the workers has the model once, and makes shard by shard.

    Args:
        workers: how many; None: one for each GPU of the cluster, or for each CPU where it has none.
        cpus, gpus: what each takes of the cluster's resources. With a GPU the model is moved there; a worker computes
            with as many threads as it has CPUs.

    A running Ray is used, and one is started and stopped otherwise. A worker has one shard at a time, so a slow disk
    slows the work down and nothing piles up. Batches of a DataLoader are loaded by the workers, those of any other
    iterable by this process, which sends them. ``out`` must be a folder or a bucket that every worker reaches. Rows are
    those of one process up to rounding: another number of threads, or another device, adds up otherwise.

    Raises PlanError for resources that the cluster does not have; RecordError where a shard has lost its worker three
    times, which was then killed by what it did.
    """

    workers: int | None = None
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.workers is not None and whole_number(self.workers, 1) is None:
            raise PlanError(f"workers={self.workers!r}: expected 1 or more, or None")
        if self.cpus <= 0 or self.gpus < 0:
            raise PlanError(f"cpus={self.cpus!r}, gpus={self.gpus!r}: expected some of a CPU, and no less than no GPU")

    def run(self, job: Job, source: BatchSource, there: Mapping[int, Shard], progress: Progress) -> None:
        """Have all shards made that are not in ``there``."""
        if distributed.meshes_of(job.model) or distributed.place()[1] > 1:
            raise PlanError("engine='ray' starts processes of its own: expected a model that is whole, and no torchrun")
        ours = next((one for one in manifest.hooks_of(job.model) if ": gaff." in one), None)
        if ours is not None or any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            what = f"a session of gaff is open on the model ({ours})" if ours is not None else "autocast is on"
            raise PlanError(f"{what}, which workers of Ray would not have: expected none, or engine='ranks'")
        ray = need("ray", "ray", for_="engine='ray'")
        if isinstance(job.out, Folder):  # workers are in another folder
            job = replace(job, out=Folder(job.out.path.absolute()))
        with _running(ray):
            loaded = source if isinstance(source, LoaderSource) else None
            workers = _Workers(ray, self, self._wanted(ray), (job, loaded))
            try:
                for number, given in _tasks(job, source, there):
                    for batch, rows in workers.submit(number, given, tuple(job.changes)):
                        progress(batch, source.expected, rows)
                for batch, rows in workers.finish():
                    progress(batch, source.expected, rows)
                missing = set(range(-(-source.count // job.options.shard))) - set(job.out.shards())
                if missing:
                    raise RecordError(f"shard {min(missing)} was made and is not in {job.out}: expected a folder that "
                                      "all workers share, or a bucket")  # fmt: skip
            finally:
                workers.stop()

    def _wanted(self, ray: Any) -> int:
        """How many workers there are to be. Raises PlanError where the cluster cannot hold one."""
        resources = ray.cluster_resources()
        room = [resources.get("CPU", 0) / self.cpus, *([resources.get("GPU", 0) / self.gpus] if self.gpus else [])]
        if min(room) < (self.workers or 1):
            raise PlanError(
                f"the cluster has {resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs: too few for "
                f"{self.workers or 1} workers of {self.cpus:g} CPUs and {self.gpus:g} GPUs"
            )
        return self.workers or int(min(room))


@contextmanager
def _running(ray: Any) -> Iterator[None]:
    """With a Ray that was there before, or one of its own, which is stopped afterwards."""
    is_own = not ray.is_initialized()
    if is_own:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        if is_own:
            ray.shutdown()


def _tasks(
    job: Job, source: BatchSource, there: Mapping[int, Shard]
) -> Iterator[tuple[int, Sequence[int] | list[Numbered]]]:
    """The shards that are to be made: with the numbers of their batches where workers can load them, else with these.

    These are copies: a generator may write into the same tensors again.
    """
    size, differs = job.options.shard, None if job.changes else job.differs
    if not isinstance(source, LoaderSource):
        batches = source.after(there, size, lambda number: True, differs)
        for number, of_shard in groupby(batches, lambda given: given.number // size):
            yield number, [deepcopy(given) for given in of_shard]
        return
    wanted = [number for number in range(-(-source.count // size)) if number not in there]
    if differs is not None:
        source.compare(there, size, differs)
    for number in wanted:
        yield number, range(number * size, min((number + 1) * size, source.count))


class _Worker:
    """The part that runs in a process of Ray."""

    def __init__(self, shared: bytes, paths: list[str], threads: int, gpus: float) -> None:
        sys.path += [one for one in paths if one not in sys.path]  # where the driver finds the user's modules
        job, self._source = need("ray", "ray").cloudpickle.loads(shared)
        torch.set_num_threads(threads)
        if gpus:
            job.model.to("cuda")
        self._changes = job.changes
        self._maker = ShardMaker(job)

    def make(self, number: int, given: Any, changes: Sequence[str]) -> list[tuple[int, int]]:
        """Make a shard; the numbers of its batches, and how many rows each gave."""
        self._changes[:] = changes
        told: list[tuple[int, int]] = []
        batches = given if self._source is None else self._source.only(given)
        self._maker.make(number, batches, lambda batch, rows: told.append((batch, rows)))
        return told


class _Task(NamedTuple):
    """A shard that a worker has."""

    worker: Any
    number: int
    given: Any
    changes: Sequence[str]
    attempt: int


def _packed(ray: Any, shared: tuple[Job, LoaderSource | None]) -> bytes:
    """What every worker is given. Raises PlanError where it cannot leave this process."""
    try:
        content: bytes = ray.cloudpickle.dumps(shared)
    except (TypeError, AttributeError, ValueError, PicklingError) as error:
        raise PlanError(
            f"the model, a function, the data set or the place cannot be sent to workers of Ray ({error}): expected "
            "what can be pickled"
        ) from None
    return content


class _Workers:
    """Processes of Ray, each with one shard or none."""

    def __init__(self, ray: Any, engine: OnRay, count: int, shared: tuple[Job, LoaderSource | None]) -> None:
        self._ray = ray
        self._kind = ray.remote(num_cpus=engine.cpus, num_gpus=engine.gpus)(_Worker)
        self._given = ray.put(_packed(ray, shared)), list(sys.path), max(1, int(engine.cpus)), engine.gpus
        self._all = [self._kind.remote(*self._given) for _ in range(count)]
        self._idle = list(self._all)
        self._busy: dict[Any, _Task] = {}  # by Ray's promise of what it returns

    def submit(self, number: int, given: Any, changes: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Give a shard to a worker that has none, as soon as there is one; the batches that were done meanwhile."""
        while not self._idle:
            yield from self._wait()
        self._start(_Task(self._idle.pop(), number, given, changes, 1))

    def finish(self) -> Iterator[tuple[int, int]]:
        """Wait for all; the batches that were done."""
        while self._busy:
            yield from self._wait()

    def stop(self) -> None:
        """End the processes; what they have not committed is lost, and made again by the next start."""
        for worker in self._all:
            self._ray.kill(worker)

    def _start(self, task: _Task) -> None:
        self._busy[task.worker.make.remote(task.number, task.given, task.changes)] = task

    def _wait(self) -> list[tuple[int, int]]:
        """Wait for one shard. Raises what was raised in the worker; a shard whose worker died is given out again."""
        done = self._ray.wait(list(self._busy), num_returns=1)[0][0]
        task = self._busy.pop(done)
        try:
            told: list[tuple[int, int]] = self._ray.get(done)
        except self._ray.exceptions.RayActorError as error:
            if error.actor_init_failed:
                why = str(error).strip().rpartition("\n")[2]
                raise PlanError(
                    f"a worker of Ray could not begin: {why}: expected a model and functions that can be made in "
                    "another process, from modules that are installed there"
                ) from None
            if task.attempt == _ATTEMPTS:
                raise RecordError(
                    f"shard {task.number}: its worker died {_ATTEMPTS} times, and may need more memory than there is: "
                    "expected fewer workers, or fewer batches in a shard"
                ) from None
            self._all.append(self._kind.remote(*self._given))
            self._start(task._replace(worker=self._all[-1], attempt=task.attempt + 1))
            return []
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, GaffError):
                raise error.cause from None
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        self._idle.append(task.worker)
        return told
