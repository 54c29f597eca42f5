"""A watched training in one cell of a notebook, which changes as the training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gaff.record.finding import Finding
from gaff.views.notebook import Cell, Shown, cell, sparkline_image, table_html
from gaff.views.run_html import findings_html
from gaff.views.run_text import number

_MOST = 2000  # points of a curve, before every second one is left out


class LiveCell:
    """The cell: ``update`` takes in how the run stands, and hands the new HTML to ``show``, if there is one.

    Curves are of what it was told, about once a second. Used on the thread that writes the record.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show
        self._curves: dict[str, list[float]] = {}
        self._updates = 0
        self._every = 1  # updates from one point of a curve to the next

    def update(self, step: int, known: Mapping[str, float], findings: Sequence[Finding], overhead: float) -> str:
        """The HTML of the run at ``step``. ``known``: the latest numbers by name, as ``run_text.line`` takes them."""
        if self._updates % self._every == 0:
            for name, value in known.items():
                if name.startswith("loss:") or name in ("grad_norm", "lr"):
                    self._curves.setdefault(name, []).append(value)
        self._updates += 1
        if any(len(values) > _MOST for values in self._curves.values()):
            self._every *= 2  # from here on every second one, as of those before
            self._curves = {name: values[::2] for name, values in self._curves.items()}
        rows: list[tuple[Cell, ...]] = []
        for name, values in self._curves.items():
            title = name.removeprefix("loss:").replace("_", " ")
            rows.append((title, sparkline_image(values, f"{title} so far"), number(known.get(name, values[-1]))))
        parts: list[Cell] = [Shown(f"<p><b>step {step}</b>, watching takes {overhead:.1%} of the time</p>")]
        if rows:
            parts.append(Shown(table_html(("", "so far", "latest"), rows, right=("latest",))))
        parts.append(findings_html(findings) if findings else "nothing wrong was found so far" if step >= 20 else "")
        html = cell(*parts)
        if self._show is not None:
            self._show(html)
        return html
