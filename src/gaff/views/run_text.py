"""A watched run as text: lines while it goes on, alarms, and the report at its end. Needs no torch.

``line`` and ``alarm`` are printed by ``gaff watch`` as the run goes on; ``report`` is what ``gaff report`` prints, and
is made of ``verdict``, ``box``, ``sparkline`` and ``site_table``. All return text and write nothing. Numbers are told
with four digits.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gaff.record.finding import Finding
from gaff.record.run import Record, Series, norm_of_all
from gaff.record.summary import summary_of
from gaff.record.trainings import teller_of
from gaff.record.verdict import LEAST_LOOKS
from gaff.views.text import counted, table
from gaff.views.trials_text import trials_table

_BARS = "▁▂▃▄▅▆▇█"
_LETTERS = "_.-=+*#@"  # where only ASCII may be printed
_WIDTH = 100
ODD_VALUES = "! NaN or inf among the values; an rms is that of the finite ones"  # below a table that has one
_SITES = 24  # of the tree, before it is cut


def line(
    step: int, known: Mapping[str, float], findings: Sequence[Finding], overhead: float, every: int, looks: int
) -> str:
    """One line about the run as it stands, as ``gaff watch`` prints it at intervals.

    ``known``: the latest value of each scalar by name (``loss:NAME``, ``grad_norm``); ``findings``: worst first, of
    which the first is told if it is not over; ``overhead``: the share of time that watching takes; ``every``: steps
    from one look to the next; ``looks``: how many there were in training.
    """
    parts = [f"step {step}"]
    parts += [
        f"{name.removeprefix('loss:')} {number(value)}" for name, value in known.items() if name.startswith("loss:")
    ]
    if "grad_norm" in known:
        parts.append(f"grad norm {number(known['grad_norm'])}")
    if findings and not findings[0].is_over:
        parts.append(f"{findings[0].rule}{findings[0].place} since step {findings[0].since}")
    elif looks >= LEAST_LOOKS:
        parts.append(f"nothing wrong in the {looks} steps that were looked at")
    else:
        parts.append(f"{looks} steps looked at, too few to judge")
    each = "every step" if every == 1 else f"one step in {every}"
    parts.append(f"looking at {each}, which takes {overhead:.1%} of the time")
    return "gaff: " + " · ".join(parts)


def alarm(finding: Finding) -> str:
    """A finding in a box, with its evidence, cause and remedy, as it is told when its rule comes to hold."""
    return box(f"{finding.severity}: {finding.rule}{finding.place}", body_of(finding))


def body_of(finding: Finding) -> list[str]:
    """The lines of a finding below its title: message, evidence, further sites, cause, remedy, where to look.

    The ops before a NaN are left to the page, which has a line for each. The texts are not made safe for a terminal:
    see ``gaff.views.text.printable``.
    """
    lines = [finding.message, f"since step {finding.since}" + _extent(finding)]
    if finding.numbers:
        lines.append("evidence: " + ", ".join(f"{name} {_shown(value)}" for name, value in finding.numbers.items()))
    if finding.also:
        more = f" and {len(finding.also) - 5} more" if len(finding.also) > 5 else ""
        lines.append(f"also at: {', '.join(finding.also[:5])}{more}")
    lines += [f"cause: {finding.cause}", f"remedy: {finding.remedy}"]
    if finding.look:
        lines.append(f"inspect: {finding.look}")
    return lines


def box(title: str, lines: Iterable[str], *, plain: bool = False) -> str:
    """A title and lines in a frame of 100 columns; longer lines are wrapped.

    ``plain``: without characters beyond ASCII, nothing wrapped, and every line begins with ``gaff:``, so that it can be
    searched for in a log.
    """
    if plain:
        return "\n".join([f"gaff: {title}", *(f"gaff:   {one}" for one in lines)])
    wrapped = [
        piece
        for one in lines
        for piece in textwrap.wrap(one, _WIDTH - 4, subsequent_indent="  ", break_on_hyphens=False) or [""]
    ]
    head = f"─ gaff · {title} "
    return "\n".join(
        [f"┌{head:─<{_WIDTH - 2}}┐", *(f"│ {one:<{_WIDTH - 4}} │" for one in wrapped), f"└{'─' * (_WIDTH - 2)}┘"]
    )


def verdict(record: Record) -> str:
    """One sentence about a run: its state, the cause, the first step that shows it, and how many there were."""
    verdict = record.verdict
    size = "" if verdict.state in ("not enough", "healthy") else f", in {counted(record.steps, 'step')}"
    in_groups = f" in {len(record.groups)} groups" if len(record.groups) > 1 else ""
    several = f" ({len(record.ranks)} processes{in_groups})" if len(record.ranks) > 1 else ""
    return f"{verdict}{size}{several}"


def report(
    record: Record, *, plain: bool = False, brief: bool = False, width: int | None = None, most: int | None = None
) -> str:
    """The verdict, the findings with evidence and remedy, and the sites with their numbers over time.

    ``plain``: ASCII only; ``brief``: one line a finding, where alarms have told the rest; ``width``: columns of the
    table of sites; ``most``: rows of it (None: 24). Curves and the table are of the process of rank 0, findings of all.
    The last lines say what was looked at and how much of the run's time that took.
    """
    parts = [f"{record.path}: {verdict(record)}", *reasons(record)]
    for name in record.scalars:
        if name.startswith("loss:") or name in ("grad_norm", "lr", "scale"):
            series = norm_of_all(record) if name == "grad_norm" else record.scalar(name, teller_of(record, name))
            if len(series):
                ends = f"{number(series.values[0])} to {number(series.values[-1])}"
                parts.append(f"{name.removeprefix('loss:'):<12} {sparkline(series.values, plain=plain)} {ends}")
    known = record.experiments
    if known is not None:
        parts.append(trials_table(known))
    findings = record.findings
    for finding in findings:
        title = f"{finding.severity}: {finding.rule}{finding.place}" + (" (over)" if finding.is_over else "")
        if brief:
            parts.append(f"  {title}, since step {finding.since}{_extent(finding)}: {finding.message}")
        else:
            parts.append(box(title, body_of(finding), plain=plain))
    tree = site_table(record, findings, plain=plain, width=width, most=_SITES if most is None else most)
    if tree:
        parts.append(tree)
    parts += [f"note: {note}" for note in record.notes]
    known_of = summary_of(record, record.ranks[0])
    parts.append(str(known_of))
    looks = record.looks
    if looks:
        parts.append(f"looked at {len(looks)} of {record.steps} steps, the last of them step {looks[-1]}")
    skipped = record.scalar("skipped", record.ranks[0]).values[-1:] if "skipped" in record.scalars else []
    if skipped and skipped[0]:
        parts.append(f"a GradScaler skipped {int(skipped[0])} steps")
    parts += _saved_files(record, [one.since for one in findings if one.severity != "info" and not one.is_over])
    parts.append(str(known_of.cost))
    return "\n".join(parts)


def _saved_files(record: Record, begun: Sequence[int]) -> list[str]:
    """The last file that was saved, and the last one before anything was wrong; ``begun``: steps that show that."""
    saved = record.saved(record.ranks[0])
    if not saved:
        return []
    count = f"{len(saved)} {'file' if len(saved) == 1 else 'files'}"
    told = [f"torch.save wrote {count}, the last one {saved[-1][1]} after {_steps(saved[-1][0])}"]
    first = min(begun, default=None)
    sound = [one for one in saved if first is not None and one[0] <= first]
    if sound and sound[-1] != saved[-1]:
        told.append(f"the last one before the first problem, at step {first}, is {sound[-1][1]} "
                    f"after {_steps(sound[-1][0])}")  # fmt: skip
    return told


def _steps(count: int) -> str:
    return f"{count} {'step' if count == 1 else 'steps'}"


def reasons(record: Record) -> list[str]:
    """What shows the verdict, what to do and to run next, and what else it may be, as lines below it."""
    verdict = record.verdict
    lines = [f"  because {one}" for one in verdict.evidence]
    if verdict.remedy:
        lines.append(f"  do: {verdict.remedy}")
    lines += [f"  {why}: {command}" for why, command in next_commands(record)]
    others = [one for one in verdict.alternatives if one.name != verdict.name]
    certain = dict.fromkeys(one.name for one in others if one.certainty == "certain")
    possible = dict.fromkeys(one.name for one in others if one.name not in certain)
    told = (("also wrong", certain), ("also possible", possible))
    return [*lines, *(f"  {what}: {', '.join(names)}" for what, names in told if names)]


def next_commands(record: Record) -> list[tuple[str, str]]:
    """What to run next to know more of the verdict: each with its purpose, a command line as a shell takes it."""
    verdict, found = record.verdict, []
    known = record.head.get("command")
    command = [str(word) for word in known] if isinstance(known, list) and known else ["COMMAND"]
    script = next((at for at, word in enumerate(command) if word.endswith(".py")), None)
    is_traced = any("op" in one.evidence for one in record.findings if one.rule == "nonfinite")
    if verdict.name == "nonfinite" and not is_traced and script is not None and len(record.ranks) == 1:
        found.append(("to find the op", f"gaff nan --again {shlex.join(command[script:])}"))
    tried = {one.name for one in record.experiments.changed} if record.experiments is not None else set()
    if more := [name for name in verdict.experiments if name not in tried]:
        found.append(("to be sure", f"gaff try --only {','.join(more)} -- {shlex.join(command)}"))
    return found


def site_table(
    record: Record, findings: Sequence[Finding], *, plain: bool, width: int | None = None, most: int = _SITES
) -> str:
    """A table of the modules: rms of what each returned and of its gradient, over time, and the findings there.

    Modules are in the order in which they were first called. Where there are more than ``most``, those with findings
    stay, then as many of the first and of the last as there is room for. Empty text where no module has numbers.
    A line below says what ``!`` means where the table has one.
    """
    flags: dict[tuple[str, str], list[str]] = {}  # by model and address
    for finding in findings:
        if not finding.is_over and finding.site:  # else of the run as a whole
            for site in (finding.site, *finding.also):
                flags.setdefault((finding.model, site), []).append(finding.rule)
    keys = record.names()
    rows = []
    names = [name for name in record.sites if ":" not in name.replace(":output", "")]
    for name in names:
        forward = record.series(name, "rms", rank=record.ranks[0])
        if not len(forward):
            continue
        gradient = gradient_of(name, record.sites)
        backward = series_of(record, gradient, "rms")
        wrong = flags.get(keys[name], [])
        rows.append((name, last_rms(record, name), sparkline(forward.values, plain=plain), last_rms(record, gradient),
                     sparkline(backward.values, plain=plain), ", ".join(dict.fromkeys(wrong))))  # fmt: skip
    if not rows:
        return ""
    cut = len(rows) - most
    if cut > 0:  # those with a finding first, then the first and last
        flagged = [row for row in rows if row[5]]
        calm = [row for row in rows if not row[5]]
        room = max(0, most - len(flagged))
        kept = {id(row) for row in (*flagged[:most], *calm[: room - room // 2], *calm[len(calm) - room // 2 :])}
        rows = [row for row in rows if id(row) in kept]
    head = ("site", "rms", "over time", "gradient rms", "over time ", "findings")
    text = table(head, rows, width=width, right=("rms", "gradient rms"), first_to_go=("over time ", "over time"))
    if any("!" in cell for row in rows for cell in row):
        text += f"\n{ODD_VALUES}"
    return text + (f"\n... {cut} more sites; gaff report --all shows them" if cut > 0 else "")


def sparkline(values: Sequence[float], *, plain: bool = False, size: int = 16) -> str:
    """A small curve of at most ``size`` characters, one for each stretch of values, as high as the largest there.

    The scale is logarithmic where all values are positive and lie more than a factor of 30 apart, else linear; ``!``
    stands for a stretch with a NaN or inf. ``plain``: in ASCII instead of blocks.
    """
    if not values:
        return ""
    step = max(1.0, len(values) / size)
    buckets = [
        values[int(at * step) : max(int(at * step) + 1, int((at + 1) * step))] for at in range(min(size, len(values)))
    ]
    points = [None if any(not math.isfinite(one) for one in bucket) else max(bucket) for bucket in buckets]
    known = [one for one in points if one is not None]
    if not known:
        return "!" * len(points)
    is_wide = min(known) > 0 and max(known) > 30 * min(known)
    scale = [math.log(one) if is_wide and one is not None else one for one in points]
    finite = [one for one in scale if one is not None]
    low, high = min(finite), max(finite)
    marks = _LETTERS if plain else _BARS
    return "".join(
        "!" if one is None else marks[min(7, int((one - low) / (high - low) * 8)) if high > low else 3] for one in scale
    )


def to_ascii(text: str) -> str:
    """Boxes and dots as plain characters, every line of a box with ``gaff:`` before it.

    For terminals and logs that are not UTF-8. Characters of the text itself that are not ASCII become ``?``.
    """
    lines = []
    for line in text.splitlines():
        if line.startswith("┌"):
            lines.append(line.strip("┌─┐ ").replace("gaff · ", "gaff: "))
        elif line.startswith("│"):
            lines.append("gaff:   " + line.strip("│ "))
        elif not line.startswith("└"):
            lines.append(line.replace(" · ", ", "))
    return "\n".join(lines).encode("ascii", "replace").decode()


def number(value: float) -> str:
    """A number with four digits, as all texts about a run show it."""
    return f"{value:.4g}"


def _extent(finding: Finding) -> str:
    """How long a finding has held, in words that go on after ``since step N``; may be empty.

    It is empty for a finding that only one step has shown so far and that is not over. The share of looks is told where
    it is below 99.5 %.
    """
    share = "" if finding.share >= 0.995 else f", in {finding.share:.0%} of the steps that were looked at"
    if finding.is_over:
        return f" until step {finding.last}{share}"
    return f", last seen at step {finding.last}{share}" if finding.last > finding.since else ""


def _shown(value: Any) -> str:
    """A value of a finding's evidence: floats with four digits, all else as Python prints it."""
    return number(value) if isinstance(value, float) else str(value)


def last_rms(record: Record, site: str | None) -> str:
    """The rms of a site's finite elements at the last look, with ``!`` where others were not finite; may be empty."""
    series = series_of(record, site, "rms")
    if not len(series):
        return ""
    is_odd = series_of(record, site, "nonfinite").values[-1] > 0
    return number(series.values[-1]) + ("!" if is_odd else "")


def series_of(record: Record, site: str | None, stat: str) -> Series:
    """The numbers of a site of the first process, or an empty series where there is no such site."""
    return record.series(site, stat, rank=record.ranks[0]) if site is not None else Series([], [])


def gradient_of(name: str, sites: Iterable[str]) -> str | None:
    """The site of the gradient at the output of the same module and call, if the record has it."""
    path, bracket, rest = name.partition("[")
    path = path.removesuffix(":output")
    wanted = f"{path}:grad_output{bracket}{rest}"
    return wanted if wanted in set(sites) else None


def told_apart(paths: Sequence[Path]) -> list[str]:
    """A name for each of several runs: of its folder, with as many folders around it as tell all of them apart."""
    for depth in range(1, max((len(one.parts) for one in paths), default=0) + 1):
        names = ["/".join(one.parts[-depth:]) for one in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(one) for one in paths]
