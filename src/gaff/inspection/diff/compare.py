"""``gaff.diff``: two of a kind, from disk or from memory.

What compares traces needs no numpy and what compares runs does, so each is imported when it is wanted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaff.compat import extras
from gaff.errors import PlanError
from gaff.inspection.diff.difference import Difference
from gaff.inspection.saved import load
from gaff.inspection.trace import Trace
from gaff.record.run import Record


def diff(a: Any, b: Any, *, tolerance: float | None = None, pairs: Mapping[str, str] | None = None) -> Difference:
    """Where two runs, or two models, first part: ``print(gaff.diff("runs/a", "runs/b"))``.

    Args:
        a, b: two runs that were watched (folders, or ``gaff.load`` of them), or two traces (files that ``Trace.save``
            wrote, or ``gaff.trace`` of a port and its original, of bfloat16 and float32). Traces are compared by
            digests and sketches of what passed, not only by their moments. A trace runs compiled code eagerly, and a
            note says so: what a compiler makes is seen by ``gaff.capture``.
        tolerance: the relative difference that is allowed. None: what rounding explains, of traces; of runs their own
            noise from look to look.

        pairs: modules of ``a`` that go by another name in ``b``, with all that is inside them:
            ``{"encoder.layer": "blocks"}``.

    Sites are matched by address. Of traces what has no namesake is matched by its weights, then by what it returns,
    then, as a guess, by order and shapes: guesses that differ are dropped where both return the same in the end. Of
    runs members of a list that have moved are matched by their parameters, the rest by order and size. Returns a
    ``Difference``, True where they part: ``first``, ``rows``, ``verdict``, ``to_json()``, ``save("diff.html")``.
    Needs no torch; runs need numpy.

    Raises:
        PlanError: for two things that cannot be compared, and for ``pairs`` that name no module.
        RecordError: for what cannot be read.
    """
    is_number = tolerance is None or (isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool))
    if not is_number or (tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0)):
        raise PlanError(f"tolerance {tolerance!r}: expected a relative difference of 0 or more, such as 1e-5")
    is_named = isinstance(pairs, Mapping) and all(isinstance(one, str) for both in pairs.items() for one in both)
    if pairs is not None and not is_named:
        raise PlanError(f"pairs={pairs!r:.60}: expected a dict, such as {{'encoder': 'backbone'}}")
    (one, name), (other, other_name) = _read(a), _read(b)
    if name == other_name:
        name, other_name = f"A, {name}", f"B, {other_name}"
    names = (name, other_name)
    if isinstance(one, Trace) and isinstance(other, Trace):
        from gaff.inspection.diff.traces import part_traces

        found, why = part_traces(one, other, names, tolerance, pairs or {}), "rounding"
    elif isinstance(one, Record) and isinstance(other, Record):
        extras.need("numpy", "page", for_="a comparison of two runs")
        from gaff.inspection.diff.runs import part_records

        found, why = part_records(one, other, names, tolerance, pairs or {}), "rounding or noise"
    else:
        raise PlanError(f"{name} is a {_kind(one)} and {other_name} a {_kind(other)}: expected two runs, or two traces")
    return replace(found, allowed=why if tolerance is None else f"the tolerance of {tolerance:g}")


def _read(value: Any) -> tuple[Any, str]:
    """What was given as a ``Trace`` or a ``Record``, and a name for it.

    A path is read by ``gaff.load``. Raises PlanError for what is none of these.
    """
    if isinstance(value, Trace):
        return value, f"trace of {value.model}"
    if isinstance(value, Record):
        return value, str(value.path)
    if not isinstance(value, (str, os.PathLike)):
        raise PlanError(f"diff was given a {type(value).__name__}: expected a run, a trace, or the path of one")
    return load(value), str(Path(value))


def _kind(value: Any) -> str:
    kinds = {"Trace": "trace", "Record": "run", "SavedRun": "run", "Store": "harvest"}
    return kinds.get(type(value).__name__, type(value).__name__)
