"""A run that ``gaff.load`` has read: a record that can also be looked at, in a notebook and as a page."""

from __future__ import annotations

import os

from gaff.compat import extras
from gaff.compat.files import write_text
from gaff.inspection.writing import ending
from gaff.record.run import Record
from gaff.views.notebook import Shown, framed
from gaff.views.run_html import FindingList, run_cell


class SavedRun(Record):
    """A run of ``gaff watch`` or ``gaff.watch``, as ``gaff.load`` returns it.

    Ends it a cell of a notebook, its verdict, curves and sites are shown; ``page()`` shows the whole page there.
    """

    @property
    def findings(self) -> FindingList:
        """What was found in all processes, worst first; what was over when the run ended comes last."""
        return FindingList(super().findings)

    def _repr_html_(self) -> str:
        return run_cell(self)

    def to_html(self, *, rank: int = 0) -> str:
        """The page of this run, as ``gaff report --html`` writes it; ``rank``: the process whose tables it shows.

        Raises PlanError without numpy, RecordError for tables that are damaged.
        """
        extras.need("numpy", "page", for_="a page of a run")
        from gaff.views.page.run import document

        return document([self], rank=rank).to_html()

    def page(self, height: int = 640, *, rank: int = 0) -> Shown:
        """The page inside a notebook, ``height`` pixels high: some 150 kB, and the numbers. Raises as ``to_html``."""
        return framed(self.to_html(rank=rank), height)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file. Raises as ``to_html``, and RecordError where the file cannot be written.

        Raises PlanError for a name of another format, such as ``.json``.
        """
        ending(path, ".html", ".htm")
        write_text(path, self.to_html())
