"""One page as one file: the head as JSON, the chunks in base64, style and script inside, nothing fetched.

A Content-Security-Policy inside the page names its script and its style by their SHA-256 and allows no other, so that
no text of a record, whatever it holds, can run as code or reach the network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from gaff.compat.files import write_text
from gaff.views.page.chunks import Chunks

FORMAT = 1
_TRAINING = ("training", "uPlot", "draws curves")  # script, the library in it, and what it is for


@dataclass(frozen=True, slots=True)
class Document:
    """What one page is made of: ``head``, which the page's script reads first, and ``chunks``, the arrays it points to.

    The head holds ``title``, ``kind`` (which views there are) and what they show; an array in it is the number of a
    chunk.
    """

    head: Mapping[str, Any]
    chunks: Chunks

    def head_json(self) -> str:
        """The head as JSON, with the format of the page and the encodings of its chunks.

        Numbers that JSON cannot hold (NaN, infinities) are null; a copy is made only where there are some.
        """
        told = {"gaff_page": FORMAT, **self.head, "chunks": self.chunks.told}
        try:
            return json.dumps(told, separators=(",", ":"), allow_nan=False)
        except ValueError:
            return json.dumps(_finite(told), separators=(",", ":"))

    def to_html(self) -> str:
        """The page as one HTML text: a few hundred kilobytes, and the data in base64."""
        data = [
            f'<script type="text/plain" id="chunk-{at}">{base64.b64encode(one).decode()}</script>'
            for at, one in enumerate(self.chunks.packed)
        ]
        return page(str(self.head["title"]), self.head_json(), "\n".join(data), kind=str(self.head["kind"]))

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the page, and return its size in bytes. Raises RecordError where it cannot be written."""
        return write_text(path, self.to_html())


def page(title: str, head: str, data: str, *, kind: str = "training", connect: str = "'none'") -> str:
    """The HTML around a head and data, with style, script and licence in it, and a policy that allows only these.

    ``title``: plain text, escaped here; ``head``: JSON; ``data``: elements with the chunks, empty where they are
    served; ``kind``: of the head, which tells the script; ``connect``: where the script may ask for more, see the
    directive connect-src of CSP level 3. Of the head ``<`` is escaped, since ``</script>`` in a text of it would end
    the element that holds it.
    """
    script_name, library, what = ("tracing", "dagre", "lays graphs out") if kind == "trace" else _TRAINING
    style, script = asset("page.css"), asset(f"{script_name}.js")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    inside = head.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return (
        f"<!doctype html>\n<!-- The page {what} with {library}:\n{asset(f'{library}-LICENSE.txt')}-->\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} · gaff</title>\n<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This page draws with JavaScript, from what is inside it; nothing is fetched.</noscript>\n"
        f'<div id="page"></div>\n<script type="application/json" id="head">{inside}</script>\n{data}\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


@lru_cache(maxsize=4)
def asset(name: str) -> str:
    """The page's style or script, as it was built into the package, or the licence of what is in it; read once."""
    return files("gaff.views.page").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The source expression of CSP that allows exactly this text as an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _finite(value: Any) -> Any:
    """A copy of JSON data in which NaN and infinite numbers are None."""
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
