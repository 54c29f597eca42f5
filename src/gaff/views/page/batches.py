"""Batches that a run has kept (``--keep-batch``), as its page shows them: images as they are seen, texts as tokens.

The files are those of ``gaff.training.watch.saved_batches``. They are read
with numpy alone; nothing in a file is executed, and one that is damaged is told in a note.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gaff.views.page.chunks import Chunks

_FOLDER = "batches"
_MOST = 8  # samples of a batch
_SIDE = 64  # pixels of an image
_TOKENS = 64
_MOST_BAD = 50  # samples that are named
_MOST_BYTES = 2**28  # of a tensor, that are looked through for what is not finite
Words = Callable[[list[int]], Sequence[str | None]]  # the texts of tokens
_DAMAGES = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError)
_TYPES = {"BF16": "<u2", "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1"}


def kept_batches(run: Path, chunks: Chunks, words: Words | None = None) -> list[dict[str, Any]]:
    """The batches of a run, in the order of their steps; pictures go into ``chunks``.

    ``words``: what tokens are, such as ``tokenizer.convert_ids_to_tokens``; one that it does not know stays a number.

    Each has ``step``, ``why``, and ``inputs``: name, shape, type, the samples that hold a NaN or inf, and of eight of
    them, bad ones among them, either images ``[samples, height, width, 3]`` as a chunk of bytes, or tokens.
    """
    found = []
    for path in sorted((run / _FOLDER).glob("*.safetensors")):
        try:
            found.append(_batch(path, chunks))
        except _DAMAGES as error:
            found.append({"step": -1, "why": f"{path.name} cannot be read: {type(error).__name__}", "inputs": []})
    if words is not None:
        for one in (given for batch in found for given in batch["inputs"]):
            one["tokens"] = [
                [word or token for word, token in zip(words(row), row, strict=True)] for row in one["tokens"]
            ]
    return found


def _batch(path: Path, chunks: Chunks) -> dict[str, Any]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, 10**8)))
        told = json.loads(header["__metadata__"]["gaff"])
        inputs = []
        for name in sorted((one for one in header if one.startswith("input.")), key=lambda one: int(one[6:])):
            entry = header[name]
            shape = [int(one) for one in entry["shape"]]
            begin, end = (int(one) for one in entry["data_offsets"])
            file.seek(8 + size + begin)
            inputs.append(_input(name, shape, str(entry["dtype"]), file, end - begin, chunks))
    return {"step": int(told["step"]), "why": str(told["why"]), "inputs": inputs}


def _input(name: str, shape: list[int], dtype: str, file: Any, size: int, chunks: Chunks) -> dict[str, Any]:
    """One tensor that the model was given, of ``size`` bytes from where ``file`` is. Samples are along dimension 0.

    ``checked``: how many samples were looked through for NaN and inf; ``shown``: the numbers of those that are drawn,
    bad ones among them.
    """
    told: dict[str, Any] = {
        "name": name, "shape": shape, "type": dtype, "bad": [], "checked": 0, "shown": [], "images": None, "tokens": []
    }  # fmt: skip
    kind = _TYPES.get(dtype)
    if kind is None or not shape or min(shape) < 1:
        return told
    width = np.dtype(kind).itemsize
    each = math.prod(shape[1:]) * width
    if each * shape[0] != size:
        raise ValueError(f"{name} has {size} bytes")
    count = min(shape[0], max(_MOST, _MOST_BYTES // each))
    values = np.frombuffer(file.read(count * each), kind).reshape(count, *shape[1:])
    if dtype == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    bad: list[int] = []
    if values.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(values.reshape(count, -1)).all(1)).tolist()
        told["bad"], told["checked"] = bad[:_MOST_BAD], count
    calm = [at for at in range(count) if at not in set(bad)]
    shown = sorted([*bad[: _MOST // 2], *calm[: _MOST - min(len(bad), _MOST // 2)]])
    told["shown"] = shown
    if values.dtype.kind == "f" and len(shape) == 4 and shape[1] in (1, 3) and min(shape[2:]) >= 4:
        told["images"] = chunks.shares(_pixels(values[shown].astype(np.float64)))
    elif len(shape) == 2 and values.dtype.kind == "i":
        told["tokens"] = [[int(one) for one in row[:_TOKENS]] for row in values[shown]]
    return told


def _pixels(images: Any) -> Any:
    """Images ``[samples, 1 or 3, height, width]`` as bytes ``[samples, height, width, 3]``, each scaled by itself.

    Every second, third ... pixel of large ones; what is not finite is magenta, as elsewhere on the page.
    """
    step = max(1, -(-max(images.shape[2:]) // _SIDE))
    small = np.broadcast_to(images[:, :, ::step, ::step], (len(images), 3, *images[:, :, ::step, ::step].shape[2:]))
    is_bad = ~np.isfinite(small)
    clean = np.where(is_bad, 0.0, small)
    low, high = clean.min((1, 2, 3), keepdims=True), clean.max((1, 2, 3), keepdims=True)
    scaled = (clean - low) / np.where(high > low, high - low, 1.0) * 255
    pixels = scaled.round().astype(np.uint8).transpose(0, 2, 3, 1).copy()
    pixels[is_bad.any(1)] = (255, 0, 220)
    return pixels
