"""A run of ``gaff.watch`` as a cell of a notebook: its verdict, what was found, its curves, and its sites."""

from __future__ import annotations

from collections.abc import Sequence

from gaff.record.finding import Finding
from gaff.record.run import Record, norm_of_all
from gaff.record.summary import summary_of
from gaff.record.trainings import teller_of
from gaff.views.notebook import Cell, Shown, cell, colored, safe, sparkline_image, table_html
from gaff.views.run_text import ODD_VALUES, gradient_of, last_rms, next_commands, number, series_of

_SITES = 40  # of the table, before it is cut
_LEVELS = {"failed": "error", "wrong": "error", "suspicious": "warning", "not enough": "info", "healthy": "fine"}


def run_cell(record: Record) -> str:
    """The HTML of a whole run, as far as it has come; numbers are of its first process, findings of all."""
    verdict = record.verdict
    told = summary_of(record, record.ranks[0])
    level = _LEVELS[verdict.state]
    since = f" since step {verdict.since}" if verdict.since is not None else ""
    parts: list[Cell] = [
        Shown(f"<p><b>{colored(verdict.state, level)}</b>: {safe(verdict.cause + since)}</p>"),
        *(Shown(f'<p class="q">because {safe(one)}</p>') for one in verdict.evidence),
        Shown(f"<p>What to do: {safe(verdict.remedy)}</p>") if verdict.remedy else "",
        *(Shown(f"<p>{safe(why)}: <code>{safe(what)}</code></p>") for why, what in next_commands(record)),
        Shown(f'<p class="q">{safe(str(told))}<br>{safe(str(told.cost))}</p>'),
        _curves(record),
    ]
    if record.findings:
        parts.append(findings_html(record.findings))
    parts.append(_sites(record))
    return cell(*parts)


class FindingList(list[Finding]):
    """Findings, worst first; a cell of a notebook that ends in them shows them as a table."""

    def _repr_html_(self) -> str:
        return cell(findings_html(self)) if self else cell("no findings")


def findings_html(findings: Sequence[Finding]) -> Shown:
    """Findings as a table, worst first, with their numbers and what to do."""
    rows: list[tuple[Cell, ...]] = [
        (
            colored(one.severity, one.severity if one.severity in ("error", "warning", "info") else "q"),
            one.rule,
            one.address,
            f"{one.since}" + (f" to {one.last}" if one.is_over else ""),
            one.message,
            one.remedy,
        )
        for one in findings
    ]
    return Shown(table_html(("", "rule", "where", "since step", "what", "what to do"), rows))


def _curves(record: Record) -> Shown:
    """The losses and what else is known of every step, each with a small curve."""
    rows: list[tuple[Cell, ...]] = []
    for name in record.scalars:
        if name.startswith("loss:") or name in ("grad_norm", "lr", "scale"):
            series = norm_of_all(record) if name == "grad_norm" else record.scalar(name, teller_of(record, name))
            if len(series):
                title = f"{name.removeprefix('loss:')} over {len(series)} steps"
                rows.append((name.removeprefix("loss:").replace("_", " "), sparkline_image(series.values, title),
                             number(series.values[0]), number(series.values[-1])))  # fmt: skip
    return Shown(table_html(("", "over time", "first", "last"), rows, right=("first", "last")) if rows else "")


def _sites(record: Record) -> Shown:
    """The modules with the rms of what they returned and of its gradient; more than 40 are cut."""
    names = [name for name in record.sites if ":" not in name.replace(":output", "")]
    rows: list[tuple[Cell, ...]] = []
    for name in names[:_SITES]:
        forward, backward = (
            record.series(name, "rms", rank=record.ranks[0]),
            series_of(record, gradient_of(name, record.sites), "rms"),
        )
        if len(forward):
            rows.append((name, last_rms(record, name), sparkline_image(forward.values, f"rms of {name}"),
                         last_rms(record, gradient_of(name, record.sites)),
                         sparkline_image(backward.values, f"rms of the gradient at {name}")))  # fmt: skip
    if not rows:
        return Shown("")
    head = ("site", "rms", "over time", "gradient rms", "over time ")
    odd = f'<p class="q">{ODD_VALUES}</p>' if any("!" in str(cell) for row in rows for cell in (row[1], row[3])) else ""
    more = f'<p class="q">{len(names) - _SITES} more sites: .page() shows all</p>' if len(names) > _SITES else ""
    return Shown(f"<details><summary>{len(names)} modules</summary>"
                 f"{table_html(head, rows, right=('rms', 'gradient rms'))}{odd}{more}</details>")  # fmt: skip
