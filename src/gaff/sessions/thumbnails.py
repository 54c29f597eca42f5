"""A captured value as a small picture for a notebook: a few kilobytes, made when it is looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gaff.compat import elements
from gaff.views.notebook import Shown, colored, picture, sparkline_image

_TILES, _SIDE = 6, 24  # of feature maps: how many, and how large at most
_HIGH, _WIDE = 24, 160
_MOST_VALUES = 4096  # of a curve
_MOST_SHOWN = 0.98  # of the cells: what is larger has the colour of this quantile


def thumbnail(value: Any) -> Shown:
    """The first example of a tensor as a picture: feature maps beside each other, tokens by channels, or a curve.

    Of a matrix all rows are drawn. Empty for what is no plain tensor of numbers. Values below zero are blue and those
    above red around a white zero, the largest two hundredths alike; a tensor without any goes from dark to light.
    Averaged down to fit; the range is that of what is drawn before that, and elements that are not finite are counted
    beside it. Copies what is drawn to the CPU.
    """
    if type(value) not in (Tensor, nn.Parameter) or not elements.is_plain(value):
        return Shown("")
    if value.is_complex() or value.is_nested or elements.is_packed(value.dtype) or not value.numel():
        return Shown("")
    with torch.no_grad():
        x = value.detach().double()
        drawn = x[0] if x.dim() > 2 or (x.dim() == 2 and min(x.shape) < 2) else x
        while drawn.dim() > 3:
            drawn = drawn[0]
        is_finite = torch.isfinite(drawn)
        bad = int((~is_finite).sum())
        known = drawn[is_finite]
        told = f"{float(known.min()):.4g} to {float(known.max()):.4g}" if known.numel() else "no finite value"
        tiles = _tiles(drawn.nan_to_num(0.0, 0.0, 0.0))
        if tiles is None:
            flat = drawn.flatten()
            cut = f", the first {_MOST_VALUES} of {flat.numel()}" if flat.numel() > _MOST_VALUES else ""
            picture_of = sparkline_image(flat[:_MOST_VALUES].tolist(), f"{told}{cut}")
        else:
            picture_of = _colored(tiles.cpu(), f"{told}, averaged to fit")
    return Shown(picture_of.html + (str(colored(f"{bad} of {drawn.numel()} not finite", "error")) if bad else ""))


def _colored(small: Tensor, title: str) -> Shown:
    """A table of numbers as a picture."""
    low, high = float(small.min()), float(small.max())
    limit = float(small.abs().quantile(_MOST_SHOWN)) if low < 0 else 0.0
    start, size = (-limit, 2 * limit) if limit else (low, high - low)
    table = ((small - start) * (255 / size if size else 0.0)).round().clamp(0, 255).to(torch.uint8)
    height, width = table.shape
    return picture(bytes(table.flatten().tolist()), height, width, is_signed=bool(limit), title=title)


def _tiles(x: Tensor) -> Tensor | None:
    """One example as [height, width]: small enough; None for a row of numbers."""
    if x.dim() == 3 and min(x.shape[1:]) > 1:
        tall, wide = min(_SIDE, x.shape[1]), min(_SIDE, x.shape[2])
        maps = functional.adaptive_avg_pool2d(x[None, :_TILES], (tall, wide))[0]
        return torch.cat(list(maps), 1)
    if x.dim() != 2 or min(x.shape) < 2:
        return None
    return functional.adaptive_avg_pool2d(x[None, None], (min(_HIGH, x.shape[0]), min(_WIDE, x.shape[1])))[0, 0]
