"""Where the record of a watched process lies: its folder, its file, and what surrounds the run.

A folder is one run; each process of it has a file of its own in there (``rank0.gaff`` and so on), and the head tells
the version of the format.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch

from gaff.errors import RecordError
from gaff.record.run import ENDING, HEAD, VERSION
from gaff.training.watch.settings import Settings


def prepare(settings: Settings) -> None:
    """Make the folder of the record, with its head.

    Raises RecordError where the folder cannot be written or holds a run already. It does if there is a file of this
    rank in it: other processes of the same run may have come before this one.
    """
    folder = settings.out
    if folder is None:
        return
    try:
        if folder.exists() and not folder.is_dir():
            raise RecordError(f"{str(folder)!r} is a file: expected the name of a new folder")
        own = f"rank{settings.rank}"  # and not that of rank 10 for rank 1
        if [*folder.glob(f"{own}{ENDING}"), *folder.glob(f"{own}-*{ENDING}")]:
            raise RecordError(f"{str(folder)!r} holds a run already: expected a new folder; name another, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        head = folder / HEAD
        if not head.exists():
            head.write_text(json.dumps({"version": VERSION}))
    except OSError as error:
        raise RecordError(f"{str(folder)!r} cannot be written: {error.strerror}") from None


def log_path(settings: Settings) -> Path | None:
    """The name of a new file for this process, by its rank, and by its process number where one of that rank is there.

    None where no record is kept. The rank is torch's as it is now, for the processes may have met since the settings
    were made. A process that another one has started without a rank of its own leaves the plain name to that one.
    """
    if settings.out is None:
        return None
    distributed = torch.distributed
    known = distributed.is_available() and distributed.is_initialized()
    rank = distributed.get_rank() if known else settings.rank
    path = settings.out / f"rank{rank}{ENDING}"
    is_child = not known and multiprocessing.parent_process() is not None
    return settings.out / f"rank{rank}-{os.getpid()}{ENDING}" if is_child or path.exists() else path


def surroundings(settings: Settings) -> dict[str, Any]:
    """What a run began with: torch's version and threads, whether there is a GPU, rank, and how it is watched; the
    number of this process, and those of the watched processes of the command that it came from."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available(),
            "rank": settings.rank, "budget": settings.budget, "every": settings.every,
            "process": os.getpid(), "started_by": settings.started_by}  # fmt: skip


def memory() -> dict[str, int]:
    """The peaks of memory in bytes: of the process, and of what torch has allocated on the GPU, if CUDA is in use.

    That of the process is what Linux tells; elsewhere it is left out.
    """
    told = {}
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            told["process"] = int(line.split()[1]) * 1024
    if torch.cuda.is_initialized():
        told["cuda"] = torch.cuda.max_memory_allocated()
    return told
