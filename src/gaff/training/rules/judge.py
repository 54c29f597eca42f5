"""From hits to findings: what holds long enough, at which places, and what merely follows from something else.

A hit is one rule at one place in one look. The judge counts hits in a ``Track`` for each rule and place, makes one
``Finding`` of all places of a rule in a model when they have come often enough, leaves out what another finding
explains, and raises the alarm once for what has stood for some looks.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gaff.record.finding import SEVERITIES, Finding
from gaff.record.sample import Key, Sample
from gaff.training.rules.registry import LEAST_TARGETS, Activity, Hit, Past, Rule

_FIRST = 5  # looks whose losses are kept as the beginning
_RECENT = 10
_LOADS = 16
# By rule the number of its site that it goes by; the rms of others tells most.
_TOLD = {
    "dead_units": "dead",
    "update_large": "update_ratio",
    "update_small": "update_ratio",
    "sparse_gradient": "zeros",
}
_NORMS = 32
_MOST_SITES = 40  # of one finding
_ONE_EVENT = 10  # steps between two spikes of a loss that are one event
_PATIENCE = 3  # looks that a finding must stand before anybody is alarmed: what explains it may come later


@dataclass(slots=True)
class Track:
    """The hits of one rule at one place, from the first on.

    ``hits``: how many looks had one; ``began``: looks of the rule's phase before the first; ``since``, ``last``: the
    steps of the first and the latest hit; ``last_look``: number of the look of the latest; ``evidence``, ``message``:
    of the latest.
    """

    hits: int
    began: int
    since: int
    last: int
    last_look: int
    evidence: dict[str, Any]
    message: str


_OF_DATA = ("input_scale",)
_OF_NONFINITE = ("nonfinite", "step_not_finite")  # of a look that is judged when a later step has told already


class Judge:
    """Asks the rules about each look. ``alarm`` is called once for every rule and model that comes to hold.

    Made for one run. Not thread-safe: looks come from the one thread that writes the record, and whoever asks for
    findings waits until that has nothing left to do. After something non-finite only the rule for that is asked, since
    all others would follow from it, and looks are not counted any more, so that shares of what held before stay what
    they were.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        alarm: Callable[[Finding], None] = lambda finding: None,
        ask: Callable[[Rule, Sample, Past], list[Hit] | str] = lambda rule, sample, past: list(rule(sample, past)),
    ) -> None:
        """``ask``: what gets a rule's hits; a text, where it raised instead: such a rule is not asked again."""
        self.past = Past()
        self._rules = sorted(rules, key=lambda one: one.rank)
        self._alarm = alarm
        self._ask = ask
        self._tracks: dict[tuple[str, Key], Track] = {}
        self._direct: list[Finding] = []  # found by other means than a rule
        self._told: set[tuple[str, str]] = set()
        self._looks = {"train": 0, "eval": 0}
        self._step = 0  # of the latest look
        self._standing: Counter[tuple[str, str]] = Counter()  # looks since which a finding has stood
        self._ends: dict[Key, tuple[float, float]] = {}  # of parameters the smallest and largest element at first
        self._order: dict[Key, int] = {}  # in which places were first seen
        self.broken: dict[str, str] = {}  # rules that raised, with what; they are asked no more
        self._is_nonfinite = False

    @property
    def looks(self) -> int:
        """How many looks at training steps were judged."""
        return self._looks["train"]

    def look(self, sample: Sample) -> None:
        """Judge one sampled step: remember what later looks compare with, ask the rules of its phase, tell what holds.

        Calls ``alarm`` from inside. A rule that raised before is passed over.
        """
        self._remember(sample)
        if not self._is_nonfinite:  # what held when that came holds still
            self._looks[sample.phase] += 1
            self._step = sample.step
        for one in self._rules:
            is_late = self._is_nonfinite and one.name not in _OF_NONFINITE
            if one.phase != sample.phase or one.name in self.broken or is_late:
                continue
            hits = self._ask(one, sample, self.past)
            if isinstance(hits, str):
                self.broken[one.name] = hits
                continue
            for hit in {hit.key: hit for hit in hits}.values():  # one a look of each place: the last
                self._note(one, hit, sample)
        if sample.phase == "train":
            self._remember_norms(sample)
        self._tell()

    def add(self, finding: Finding) -> None:
        """Take in a finding that no rule has made: the origin of a NaN, a spike of the loss.

        It takes the place of an earlier one of the same rule and site, and of whatever a rule of its name finds; but
        spikes that follow one another closely are told by the first, which the others come from. It is certain at once:
        ``alarm`` need not wait for further looks.
        """
        self._is_nonfinite |= finding.rule == "nonfinite"
        known = next((one for one in self._direct if (one.rule, one.site) == (finding.rule, finding.site)), None)
        if known is not None and finding.rule == "loss_spike" and finding.since - known.last <= _ONE_EVENT:
            finding = replace(known, last=finding.last)
        self._direct = [one for one in self._direct if one is not known]
        self._direct.append(finding)
        self._tell()

    @property
    def findings(self) -> list[Finding]:
        """What holds or has held for long; worst first, with those that are over at the end.

        Made anew from all tracks each time. What a finding that is not over explains (``hides`` of its rule) is left
        out, in the same model or, where one of the two is of the run as a whole, in any; not what names the examples
        that it began with. A spike whose batch shows nothing is none of an agent's loss, which follows what it meets,
        and jumps where its targets are those of newer weights; nor of one that is divided by another number later.
        """
        told = [one for one in self._direct
                if one.rule != "loss_spike" or "batch_indices" in one.evidence
                or not (self.past.is_acting or self.past.scales.varied)]  # fmt: skip
        direct = {one.rule for one in told}
        found = [*told, *(one for one in self._grouped() if one.rule not in direct)]
        hidden = {(name, one.model) for one in found if not one.is_over for name in self._hides(one.rule)}
        kept = [one for one in found if "batch_indices" in one.evidence
                or (not any((one.rule, model) in hidden for model in ("", one.model))
                and not (one.model == "" and any(name == one.rule for name, _ in hidden)))]  # fmt: skip
        return sorted(kept, key=lambda one: (one.is_over, SEVERITIES.index(one.severity), one.since))

    def _hides(self, name: str) -> tuple[str, ...]:
        """The names of the rules whose findings follow from one of this name."""
        return next((one.hides for one in self._rules if one.name == name), ())

    def _note(self, one: Rule, hit: Hit, sample: Sample) -> None:
        """Count one hit in the track of its rule and place."""
        looks = self._looks[one.phase]
        track = self._tracks.get((one.name, hit.key))
        self._is_nonfinite |= one.name == "nonfinite"
        if track is None:
            self._tracks[one.name, hit.key] = Track(
                1, looks - 1, sample.step, sample.step, looks, hit.evidence, hit.message
            )
            return
        track.hits += 1
        track.last, track.last_look = sample.step, looks
        track.evidence, track.message = hit.evidence, hit.message

    def _grouped(self) -> list[Finding]:
        """The findings of rules: of each rule and model the places whose hits are enough, in number and share.

        The share is of the looks since the first hit at that place: a symptom that begins late in a long run is found
        as soon as one that was there from the beginning. What all looks tell of the data is enough where values are
        not finite after few of them: no other is to come.
        """
        found: dict[tuple[str, str], list[tuple[Key, Track]]] = {}
        for (name, key), track in self._tracks.items():
            one = next(one for one in self._rules if one.name == name)
            share = track.hits / max(1, self._looks[one.phase] - track.began)
            is_short = self._is_nonfinite and name in _OF_DATA
            least = min(one.least, max(1, self._looks[one.phase])) if is_short else one.least
            if track.hits >= least and share >= one.share:
                found.setdefault((name, key[0]), []).append((key, track))
        return [self._finding(name, places) for (name, _), places in found.items()]

    def _finding(self, name: str, places: list[tuple[Key, Track]]) -> Finding:
        """One finding of all places of a rule in a model; its site is where it began, the others stand in ``also``.

        A place is live that was hit in the last three looks, or in the last quarter of them and the second half of the
        steps: looks become rarer, and most may lie in a first part of a run. A live one is preferred as the site; of
        those that began at one step the one comes first whose module was called first. Without any live place the
        finding is over; one of a rule that asks for no share (a single hit is enough) never is.
        """
        one = next(one for one in self._rules if one.name == name)
        looks = self._looks[one.phase]
        places = sorted(places, key=lambda place: (place[1].since, self._order.get(place[0], 0)))
        live = [place for place in places if looks - place[1].last_look < 3
                or (looks - place[1].last_look < looks // 4 and 2 * place[1].last >= self._step)]  # fmt: skip
        key, track = (live or places)[0]
        also = tuple(other[1] for other, _ in places if other != key)
        return Finding(
            rule=name,
            site=key[1],
            model=key[0],
            since=track.since,
            severity=one.severity,
            message=track.message or one.means,
            cause=one.cause,
            remedy=one.remedy,
            evidence=track.evidence,
            last=track.last,
            share=track.hits / max(1, looks - track.began),
            also=also[:_MOST_SITES],
            is_over=not live and one.share > 0,
        )

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

    def _remember(self, sample: Sample) -> None:
        """Take into ``past`` what rules compare later looks with; of evaluation only in which order places were seen.

        Happens before the rules are asked, so ``past`` holds the look that they are asked about, but for the rms of its
        outputs: these are compared with evaluations, and are taken in afterwards.
        """
        past = self.past
        for key in (*sample.rows, *sample.parameters):
            if key not in self._order:
                self._order[key] = len(self._order)
                self._remember_forbidden(key, sample)
        if sample.phase == "eval":
            return
        past.looks += 1
        past.acting += sample.is_acting
        self._remember_setup(sample)
        for key, units in sample.units.items():
            past.active.setdefault(key, Activity()).add(units.active, units.inputs)
        for (name, key), value in sample.shares.items():
            if name == "entropy":
                past.entropy[key] = max(value, past.entropy.get(key, 0.0))
        for key, load in sample.loads.items():
            past.loads.setdefault(key, deque(maxlen=_LOADS)).append(load)
        for name, told in sample.losses.items():
            value = past.scales.at_first(name, told, sample.facts.get("factor", {}))
            first = past.losses.setdefault(name, [])
            if len(first) < _FIRST:
                first.append(value)
            past.recent.setdefault(name, deque(maxlen=_RECENT)).append(value)

    def _remember_forbidden(self, key: Key, sample: Sample) -> None:
        """Take in how many elements of a parameter are -inf at its first look, where nothing else is not finite."""
        row = sample.rows.get(key)
        if row is not None and key[1].endswith(":param") and row.nonfinite == row.negative_inf > 0:
            self.past.forbidden[key] = row.negative_inf

    def _remember_setup(self, sample: Sample) -> None:
        """Take in which models got gradients, which weights have moved, and which targets stood alone in a batch."""
        past = self.past
        for key in sample.parameters.keys() & sample.rows.keys():
            ends = sample.rows[key].min, sample.rows[key].max
            if self._ends.setdefault(key, ends) != ends:
                past.moved.add(key)
        tokens = sample.facts.get("tokens", {})
        past.has_leaked |= not sample.step and bool(tokens.get("leaks") or tokens.get("leaks_row"))
        for one in sample.facts.get("targets", ()):
            if one["count"] >= LEAST_TARGETS:
                past.targets.add(one["low"] if one["low"] == one["high"] else math.inf)
        rate = max((one.lr for one in sample.parameters.values()), default=0.0)
        for name, value in (("lr", rate), ("constant", (sample.facts.get("spread") or {}).get("constant", math.nan))):
            past.norms.setdefault(("", name), deque(maxlen=_NORMS)).append(value)
        past.trained |= {key[0] for key, one in sample.parameters.items() if one.optimizer is not None and one.has_grad}

    def _remember_norms(self, sample: Sample) -> None:
        """Take in what a look at training has told, after the rules were asked: they compare it with those before."""
        for port in ("grad", "update"):
            for key, row in sample.port(port).items():
                self.past.norms.setdefault(key, deque(maxlen=_NORMS)).append(row.norm)
            for model, norm in sample.norms(port).items():
                self.past.norms.setdefault((model, port), deque(maxlen=_NORMS)).append(norm)
        for key, row in sample.port("output").items():
            if row.count:
                known = self.past.train_outputs.get(key, [])
                self.past.train_outputs[key] = [*known[-1:], (sample.step, row.rms)]

    def about(self, finding: Finding, path: str) -> Finding:
        """The finding with the line of Python that looks closer, into the record at ``path``.

        Without a path there is no record, and the finding stays as it is.
        """
        if not path:
            return finding
        is_known = (finding.model, finding.site) in self._order
        what = f"series({finding.site!r}, {_TOLD.get(finding.rule, 'rms')!r})" if is_known else "scalar('loss')"
        return replace(finding, look=f"gaff.load({path!r}).{what}")
