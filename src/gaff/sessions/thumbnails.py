"""A captured value as a small picture for a notebook: a few kilobytes, made when it is looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gaff.compat import elements
from gaff.views.notebook import Shown, picture, sparkline_image

_TILES, _SIDE = 6, 24  # of feature maps: how many, and how large at most
_HIGH, _WIDE = 24, 160
_MOST_SHOWN = 0.98  # of the cells: what is larger has the colour of this quantile


def thumbnail(value: Any) -> Shown:
    """The first example of a tensor as a picture: feature maps beside each other, tokens by channels, or a curve.

    Empty for what is no tensor of numbers. Values below zero are blue and those above red around a white zero, the
    largest two hundredths alike; a tensor without any goes from dark to light. Averaged down to fit; copies what is
    drawn to the CPU.
    """
    if not isinstance(value, Tensor) or not elements.is_plain(value) or value.is_complex() or not value.numel():
        return Shown("")
    with torch.no_grad():
        x = value.detach().float().nan_to_num(0.0, 0.0, 0.0)
        tiles = _tiles(x[0] if x.dim() > 2 else x)
        if tiles is None:
            return sparkline_image(x.flatten()[:_WIDE].tolist(), f"{x.numel()} values")
        small = tiles.cpu()
        low, high = float(small.min()), float(small.max())
        limit = float(small.abs().quantile(_MOST_SHOWN)) if low < 0 else 0.0
        start, size = (-limit, 2 * limit) if limit else (low, high - low)
        table = ((small - start) * (255 / size if size else 0.0)).round().clamp(0, 255).to(torch.uint8)
    height, width = table.shape
    title = f"{low:.4g} to {high:.4g}, averaged to fit"
    return picture(bytes(table.flatten().tolist()), height, width, is_signed=bool(limit), title=title)


def _tiles(x: Tensor) -> Tensor | None:
    """One example as [height, width]: small enough; None for a row of numbers."""
    while x.dim() > 3:
        x = x[0]
    if x.dim() == 3 and min(x.shape[1:]) > 1:
        tall, wide = min(_SIDE, x.shape[1]), min(_SIDE, x.shape[2])
        maps = functional.adaptive_avg_pool2d(x[None, :_TILES], (tall, wide))[0]
        return torch.cat(list(maps), 1)
    x = x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x
    if x.dim() != 2 or min(x.shape) < 2:
        return None
    return functional.adaptive_avg_pool2d(x[None, None], (min(_HIGH, x.shape[0]), min(_WIDE, x.shape[1])))[0, 0]
