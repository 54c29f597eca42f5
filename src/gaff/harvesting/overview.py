"""What the page of a harvest tells: read from the store in runs of rows, never all of them at once."""

from __future__ import annotations

import base64
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gaff.compat.extras import need
from gaff.errors import PlanError
from gaff.harvesting.rows import PLACE_OF
from gaff.harvesting.store import Column, Store
from gaff.views.page.harvest import Example, HarvestTold, Histogram, SiteTold, save
from gaff.views.text import bytes_text, counted

Shown = str | tuple[str, str, str] | Tensor | None
Show = Callable[[int, dict[str, Any]], Shown]  # from the number of a row and its labels to its text or picture

_RUN = 4096  # rows that are read together
_BINS, _EXAMPLES, _WIDEST = 40, 6, 1 << 17
_FEW = 12  # different values of a label that are counted one by one


def save_page(store: Store, path: str | os.PathLike[str], *, show: Show | None = None, rows: int = 200_000,
              features: int = 12) -> int:  # fmt: skip
    """Write the page of a harvest: what is in it, and of some features the rows that make them largest.

    The arguments are those of ``overview``. One file, without a script, that needs no network; returns its size in
    bytes. Raises RecordError where it cannot be written, or the store holds what was not written.
    """
    return save(overview(store, show=show, rows=rows, features=features), path)


def overview(store: Store, *, show: Show | None = None, rows: int = 200_000, features: int = 12) -> HarvestTold:
    """Read a store, and tell what is in it.

    Args:
        show: a function (number of the row, its labels by name) -> what it is of: a text; a text in three parts, of
            which the second is meant; or a picture as a tensor, ``[height, width]`` or ``[3, height, width]`` from 0
            to 1 (needs pillow). None: labels only.
        rows: how many are read of each site, in runs that are spread evenly; all, where there are fewer.
        features: of how many the rows are shown where they are largest.
    """
    if rows < 1 or features < 0:
        raise PlanError(f"rows={rows!r}, features={features!r}: expected 1 row or more, and no less than no feature")
    runs = _spread(store.rows, rows)
    read = sum(last - first for first, last in runs)
    looked = "all rows were read" if read == store.rows else f"{read} of {store.rows} rows were read, spread evenly"
    known = store.manifest
    model = known.get("model", {})
    facts = [
        ("model", f"{model.get('class')}, {counted(int(model.get('modules', 0)), 'module')}"),
        ("rows", f"{store.rows} in {counted(len(store.shards), 'shard')}, {bytes_text(store.nbytes)}"),
        ("a row is", str(known.get("options", {}).get("rows"))),
        ("state", "complete" if store.is_complete else "not complete: the same gaff harvest again goes on"),
        ("made by", f"gaff {known.get('gaff')}, torch {known.get('torch')}"),
        *(("changed", text) for text in store.changes),
    ]
    labels = [(name, _values(column)) for name, column in store.labels.items()]
    sites = [_site(store, name, runs, show, features) for name in store]
    return HarvestTold(str(store.place), facts, labels, sites, looked)


