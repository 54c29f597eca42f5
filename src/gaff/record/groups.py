"""Which processes of a run worked together, and which of them failed first. Needs no torch.

One command may start several groups of processes: a sweep, or a launcher that begins again after a failure. Each has a
rank 0, and what is compared or put together is of one group. Of a process that trains and one that it has started to
train something else the one with fewer steps is a helper: a group of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gaff.errors import RecordError
from gaff.record.part import RankPart


def groups(parts: Sequence[RankPart]) -> list[list[RankPart]]:
    """The processes by the group of torch.distributed that they were in, in the order in which groups began; helpers
    come before them.

    The second process that had a rank among as many belongs to the second group of that size. Processes that are alone
    in theirs, or have none, are one together, as are those of records that do not tell.
    """
    found: dict[tuple[int, int], list[RankPart]] = {}
    before: Counter[tuple[int, int]] = Counter()
    aside = helpers(parts)
    for part in sorted((one for one in parts if one not in aside), key=lambda one: one.generation):
        world = _world(part)
        found.setdefault((world, before[part.own, world] if world else 0), []).append(part)
        before[part.own, world] += 1
    ordered = sorted(found.values(), key=lambda group: min(one.began_at for one in group))
    return [*([one] for one in aside), *(sorted(group, key=lambda one: one.rank) for group in ordered)]


def helpers(parts: Sequence[RankPart]) -> list[RankPart]:
    """The processes that train by themselves beside another one that started them, or that they have started, and that
    has made more steps: what the command is about. Of as many steps the one that was started is the helper."""
    alone = [one for one in parts if one.trains and not _world(one)] if len(parts) > 1 else []
    return [one for one in alone if any(_helps(one, other) for other in alone if other is not one)]


def _helps(one: RankPart, other: RankPart) -> bool:
    if one.was_started_by(other):
        return one.length <= other.length
    return other.was_started_by(one) and one.length < other.length


def _world(part: RankPart) -> int:
    """How many processes were in the group of torch.distributed that this one was in; 0 where it was in none."""
    told = (one.get("world") for _, one in part.events if one.get("kind") == "model")
    return next((one for one in told if isinstance(one, int) and one > 1), 0)


def only_group(parts: Sequence[RankPart]) -> list[RankPart]:
    """All of the processes, which must be of one group; raises RecordError where they are of several."""
    found = groups(parts)
    if len(found) > 1:
        told = "; ".join(str([part.rank for part in group]) for group in found)
        raise RecordError(
            f"the processes of this run were in {len(found)} groups ({told}): what they tell is not "
            f"put together; expected one process, such as rank={found[-1][0].rank}"
        )
    return found[0] if found else []


def failed_first(parts: Sequence[RankPart], head: Mapping[str, Any]) -> RankPart | None:
    """The process whose error ended the run: of the last group that whose end came first; None where none has one.

    When one process is gone the others lose their connection to it, and end with errors as well.
    """
    last = [part for group in groups(parts)[-1:] for part in group]
    failed = [part for part in last if error_of(part)]
    gone = head.get("gone")
    which = gone.get("rank") if isinstance(gone, Mapping) else None
    return min(failed, key=lambda part: (part.ended_at, part.own != which), default=None)


def error_of(part: RankPart) -> str:
    """The error with which a process ended, in one line; empty where it ended well, or has not told of its end."""
    error = (part.latest("end") or {}).get("error")
    return error.splitlines()[0].rstrip(": ") if isinstance(error, str) and error else ""


def left_before(part: RankPart, parts: Sequence[RankPart]) -> RankPart | None:
    """Another process of the group of ``part``, which failed, that had ended before it, at an earlier step and well."""
    group = next(group for group in groups(parts) if part in group)
    early = [one for one in group if one is not part and one.latest("end") and not error_of(one)]
    return next((one for one in early if one.ended_at < part.ended_at and _end(one) <= _end(part)), None)


def _end(part: RankPart) -> int:
    """The step at which a process ended."""
    return next((step for step, one in reversed(part.events) if one.get("kind") == "end"), 0)
