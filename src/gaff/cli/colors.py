"""Texts in colours, by rich: states, severities, frames, heads of tables, and numbers that are not finite."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.text import Text

_STYLES = (
    (r"(?<![\w-])(failed|wrong)(?=: |, probably)|\berror(?=: )", "bold red"),
    (r"(?<![\w-])suspicious(?=: )|\bwarning(?=: )|\bparted\b|\bthey differ first at [^ ]+", "yellow"),
    (r"(?<![\w-])healthy(?=: )|\bthe same in all\b", "green"),
    (r"(?<![\w-])not enough(?=: )|\binfo(?=: )", "cyan"),
    (r"(?m)^  (because|do|to be sure|to find the op|also wrong|also possible)(?=: | )", "bold"),
    (r"(?m)^[┌└].*[┐┘]$|(?m:^)│|│(?m:$)", "dim"),
    (r"\b(nan|inf|non-finite)\b|!+(?=\s)", "red"),
    (r"(?m)^(site|parameter|run|phase|pattern|node|gradient of)  .*$", "bold"),
    (r"(?m)^(note: .*|\(not shown for want of room: .*\)|watching took .*|looked at .*)$", "dim"),
)


def paint(text: str, stream: IO[str] | Console) -> None:
    """Print ``text`` as it is, line by line, with colours; nothing is wrapped or read as markup."""
    shown = Text(text)
    for pattern, style in _STYLES:
        shown.highlight_regex(pattern, style)
    console = stream if isinstance(stream, Console) else Console(file=stream, highlight=False)
    console.print(shown, soft_wrap=True)
