"""What the page of a training carries: of one run or of several, from their records.

``run_of`` makes one entry of the head's ``runs``; its arrays go into ``Chunks``, and the entry holds their numbers.
What is there, and under which name, is what ``types.ts`` of the page's script declares. How many columns a table may
have follows from the number of sites, so that a page stays near 10 MB. A damaged record may hold anything in place of a
text or a list: it is made one here, so that the script need not ask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gaff.errors import RecordError
from gaff.record.cube import WHEN, Cache, Cube, read_cubes
from gaff.record.run import Record
from gaff.record.sample import Key, address_of
from gaff.record.statistics import STATISTICS
from gaff.record.summary import summary_of
from gaff.version import __version__
from gaff.views import run_text
from gaff.views.page.batches import Words, kept_batches
from gaff.views.page.chunks import Chunks
from gaff.views.page.document import Document

_CELLS = 600_000  # sites times columns: what fits into a page of 10 MB
_MOST_COLUMNS, _LEAST_COLUMNS = 512, 64
_MOST_MARKS, _LEAST_MARKS = 128, 16  # looks whose magnitudes are shown
_TOGETHER = 32  # sites whose magnitudes are in one chunk
_MOST_STEPS = 4000  # of a curve, before it is drawn by its lowest and highest values
_MOST_ODD = 8  # steps without a finite loss that are named
_TINY = 1e-6  # of the median gradient of all parameters
_NOTHING = 1e-10  # of a weight: less moves it by no digit, whatever the learning rate

_KEPT = {one.name: one.ends for one in STATISTICS if one.ends}


def document(records: Sequence[Record], *, rank: int = 0, words: Words | None = None) -> Document:
    """The page of one or several runs; tables are of one process, ``rank``, of each.

    ``words``: what the tokens of kept batches are, such as ``tokenizer.convert_ids_to_tokens``. The room that a page
    has is divided evenly among the runs. Raises RecordError for tables that are damaged.
    """
    chunks = Chunks()
    many = max(1, len(records))
    names = run_text.told_apart([record.path.resolve() for record in records])
    runs = [
        {**run_of(record, chunks, rank=rank, share=1 / many, words=words), "name": name}
        for record, name in zip(records, names, strict=True)
    ]
    title = ", ".join(run["name"] for run in runs)
    return Document({"kind": "training", "title": title, "gaff": __version__, "runs": runs}, chunks)


def run_of(  # the range of steps and the width are what a zoom asks for
    record: Record,
    chunks: Chunks,
    *,
    rank: int = 0,
    share: float = 1.0,
    begin: int = 0,
    end: int | None = None,
    cache: Cache | None = None,
    words: Words | None = None,
) -> dict[str, Any]:
    """Everything of one run, as JSON holds it; its arrays are added to ``chunks``.

    ``rank``: whose tables are shown, the first process's where there is none of this rank; ``share``: of the room that
    a page has; ``begin``, ``end``: a range of steps, whose columns are then finer; ``cache``: columns of an earlier
    call for the same record, which is read on instead of anew; ``words``: as of ``document``.
    """
    rank = rank if rank in record.ranks else record.ranks[0]
    part = record.part(rank)
    known = {key: name for name, key in record.names().items()}
    sites = max(1, len(known))
    chunks.is_large = sites * max(1, len(part.tables)) > 1 << 17
    columns = _within(_CELLS * share / sites, _LEAST_COLUMNS, _MOST_COLUMNS)
    marks = _within(_CELLS * share / sites / 4, _LEAST_MARKS, _MOST_MARKS)
    cubes = read_cubes(part, columns=columns, marks=marks, begin=begin, end=end, cache=cache)
    keys = list(dict.fromkeys(key for cube in cubes for key in cube.keys))
    number = {key: at for at, key in enumerate(keys)}
    return {
        **_facts(record, rank),
        "sites": [[key[0], key[1], known.get(key, key[1])] for key in keys],
        "groups": [_group(cube, number, chunks) for cube in cubes],
        "scalars": _scalars(record, rank, chunks),
        "models": [_model(one) for _, one in record.events("model", rank)],
        "gradients": _gradients(record, rank, cubes),
        "flight": [_flight(one) for one in _last_steps(record, rank)],
        "batches": kept_batches(record.path, chunks, words),
        "changes": [
            {"step": step, "what": _text(one.get("what")), "lines": [_text(line) for line in _list(one.get("lines"))]}
            for step, one in record.events("changes", rank)
        ],
    }


def _model(told: Mapping[str, Any]) -> dict[str, Any]:
    """Name, class, and path and class of each module, whatever a damaged file says."""
    modules = [one for one in _list(told.get("modules")) if isinstance(one, list) and len(one) == 2]
    modules = [one for one in modules if isinstance(one[0], str)]
    return {
        "name": _text(told.get("name")),
        "class": _text(told.get("class")),
        "compiled": bool(told.get("compiled")),
        "modules": [[address_of(_text(path), "param").removesuffix(":param"), _text(kind)] for path, kind in modules],
    }


def _last_steps(record: Record, rank: int) -> list[dict[str, Any]]:
    """The last steps, looked at or not, from the flight recorder's ring.

    Where the ring cannot be read they are those that the log holds, as they were when something was last found.
    """
    try:
        return [one.to_dict() for one in record.flight(rank)]
    except RecordError:
        told = record.describe("flight", rank).get("rows")
        return [one for one in _list(told) if isinstance(one, dict)]


def _flight(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a step, whatever a damaged file says."""
    numbers = {name: row.get(name) for name in ("step", "seconds", "lr", "scale", "samples")}
    return {
        **{name: value if isinstance(value, (int, float)) else None for name, value in numbers.items()},
        "batch": _text(row.get("batch")),
        "losses": _losses(row.get("losses")),
    }


