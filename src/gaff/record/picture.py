"""Tensors as small grey pictures, kept as bytes. Needs no torch.

``gaff.inspection.pictures`` makes them while a traced run goes on; they are saved with the trace and drawn by its
page.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass
from typing import Any

LENGTH = 32  # numbers of a sketch
KINDS = ("image", "feature maps", "attention", "tokens x channels", "values", "class activation")


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of one tensor that passed a site; of the first example of the batch.

    ``data``: a byte a cell, of [tiles, height, width], or [height, width, 3] of an image. ``low``, ``high``: the range
    of the finite values; bytes go linearly from one to the other, or with a ``limit`` from minus to plus that, zero in
    the middle. ``shape``: the tensor's. ``over``: the number of the picture that this one is laid over.
    """

    site: str
    kind: str
    title: str
    size: tuple[int, int, int]
    data: bytes
    shape: tuple[int, ...]
    low: float
    high: float
    limit: float = 0.0
    over: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them, ``data`` as a text in base64."""
        return {**asdict(self), "data": base64.b64encode(self.data).decode()}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Picture:
        """Inverse of ``to_dict``. Raises ValueError, KeyError or TypeError for what is no picture."""
        data = base64.b64decode(str(value["data"]), validate=True)
        size = tuple(int(one) for one in value["size"])
        if len(size) != 3 or size[0] * size[1] * size[2] != len(data) or value["kind"] not in KINDS:
            raise ValueError(f"a picture of {value.get('kind')!r} and size {size} has {len(data)} bytes")
        shape = tuple(int(one) for one in value["shape"])
        return cls(**{**value, "data": data, "size": size, "shape": shape})
