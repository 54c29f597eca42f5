"""Experiments as text: what a change did to the loss, and what that says. Needs no torch."""

from __future__ import annotations

import math

from gaff.record.experiments import AGAIN, KINDS, Experiments, Outcome
from gaff.views.text import printable, table

_FEW = 50


def trials_table(known: Experiments) -> str:
    """A line for the run as it is and for every other: the loss after the last step with its spread, what that says."""
    bare = known.bare
    rows = [("as it is", _loss(bare), f"from {_number(bare.start)} in {bare.steps} steps{_repeated(known)}")]
    rows += [(one.name, _loss(one), _says(known, one)) for one in known.changed]
    head = ("experiment", f"loss {known.loss_name!r} after {bare.steps} steps", "what that says")
    return table(head, [tuple(map(printable, row)) for row in rows])


def _loss(one: Outcome) -> str:
    if one.loss is None:
        return ""
    return f"{_number(one.loss)} ± {one.scatter:.2g}" if math.isfinite(one.loss) else "not finite"


def _says(known: Experiments, one: Outcome) -> str:
    """What an outcome says, in a few words; one that the same happens to as with another seed says nothing."""
    if one.loss is None:
        return f"cannot be told: {one.why_not}"
    if known.goes_on:
        return "not compared"
    if one.kind == "seed" and known.bare.loss is not None and not math.isfinite(known.bare.loss):
        return "not finite with another seed, too" if not math.isfinite(one.loss) else "finite with another seed"
    if one.kind == "seed":
        return f"two runs that mean the same differ by {_number(known.noise)}"
    effect = known.effect(one)
    if one.kind == "one-batch":
        if known.is_well(one):
            return "the model can learn"
        return "the model cannot learn even one batch" if one.steps >= _FEW else "not learned in so few steps"
    if not KINDS[one.kind].is_remedy:
        worse = (
            "the input is used" if one.kind == "blind" else "each label is learned for its input, by rule or by heart"
        )
        return {"higher": worse, "same": "makes no difference"}.get(effect, "lower than as it is")
    if effect != "lower":
        return {"higher": "worse", "same": "makes no difference"}[effect]
    gain = known.gain(one)
    return "helps" if gain >= 0.2 else "helps a little"


def _repeated(known: Experiments) -> str:
    if known.goes_on:
        return ("; the second time it began where the first had ended: it goes on from what an earlier run has left on "
                "disk, and nothing is concluded")  # fmt: skip
    if known.is_repeatable is None:
        return ""
    return ", twice the same" if known.is_repeatable else f"; a second time they are others ({AGAIN})"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
