"""Rules about evaluations: what a model returns there beside training, and in which mode it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaff.record.sample import Sample, path_of
from gaff.training.rules.registry import Hit, Past, rule


@rule(
    "eval_drift",
    severity="warning",
    means="what a layer returns is of another size in evaluation than in training",
    cause="evaluation data prepared in another way, BatchNorm statistics that have not settled, or a dropout by hand",
    remedy="compare a batch of training with one of evaluation; look at running_mean and momentum of BatchNorm",
    phase="eval",
    least=2,
    share=0.5,
)
def eval_drift(sample: Sample, past: Past) -> Iterator[Hit]:
    """The first layer whose rms in eval mode is five times larger or smaller than in training, from step 20 on.

    Left out is what returns one number for a batch: a loss, or a measure; and the output of the model as a whole, where
    its layers return what they did: it may make probabilities, or units of it, in evaluation alone. Compared is with
    the latest look at training, if that was in the second half of the run so far. By what the rms has changed from the
    look before to that one it may have changed on to the evaluation, which is allowed for.
    """
    if sample.age < 20 or sample.facts.get("training"):
        return
    compared: set[str] = set()
    for key, row in sample.port("output").items():
        known = past.train_outputs.get(key, [])
        if not path_of(key[1]) and key[0] in compared:
            continue
        if not known or row.count <= 1 or not known[-1][1] or sample.step - known[-1][0] > sample.age / 2:
            continue
        step, rms = known[-1]
        compared.add(key[0])
        far = abs(math.log(row.rms / rms)) if row.rms else math.inf
        if far > math.log(5) + _change(known) * (sample.step - step):
            told = f"the rms of {key[1]} is {row.rms:.4g} in evaluation, and was {rms:.4g} in training at step {step}"
            yield Hit(key, told, eval_rms=row.rms, train_rms=rms, train_step=step)
            return


def _change(looks: list[tuple[int, float]]) -> float:
    """By how much a logarithm of rms changes from one step to the next, as two looks tell; 0 where there is one."""
    if len(looks) < 2 or not looks[0][1] or looks[0][0] == looks[1][0]:
        return 0.0
    return abs(math.log(looks[1][1] / looks[0][1])) / (looks[1][0] - looks[0][0])


@rule(
    "random_in_eval",
    severity="warning",
    means="dropout is active while the model is in eval mode: what it returns is random",
    cause="dropout that ignores the mode: F.dropout without training=self.training, or a module left in train mode",
    remedy="pass training=self.training to F.dropout; call model.eval() on the whole model; where it is meant (Monte "
    "Carlo dropout), leave this rule out: --rules-off random_in_eval",
    phase="eval",
    least=1,
    share=0.5,
)
def random_in_eval(sample: Sample, past: Past) -> Iterator[Hit]:
    """A dropout of torch's drops something in a forward of a model in eval mode. Certain.

    Other random numbers, as those of a model that samples, are not meant.
    """
    for model, path in sample.facts.get("dropout_in_eval", ())[:1]:
        yield Hit((model, path))


@rule(
    "train_mode_in_eval",
    severity="warning",
    means="the model is evaluated in training mode: dropout is active, or BatchNorm updates its running statistics",
    cause="model.eval() is missing before the evaluation, unless dropout is meant to stay (Monte Carlo dropout)",
    remedy="model.eval() before it, model.train() after it",
    phase="eval",
    least=2,
    share=0.5,
)
def train_mode_in_eval(sample: Sample, past: Past) -> Iterator[Hit]:
    """Forwards without gradients in training mode, of a model with dropout (also F.dropout) or BatchNorm:

    ten in a row, or the first after five steps or more without any; those that come in every step (rollouts, teachers)
    are no evaluation.
    """
    for model in sample.facts.get("train_mode", ()):
        yield Hit((model, ""))
