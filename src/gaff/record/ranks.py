"""The processes of one run: whether they still have the same weights, and their numbers together. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gaff.errors import RecordError
from gaff.record.finding import Finding

if TYPE_CHECKING:
    from gaff.record.run import Part

Weights = dict[tuple[int, tuple[str, str]], tuple[float, float]]


def divergence(parts: Sequence[Part]) -> list[Finding]:
    """One finding for each model inside DistributedDataParallel whose weights differ between ranks at the same step.

    Means and spreads are compared bit for bit: replicas make the same steps from the same gradients. Certain.
    """
    replicated = {str(one.get("name")) for part in parts for _, one in part.events if one.get("replicated")}
    if len(parts) < 2 or not replicated:
        return []
    weights = [_weights(part, replicated) for part in parts]
    found: dict[str, Finding] = {}
    for (step, key), first in sorted(weights[0].items(), key=lambda item: item[0][0]):
        for part, other in zip(parts[1:], weights[1:], strict=True):
            there = other.get((step, key), first)
            if there != first and not any(math.isnan(one) for one in (*there, *first)) and key[0] not in found:
                found[key[0]] = Finding(
                    rule="rank_divergence",
                    site=key[1],
                    model=key[0],
                    since=step,
                    severity="error",
                    message=f"rank {part.rank} has other weights than rank {parts[0].rank}",
                    cause="a rank that skipped a step or a reduction, or weights that were changed on one rank only",
                    remedy="make the same steps on every rank; change weights before DDP wraps the model, or on all",
                    evidence={"mean": first[0], f"mean on rank {part.rank}": there[0]},
                    last=step,
                    rank=part.rank,
                )
    return list(found.values())


def lost(parts: Sequence[Part]) -> list[Finding]:
    """One finding for each process that has never said that it ended, where another has, later than it stopped."""
    last = {part.rank: max((int(step) for step in part.series.get("step", ())), default=-1) for part in parts}
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
                    cause="the process was killed (out of memory, a signal), or its record could not be written",
                    remedy="look at that process's own output and at the last rows of its flight recorder",
                    evidence={f"last step of rank {rank}": float(last[rank]) for rank in ended},
                    last=last[part.rank] + 1,
                    rank=part.rank,
                )
            )
    return found


def _weights(part: Part, models: set[str]) -> Weights:
    found: Weights = {}
    for at, (step, _) in enumerate(part.tables):
        table = part.table(at)
        if table is None or table.phase != "train" or table.layout.group != "parameters":
            continue
        for row, key in enumerate(table.layout.rows):
            if key[0] in models and key[1].endswith(":param") and not math.isnan(table.columns["count"][row]):
                found[step, key] = table.columns["mean"][row], table.columns["std"][row]
    return found


_SUMMED = ("count", "zeros", "nan", "positive_inf", "negative_inf")
_TOGETHER = (*_SUMMED, "mean", "std", "min", "max", "rms", "norm", "nonfinite")


def together(parts: Sequence[Part], key: tuple[str, str], stat: str, phase: str) -> tuple[list[int], list[float]]:
    """Steps that all processes have looked at, and one number of a site over their parts; a replica counts once."""
    if stat not in _TOGETHER:
        raise RecordError(f"{stat!r} of several processes does not add up: expected one of {', '.join(_TOGETHER)}")
    rows = [_rows(part, key, phase) for part in _distinct(parts, key)]
    steps = sorted(set.intersection(*(set(one) for one in rows))) if rows else []
    return steps, [_merged([one[step] for one in rows], stat) for step in steps]


def _distinct(parts: Sequence[Part], key: tuple[str, str]) -> list[Part]:
    """Those that hold different parts of what passes at a site."""
    found: dict[str, Part] = {}
    for part in parts:
        told = next((one for _, one in part.events if one.get("kind") == "model" and one.get("name") == key[0]), {})
        path, _, port = key[1].rpartition(":")
        places = told.get("places") or {}
        if port in ("param", "grad", "update") or path in places:
            place = str(places.get(path, ""))  # without one every process has the whole of it
        elif told.get("has_parts"):
            raise RecordError(
                f"{key[1]!r}: processes of tensor parallelism share rows: expected one rank, such as rank=0"
            )
        else:
            place = str(part.rank)
        found.setdefault(place, part)
    return list(found.values())


def _rows(part: Part, key: tuple[str, str], phase: str) -> dict[int, dict[str, float]]:
    found = {}
    for at, (step, _) in enumerate(part.tables):
        table = part.table(at)
        row = table.layout.index.get(key) if table is not None and table.phase == phase else None
        if table is not None and row is not None and not math.isnan(table.columns.get("count", {row: math.nan})[row]):
            found[step] = {name: values[row] for name, values in table.columns.items()}
    return found


def _merged(rows: Sequence[dict[str, float]], stat: str) -> float:
    if stat in _SUMMED:
        return sum(row[stat] for row in rows)
    if stat in ("min", "max"):
        return (min if stat == "min" else max)(row[stat] for row in rows)
    if stat == "nonfinite":
        return sum(row[name] for row in rows for name in ("nan", "positive_inf", "negative_inf"))
    filled = [row for row in rows if row["count"] > 0]
    count = sum(row["count"] for row in filled)
    if not count:
        return math.nan
    mean = sum(row["count"] * row["mean"] for row in filled) / count
    square = sum(row["count"] * (row["std"] ** 2 + row["mean"] ** 2) for row in filled)
    if stat == "std":
        return math.sqrt(sum(row["count"] * (row["std"] ** 2 + (row["mean"] - mean) ** 2) for row in filled) / count)
    return {"mean": mean, "rms": math.sqrt(square / count), "norm": math.sqrt(square)}[stat]
