"""What a cell of a notebook shows, for ``_repr_html_``: a whole page in a frame, or a plain table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def framed(page: str, height: int = 640) -> str:
    """A page in an ``<iframe>`` of its own, without rights to anything of the notebook's; ``height`` in pixels.

    ``page`` is a complete HTML document. The sandbox lets its script run, but gives it no origin: it can neither read
    the notebook's document nor its cookies.
    """
    return (
        f'<iframe sandbox="allow-scripts" width="100%" height="{height}" style="border: 1px solid #8886" '
        f'srcdoc="{escape(page, quote=True)}"></iframe>'
    )


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A ``<table>`` of heads and cells, all escaped."""
    heading = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heading}</tr></thead><tbody>{cells}</tbody></table>"
