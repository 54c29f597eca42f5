"""What the page of a difference carries: the verdict and rows of two runs or traces that were compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gaff.version import __version__
from gaff.views.page.chunks import Chunks
from gaff.views.page.document import Document


def document(difference: Mapping[str, Any]) -> Document:
    """The page of a difference between two runs or two traces.

    ``difference``: as ``Difference.to_dict`` gives it. It goes into the head as it is; there are no arrays.
    """
    names = [str(difference[one]).replace("\\", "/").rstrip("/").rpartition("/")[2] for one in ("a", "b")]
    title = " and ".join(names if names[0] != names[1] else [str(difference["a"]), str(difference["b"])])
    return Document({"kind": "diff", "title": title, "gaff": __version__, "diff": difference}, Chunks())
