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
from gaff.errors import RecordError
from gaff.record.cube import Cube, read_cubes
from gaff.record.run import Record
from gaff.record.sample import port_of

if TYPE_CHECKING:
    from gaff.record.trace_rows import Traced

_ALL = 1 << 30  # columns: every look
_MOST_NAMES = 40  # of sites that are written beside a map
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
    grey; otherwise they are linear. What is missing or not finite is grey as well.
    """
    cube, rows, names = _rows(record, stat, port, rank)
    table = np.where(np.isinf(cube.latest[stat][rows]), np.nan, cube.latest[stat][rows])
    figure, axes = _axes((7.0, max(2.4, 0.16 * len(names))))
    colors = need("matplotlib.colors", "figures")
    is_log = bool(np.nanmin(table) >= 0) and bool((table > 0).any())
    shown = np.where(table > 0, table, np.nan) if is_log else table
    axes.set_facecolor("0.6")
    edges = [*cube.first.tolist(), int(cube.last[-1]) + 1]
    mesh = axes.pcolormesh(edges, np.arange(len(names) + 1), shown, norm=colors.LogNorm() if is_log else None,
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
    for record in several:
        series = record.scalar(name)
        axes.plot(series.steps, series.values, linewidth=1, label=record.path.name)
    axes.set(xlabel="step", ylabel=name.removeprefix("loss:"))
    if len(several) > 1:
        axes.legend(fontsize="x-small")
    return figure


def picture(trace: Traced, site: str, kind: str | None = None) -> Any:
    """A picture of a trace made with ``pictures=True``: maps side by side, or a class activation over its image.

    ``site``: an address of the trace; ``kind``: where a site has several pictures, such as ``class activation``;
    without it the first one is drawn. Values that have a sign are blue below zero and red above. Raises RecordError
    with near names.
    """
    known = [one for one in trace.pictures if one.site == site and kind in (None, one.kind)]
    if not known:
        near = ", ".join(nearest(site, list(dict.fromkeys(one.site for one in trace.pictures)))) or "none"
        what = f"picture of {kind}" if kind else "picture"
        raise RecordError(f"the trace has no {what} at {site!r}; nearest: {near}")
    one = known[0]
    table = np.frombuffer(one.data, np.uint8).reshape(one.size)
    if one.kind == "image":
        figure, axes = _axes((4.0, 4.0))
        axes.imshow(table)
        axes.set_axis_off()
        return figure
    count = table.shape[0]
    across = int(np.ceil(np.sqrt(count)))
    plt = _figure_class()
    figure = plt(figsize=(1.4 * across + 0.6, 1.4 * int(np.ceil(count / across)) + 0.4), layout="constrained")
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
