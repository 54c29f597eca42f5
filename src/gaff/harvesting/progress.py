"""How far a harvest is, on a terminal: a bar with rows, rate and the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, int], None]  # number of a batch, how many there are (as far as known), rows it gave


def silent(number: int, count: int, rows: int) -> None:
    """Tell nobody."""


@contextmanager
def on_terminal() -> Iterator[Progress]:
    """A bar on standard error, where that is a terminal and the package ``rich`` is installed; else nothing is told."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield silent
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("gaff harvest"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rows]} rows, "
               "{task.speed} batches/s"), TimeRemainingColumn())  # fmt: skip
    with Bar(*columns, console=console, transient=True) as bar:
        task, total = bar.add_task("", rows=0), [0]

        def tell(number: int, count: int, rows: int) -> None:
            total[0] += rows
            bar.update(task, completed=number + 1, total=count or None, rows=total[0])

        yield tell
