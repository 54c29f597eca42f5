"""A page inside a notebook."""

from __future__ import annotations

from html import escape


def framed(page: str, height: int = 640) -> str:
    """In a frame of its own, without rights to anything of the notebook's; ``height`` in pixels."""
    return (
        f'<iframe sandbox="allow-scripts" width="100%" height="{height}" style="border: 1px solid #8886" '
        f'srcdoc="{escape(page, quote=True)}"></iframe>'
    )