def _spread(rows: int, wanted: int) -> list[tuple[int, int]]:
    """Runs of rows, all of them or some that lie evenly; together no more than ``wanted``."""
    starts: Sequence[int] = range(0, rows, _RUN)
    if rows > wanted:
        count = max(1, wanted // _RUN)
        starts = [starts[at * len(starts) // count] for at in range(count)]
    return [(start, min(start + min(_RUN, wanted), rows)) for start in starts]


def _site(store: Store, name: str, runs: list[tuple[int, int]], show: Show | None, features: int) -> SiteTold:
    column = store[name]
    norms, best, width = [], _Largest(), _width(store, name)
    for first, last in runs:
        flat = _dense(store, name, first, last, width)
        norms.append(torch.linalg.vector_norm(flat, dim=1))
        if features and flat.shape[1] <= _WIDEST:
            best.see(flat, first)
    told = [
        (number, peak, [_example(store, row, value, show) for value, row in rows])
        for number, peak, rows in best.most_peaked(features)
    ]
    return SiteTold(
        name, "x".join(map(str, column.shape)), str(column.dtype).removeprefix("torch."), bytes_text(column.nbytes),
        store.nonfinite.get(name, 0), _histogram(torch.cat(norms) if norms else torch.empty(0, device="cpu")), told,
    )  # fmt: skip


def _dense(store: Store, name: str, first: int, last: int, width: int) -> Tensor:
    """Rows as ``[rows, features]`` in float64, of complex numbers their sizes; where only the largest of ``width`` were
    kept all others are 0."""
    found = store[name][first:last]
    found = (found.abs() if found.is_complex() else found).double()
    if width:
        places = store.labels[PLACE_OF + name][first:last].long()
        found = torch.zeros(*places.shape[:-1], width, dtype=found.dtype, device="cpu").scatter_(-1, places, found)
    return found.reshape(last - first, -1)


def _width(store: Store, name: str) -> int:
    """Of how many numbers the largest were kept, as far as the places tell; 0 where all were."""
    places = store.labels.get(PLACE_OF + name)
    if places is None:
        return 0
    return 1 + max((int(places[first : first + _RUN].max()) for first in range(0, len(places), _RUN)), default=0)


class _Largest:
    """For each feature the rows where it is largest, and its mean square, over all that was seen."""

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._rows = self._squares = torch.zeros(0, device="cpu")
        self._seen = 0

    def see(self, flat: Tensor, first: int) -> None:
        """Rows ``first`` and onward, ``[rows, features]``. What is not finite counts as 0."""
        flat = flat.nan_to_num(0, 0, 0)
        rows = torch.arange(first, first + len(flat), device="cpu").unsqueeze(1).expand_as(flat)
        if self._values is None:
            values, self._squares = flat, torch.zeros(flat.shape[1], dtype=flat.dtype, device="cpu")
        else:
            values, rows = torch.cat([self._values, flat]), torch.cat([self._rows, rows])
        self._values, at = values.topk(min(_EXAMPLES, len(values)), dim=0)
        self._rows = rows.gather(0, at)
        self._squares += flat.square().sum(0)
        self._seen += len(flat)

    def most_peaked(self, count: int) -> Iterator[tuple[int, float, list[tuple[float, int]]]]:
        """The features whose largest value is most times their root mean square: number, how many times, rows."""
        if self._values is None or not self._seen:
            return
        peaks = (self._values[0] / (self._squares / self._seen).sqrt()).nan_to_num(0)
        for number in peaks.topk(min(count, len(peaks))).indices.tolist():
            if peaks[number] > 0:
                pairs = zip(self._values[:, number].tolist(), self._rows[:, number].tolist(), strict=True)
                yield number, float(peaks[number]), [pair for pair in pairs if pair[0] > 0]


def _example(store: Store, row: int, value: float, show: Show | None) -> Example:
    labels = {name: one[row].tolist() for name, one in store.labels.items() if len(one.shape) == 1}
    known = ", ".join(
        f"{name} {one:.6g}" if isinstance(one, float) else f"{name} {one}" for name, one in labels.items()
    )
    shown = show(row, labels) if show is not None else None
    if isinstance(shown, Tensor):
        return Example(value, known, picture=_picture(shown))
    return Example(value, known, text=(shown, "", "") if isinstance(shown, str) else shown)


def _picture(pixels: Tensor) -> str:
    """A picture as a data URL. Raises PlanError for a tensor that is none."""
    if pixels.dim() not in (2, 3) or (pixels.dim() == 3 and len(pixels) != 3):
        raise PlanError(f"show= gave a tensor of shape {list(pixels.shape)}: expected a picture, [height, width] or "
                        "[3, height, width]")  # fmt: skip
    image = need("PIL.Image", "images", for_="a picture of a sample")
    whole = (pixels.detach().float().cpu().nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    file = io.BytesIO()
    image.fromarray((whole.movedim(0, -1) if whole.dim() == 3 else whole).contiguous().numpy()).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _histogram(norms: Tensor) -> Histogram:
    finite = norms[norms.isfinite()]
    if not len(finite):
        return Histogram([], 0.0, 0.0)
    low, high = float(finite.min()), float(finite.max())
    counts = torch.histc(finite, _BINS, low, high) if high > low else torch.tensor([len(finite)], device="cpu")
    return Histogram([int(one) for one in counts.tolist()], low, high)


def _values(column: Column) -> str:
    """What a label holds: each value with how often it comes, or from where to where they go."""
    if len(column.shape) > 1 or column.dtype.is_complex:
        shape = f"{list(column.shape[1:])} of " if len(column.shape) > 1 else ""
        return f"{shape}{str(column.dtype).removeprefix('torch.')} for each row"
    often: Counter[Any] = Counter()
    ends: list[Any] = []
    missing = 0
    for first in range(0, len(column), 1 << 20):
        rows = column[first : first + (1 << 20)]
        rows = rows.float() if rows.is_floating_point() and rows.dtype.itemsize == 1 else rows
        missing += int(rows.isnan().sum())
        found, counts = rows[~rows.isnan()].unique(return_counts=True)
        ends += [found[0].item(), found[-1].item()] if len(found) else []
        if len(often) <= _FEW:
            often.update(dict(zip(found[: _FEW + 1].tolist(), counts[: _FEW + 1].tolist(), strict=True)))
    told = [f"NaN: {counted(missing, 'row')}"] if missing else []
    if len(often) <= _FEW:
        return ", ".join([f"{value}: {counted(count, 'row')}" for value, count in sorted(often.items())] + told)
    return ", ".join([f"from {min(ends)} to {max(ends)}", *told])
