"""One training as the judge knows it: what its looks have told, and how often each rule has had a hit at each place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gaff.record.finding import Finding, is_of_output
from gaff.record.sample import Key, Sample
from gaff.training.rules.registry import LEAST_TARGETS, Activity, Hit, Past, Rule

_FIRST = 5  # looks whose losses are kept as the beginning
_RECENT = 10
_LOADS = 16
_NORMS = 32
_MOST_SITES = 40  # of one finding
_OF_DATA = ("input_scale",)
_SETTLED = 16  # steps in which the losses of one training come one by one


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


class Hearing:
    """What is known of one training of a run, from its first look on; most runs have one.

    ``past``: what its looks have told, for rules that compare; ``models``: those that were looked at in it. While
    something is not finite that all else follows from (``is_nonfinite``) looks are not counted, so that shares of what
    held before stay what they were; a training step all of whose losses are finite ends that. Used on the one thread
    that judges.
    """

    def __init__(self, rules: Sequence[Rule], began: int = 0) -> None:
        """``began``: the step of its first look."""
        self.past = Past()
        self.began = began
        self.is_nonfinite = False
        self._is_loss_finite = False  # in the latest look at training
        self.looks = {"train": 0, "eval": 0}
        self.models: set[str] = set()
        self._rules = {one.name: one for one in rules}
        self._tracks: dict[tuple[str, Key], Track] = {}
        self._step = began  # of the latest look
        self._ends: dict[Key, tuple[float, float]] = {}  # of parameters the smallest and largest element at first
        self.order: dict[Key, int] = {}  # in which places were first seen

    def is_left(self, sample: Sample) -> bool:
        """Whether a look can be none at this training any more: no loss in it is one of this, which has some.

        A training whose parts come one by one is given sixteen steps for that.
        """
        is_late = sample.phase == "train" and sample.step - self.began >= _SETTLED
        return (
            is_late and bool(sample.losses and self.past.losses) and self.past.losses.keys().isdisjoint(sample.losses)
        )

    def begin(self, sample: Sample) -> None:
        """Take in one look, before rules are asked about it."""
        sample.age = sample.step - self.began
        self._remember(sample)
        if sample.phase == "train":
            self._is_loss_finite = bool(sample.losses) and all(map(math.isfinite, sample.losses.values()))
            self.is_nonfinite &= not self._is_loss_finite
        if not self.is_nonfinite:  # what held when that came holds still
            self.looks[sample.phase] += 1
            self._step = sample.step

    def end(self, sample: Sample) -> None:
        """A look was judged: take in what later ones are compared with."""
        if sample.phase == "train":
            self._remember_norms(sample)

    def meet_nonfinite(self, site: str) -> None:
        """Something is not finite at this site, which all else follows from; but outputs alone, where the losses are
        finite, are left out of them."""
        self.is_nonfinite |= not (self._is_loss_finite and is_of_output(site))

    def note(self, one: Rule, hit: Hit, sample: Sample) -> None:
        """Count one hit in the track of its rule and place."""
        looks = self.looks[one.phase]
        track = self._tracks.get((one.name, hit.key))
        if one.name == "nonfinite":
            self.meet_nonfinite(hit.key[1])
        if track is None:
            self._tracks[one.name, hit.key] = Track(
                1, looks - 1, sample.step, sample.step, looks, hit.evidence, hit.message
            )
            return
        track.hits += 1
        track.last, track.last_look = sample.step, looks
        track.evidence, track.message = hit.evidence, hit.message

    @property
    def findings(self) -> list[Finding]:
        """The findings of rules: of each rule and model the places whose hits are enough, in number and share.

        The share is of the looks since the first hit at that place: a symptom that begins late in a long run is found
        as soon as one that was there from the beginning. What all looks tell of the data is enough where values are
        not finite after few of them: no other is to come.
        """
        found: dict[tuple[str, str], list[tuple[Key, Track]]] = {}
        for (name, key), track in self._tracks.items():
            one = self._rules[name]
            share = track.hits / max(1, self.looks[one.phase] - track.began)
            is_short = self.is_nonfinite and name in _OF_DATA
            least = min(one.least, max(1, self.looks[one.phase])) if is_short else one.least
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
        one = self._rules[name]
        looks = self.looks[one.phase]
        places = sorted(places, key=lambda place: (place[1].since, self.order.get(place[0], 0)))
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

    def _remember(self, sample: Sample) -> None:
        """Take into ``past`` what rules compare later looks with; of evaluation only in which order places were seen.

        Happens before the rules are asked, so ``past`` holds the look that they are asked about, but for the rms of its
        outputs: these are compared with evaluations, and are taken in afterwards.
        """
        past = self.past
        for key in (*sample.rows, *sample.parameters):
            if key not in self.order:
                self.order[key] = len(self.order)
                self._remember_forbidden(key, sample)
        if sample.phase == "eval":
            return
        self.models.update(name for name, _ in sample.rows)
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
        past.leaked |= {row for row in ("", "_row") if not sample.age and tokens.get("leaks" + row)}
        for one in sample.facts.get("targets", ()):
            if one["count"] >= LEAST_TARGETS:
                past.targets.add(one["low"] if one["low"] == one["high"] else math.inf)
        rate = max((one.lr for one in sample.parameters.values()), default=0.0)
        for name, value in (("lr", rate), ("constant", (sample.facts.get("spread") or {}).get("constant", math.nan))):
            past.norms.setdefault(("", name), deque(maxlen=_NORMS)).append(value)
        past.trained |= {key[0] for key, one in sample.parameters.items() if one.optimizer is not None and one.has_grad}

    def _remember_norms(self, sample: Sample) -> None:
        """Take in what a look at training has told, after the rules were asked: they compare it with those before.

        Of weights themselves, and of a model's gradients together, the first one stays.
        """
        for key in sample.parameters:
            if (weight := sample.rows.get(key)) is not None and weight.count:
                self.past.norms.setdefault(key, deque([weight.norm]))
        for port in ("grad", "update"):
            for key, row in sample.port(port).items():
                self.past.norms.setdefault(key, deque(maxlen=_NORMS)).append(sample.norm_of_all(key, row))
            for model, norm in sample.norms(port).items():
                self.past.norms.setdefault((model, port), deque(maxlen=_NORMS)).append(norm)
                self.past.norms.setdefault((model, f"first {port}"), deque([norm]))
        for key, row in sample.port("grad_output").items():
            if key[1].startswith(":grad_output") and row.zeros < 1.0:  # a loss has brought something to the model's end
                self.past.norms.setdefault((key[0], "slope"), deque([row.norm]))
        for key, row in sample.port("output").items():
            if row.count:
                known = self.past.train_outputs.get(key, [])
                self.past.train_outputs[key] = [*known[-1:], (sample.step, row.rms)]