def _within(value: float, least: int, most: int) -> int:
    """``value`` as a whole number, between ``least`` and ``most``."""
    return max(least, min(most, int(value)))


_LEVELS = {"failed": "error", "wrong": "error", "suspicious": "warning", "not enough": "info", "healthy": "fine"}


def _facts(record: Record, rank: int) -> dict[str, Any]:
    """What the head tells of a run apart from numbers over time: verdict, findings, notes, progress."""
    findings = record.findings
    verdict = record.verdict
    begin, progress = record.describe("begin", rank), record.describe("progress", rank)
    looks = [step for step, one in record.events("look", rank) if one.get("phase") == "train"]
    notes = list(record.notes)
    if len(record.ranks) > 1:
        notes.append(f"{len(record.ranks)} processes: tables are of rank {rank}; findings are of all")
    return {
        "name": record.path.resolve().name,
        "path": str(record.path),
        "verdict": run_text.verdict(record),
        "level": _LEVELS[verdict.state],
        "steps": record.steps,
        "complete": record.is_complete,
        "error": _text(record.describe("end", rank).get("error")),
        "about": _about(record, rank),
        "overhead": record.overhead,
        "rank": rank,
        "ranks": record.ranks,
        "looks": len(set(looks)),
        "lastLook": max(looks, default=-1),
        "command": _command(record.head.get("command")),
        "began": _date(record.head.get("began")),
        "facts": _plain({**begin, **_flat(progress)}),
        "notes": notes,
        "findings": [{**one.to_dict(), "address": one.address, "numbers": one.numbers} for one in findings],
    }


def _about(record: Record, rank: int) -> dict[str, Any]:
    """The verdict in its parts, and the run in a few facts; ``evaluated``: name, step and loss of each evaluation."""
    verdict, told = record.verdict, summary_of(record, rank)
    return {
        "state": verdict.told_state,
        "cause": verdict.cause,
        "rule": verdict.name,
        "evidence": list(verdict.evidence),
        "remedy": verdict.remedy,
        "since": verdict.since,
        "others": [[one.name, one.text, one.certainty] for one in verdict.alternatives],
        "next": [list(one) for one in run_text.next_commands(record)],
        "seconds": told.seconds,
        "stepSeconds": told.step_s,
        "device": told.device,
        "ended": told.ended,
        "hasFailed": told.has_failed,
        "cost": str(told.cost),
        "spent": told.cost.share,
        "steady": told.cost.steady,
        "settings": list(map(list, told.settings.items())),
        "saved": [[step, file] for step, file in record.saved(rank)],
        "ends": {
            name: f"{values[-1]:.4g}"
            for name in record.scalars
            if name.startswith("loss:") and (values := record.scalar(name, rank).values)
        },
        "evaluated": [
            [str(name), step, value, f"{value:.4g}"]
            for step, one in record.events("evaluated", rank)
            for name, value in _losses(one.get("losses")).items()
        ],
    }


