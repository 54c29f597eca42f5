"""Whether the processes of one run still have the same weights. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
