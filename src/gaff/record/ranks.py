"""The processes of one run: whether they still have the same weights, and their numbers together. Needs no torch.

Everything here is worked out from the logs by whoever reads them: no process of the run waits for another to be
compared with it, and a process that is gone is told of by the others' logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from gaff.errors import RecordError
from gaff.record.finding import Finding
from gaff.record.statistics import BY_NAME, STATISTICS, merged, value_of

if TYPE_CHECKING:
    from gaff.record.part import RankPart

_KILLED = "the process was killed (out of memory, a signal), or its record could not be written"
OF_MODELS = ("model", "spread")  # events that tell how a model lies in the processes; the latter where that has changed
_LOOK = "look at that process's own output and at the last rows of its flight recorder"
# severity, cause and remedy where replicas have other weights: where gradients are reduced, and where they are not
_DIVERGED = ("error", "a rank that skipped a step or a reduction, or weights that were changed on one rank only",
             "make the same steps on every rank; change weights before DDP wraps the model, or on all")  # fmt: skip
_UNREDUCED = ("warning", "gradients are not reduced, as inside no_sync() or of a model that is called past DDP; or "
              "weights are averaged at steps that were not looked at, which is meant",
              "call the model that DDP returned, and leave no_sync() for the last backward pass of each step; where "
              "weights are averaged from time to time, look at such a step (every=)")  # fmt: skip
_LEAST_STEPS = 8
_LATE = 0.1  # of a step
_OWN = "rank "  # begins the place of what a process has for itself alone
_COMPARED = ("count", "mean", "std", "min", "max")
_OF_WHOLES = ("zero_gradient", "vanishing", "sparse_gradient", "never_updated", "update_small")

Rows = dict[int, dict[str, float]]  # the stored numbers of a site by step and name
Weights = dict[tuple[int, tuple[str, str]], tuple[float, float]]


def divergence(parts: Sequence[RankPart]) -> list[Finding]:
    """One finding for each model inside DistributedDataParallel whose weights differ between ranks at the same step.

    Means and spreads are compared bit for bit: replicas make the same steps from the same gradients. Each is compared
    with the first of the ranks that it is a replica of. Certain, and an error, where gradients are reduced; where these
    always differ, too, weights may be averaged at steps that were not looked at. Left out are weights that are alike
    again later, as those that are averaged from time to time, and parameters that each process has for itself.
    """
    replicas = {part.rank: _replicas(part) for part in parts}
    if len(parts) < 2 or not any(replicas.values()):
        return []
    numbers = {part.own: part.rank for part in parts}  # in the record, by rank
    weights = {part.rank: _numbers_of(part, set(replicas[part.rank]), "param") for part in parts}
    gradients = {part.rank: _numbers_of(part, set(replicas[part.rank]), "grad") for part in parts}
    found: list[tuple[tuple[str, str], Finding]] = []
    averaged: set[tuple[str, str]] = set()
    for part in parts[1:]:
        differs: dict[tuple[str, str], Finding] = {}
        for (step, key), there in sorted(weights[part.rank].items(), key=lambda item: item[0][0]):
            known = (numbers[own] for own in replicas[part.rank].get(key[0], ()) if own in numbers)
            against = next(known, part.rank)
            first = weights[against].get((step, key))
            if first is None:  # only one of them has looked at this step
                continue
            if there == first:
                averaged |= differs.keys() & {key}
            elif not any(math.isnan(one) for one in (*there, *first)) and key not in differs:
                is_reduced = _is_reduced(key[0], gradients[part.rank], gradients.get(against, {}))
                severity, cause, remedy = _DIVERGED if is_reduced else _UNREDUCED
                differs[key] = Finding(
                    rule="rank_divergence",
                    site=key[1],
                    model=key[0],
                    since=step,
                    severity=severity,
                    message=f"rank {part.rank} has other weights than rank {against}",
                    cause=cause,
                    remedy=remedy,
                    evidence={"mean": first[0], f"mean on rank {part.rank}": there[0]},
                    last=step,
                    rank=part.rank,
                )
        found += differs.items()
    lasting = sorted((one for key, one in found if key not in averaged), key=lambda one: one.since)
    return list({one.model: one for one in reversed(lasting)}.values())


def _is_reduced(model: str, one: Weights, other: Weights) -> bool:
    """Whether two replicas have ever told the same numbers of a gradient, as they do where it is reduced; also where
    they have told of none at the same step."""
    both = [which for which in one.keys() & other.keys() if which[1][0] == model and one[which][1] > 0]
    return not both or any(one[which] == other[which] for which in both)


def _replicas(part: RankPart) -> dict[str, list[int]]:
    """By name of a model of a process: the ranks that have replicas of it, of those inside DistributedDataParallel."""
    told = {str(one.get("name")): one.get("replicated") for _, one in part.events}
    lists = {name: ranks for name, ranks in told.items() if isinstance(ranks, list) and ranks}
    return {name: sorted(one for one in ranks if isinstance(one, int)) for name, ranks in lists.items()}


def lost(parts: Sequence[RankPart], head: Mapping[str, Any]) -> list[Finding]:
    """One finding for each process that has never said that it ended, where another has, later than it stopped.

    ``head``: what ``gaff watch`` knows of the run; it has seen which process was gone first, before a launcher stopped
    the others.
    """
    first = _gone_first(parts, head)
    if first is not None:
        return [first]
    last = {part.rank: _last(part) for part in parts}
    ended = [part.rank for part in parts if part.latest("end") is not None]
    found = []
    for part in parts:
        if ended and part.rank not in ended and last[part.rank] < max(last[rank] for rank in ended):
            found.append(
                Finding(
                    rule="rank_lost",
                    site="",
                    model="",
                    since=last[part.rank] + 1,
                    severity="error",
                    message=f"rank {part.rank} wrote nothing after step {last[part.rank]}, others went on",
                    cause=_KILLED,
                    remedy=_LOOK,
                    evidence={f"last step of rank {rank}": float(last[rank]) for rank in ended},
                    last=last[part.rank] + 1,
                    rank=part.rank,
                )
            )
    return found


def slow(parts: Sequence[RankPart]) -> list[Finding]:
    """One finding for each process that gets to what it has to wait for others at later than they do, nearly always.

    Compared are the seconds from the end of one step to where the next begins its first forward pass and, with
    DistributedDataParallel, its first backward pass, for no process waits for another before that. Where forward
    passes gather weights only the forward tells. Chosen: at least eight steps, the first two apart; later by a tenth
    of a step in the middle of them, and last in four of five.
    """
    told = [one for part in parts for _, one in part.events if one.get("kind") in OF_MODELS]
    names = ["to_forward"] if any(one.get("places") for one in told) else ["to_forward", "to_backward"]
    if len(parts) < 2 or not any(one.get("places") or one.get("replicated") for one in told):
        return []
    found: dict[int, Finding] = {}
    for name in names:
        times = [_times(part, name) for part in parts]
        steps = sorted(set.intersection(*(set(one) for one in times)))[2:]
        if len(steps) < _LEAST_STEPS:
            continue
        step_s = median(_times(parts[0], "seconds").get(step, math.nan) for step in steps)
        for part, own in zip(parts, times, strict=True):
            others = {step: median(one[step] for one in times if one is not own) for step in steps}
            late_s = median(own[step] - others[step] for step in steps)
            is_last = [own[step] == max(one[step] for one in times) for step in steps]
            if late_s > _LATE * step_s and sum(is_last) >= 0.8 * len(steps) and part.rank not in found:
                found[part.rank] = _slow(part.rank, name.removeprefix("to_"), late_s, late_s / step_s, steps)
    return list(found.values())


def _slow(rank: int, what: str, late_s: float, share: float, steps: Sequence[int]) -> Finding:
    """The finding of one process, late at ``what`` (forward or backward) by ``late_s``, a ``share`` of a step."""
    return Finding(
        rule="rank_slow",
        site="",
        model="",
        since=steps[0],
        severity="warning",
        message=f"rank {rank} begins its {what} pass {1e3 * late_s:.3g} ms after the others, {share:.0%} of a step: "
        "they wait for it",
        cause="a slower device, slower loading of data, larger batches, or work that only this rank does",
        remedy=f"look at what rank {rank} does before its {what} pass, and at what else runs on its machine",
        evidence={"late_s": late_s, "share": share, "steps": float(len(steps))},
        last=steps[-1],
        rank=rank,
    )


def same_batches(parts: Sequence[RankPart]) -> list[Finding]:
    """One finding for each process that was given the very batches of another one at the same steps, by checksums.

    Asked of replicas of one model (DistributedDataParallel), of at least eight steps that both have looked at, with two
    batches or more among them: the ranks then learn the same, and an epoch is as many times as long. Certain.
    """
    given = {
        part.own: {step: one["fingerprint"] for step, one in part.events if "fingerprint" in one} for part in parts
    }
    found = []
    for part in parts:
        others = {rank for ranks in _replicas(part).values() for rank in ranks if rank < part.own and rank in given}
        for other in sorted(others):
            steps = sorted(given[part.own].keys() & given[other].keys())
            own = [given[part.own][step] for step in steps]
            if len(steps) >= _LEAST_STEPS and len(set(own)) > 1 and own == [given[other][step] for step in steps]:
                rank = next(one.rank for one in parts if one.own == other)
                found.append(_same(part.rank, rank, steps))
                break
    return found


def _same(rank: int, other: int, steps: Sequence[int]) -> Finding:
    """The finding of a process that is given what an ``other`` one is given, at those steps."""
    return Finding(
        rule="rank_same_batches",
        site="",
        model="",
        since=steps[0],
        severity="warning",
        message=f"rank {rank} is given the same batches as rank {other}, at all {len(steps)} steps that both looked at",
        cause="a DataLoader without a DistributedSampler, or a data set that each rank shuffles by the same seed",
        remedy="DataLoader(..., sampler=DistributedSampler(data)), and sampler.set_epoch(epoch) in each epoch",
        evidence={"steps": float(len(steps))},
        last=steps[-1],
        rank=rank,
    )


def _times(part: RankPart, name: str) -> dict[int, float]:
    """A series of one process by step, without the steps at which it is missing."""
    rows = zip(part.series.get("step", ()), part.series.get(name, ()), strict=False)
    return {int(step): value for step, value in rows if not math.isnan(value)}


def _last(part: RankPart) -> int:
    """The last step that a process has written anything of; -1 where there is none."""
    looks = (step for step, one in part.events if one.get("kind") == "look" and one.get("phase") == "train")
    return max([-1, *looks, *(int(step) for step in part.series.get("step", ()))])


def _gone_first(parts: Sequence[RankPart], head: Mapping[str, Any]) -> Finding | None:
    """The process that ``gaff watch`` has seen end before the others, as a finding.

    None where it saw none, or where that process has written its own end, which says more: of its error, or that there
    was none.
    """
    gone = head.get("gone")
    part = next((one for one in parts if isinstance(gone, dict) and one.own == gone.get("rank")), None)
    if part is None or part.latest("end") is not None:
        return None
    last = _last(part)
    how = (gone.get("how") if isinstance(gone, dict) else None) or "it was not seen how"
    return Finding(
        rule="rank_lost",
        site="",
        model="",
        since=last + 1,
        severity="error",
        message=f"rank {part.rank} ended first ({how}), and the launcher stopped the others",
        cause=_KILLED,
        remedy=_LOOK,
        evidence={},
        last=last + 1,
        rank=part.rank,
    )


def _numbers_of(part: RankPart, models: set[str], port: str) -> Weights:
    """Mean and standard deviation at one port of each parameter of these models, by step and key: replicas are alike
    there."""
    found: Weights = {}
    places = _places(part)
    for at, (step, _) in enumerate(part.tables):
        table = part.table(at)
        if table is None or table.phase != "train" or table.layout.group != "parameters":
            continue
        for row, key in enumerate(table.layout.rows):
            is_own = (key[0], key[1].rpartition(":")[0]) in places
            if (
                key[0] in models
                and not is_own
                and key[1].endswith(f":{port}")
                and not math.isnan(table.columns["count"][row])
            ):
                found[step, key] = table.columns["mean"][row], table.columns["std"][row]
    return found


def of_wholes(found: Sequence[Finding], parts: Sequence[RankPart]) -> list[Finding]:
    """Findings without those that a process has of its part of a parameter, and others have not of theirs.

    Meant are those of rules that speak of all elements or of their size: a part may be zero where the whole is not.
    """
    told: dict[tuple[str, str, str], set[int]] = {}
    for one in found:
        told.setdefault((one.rule, one.model, one.site), set()).add(one.rank)

    def is_of_whole(one: Finding) -> bool:
        key = (one.model, one.site)
        place = one.model, one.site.rpartition(":")[0]
        held = [_places(part).get(place, _OWN) for part in parts]
        if one.rule not in _OF_WHOLES or all(where.startswith(_OWN) for where in held):
            return True
        holders = {part.rank for part in parts if any(row["count"] for row in _rows(part, key, "train").values())}
        return holders <= told[one.rule, one.model, one.site]

    return [one for one in found if is_of_whole(one)]


def origins_first(found: Sequence[Finding]) -> list[Finding]:
    """Findings in their order, but those about a NaN after another of the same step that knows where it began.

    A NaN of one process is in the gradients of all that average them. What knows its origin says on which rank it is.
    """

    def knows(one: Finding) -> bool:
        return one.rule == "nonfinite" and bool(one.evidence.keys() - {"kept"})  # the file of a batch is no origin

    known = {one.since for one in found if knows(one)}
    told = [replace(one, message=f"{one.message}, on rank {one.rank}") if knows(one) else one for one in found]
    return sorted(told, key=lambda one: one.rule == "nonfinite" and not knows(one) and one.since in known)


def together(parts: Sequence[RankPart], key: tuple[str, str], stat: str, phase: str) -> tuple[list[int], list[float]]:
    """Steps that all processes have looked at, and one number of a site over their parts; a replica counts once.

    Raises RecordError for a number that does not add up, such as a learning rate, and for rows that processes share.
    """
    if stat not in BY_NAME or not BY_NAME[stat].merge:
        known = ", ".join(one.name for one in STATISTICS if one.merge)
        raise RecordError(f"{stat!r} of several processes does not add up: expected one of {known}")
    _need_same_steps(parts)
    rows = [_to_scale(one, part, key, phase) for part, one in _distinct(parts, key, phase)]
    steps = sorted(set.intersection(*(set(one) for one in rows))) if rows else []
    return steps, [merged([one[step] for one in rows], stat) for step in steps]


def holds_parts(parts: Sequence[RankPart]) -> bool:
    """Whether processes hold parts of parameters, so that what each tells of its gradients is a share."""
    return any(map(_places, parts))


def scalar_together(parts: Sequence[RankPart], name: str, rank: str) -> tuple[list[int], list[float]]:
    """Steps that all processes have looked at, and the L2 norm of all gradients, of which each part counts once.

    Infinite where any process has met an element that is not finite, as ``grad_norm`` of one process is. Raises
    RecordError for another ``name`` than that, or another ``rank`` than "all".
    """
    if rank != "all" or name != "grad_norm":
        ranks = [part.rank for part in parts]
        raise RecordError(f"{name!r} with rank={rank!r}: expected one of {ranks}; 'all' is for 'grad_norm'")
    _need_same_steps(parts)
    told = [_times(part, "grad_norm") for part in parts]
    steps = sorted(set.intersection(*(set(one) for one in told))) if told else []
    squares = dict.fromkeys(steps, 0.0)
    known: dict[tuple[int, tuple[str, str], str], tuple[int, float]] = {}  # of several that hold the same one counts
    for part in parts:
        places, run = _places(part), None
        for at, (own, _) in enumerate(part.tables):
            table = part.table(at)
            if table is None or table.phase != "train":
                continue
            if table.layout.group != "parameters":
                run = own
                continue
            step = own if run is None else run  # an optimizer counts steps of its own
            if step not in squares:
                continue
            for row, key in enumerate(table.layout.rows):
                path, _, port = key[1].rpartition(":")
                norm = (value_of(table.columns, row, "norm") or 0.0) if port == "grad" else 0.0
                if norm > 0:  # NaN where a process has no element
                    place = step, key, places.get((key[0], path), "")
                    owner, first = known.setdefault(place, (part.rank, norm))
                    if norm != first:
                        raise _no_replica(key[1], owner, part.rank)
                    squares[step] += norm * norm if owner == part.rank else 0.0
    is_odd = {step for step in steps if any(math.isinf(one[step]) for one in told)}
    return steps, [math.inf if step in is_odd else math.sqrt(squares[step]) for step in steps]


def _need_same_steps(parts: Sequence[RankPart]) -> None:
    """Raises RecordError where one step of the run is another one of the optimizer's in different processes.

    Something was trained on one of them alone: numbers of different steps would be put together.
    """
    counted = [(part.rank, _own_steps(part)) for part in parts]
    for rank, steps in counted[1:]:
        first, known = counted[0]
        step = next((one for one in sorted(steps.keys() & known.keys()) if steps[one] != known[one]), None)
        if step is not None:
            raise RecordError(
                f"step {step} of the run is step {known[step]} of an optimizer on rank {first} and step {steps[step]} "
                f"on rank {rank}, where something else was trained as well: expected one rank, such as rank={first}"
            )


def _own_steps(part: RankPart) -> dict[int, int]:
    """By step of the run the number that the optimizer of its parameters counts, of looks that tell of both."""
    found: dict[int, int] = {}
    run = None
    for at, (step, _) in enumerate(part.tables):
        table = part.table(at)
        if table is not None and table.phase == "train":
            is_of_parameters = table.layout.group == "parameters"
            if is_of_parameters and run is not None:
                found.setdefault(run, step)
            run = run if is_of_parameters else step
    return found


def _no_replica(site: str, rank: int, other: int) -> RecordError:
    return RecordError(
        f"{site!r}: ranks {rank} and {other} tell different numbers of it, and neither says which part of it it holds: "
        "these are no replicas of one tensor (modules of one name in several stages, a sum that is still due); "
        f"expected one rank, such as rank={rank}"
    )


def _places(part: RankPart) -> dict[tuple[str, str], str]:
    """By model and path of a parameter which part of it a process has; those that it has whole are not there."""
    told = [one for _, one in part.events if one.get("kind") in OF_MODELS]
    return {
        (str(one.get("name")), path): str(place) for one in told for path, place in (one.get("places") or {}).items()
    }


def _distinct(parts: Sequence[RankPart], key: tuple[str, str], phase: str) -> list[tuple[RankPart, Rows]]:
    """A process, and the numbers that it tells, for each different part of what passes at a site.

    Of a parameter the place of its part tells, and replicas hold the same one. Of an activation every process sees the
    rows of its own examples; with tensor parallelism the processes of one group see the same rows. Where all of a group
    tell the same numbers they hold the same tensor, and one of them counts; parts of a tensor are refused.
    """
    found: dict[str, tuple[RankPart, Rows]] = {}
    for part in parts:
        rows = _rows(part, key, phase)
        events = [one for _, one in part.events if one.get("kind") in OF_MODELS and one.get("name") == key[0]]
        told = events[-1] if events else {}
        path, _, port = key[1].rpartition(":")
        places = told.get("places") or {}
        if port in ("param", "grad", "update") or path in places:
            place = str(places.get(path, ""))  # without one every process has the whole of it
            if place in found and not _tell_the_same(found[place][1], rows):
                raise _no_replica(key[1], found[place][0].rank, part.rank)
        else:
            place = str(told.get("same_rows") or part.rank)
            if place in found and not _is_one_tensor(found[place][1], rows):
                raise RecordError(
                    f"{key[1]!r}: processes of tensor parallelism share rows, and each tells the numbers of a part of "
                    "it: expected one rank, such as rank=0"
                )
        found.setdefault(place, (part, rows))
    return list(found.values())


def _to_scale(rows: Rows, part: RankPart, key: tuple[str, str], phase: str) -> Rows:
    """Numbers of updates counted by how many elements a process holds: of a large part it has told only a sample."""
    path, _, port = key[1].rpartition(":")
    if port != "update":
        return rows
    size = max((one["count"] for one in _rows(part, (key[0], f"{path}:param"), phase).values()), default=0.0)
    return {step: {**one, "count": max(size, one["count"])} for step, one in rows.items()}


def _is_one_tensor(one: Rows, other: Rows) -> bool:
    """Whether two processes, of which one may be compared with itself, have told numbers of the same tensor.

    Compared are the steps that both have looked at. Parts of a tensor may be alike where all its elements are: of such
    numbers nobody can tell.
    """
    is_clear = any(one[step]["min"] < one[step]["max"] for step in one.keys() & other.keys())
    return one is other or (is_clear and _tell_the_same(one, other))


def _tell_the_same(one: Rows, other: Rows) -> bool:
    """Whether two processes tell the same numbers of a site at the steps that both have looked at."""

    def values(rows: Rows) -> list[float]:
        return [rows[step].get(name, math.nan) for step in both for name in _COMPARED]

    both = sorted(one.keys() & other.keys())
    pairs = zip(values(one), values(other), strict=True)
    return all(here == there or (math.isnan(here) and math.isnan(there)) for here, there in pairs)


def _rows(part: RankPart, key: tuple[str, str], phase: str) -> Rows:
    """The stored numbers of one site in one phase of one process, by step and name."""
    found = {}
    for at, (step, _) in enumerate(part.tables):
        table = part.table(at)
        row = table.layout.index.get(key) if table is not None and table.phase == phase else None
        if table is not None and row is not None and not math.isnan(table.columns.get("count", {row: math.nan})[row]):
            found[step] = {name: values[row] for name, values in table.columns.items()}
    return found