def _losses(told: Any) -> dict[str, float]:
    """Losses by name, whatever a damaged file says."""
    known = told if isinstance(told, dict) else {}
    return {str(name): value for name, value in known.items() if isinstance(value, (int, float))}


def _group(cube: Cube, number: Mapping[Key, int], chunks: Chunks) -> dict[str, Any]:
    """One cube as the page has it: which sites and steps its rows and columns are of, and the chunks of its numbers.

    ``number``: place of each site in the list of all sites. Where a column is of several looks, as many ends of a
    statistic are carried as ``gaff.record.statistics`` declares for it; where each is of one look they are equal, and
    one is carried. Magnitudes are dealt into chunks of 32 sites, for a view shows those of one site, while a map needs
    all rows of a number.
    """
    stats: dict[str, dict[str, int]] = {}
    for name, ends in _KEPT.items():
        if name not in cube.highest or np.isnan(cube.highest[name]).all():
            continue
        if name == "nonfinite" and not np.nanmax(cube.highest[name]):
            continue
        kept = ends if cube.is_bucketed else ends[:1]
        pack = chunks.numbers if name == "nonfinite" else chunks.log16  # counts are told as they are
        stats[name] = {end: pack(getattr(cube, end)[name]) for end in kept}
        if cube.is_bucketed and "latest" not in kept:
            stats[name]["now"] = pack(_last_known(cube.latest[name]))
    shares = cube.magnitudes
    places = range(0, len(cube.keys), _TOGETHER) if shares.shape[-1] else ()
    return {
        "group": cube.group,
        "phase": cube.phase,
        "sites": [number[key] for key in cube.keys],
        "first": cube.first.tolist(),
        "last": cube.last.tolist(),
        "stats": stats,
        "marks": cube.marks.tolist(),
        "together": _TOGETHER,
        "magnitudes": [chunks.shares(shares[at : at + _TOGETHER]) for at in places],
    }


def _last_known(values: Any) -> Any:
    """Of each row the last number that is known, as one column."""
    known = ~np.isnan(values)
    at = values.shape[1] - 1 - np.argmax(known[:, ::-1], axis=1)
    return values[np.arange(len(values)), at][:, None]


def _scalars(record: Record, rank: int, chunks: Chunks) -> dict[str, Any]:
    """Curves of every step: rows of ``chunk`` are the steps and then each name, of ``low`` the lowest values.

    More than 4,000 steps are joined: ``chunk`` then holds the last step and the highest value of each stretch, ``mean``
    the mean of what is finite. ``odd``: of losses that
    are missing or not finite now and then, how often and the first steps at which they were.
    """
    series = record.part(rank).series
    names = [name for name in series if name != "step"]
    if not names or not len(series["step"]):
        return {"names": []}
    table = np.array([series["step"], *(series[name] for name in names)], np.float64)
    losses = {name: table[0][~np.isfinite(table[at])] for at, name in enumerate(names, 1) if name.startswith("loss:")}
    odd = {
        name: {"count": len(steps), "steps": steps[:_MOST_ODD].astype(int).tolist()}
        for name, steps in losses.items()
        if _is_odd(steps, table[0])
    }
    count = table.shape[1]
    if count <= _MOST_STEPS:
        return {"names": names, "chunk": chunks.numbers(table), "odd": odd}
    edges = np.arange(_MOST_STEPS) * count // _MOST_STEPS
    with np.errstate(invalid="ignore"):
        high = np.fmax.reduceat(table, edges, axis=1)
        low = np.fmin.reduceat(table, edges, axis=1)
        finite = np.isfinite(table)
        sums = np.add.reduceat(np.where(finite, table, 0.0), edges, axis=1)
        mean = sums / np.add.reduceat(finite, edges, axis=1, dtype=np.float64)
    packed = {name: chunks.numbers(one) for name, one in (("chunk", high), ("low", low), ("mean", mean))}
    return {"names": names, **packed, "odd": odd}


def _is_odd(without: Any, steps: Any) -> bool:
    """Whether the steps without a finite loss are worth naming: else it is just not computed in each step."""
    return 0 < len(without) < len(steps) / 10 or (len(without) > 0 and without[-1] == steps[-1])


