"""Activations and gradients as pictures, made while they pass: nothing of a tensor is kept but its picture.

Only the first example of the batch is drawn. A tensor is averaged down to what a page has room for, and becomes one
byte a cell, which waits for the device. ``gaff.record.picture.Picture`` says what the bytes mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gaff.compat import elements
from gaff.engine.ops.attention import Weights
from gaff.keep import Part
from gaff.record.picture import Picture

_ROOM = 5_000_000  # bytes of all pictures of a trace
_LEAST, _MOST = 2_048, 50_000  # of one
_TILES = 36
_TOKENS, _CHANNELS = 128, 256
_IMAGE = 224  # pixels
_HEADS = 16
_OF_GRADIENT = "gradient of "  # begins the title of such a picture
_MAPS = 8  # class activation maps of one trace


class Album:
    """The pictures of one trace. ``sites``: about how many there will be, which tells how large they may be.

    The tracer makes one for a run, and hands it to its ``CallLog`` and to its taps. ``pictures`` are in the order in
    which they were taken. Feature maps that wait for a gradient are the only tensors it holds, the latest eight.
    """

    def __init__(self, sites: int) -> None:
        self.pictures: list[Picture] = []
        self.takes_gradients = False  # until then they are those of passes that the forward itself runs
        self._room = max(_LEAST, min(_MOST, _ROOM // max(1, sites)))
        self._maps: dict[str, Tensor] = {}  # feature maps that wait for their gradients
        self._class = ""  # whose score backward runs from, for the titles of class activation maps

    def add_input(self, site: str, tensor: Tensor) -> None:
        """Add a picture of an input: an image as it is seen, anything else as an activation.

        An image has 1 or 3 channels and at least 4 pixels either way; it is made no larger than 224.
        """
        value = _first(tensor)
        if value is None or value.dim() != 3 or value.shape[0] not in (1, 3) or min(value.shape[1:]) < 4:
            return self.add(site, tensor)
        tall, wide = value.shape[1:]
        scale = min(1.0, _IMAGE / max(tall, wide))
        small = _resized(value[None], max(1, int(tall * scale)), max(1, int(wide * scale)))[0]
        low, high = _range(small)
        pixels = _bytes(small.expand(3, -1, -1).permute(1, 2, 0), low, high)
        size = (small.shape[1], small.shape[2], 3)
        self.pictures.append(Picture(site, "image", "the input", size, pixels, tuple(tensor.shape), low, high))
        return None

    def add(self, site: str, tensor: Tensor, *, is_gradient: bool = False, is_attention: bool = False) -> None:
        """Add a picture of whatever the shape of a tensor lets be drawn; nothing where it lets nothing be.

        Gradients, and values of which some are negative, are drawn around zero: the scale then goes as far down as up.
        ``is_attention``: its last two dimensions are queries and keys.
        """
        value = _first(tensor)
        if value is None or not value.numel():
            return
        kind, tiles = self._tiles(value, is_attention=is_attention)
        if tiles is None:
            return
        low, high = _range(tiles)
        limit = max(abs(low), abs(high)) if is_gradient or low < 0 else 0.0
        data = _bytes(tiles, -limit, limit) if limit else _bytes(tiles, low, high)
        what = _OF_GRADIENT if is_gradient else ""
        more = self._more(kind, value, tiles)
        shape = tuple(tensor.shape)
        size = (tiles.shape[0], tiles.shape[1], tiles.shape[2])
        self.pictures.append(Picture(site, kind, f"{what}{kind}{more}", size, data, shape, low, high, limit))

    def keep_maps(self, site: str, tensor: Tensor) -> None:
        """Keep the feature maps of one example, for a class activation map when their gradient comes; the latest eight.

        A copy on the device, for the model may write into its output before backward.
        """
        value = _first(tensor)
        if value is not None and value.dim() == 3 and min(value.shape[1:]) > 1:
            self._maps.pop(site, None)
            self._maps[site] = value.clone()
            while len(self._maps) > _MAPS:
                self._maps.pop(next(iter(self._maps)))

    def note_class(self, gradient: Tensor, names: Callable[[int], str]) -> None:
        """The gradient at the model's output has come: where only one number of the first example has one, and the
        output is [examples, classes], it is the score of that class; ``names`` calls it by name.
        """
        value = _first(gradient)
        if value is None or value.dim() != 1 or value.numel() < 2:
            return
        places = value.nonzero()
        if len(places) == 1:
            self._class = f" of class {names(int(places[0]))}"

    def forget_gradients(self) -> None:
        """Draw gradients from now on: a pass that matters comes, and those that there are were of another."""
        self.takes_gradients = True
        self.pictures = [one for one in self.pictures if not one.title.startswith(_OF_GRADIENT)]

    def add_class_activation(self, site: str, gradient: Tensor) -> None:
        """Add a class activation map where the maps of ``site`` were kept, and forget them.

        Grad-CAM (Selvaraju et al. 2017, equations 1, 2): maps weighted by the mean of their gradient, above zero.
        Where the input was drawn as an image, the map has its size and is laid over it.
        """
        maps, value = self._maps.pop(site, None), _first(gradient)
        if maps is None or value is None or maps.shape != value.shape:
            return
        weights = value.mean((1, 2), keepdim=True)
        found = (weights * maps).sum(0).relu()
        under = next((at for at, one in enumerate(self.pictures) if one.kind == "image"), None)
        small = found[None]
        if under is not None:
            tall, wide, _ = self.pictures[under].size
            small = functional.interpolate(small[None], (tall, wide), mode="bilinear", align_corners=False)[0]
        low, high = _range(small)
        size = (1, small.shape[1], small.shape[2])
        title = f"class activation map{self._class}" + (" over the input" if under is not None else "")
        shape = tuple(gradient.shape)
        data = _bytes(small, low, high)
        self.pictures.append(Picture(site, "class activation", title, size, data, shape, low, high, over=under))

    def _tiles(self, value: Tensor, *, is_attention: bool) -> tuple[str, Tensor | None]:
        """What can be drawn of one example, and as what: [tiles, height, width], small enough; None where nothing can.

        ``value`` has no batch dimension. The first heads or channels are taken, so many that each keeps some size.
        """
        if is_attention and value.dim() in (2, 3) and min(value.shape[-2:]) > 1:
            heads = value.reshape(-1, *value.shape[-2:])[:_HEADS]
            side = int(math.sqrt(self._room * 2 / heads.shape[0]))
            return "attention", _limited(heads, side, side)
        if value.dim() == 3 and min(value.shape[1:]) > 1:
            maps = value[:_TILES]
            side = max(8, int(math.sqrt(self._room / maps.shape[0])))
            return "feature maps", _limited(maps, side, side)
        if value.dim() == 2 and min(value.shape) > 1:
            return "tokens x channels", _limited(value[None], _TOKENS, min(_CHANNELS, self._room // _TOKENS * 2))
        if value.dim() >= 1 and value.numel() > 1:
            row = value.reshape(1, 1, -1)
            return "values", _limited(row, 1, 2 * _CHANNELS)
        return "", None

    @staticmethod
    def _more(kind: str, value: Tensor, tiles: Tensor) -> str:
        """What the title of a picture adds in parentheses: what was left out, averaged, or is not finite."""
        names = {"attention": "heads", "feature maps": "channels"}
        there = math.prod(value.shape[:-2]) if value.dim() > 2 else 1
        if kind == "attention" and value.dim() == 2:
            return " (the first of the batch, of its first head)"
        parts = [f"first {tiles.shape[0]} of {there} {names[kind]}"] if kind in names and there > tiles.shape[0] else []
        whole = tuple(value.shape[-2:]) if value.dim() > 1 and kind != "values" else (1, value.numel())
        if tuple(tiles.shape[-2:]) != whole:
            parts.append("averaged to fit")
        if not bool(torch.isfinite(value).all()):
            parts.append(f"{int((~torch.isfinite(value)).sum())} not finite, drawn at the ends of the scale")
        return f" ({', '.join(parts)})" if parts else ""


def attention_of(op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The weights of an op of attention, which it does not return, of the first example and its first heads.

    None where they cannot be told, or where there are no heads.
    """
    weights = Weights(op, func, args, kwargs)
    if weights.untold or len(weights.shape) < 3 or not weights.shape[0]:
        return None
    with torch.no_grad():
        first = weights.make(Part(0, 0))
    return first.reshape(1, -1, *first.shape[-2:])[:, :_HEADS]


