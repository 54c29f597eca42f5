"""What the page of a traced run carries: its rows, the edges of who took what from whom, and pictures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from gaff.record.picture import Picture
from gaff.record.trace_rows import Traced
from gaff.version import __version__
from gaff.views.page.chunks import Chunks
from gaff.views.page.document import Document


def document(trace: Traced) -> Document:
    """The page of a trace: rows and notes go into the head as they are, pictures into chunks.

    A row of a call has its path beside its fields.
    """
    chunks = Chunks()
    told = {
        "model": trace.model,
        "rows": [{"path": row.path, **asdict(row, dict_factory=_shown)} for row in trace.rows],
        "tokens": list(trace.tokens),
        "parameters": [asdict(row, dict_factory=_shown) for row in trace.parameters],
        "unused_modules": trace.unused_modules,
        "unused_parameters": trace.unused_parameters,
        "has_backward": trace.has_backward,
        "device": trace.device,
        "notes": trace.notes,
        "edges": trace.edges,
        "pictures": [_picture(one, chunks) for one in trace.pictures],
    }
    return Document({"kind": "trace", "title": trace.model, "gaff": __version__, "trace": told}, chunks)


def _shown(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``asdict``: a row, or a part of one, without fingerprints, which serve to compare traces, not to be read."""
    return {name: value for name, value in fields if name != "fingerprint"}


def _picture(one: Picture, chunks: Chunks) -> dict[str, Any]:
    """One picture as the page has it: its bytes in a chunk, and what they stand for.

    ``signed``: whether the bytes go from minus the limit to plus the limit, with zero in the middle.
    """
    table = np.frombuffer(one.data, np.uint8).reshape(one.size)
    return {
        "site": one.site,
        "kind": one.kind,
        "title": one.title,
        "chunk": chunks.shares(table),
        "shape": one.shape,
        "low": one.low,
        "high": one.high,
        "labels": [],
        "over": one.over,
        "signed": one.limit > 0,
    }
