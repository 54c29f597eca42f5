"""Pictures of a run or a trace for papers, as matplotlib figures. Needs matplotlib (``gaff[figures]``).

Each function returns a ``Figure`` that belongs to no window: ``signal_by_depth(record).savefig("depth.pdf")``. Nothing
is registered with pyplot, so no backend is chosen and nothing has to be closed. All raise PlanError where matplotlib is
not installed, and RecordError where the record or trace does not hold what was asked for. Nothing is written to either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gaff.address.grammar import nearest
from gaff.compat.extras import need
from gaff.errors import PlanError, RecordError
from gaff.record.cube import Cube, read_cubes
from gaff.record.run import Record
from gaff.record.sample import port_of
from gaff.views.run_text import told_apart

if TYPE_CHECKING:
    from gaff.record.picture import Picture
    from gaff.record.trace_rows import Traced

_ALL = 1 << 30  # columns: every look
_MOST_NAMES = 40  # of sites that are written beside a map
_MOST_TOKENS = 40  # that are written beside a map of attention
_SIGNED = "RdBu_r"


def signal_by_depth(record: Record, *, stat: str = "rms", port: str = "output", looks: int = 6, rank: int = 0) -> Any:
    """One number of all sites of a port from the first layer to the last, one line for each of some looks.

    ``port``: ``output``, ``grad_output``, ``param``, ``grad``; ``stat``: a column of the record, such as ``rms`` or
    ``update_ratio``; ``looks``: how many lines at most, spread evenly from the first look to the last; ``rank``: the
    process whose tables are shown. The axis is logarithmic; what is not finite leaves a gap.
    """
    cube, rows, names = _rows(record, stat, port, rank)
    table = np.where(np.isinf(cube.latest[stat][rows]), np.nan, cube.latest[stat][rows])
    columns = np.unique(np.linspace(0, table.shape[1] - 1, min(looks, table.shape[1])).round().astype(int))
    figure, axes = _axes((max(5.0, 0.18 * len(names)), 3.6))
    shades = need("matplotlib", "figures").colormaps["viridis_r"](np.linspace(0.05, 0.95, len(columns)))
    for column, shade in zip(columns, shades, strict=True):
        axes.plot(table[:, column], color=shade, marker=".", linewidth=1, label=f"step {cube.last[column]}")
    axes.set(yscale="log", ylabel=f"{stat} of {port}")
    _name(axes.xaxis, names, rotation=90)
    axes.legend(fontsize="x-small")
    return figure


def heat_map(record: Record, *, stat: str = "rms", port: str = "output", rank: int = 0) -> Any:
    """One number of all sites of a port over all looks, as a map: a row for each site, a column for each look.

    Arguments are those of ``signal_by_depth``. Where no value is negative the colours are logarithmic, and zeros are
    grey; otherwise they are linear, and white is zero. What is missing or not finite is grey as well, and so is a pause
    between looks that is three times as long as those beside it.
    """
    cube, rows, names = _rows(record, stat, port, rank)
    table = np.where(np.isinf(cube.latest[stat][rows]), np.nan, cube.latest[stat][rows])
    figure, axes = _axes((7.0, max(2.4, 0.16 * len(names))))
    colors = need("matplotlib.colors", "figures")
    is_log = not (table < 0).any() and bool((table > 0).any())
    shown = np.where(table > 0, table, np.nan) if is_log else table
    axes.set_facecolor("0.6")
    edges, shown = _with_gaps(cube.first.tolist(), cube.last.tolist(), shown)
    limit = float(np.nanmax(np.abs(shown), initial=0.0)) or 1.0
    norm = colors.LogNorm() if is_log else colors.Normalize(-limit, limit)
    mesh = axes.pcolormesh(edges, np.arange(len(names) + 1), shown, norm=norm,
                           cmap="magma" if is_log else _SIGNED, rasterized=True)  # fmt: skip
    axes.invert_yaxis()
    axes.set(xlabel="step")
    _name(axes.yaxis, names, at=0.5)
    figure.colorbar(mesh, label=f"{stat} of {port}")
    return figure


def curves(records: Sequence[Record] | Record, name: str = "loss") -> Any:
    """A number of every step, such as ``loss`` or ``grad_norm``, of one run or of several in the same axes.

    ``name``: as ``Record.scalar`` takes it; each run is labelled with the name of its folder. Of runs of several
    processes the numbers of rank 0 are drawn.
    """
    several = [records] if isinstance(records, Record) else list(records)
    figure, axes = _axes((5.5, 3.2))
    for record, title in zip(several, told_apart([one.path for one in several]), strict=True):
        series = record.scalar(name)
        axes.plot(series.steps, series.values, linewidth=1, label=title)
    axes.set(xlabel="step", ylabel=name.removeprefix("loss:"))
    if len(several) > 1:
        axes.legend(fontsize="x-small")
    return figure


def loss(records: Sequence[Record] | Record, *, smoothing: float = 0.0, events: bool = True) -> Any:
    """The losses of one run or several, trained and evaluated, with what was found marked at its first step.

    ``smoothing``: the weight of an exponential mean without the pull of its beginning, from 0 to below 1; what it was
    made of stays, faintly. ``events``: findings of the first run, a line for each rule, red for errors, and triangles
    where ``torch.save`` wrote a file. The axis is logarithmic where all losses are positive and lie more than a factor
    of 30 apart. Of runs of several processes the numbers of rank 0 are drawn. Raises RecordError where no run has a
    loss, PlanError for another ``smoothing``.
    """
    if not 0 <= smoothing < 1:
        raise PlanError(f"smoothing={smoothing}: expected a weight from 0 to below 1")
    several = [records] if isinstance(records, Record) else list(records)
    figure, axes = _axes((6.4, 3.4))
    drawn: list[float] = []
    names = told_apart([one.path for one in several])
    for at, record in enumerate(several):
        title = f"{names[at]}: " if len(several) > 1 else ""
        color = f"C{at}"
        for name in (one for one in record.scalars if one.startswith("loss:")):
            series = record.scalar(name)
            drawn += [one for one in series.values if np.isfinite(one)]
            label = f"{title}{name.removeprefix('loss:')}"
            if smoothing:
                axes.plot(series.steps, series.values, linewidth=0.8, color=color, alpha=0.3)
            axes.plot(series.steps, smoothed(series.values, smoothing), linewidth=1.2, color=color, label=label)
        for name, pairs in record.evaluated().items():
            steps, values = zip(*pairs, strict=True)
            axes.plot(steps, values, marker="o", markersize=3, linestyle="--", linewidth=1, color=color,
                      label=f"{title}evaluated ({name})")  # fmt: skip
            drawn += [one for one in values if np.isfinite(one)]
    if not axes.get_lines():
        raise RecordError(f"{several[0].path if several else 'no run'}: no loss was seen: expected a run that has some")
    if drawn and min(drawn) > 0 and max(drawn) > 30 * min(drawn):
        axes.set_yscale("log")
    if events:
        _mark(axes, several[0])
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(fontsize="x-small")
    return figure


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """An exponential mean of what is finite, without the pull of its beginning, as Adam corrects its moments.

    What is not finite stays as it is. Kingma and Ba, 2015, section 3, has the correction.
    """
    mean = total = 0.0
    found = []
    for value in values:
        if not np.isfinite(value):
            found.append(value)
            continue
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        found.append(mean / total)
    return found


def attention(trace: Traced, site: str, *, heads: Sequence[int] | None = None) -> Any:
    """The attention weights of one call, a map for each head: a row looks, a column is looked at.

    ``trace``: made with ``pictures=True``; ``site``: the address of the op or module, as its pictures have it;
    ``heads``: which of them, by their numbers, all by default. Tokens stand beside the maps where the trace knows them
    (see ``Trace.with_tokens``). Colours go from 0 to the largest weight of all heads. Raises RecordError with near
    names, PlanError for a head that there is not.
    """
    one = _picture_of(trace, site, "attention")
    table = np.frombuffer(one.data, np.uint8).reshape(one.size)
    chosen = list(range(len(table))) if heads is None else list(heads) if isinstance(heads, Sequence) else []
    if not chosen or not all(isinstance(at, int) and 0 <= at < len(table) for at in chosen):
        raise PlanError(f"heads={heads!r}: expected numbers from 0 to {len(table) - 1}")
    across = min(4, len(chosen))
    down = -(-len(chosen) // across)
    has_names = len(trace.tokens) == table.shape[2] <= _MOST_TOKENS
    size = (2.1 if has_names else 1.6) * across, (2.1 if has_names else 1.6) * down
    figure = _figure_class()(figsize=size, layout="constrained")
    for place, head in enumerate(chosen):
        axes = figure.add_subplot(down, across, place + 1)
        axes.imshow(one.low + table[head] / 255 * (one.high - one.low), cmap="magma", vmin=0, vmax=one.high)
        axes.set_title(f"head {head}", fontsize="x-small")
        _name(axes.xaxis, trace.tokens if has_names and place >= len(chosen) - across else [], rotation=90)
        _name(axes.yaxis, trace.tokens if has_names and place % across == 0 else [])
    figure.suptitle(f"{one.site}, weights from 0 to {one.high:.3g}", fontsize="small")
    return figure


def features(trace: Traced, site: str) -> Any:
    """The feature maps of one call, or of a gradient there, as ``picture`` draws them. Raises as ``picture``."""
    return picture(trace, site, "feature maps")


def picture(trace: Traced, site: str, kind: str | None = None) -> Any:
    """A picture of a trace made with ``pictures=True``: maps side by side, or a class activation over its image.

    ``site``: an address of the trace; ``kind``: where a site has several pictures, such as ``class activation``;
    without it the first one is drawn. Values that have a sign are blue below zero and red above. Raises RecordError
    with near names.
    """
    one = _picture_of(trace, site, kind)
    table = np.frombuffer(one.data, np.uint8).reshape(one.size)
    if one.kind == "image":
        figure, axes = _axes((4.0, 4.0))
        axes.imshow(table)
        axes.set_axis_off()
        return figure
    count = table.shape[0]
    across = int(np.ceil(np.sqrt(count)))
    plt = _figure_class()
    figure = plt(
        figsize=(max(3.6, 1.4 * across + 0.6), 0.8 * (count == 1) + 1.4 * int(np.ceil(count / across)) + 0.4),
        layout="constrained",
    )
    low, high = (-one.limit, one.limit) if one.limit else (one.low, one.high)
    for at in range(count):
        axes = figure.add_subplot(int(np.ceil(count / across)), across, at + 1)
        axes.set_axis_off()
        values = low + table[at] / 255 * (high - low)
        if one.over is not None:
            under = trace.pictures[one.over]
            axes.imshow(np.frombuffer(under.data, np.uint8).reshape(under.size))
        is_over, is_row = one.over is not None, 1 in values.shape
        drawn = axes.imshow(values, cmap=_SIGNED if one.limit else "magma", vmin=low, vmax=high)
        drawn.set_alpha(0.55 if is_over else 1.0)
        axes.set_aspect("auto" if is_row else "equal")
    figure.suptitle(f"{one.site or 'the model'}, {one.title}", fontsize="small")
    return figure


def _picture_of(trace: Traced, site: str, kind: str | None) -> Picture:
    """The first picture of a site, of this kind; raises RecordError with near names."""
    known = [one for one in trace.pictures if one.site == site and kind in (None, one.kind)]
    if known:
        return known[0]
    there = dict.fromkeys(one.site for one in trace.pictures if kind in (None, one.kind))
    near = ", ".join(nearest(site, list(there))) or ", ".join(list(there)[:3]) or "none"
    what = f"picture of {kind}" if kind else "picture"
    raise RecordError(f"the trace has no {what} at {site!r}; nearest: {near}")


def _with_gaps(first: list[int], last: list[int], table: Any) -> tuple[list[int], Any]:
    """Where columns begin, and the last ends; with a column of nothing where nobody looked for long.

    A column reaches to the next, but not over a distance that is more than three times those beside it.
    """
    far = [0, *(begin - end for begin, end in zip(first[1:], last, strict=False)), 0, 0]
    edges, kept = [], []
    for at, begin in enumerate(first):
        edges.append(begin)
        kept.append(table[:, at])
        around = max(far[at], far[at + 2])
        if at + 1 < len(first) and 0 < 3 * around < far[at + 1]:
            edges.append(last[at] + around)
            kept.append(np.full(len(table), np.nan))
    return [*edges, last[-1] + max(1, far[len(first) - 1])], np.stack(kept, 1)


def _mark(axes: Any, record: Record) -> None:
    """Lines where rules came to hold, the first of each, with their names; triangles where files were saved."""
    saved = sorted({max(0, step - 1) for step, _ in record.saved()})
    if saved:
        axes.plot(saved, [0.02] * len(saved), "^", markersize=4, color="0.4", label="saved",
                  transform=axes.get_xaxis_transform())  # fmt: skip
    colors = {"error": "#c22c2c", "warning": "#a86400", "info": "#1d5fd1"}
    first: dict[str, Any] = {}
    for one in sorted(record.findings, key=lambda one: one.since):
        first.setdefault(one.rule, one)
    for one in first.values():
        color = colors.get(one.severity, "0.5")
        axes.axvline(one.since, color=color, linewidth=0.8, linestyle=":")
        axes.annotate(one.rule, (one.since, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top",
                      ha="right", fontsize="xx-small", color=color)  # fmt: skip


def _rows(record: Record, stat: str, port: str, rank: int) -> tuple[Cube, list[int], list[str]]:
    """The first training cube with numbers of this kind at this port, the rows of it that have some, and their names.

    Rows are in the order in which sites were first seen, which for modules is the order of their calls.
    """
    names = {key: name for name, key in record.names().items()}
    for cube in read_cubes(record.part(rank), columns=_ALL, marks=1):
        if cube.phase != "train" or stat not in cube.latest:
            continue
        table = cube.latest[stat]
        rows = [at for at, key in enumerate(cube.keys) if port_of(key[1]) == port and not np.isnan(table[at]).all()]
        if rows:
            return cube, rows, [names.get(cube.keys[at], cube.keys[at][1]) for at in rows]
    raise RecordError(f"{record.path}: no site has {stat!r} of {port!r}: see record.sites and record.latest(site)")


def _axes(size: tuple[float, float]) -> tuple[Any, Any]:
    """A new figure of this size in inches, and its only axes."""
    figure = _figure_class()(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


def _figure_class() -> Any:
    """Matplotlib's ``Figure``, imported when the first figure is made; pyplot is never imported."""
    return need("matplotlib.figure", "figures", for_="a figure").Figure


def _name(axis: Any, names: Sequence[str], *, at: float = 0.0, rotation: float = 0.0) -> None:
    """Write the sites' names at an axis; only some of them, evenly spaced, where there are too many to be read.

    ``at``: how far a tick stands from the beginning of its row, in rows. A dollar sign in a name begins no formula.
    """
    every = max(1, -(-len(names) // _MOST_NAMES))
    axis.set_ticks([place + at for place in range(0, len(names), every)])
    axis.set_ticklabels(list(names)[::every], rotation=rotation, fontsize="x-small", parse_math=False)