def are_probabilities(tensor: Any) -> bool:
    """Whether the last dimension holds shares of one: heads of queries and keys, or a square. Waits for the device."""
    if not isinstance(tensor, Tensor) or tensor.dim() not in (3, 4) or not tensor.is_floating_point():
        return False
    if tensor.is_nested:
        return False
    if min(tensor.shape[-2:]) < 2 or (tensor.dim() == 3 and tensor.shape[-1] != tensor.shape[-2]):
        return False  # shares of classes for each token are no attention
    with torch.no_grad():
        value = tensor.detach()[:1].float()
        return bool((value >= 0).all()) and bool(((value.sum(-1) - 1).abs() < 1e-2).all())


def _first(tensor: Tensor) -> Tensor | None:
    """The first example as float32, detached; None of what cannot be drawn."""
    if (
        not elements.is_plain(tensor)
        or tensor.is_complex()
        or tensor.is_nested
        or tensor.dtype == torch.bool
        or tensor.dim() < 2
        or not tensor.shape[0]
    ):
        return None
    return tensor.detach()[0].float()


def _range(value: Tensor) -> tuple[float, float]:
    """The least and the largest finite element; 0 and 0 where there is none. Waits for the device."""
    finite = value[torch.isfinite(value)]
    return (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)


def _bytes(value: Tensor, low: float, high: float) -> bytes:
    """One byte an element, linear from ``low`` to ``high``; NaN and -inf are drawn as ``low``, +inf as ``high``."""
    scaled = (value.nan_to_num(low, high, low) - low) * (255 / (high - low) if high > low else 0.0)
    table = scaled.round().clamp(0, 255).to(torch.uint8).cpu().contiguous()
    return bytes(table.flatten().tolist())


def _limited(tiles: Tensor, tall: int, wide: int) -> Tensor:
    """Tiles averaged down to at most ``tall`` times ``wide``; those that fit are returned as they are."""
    tall, wide = min(tall, tiles.shape[-2]), min(wide, tiles.shape[-1])
    return tiles if (tall, wide) == tuple(tiles.shape[-2:]) else _resized(tiles[None], tall, wide)[0]


def _resized(value: Tensor, tall: int, wide: int) -> Tensor:
    return functional.adaptive_avg_pool2d(value, (tall, wide))