def _gradients(record: Record, rank: int, cubes: Sequence[Cube]) -> list[dict[str, Any]]:
    """What reached each parameter at the last look in which its optimizer made a step.

    Parameters are in the order of the model, then those that only the tables know, then those without any numbers.
    """
    cube = next((one for one in cubes if one.group == "parameters" and one.phase == "train"), None)
    weights = {
        (str(model.get("name")), address_of(str(weight[0]), "param").removesuffix(":param")): weight
        for _, model in record.events("model", rank)
        for weight in _list(model.get("weights"))
        if isinstance(weight, list) and len(weight) == 4 and isinstance(weight[1], list)
    }
    if cube is None:
        return []
    index = {key: at for at, key in enumerate(cube.keys)}
    paths = {(key[0], key[1].rpartition(":")[0]) for key in cube.keys if key[1].endswith((":param", ":grad"))}
    sizes = [_latest(cube, at)[1].get("rms", 0.0) for key, at in index.items() if key[1].endswith(":grad")]
    known = [size for size in sizes if 0 < size < math.inf]
    middle = float(np.median(known)) if known else 0.0
    ordered = [key for key in weights if key in paths] + sorted(paths - set(weights))
    missing = [key for key in weights if key not in paths]
    return [_reached(cube, index, key, weights.get(key), middle) for key in [*ordered, *missing]]


def _reached(
    cube: Cube, index: Mapping[Key, int], key: Key, weight: Sequence[Any] | None, middle: float
) -> dict[str, Any]:
    """One parameter: its latest gradient and weight, and in ``state`` what to think of it.

    ``none``, or ``frozen`` where it is not trained: no gradient is known, or its optimizer has made a step since
    without one. ``tiny``: an rms below 1e-6 of ``middle``, the median over all gradients that are neither zero nor
    infinite, or 1e-10 of the weight's own, which no median of a dead net hides. Else ``zero``, ``not finite`` or
    ``arrived``.
    """
    model, path = key
    step, grad = _latest(cube, index.get((model, f"{path}:grad")))
    own_step, own = _latest(cube, index.get((model, f"{path}:param")))
    is_trained = bool(weight[3]) if weight is not None else True
    size = grad.get("rms", math.nan)
    if not grad or own_step > step:  # its optimizer has made a step since, without a gradient of it
        state = "none" if is_trained else "frozen"
    elif grad.get("nonfinite", 0) > 0:
        state = "not finite"
    elif size == 0:
        state = "zero"
    else:
        state = "tiny" if size < _TINY * middle or size < _NOTHING * own.get("rms", 0.0) else "arrived"
    is_there = bool(grad) and math.isfinite(size)
    return {
        "model": model,
        "path": path,
        "shape": "x".join(map(str, weight[1])) if weight is not None else "",
        "dtype": str(weight[2]) if weight is not None else "",
        "state": state,
        "step": step,
        "norm": size * math.sqrt(grad["count"]) if is_there else None,
        "rms": size if is_there else None,
        "weight": own.get("rms"),
        "ratio": own.get("update_ratio"),
    }


def _latest(cube: Cube, row: int | None) -> tuple[int, dict[str, float]]:
    """The step of the last look that has a row, and its numbers; -1 and nothing where there is none."""
    if row is None or np.isnan(cube.latest["count"][row]).all():
        return -1, {}
    column = int(np.flatnonzero(~np.isnan(cube.latest["count"][row]))[-1])
    known = {name: float(values[row, column]) for name, values in cube.latest.items()}
    return int(known.pop(WHEN)), known


def _plain(told: Mapping[str, Any]) -> list[list[str]]:
    """Names and texts of the facts that there are, without the kind of the event they come from."""
    return [[str(name), _text(value)] for name, value in told.items() if name != "kind" and value is not None]


def _flat(told: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds, and memory in MiB, of an event of progress."""
    memory = told.get("memory")
    kept = {name: told[name] for name in ("seconds",) if name in told}
    sizes = memory if isinstance(memory, dict) else {}
    return {**kept, **{f"memory of {name}": f"{value / 2**20:.0f} MiB" for name, value in sizes.items()
                       if isinstance(value, (int, float))}}  # fmt: skip


def _command(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else ""


def _date(value: Any) -> str:
    is_time = isinstance(value, (int, float)) and 0 <= value < 1e11
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if is_time else ""


def _text(value: Any) -> str:
    """A value of the record as the page shows it: floats with four digits, None as nothing."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _list(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one: a damaged record may hold anything."""
    return value if isinstance(value, list) else []
