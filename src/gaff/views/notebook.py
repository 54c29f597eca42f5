"""A whole page shown in a cell of a notebook, for ``_repr_html_`` of traces and differences."""

from __future__ import annotations

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
