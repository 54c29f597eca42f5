"""How far a harvest is, on a terminal: a bar with rows, rate and the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

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
    told = TextColumn("{task.fields[rows]} rows, {task.fields[rate]:.0f} rows/s")
    columns = (TextColumn("gaff harvest"), BarColumn(), MofNCompleteColumn(), told, TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task, total, begun = bar.add_task("", total=None, rows=0, rate=0.0), [0], perf_counter()

        def tell(number: int, count: int, rows: int) -> None:
            total[0] += rows
            rate = total[0] / (perf_counter() - begun)
            bar.update(task, completed=number + 1, total=count or None, rows=total[0], rate=rate)

        yield tell
