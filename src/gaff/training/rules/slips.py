"""Rules about slips: what was set, loaded or scheduled for nothing, as a name that torch does not know.

Written as those of ``gaff.training.rules.steps``. All of it is read from the process.
"""

from __future__ import annotations

from collections.abc import Iterator

from gaff.record.sample import Key, Parameter, Sample
from gaff.training.rules.registry import Hit, Past, rule


@rule(
    "set_for_nothing",
    severity="error",
    means="an attribute was set that torch does not read: nothing has changed by it",
    cause="optimizer.lr for param_groups[i]['lr'], require_grad for requires_grad, module.requires_grad = False",
    remedy="group['lr'] = ... for each group of optimizer.param_groups; module.requires_grad_(False)",
    least=1,
    share=0.0,
    hides=("loss_spike", "update_large", "diverging"),
)
def set_for_nothing(sample: Sample, past: Past) -> Iterator[Hit]:
    """An optimizer of torch's has an attribute ``lr``, ``learning_rate``, ``weight_decay`` or ``momentum``, which none
    has, with a number that none of its groups has; a parameter has ``require_grad``, or another name that is nearly
    right, with another truth than its ``requires_grad``; or a module of torch's, torchvision's, timm's or transformers'
    has ``requires_grad``, while all of its parameters say the opposite; these two are looked for at the first looks,
    and at every sixteenth. Certain."""
    for one in sample.facts.get("for_nothing", ()):
        yield Hit((one["model"], one["site"]), f"{one['name']} = {one['value']} does nothing: {one['meant']}")


@rule(
    "betas_swapped",
    severity="error",
    means="the betas of Adam are in the wrong order: steps follow an average over a thousand gradients",
    cause="betas=(0.999, 0.9) for betas=(0.9, 0.999): the first is that of the gradient, the second of its square",
    remedy="betas=(0.9, 0.999)",
    least=1,
    share=0.0,
)
def betas_swapped(sample: Sample, past: Past) -> Iterator[Hit]:
    """An optimizer has two betas of which the first is 0.99 or more, and above the second. Asked when it is new."""
    for one in sample.facts.get("settings", ()):
        pairs = [tuple(group["betas"]) for group in one["settings"] if len(group.get("betas") or ()) == 2]
        if any(first >= 0.99 and first > second for first, second in pairs):
            yield Hit(("", ""), f"{one['class']} has betas={pairs[0]}: the first is that of the gradient, and is to be "
                      "the smaller one", betas=list(pairs[0]))  # fmt: skip


@rule(
    "loads_itself",
    severity="error",
    means="load_state_dict is given the model's own tensors, so nothing comes back: state_dict() makes no copy",
    cause="best = model.state_dict() is kept while training goes on, which writes into the same tensors",
    remedy="best = copy.deepcopy(model.state_dict()), or torch.save it; for a second model copy.deepcopy(model)",
    least=1,
    share=0.0,
)
def loads_itself(sample: Sample, past: Past) -> Iterator[Hit]:
    """After the first step a model is loaded with tensors that lie in the very memory of its own parameters, all of
    them; not where the program has written into them since the last step, as to limit them, before the second such
    load. Told at the end. Certain."""
    yield from ()


@rule(
    "schedule_not_finished",
    severity="error",
    means="the schedule of the learning rate counts steps, and is stepped once an epoch: it has hardly begun",
    cause="scheduler.step() stands after the loop over batches, while its length is that of all batches",
    remedy="scheduler.step() after each optimizer.step(), or a length in epochs",
    least=1,
    share=0.0,
)
def schedule_not_finished(sample: Sample, past: Past) -> Iterator[Hit]:
    """A OneCycleLR or CosineAnnealingLR is as long as the run has had steps, to a twentieth, and has made a fifth of
    these or fewer, but one. Told at the end of a run of 64 steps or more. Certain."""
    yield from ()


@rule(
    "sampler_weights",
    severity="error",
    means="a WeightedRandomSampler has fewer weights than the data set has examples: the others are never drawn",
    cause="a weight for each class, where it wants one for each example",
    remedy="WeightedRandomSampler(class_weights[labels], len(labels))",
    least=1,
    share=0.0,
)
def sampler_weights(sample: Sample, past: Past) -> Iterator[Hit]:
    """Asked of DataLoaders that begin. Certain."""
    one = sample.facts.get("sampler")
    if one:
        yield Hit(("", ""), f"the WeightedRandomSampler has {one['weights']} weights, and the data set "
                  f"{one['examples']} examples: only the first {one['weights']} are ever drawn",
                  weights=one["weights"], examples=one["examples"])  # fmt: skip


@rule(
    "lr_negative",
    severity="error",
    means="the learning rate is below zero: steps go up the gradient",
    cause="a schedule that runs on behind its end, such as LambdaLR(lambda step: 1 - step / steps)",
    remedy="end the schedule with the training, or at zero: max(0.0, 1 - step / steps)",
    least=1,
    share=0.0,
    hides=("lr_zero", "diverging", "update_large", "exploding", "loss_spike"),
)
def lr_negative(sample: Sample, past: Past) -> Iterator[Hit]:
    """Below -1e-12 for a parameter. Certain."""
    rates = {key[0]: one.lr for key, one in sample.parameters.items() if one.optimizer is not None and one.lr < -1e-12}
    for model, rate in rates.items():
        yield Hit((model, ""), f"the learning rate of {model!r} is {rate:.4g}: steps go up the gradient", lr=rate)


@rule(
    "lr_zero_in_part",
    severity="info",
    means="a group of parameters has a learning rate of zero: they never change",
    cause="a parameter group that is meant to be frozen, or one with a setting or a scheduler of its own",
    remedy="look at the lr of each group in optimizer.param_groups",
    least=8,
    share=0.95,
)
def lr_zero_in_part(sample: Sample, past: Past) -> Iterator[Hit]:
    """Within 1e-12 of zero for some parameters of an optimizer that get gradients, and not for others."""
    groups: dict[tuple[str, int], list[tuple[Key, Parameter]]] = {}
    for key, one in sample.parameters.items():
        if one.optimizer is not None and one.has_grad:
            groups.setdefault((key[0], one.optimizer), []).append((key, one))
    for (model, _), pairs in groups.items():
        still = [key for key, one in pairs if abs(one.lr) < 1e-12]
        if still and len(still) < len(pairs):
            yield Hit((model, still[0][1]), parameters=f"{len(still)} of {len(pairs)}")
