"""From hits to findings: what holds long enough, at which places, and what merely follows from something else.

A hit is one rule at one place in one look. The judge has them counted (``Hearing``), for each training of a run by
itself, leaves out what another finding explains, and raises the alarm once for what has stood for some looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from gaff.record.finding import SEVERITIES, Finding
from gaff.record.sample import Sample
from gaff.training.rules.hearing import Hearing
from gaff.training.rules.registry import Hit, Past, Rule

# By rule the number of its site that it goes by; the rms of others tells most.
_TOLD = {
    "dead_units": "dead",
    "update_large": "update_ratio",
    "update_small": "update_ratio",
    "sparse_gradient": "zeros",
}
_ONE_EVENT = 10  # steps between two spikes of a loss that are one event
_PATIENCE = 3  # looks that a finding must stand before anybody is alarmed: what explains it may come later
_MOST = 32  # trainings that are told apart
# Asked of a look that is judged when something non-finite was told already, which may come of what they tell.
_OF_NONFINITE = ("nonfinite", "step_not_finite", "kl_of_log_targets")


class Judge:
    """Asks the rules about each look. ``alarm`` is called once for every rule and model that comes to hold.

    Made for one run, which may have several trainings, one after the other: what rules compare with, and what a hit
    must be a share of, is counted for each of them anew. Not thread-safe: looks come from the one thread that writes
    the record, and whoever asks for findings waits until that has nothing left to do. While something is not finite,
    only the rule for that is asked in the same training, since all others would follow from it.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        alarm: Callable[[Finding], None] = lambda finding: None,
        ask: Callable[[Rule, Sample, Past], list[Hit] | str] = lambda rule, sample, past: list(rule(sample, past)),
    ) -> None:
        """``ask``: what gets a rule's hits; a text, where it raised instead: such a rule is not asked again."""
        self._rules = sorted(rules, key=lambda one: one.rank)
        self._alarm = alarm
        self._ask = ask
        self._trainings = [Hearing(self._rules)]
        self._losses: set[str] = set()  # of all trainings
        self._direct: list[Finding] = []  # found by other means than a rule
        self._told: set[tuple[str, str]] = set()
        self._standing: Counter[tuple[str, str]] = Counter()  # looks since which a finding has stood
        self.withdrawn: set[str] = set()  # rules that what came later has refuted
        self.broken: dict[str, str] = {}  # rules that raised, with what; they are asked no more

    @property
    def looks(self) -> int:
        """How many looks at training steps were judged."""
        return sum(one.looks["train"] for one in self._trainings)

    @property
    def _now(self) -> Hearing:
        """The training in progress."""
        return self._trainings[-1]

    def look(self, sample: Sample) -> None:
        """Judge one sampled step: remember what later looks compare with, ask the rules of its phase, tell what holds.

        Where all of its losses are new, and none is of the training in progress, another one has begun. Calls
        ``alarm`` from inside. A rule that raised before is passed over.
        """
        if self._now.is_left(sample) and self._losses.isdisjoint(sample.losses) and len(self._trainings) < _MOST:
            self._trainings.append(Hearing(self._rules, sample.step))
        self._losses.update(sample.losses)
        training = self._now
        training.begin(sample)
        for one in self._rules:
            is_late = training.is_nonfinite and one.name not in _OF_NONFINITE
            if one.phase != sample.phase or one.name in self.broken or is_late:
                continue
            hits = self._ask(one, sample, training.past)
            if isinstance(hits, str):
                self.broken[one.name] = hits
                continue
            for hit in {hit.key: hit for hit in hits}.values():  # one a look of each place: the last
                training.note(one, hit, sample)
        training.end(sample)
        self._tell()

    def add(self, finding: Finding) -> None:
        """Take in a finding that no rule has made: the origin of a NaN, a spike of the loss.

        It takes the place of an earlier one of the same rule and site, and of whatever a rule of its name finds; but
        spikes that follow one another closely are told by the first, which the others come from. It is certain at once:
        ``alarm`` need not wait for further looks.
        """
        if finding.rule == "nonfinite":
            self._now.meet_nonfinite(finding.site)
        known = next((one for one in self._direct if (one.rule, one.site) == (finding.rule, finding.site)), None)
        if known is not None and finding.rule == "loss_spike" and finding.since - known.last <= _ONE_EVENT:
            finding = replace(known, last=finding.last)
        self._direct = [one for one in self._direct if one is not known]
        self._direct.append(finding)
        self._tell()

    @property
    def findings(self) -> list[Finding]:
        """What holds or has held for long; worst first, with those that are over at the end.

        Made anew from all tracks each time. What a training has found stays as it was at its end, unless a later one
        has looked at the same model: then that tells whether it is over.
        """
        found: list[Finding] = []  # of later trainings first
        later: set[str] = set()  # models that were looked at in one of them
        for training, end in reversed([*zip(self._trainings, self._ends(), strict=True)]):
            now = []
            for one in self._of(training, end):
                at = next((at for at, known in enumerate(found) if one.model and _is_same(known, one)), None)
                if at is None:
                    now.append(replace(one, is_over=one.is_over or one.model in later))
                else:
                    found[at] = _joined(found[at], one)
            found += now
            later |= training.models
        return sorted(found, key=lambda one: (one.is_over, SEVERITIES.index(one.severity), one.since))

    def _ends(self) -> list[float]:
        """The first step after each training."""
        return [*(one.began for one in self._trainings[1:]), float("inf")]

    def _of(self, training: Hearing, end: float) -> list[Finding]:
        """The findings of one training, which is over at step ``end``.

        What a finding that is not over explains (``hides`` of its rule) is left out, in the same model or, where one of
        the two is of the run as a whole, in any; not what names the examples that it began with. A spike whose batch
        shows nothing is none of an agent's loss, which follows what it meets, and jumps where its targets are those of
        newer weights; nor of one that is divided by another number later.
        """
        past = training.past
        told = [one for one in self._direct if training.began <= one.since < end
                and (one.rule != "loss_spike" or "batch_indices" in one.evidence
                     or not (past.is_acting or past.scales.varied))]  # fmt: skip
        direct = {one.rule for one in told}
        found = [*told, *(one for one in training.findings if one.rule not in direct)]
        found = [one for one in found if one.rule not in self.withdrawn]
        hidden = {(name, one.model) for one in found if not one.is_over for name in self._hides(one.rule)}
        return [one for one in found if "batch_indices" in one.evidence
                or (not any((one.rule, model) in hidden for model in ("", one.model))
                and not (one.model == "" and any(name == one.rule for name, _ in hidden)))]  # fmt: skip

    def _hides(self, name: str) -> tuple[str, ...]:
        """The names of the rules whose findings follow from one of this name."""
        return next((one.hides for one in self._rules if one.name == name), ())

    def _tell(self) -> None:
        """Raise the alarm for findings that have come to hold, once for each rule and model.

        What a rule has found must stand three times in a row that this is asked, since what explains it may come a look
        later; what was added by other means is told at once. Facts (``info``) never alarm.
        """
        standing = [one for one in self.findings if not one.is_over and one.severity != "info"]
        self._standing = Counter({(one.rule, one.model): self._standing[one.rule, one.model] + 1 for one in standing})
        for finding in standing:
            which = finding.rule, finding.model
            is_certain = finding in self._direct or self._standing[which] >= _PATIENCE
            if which not in self._told and is_certain:
                self._told.add(which)
                self._alarm(finding)

    def about(self, finding: Finding, path: str) -> Finding:
        """The finding with the line of Python that looks closer, into the record at ``path``.

        Without a path there is no record, and the finding stays as it is.
        """
        if not path:
            return finding
        is_known = any((finding.model, finding.site) in one.order for one in self._trainings)
        what = f"series({finding.site!r}, {_TOLD.get(finding.rule, 'rms')!r})" if is_known else "scalar('loss')"
        return replace(finding, look=f"gaff.load({path!r}).{what}")


def _is_same(one: Finding, other: Finding) -> bool:
    """Whether two trainings have found the same in one model."""
    return (one.rule, one.model) == (other.rule, other.model)


def _joined(later: Finding, one: Finding) -> Finding:
    """What a later training has found, with the beginning and the places of what an earlier one has."""
    sites = dict.fromkeys(site for site in (*later.also, one.site, *one.also) if site != later.site)
    return replace(later, since=min(one.since, later.since), also=tuple(sites))
