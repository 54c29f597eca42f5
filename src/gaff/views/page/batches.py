"""Batches that a run has kept (``--keep-batch``), as its page shows them: images as they are seen, texts as tokens.

The files are those of ``gaff.training.watch.saved_batches``. Of each tensor only the bytes of the first samples are
read, with numpy alone; nothing in a file is executed, and one that is damaged is told in a note.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gaff.views.page.chunks import Chunks

_FOLDER = "batches"
_MOST = 8  # samples of a batch
_SIDE = 64  # pixels of an image
_TOKENS = 64
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1"}


def kept_batches(run: Path, chunks: Chunks) -> list[dict[str, Any]]:
    """The batches of a run, in the order of their steps; pictures go into ``chunks``.

    Each has ``step``, ``why``, and ``inputs``: name, shape, type, the samples that hold a NaN or inf, and either images
    ``[samples, height, width, 3]`` as a chunk of bytes, or the tokens of the first samples.
    """
    found = []
    for path in sorted((run / _FOLDER).glob("*.safetensors")):
        try:
            found.append(_batch(path, chunks))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            found.append({"step": -1, "why": f"{path.name} cannot be read: {type(error).__name__}", "inputs": []})
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
            file.seek(8 + size + int(entry["data_offsets"][0]))
            inputs.append(_input(name, shape, str(entry["dtype"]), file, chunks))
    return {"step": int(told["step"]), "why": str(told["why"]), "inputs": inputs}


def _input(name: str, shape: list[int], dtype: str, file: Any, chunks: Chunks) -> dict[str, Any]:
    """One tensor that the model was given. Samples are along dimension 0."""
    told: dict[str, Any] = {"name": name, "shape": shape, "type": dtype, "bad": [], "images": None, "tokens": []}
    kind = _TYPES.get(dtype)
    if kind is None or not shape or not all(shape):
        return told
    each = int(np.prod(shape[1:], dtype=np.int64))
    count = min(shape[0], _MOST)
    width = np.dtype(kind).itemsize
    values = np.frombuffer(file.read(count * each * width), kind).reshape(count, *shape[1:])
    if values.dtype.kind == "f":
        told["bad"] = np.flatnonzero(~np.isfinite(values.reshape(count, -1)).all(1)).tolist()
        if len(shape) == 4 and shape[1] in (1, 3) and min(shape[2:]) >= 4:
            told["images"] = chunks.shares(_pixels(values.astype(np.float64)))
    elif len(shape) == 2 and values.dtype.kind == "i":
        told["tokens"] = [[int(one) for one in row[:_TOKENS]] for row in values]
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
