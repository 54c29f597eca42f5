"""What the page of a difference carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gaff.version import __version__
from gaff.views.page.chunks import Chunks
from gaff.views.page.document import Document


def document(difference: Mapping[str, Any]) -> Document:
    """``difference``: as ``Difference.to_dict`` gives it."""
    title = f"{difference['a']} and {difference['b']}"
    return Document({"kind": "diff", "title": title, "gaff": __version__, "diff": difference}, Chunks())
