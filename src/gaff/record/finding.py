"""What a health rule has found. Needs no torch.

The rules of ``gaff.training`` make findings from samples, ``gaff.record.ranks`` makes those that need the logs of
several processes. They are written into the log as events, and read back by ``Record.findings``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gaff.errors import RecordError

SEVERITIES = ("error", "warning", "info")  # worst first
_NOT_TOLD = ("chain", "call_order")  # names of evidence: the ops before a NaN, a line each; which site was called first


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule at one site, or at several of the same kind: the first of them is ``site``.

    ``since``: the first step at which it was seen; ``last``: the latest; ``share``: of the looks in between and after.
    ``evidence``: the numbers at the latest look that saw it. ``look``: a line of Python that shows more.
    """

    rule: str
    site: str
    model: str
    since: int
    severity: str
    message: str
    cause: str
    remedy: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    last: int = 0
    share: float = 1.0
    also: tuple[str, ...] = ()  # further sites
    look: str = ""
    rank: int = 0
    is_over: bool = False  # not seen any more when the run ended

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them; ``from_dict`` reads them back."""
        return {**asdict(self), "evidence": dict(self.evidence), "also": list(self.also)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Finding:
        """Inverse of ``to_dict``; fields that are not known are left out. Raises RecordError for what is no finding."""
        known = {one.name for one in fields(cls)}
        try:
            given = {name: inner for name, inner in value.items() if name in known}
            given["also"] = tuple(str(one) for one in given.get("also", ()))
            finding = cls(**given)
        except (TypeError, AttributeError) as error:
            raise RecordError(f"a finding cannot be read: {error}") from None
        wanted = {"rule": str, "site": str, "model": str, "since": int, "message": str, "cause": str, "remedy": str,
                  "evidence": dict, "last": int, "share": (int, float), "look": str, "is_over": bool}  # fmt: skip
        for name, kind in wanted.items():
            if not isinstance(getattr(finding, name), kind):  # type: ignore[arg-type]
                raise RecordError(f"a finding has {name!r} {getattr(finding, name)!r:.50}: expected {kind}")
        if finding.severity not in SEVERITIES:
            raise RecordError(f"a finding of severity {finding.severity!r}: expected one of {', '.join(SEVERITIES)}")
        return finding

    @property
    def numbers(self) -> dict[str, Any]:
        """The evidence as people are told it: names as words, without what is there for drawing and for order."""
        return {name.replace("_", " "): value for name, value in self.evidence.items() if name not in _NOT_TOLD}

    @property
    def place(self) -> str:
        """``address`` as the end of a title: `` at fc1``; empty for a finding about the run as a whole."""
        return f" at {self.address}" if self.model or self.site else ""

    @property
    def address(self) -> str:
        """The model and the site in one, as messages show it."""
        if not self.model:
            return self.site or "the run"
        return f"{self.model}{self.site}" if not self.site or self.site[0] == ":" else f"{self.model}.{self.site}"


def told_of(finding: Finding) -> str:
    """What a finding means, with its place where that is not part of its message."""
    more = f" and {len(finding.also)} more" if finding.also else ""
    if not finding.site or finding.site in finding.message:
        return f"{finding.message} ({finding.address}{more})" if more and finding.site else finding.message
    return f"{finding.message} ({finding.address}{more})"


def evidence_of(finding: Finding) -> str:
    """A finding as a line of evidence: its rule, place, first step and numbers; of an op that made a NaN its line."""
    is_origin = "op" in finding.evidence
    told = [_told(name, value) for name, value in finding.numbers.items() if not is_origin or name in ("op", "line")]
    numbers = ", ".join(one for one in told if one)
    return f"{finding.rule}{finding.place} since step {finding.since}{': ' if numbers else ''}{numbers}"


def _told(name: str, value: Any) -> str:
    """A number of a finding with its name, as people are told it."""
    if isinstance(value, bool):
        return name if value else f"{name}: no"
    if isinstance(value, (list, tuple)):
        return f"{name} {'; '.join(map(str, value))}" if value else ""
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def origin_of(finding: Finding) -> tuple[str, ...]:
    """What is known of the op that made a NaN: its line, why it does, what it was given; else the finding's numbers."""
    known = finding.evidence
    if "op" not in known:
        return (evidence_of(finding),)
    lines = [f"{known['line']}: {known['code']}"] if known.get("line") and known.get("code") else []
    return (*lines, finding.cause, *map(str, known.get("inputs", ())), *(str(one) for one in known.get("notes", ())))


def is_of_output(site: str) -> bool:
    """Whether a site is of a value of the forward: no gradient, no parameter, no update of one, and not the run."""
    return bool(site) and not re.search(r":(grad|param|update|grad_output|grad_input|outer_grad)(\[|$)", site)


def is_of_all(finding: Finding, least: int) -> bool:
    """Whether a finding is about all of the weights that there are, and about so many: its evidence says "4 of 4"."""
    count, _, of = str(finding.evidence.get("weight_tensors", "")).partition(" of ")
    return count == of and count.isdigit() and int(count) >= least


def by_severity(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings that hold and are no mere facts, worst first, then in the order in which they began."""
    lasting = [one for one in findings if not one.is_over and one.severity != "info"]
    return tuple(sorted(lasting, key=lambda one: (SEVERITIES.index(one.severity), one.since)))
