"""Rules about the order of things in a training loop, and about which tokens a model of sequences is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gaff.record.sample import Key, Parameter, Sample, path_of
from gaff.record.statistics import Numbers
from gaff.training.rules.registry import Hit, Past, rule
from gaff.training.rules.steps import has_fallen, is_solved, stepped

_KEPT = 0.05  # of a change that is still there
_ENDLESS = 1e6  # no limit of gradients, but a way to measure them


@rule(
    "not_cleared",
    severity="error",
    means="gradients are not cleared between steps: each step uses those of earlier ones, too",
    cause="optimizer.zero_grad() is missing, or called on another optimizer",
    remedy="call optimizer.zero_grad() once for each step (in a closure first of all), and not between backward passes "
    "that belong together",
    least=3,
    share=0.5,
    hides=("exploding", "update_large", "diverging", "loss_spike"),
)
def not_cleared(sample: Sample, past: Past) -> Iterator[Hit]:
    """None of a few small gradients of an optimizer, which were not zero after the last step, has been None or zero
    since. Certain."""
    for key, parameter in sample.parameters.items():
        if not parameter.was_cleared:
            yield Hit((key[0], key[1].replace(":param", ":grad")))


@rule(
    "never_stepped",
    severity="error",
    means="an optimizer never makes a step: the parameters that it holds never change",
    cause="optimizer.step() is missing, or is called on another optimizer",
    remedy="call optimizer.step() after each backward pass, or after each that ends an accumulation",
    least=1,
    share=0.9,
    hides=("not_owned", "never_updated", "update_small"),
)
def never_stepped(sample: Sample, past: Past) -> Iterator[Hit]:
    """An optimizer holds parameters that are in no optimizer that steps, has not made a step itself, and 16 steps of
    others were made, in which these parameters got gradients, or 16 backward passes where no optimizer stepped."""
    for one in sample.facts.get("idle", ()):
        part = "all" if one["held"] == one["parameters"] else f"{one['held']} of the"
        told = f"{one['optimizer']} holds {part} {one['parameters']} parameters of {one['model']!r}"
        yield Hit((one["model"], ""), f"{told}, and never makes a step: they never change", optimizer=one["optimizer"],
                  held=one["held"], parameters=one["parameters"])  # fmt: skip


@rule(
    "gradients_lost",
    severity="error",
    means="gradients are cleared before a step has used them: of several backward passes only the last counts",
    cause="optimizer.zero_grad() in the loop that accumulates gradients, or optimizer.step() outside of the loop over "
    "batches",
    remedy="call optimizer.zero_grad() once for each optimizer.step(), right before or after it",
    least=3,
    share=0.5,
)
def gradients_lost(sample: Sample, past: Past) -> Iterator[Hit]:
    """What a backward pass has left is gone when the next one begins, of another batch of about the same size, weights
    are what they were, and the step uses what the last one has left, but for a factor. That one is from the same loss,
    or the first has brought gradients to this optimizer alone. Of passes that reach no leaf but parameters, and of the
    first 64 parameters. Certain."""
    for one in sample.facts.get("lost", ()):
        if one["loss"] != one["kept"]:
            told = f"the gradients of {one['loss']!r} are cleared before a step of {one['optimizer']} has used them"
            yield Hit(("", ""), f"{told}: it uses those of {one['kept']!r} alone", lost=one["lost"],
                      optimizer=one["optimizer"])  # fmt: skip
            continue
        passes = f"of {one['lost'] + 1} backward passes from {one['loss']!r} ahead of a step of {one['optimizer']}"
        told = f"{passes} only the last counts: the gradients of those before it are cleared"
        yield Hit(("", ""), told, lost=one["lost"], optimizer=one["optimizer"])


@rule(
    "clipped_too_early",
    severity="error",
    means="gradients are clipped when the backward pass has not run yet: what the step uses is not limited",
    cause="clip_grad_norm_ is called before loss.backward(), or after optimizer.step()",
    remedy="call clip_grad_norm_ after loss.backward() and before optimizer.step()",
    least=3,
    share=0.9,
)
def clipped_too_early(sample: Sample, past: Past) -> Iterator[Hit]:
    """Since the last step clip_grad_norm_ was called, with a limit below a million (chosen: one that is never reached
    only measures), and with no backward pass before it and one after it, and found a norm of 0, or the very gradients
    that the last step has used. Certain."""
    found = sample.facts.get("clipped") or {}
    is_early = found and not found.get("passes", 1) and sample.facts.get("backwards")
    if is_early and found["most"] < _ENDLESS and (found["is_stale"] or not found["norm"]):
        yield Hit(("", ""), limit=found["most"])


@rule(
    "stepped_again",
    severity="error",
    means="an optimizer makes a second step with the gradients that it has used already",
    cause="optimizer.step() is called twice in the loop, as by hand and by a helper",
    remedy="call optimizer.step() once after each backward pass, or after each that ends an accumulation",
    least=3,
    share=0.3,
)
def stepped_again(sample: Sample, past: Past) -> Iterator[Hit]:
    """No backward pass has begun since the step before, and the first gradient of the optimizer is the one that it has
    used then, which nobody has written to. Not for steps with a closure. Certain."""
    name = sample.facts.get("repeated")
    if name:
        yield Hit(("", ""), f"{name} makes steps without a backward pass since its last one: it uses the same "
                  "gradients again", optimizer=name)  # fmt: skip


@rule(
    "stepped_while_scaled",
    severity="error",
    means="steps are made with gradients that a GradScaler's factor is still on",
    cause="optimizer.step() where scaler.step(optimizer) is meant",
    remedy="call scaler.step(optimizer) and scaler.update() in place of optimizer.step()",
    least=1,
    share=0.0,
    hides=("exploding", "update_large", "diverging", "loss_spike"),
)
def stepped_while_scaled(sample: Sample, past: Past) -> Iterator[Hit]:
    """The step uses, element by element, what the last backward pass has left, from a loss that a GradScaler has
    multiplied by a factor other than 1, and has not taken off. Certain."""
    found = sample.facts.get("scaled")
    if found and found["factor"] != 1:
        yield Hit(("", ""), f"{found['optimizer']} makes steps with gradients that are {found['factor']:.6g} times too "
                  "large, by a GradScaler", **found)  # fmt: skip


@rule(
    "divided_for_nothing",
    severity="error",
    means="a GradScaler divides gradients whose loss it has never multiplied: they are far too small",
    cause="loss.backward() where scaler.scale(loss).backward() is meant, of this loss or of one of several",
    remedy="scaler.scale(loss).backward() for every loss whose gradients scaler.step takes",
    least=1,
    share=0.0,
    hides=("update_small", "vanishing", "no_signal"),
)
def divided_for_nothing(sample: Sample, past: Past) -> Iterator[Hit]:
    """A GradScaler that has multiplied some loss of the run, by another factor than 1, divides what an optimizer is
    about to use, and the last backward pass that has left gradients there began at a loss that none has multiplied.
    Certain."""
    found = sample.facts.get("divided")
    if found and found["factor"] != 1:
        told = f"the gradients of {found['loss']!r} are {found['factor']:.6g} times too small: a GradScaler "
        yield Hit(("", ""), f"{told}divides those of {found['optimizer']}, and has not multiplied this loss", **found)


@rule(
    "optimizer_made_anew",
    severity="warning",
    means="a new optimizer makes each step: what it averages over steps begins from nothing every time",
    cause="the optimizer is made inside the loop over batches",
    remedy="make the optimizer once, before the loop; Adam's first step moves every weight by the whole learning rate",
    least=5,
    share=0.8,
)
def optimizer_made_anew(sample: Sample, past: Past) -> Iterator[Hit]:
    """At nearly every look an optimizer with momentum, or Adam's averages, makes its first step of this model, whose
    weights are those that the step before has left: nobody has reset them."""
    for model, name in sample.facts.get("begun", {}).items():
        yield Hit((model, ""), f"every step of {model!r} is the first one of a new {name}", optimizer=name)


@rule(
    "targets_are_inputs",
    severity="warning",
    means="the targets are the very tokens that the model was given: it learns to copy them",
    cause="targets that are not shifted by one against the input, where the next token is to be told",
    remedy="targets = tokens[:, 1:] for an input of tokens[:, :-1]; transformers' models shift labels by themselves",
    least=3,
    share=0.9,
)
def targets_are_inputs(sample: Sample, past: Past) -> Iterator[Hit]:
    """All targets of a cross entropy are the tokens at their own places, a loss is below a tenth of its first, and what
    the model returns at a position depends on the token there, and on no later one, as in a model of next tokens. Where
    that cannot be compared it is enough that all attention over them, torch's or by hand, hides what comes next."""
    found = sample.facts.get("tokens") or {}
    low = [name for name, value in sample.losses.items() if 0 <= value < 0.1 * past.losses.get(name, [0.0])[0]]
    is_copied = found and found["same"] == 1.0 and max(found["next"], found["next_row"]) < 0.9
    if is_copied and low and (found["uses_own"] if found["is_causal"] else _attends(sample, "hides")):
        yield Hit(("", ""), loss=sample.losses[low[0]])


@rule(
    "targets_skip_a_token",
    severity="warning",
    means="the targets are not the next tokens of the input, but those after them",
    cause="labels that were shifted before they were given to a model, or a loss, that shifts them by itself",
    remedy="give transformers' models labels=input_ids, unshifted: they shift them by themselves",
    least=3,
    share=0.9,
)
def targets_skip_a_token(sample: Sample, past: Past) -> Iterator[Hit]:
    """All targets of every cross entropy of the step are the tokens two places on, and neither the next ones nor those
    at their own places. Possible: a model may be meant to tell what comes after the next token, as of two streams that
    take turns."""
    found = sample.facts.get("tokens") or {}
    if found.get("after_next", 0.0) == 1.0 and max(found["same"], found["next"], found["next_row"]) < 0.9:
        yield Hit(("", ""))


@rule(
    "sees_the_future",
    severity="error",
    means="the model sees the tokens that it is to tell: what it returns at a position depends on later ones",
    cause="attention without a causal mask, or with one that is turned around; a softmax over queries; layers that go "
    "both ways",
    remedy="scaled_dot_product_attention(..., is_causal=True), or a mask that lets each position see itself and what "
    "is before it: torch.ones(n, n, dtype=torch.bool).tril()",
    least=3,
    share=0.5,
)
def sees_the_future(sample: Sample, past: Past) -> Iterator[Hit]:
    """All targets are the next tokens of the input, the first ones too (a prefix may be seen as a whole), and
    either all attention over as many positions, torch's or by hand, lets each one see the next, or outputs at the
    first position differ (by a twentieth of the largest output) of two sequences that begin alike and go on
    otherwise, at the first step already, and in a run that draws no random numbers and is given tokens alone.
    Likely: a model that is to give back what it has read sees it on purpose."""
    found = sample.facts.get("tokens")
    if not found or found["same"] >= 0.9 or max(found["next"], found["next_row"]) < 1.0 or not found["begins"]:
        return
    row = "" if found["next"] == 1.0 else "_row"
    if found["leaks" + row] and row in past.leaked:
        yield Hit(("", ""), "sequences that begin with the same token, and go on with another, differ in what the model"
                  " returns at their first position: it sees the tokens that it is to tell")  # fmt: skip
    elif _attends(sample, "sees", row) and not found["is_causal" + row]:
        yield Hit(
            ("", ""), "attention lets each position see the next one: the model sees the tokens that it is to tell"
        )


def _attends(sample: Sample, how: str, row: str = "") -> bool:
    """Whether all attention over the tokens ``sees`` the next one everywhere, or ``hides`` it; False without any."""
    found, by_hand = sample.facts["tokens"], sample.facts.get("by_hand", {})
    told = [by_hand[length][how] for length in found["lengths" + row] if length in by_hand]
    told += [found[how + row]] if found[how + row] is not None else []
    return bool(told) and all(told)


@rule(
    "cleared_before_step",
    severity="error",
    means="gradients passed, and there are none when the optimizer makes its step: nothing is learned from them",
    cause="optimizer.zero_grad() is called between loss.backward() and optimizer.step(); or they were asked for by "
    "torch.autograd.grad, and not put into .grad",
    remedy="optimizer.zero_grad() before loss.backward(), or after optimizer.step(); let backward() make the gradients",
    least=3,
    share=0.9,
    hides=("no_gradient", "never_trained", "zero_gradient", "vanishing", "never_updated", "update_small"),
)
def cleared_before_step(sample: Sample, past: Past) -> Iterator[Hit]:
    """At the step the gradients of all parameters of a model are None, though gradients that are not zero have passed
    the outputs of the very modules which hold those. Not of a step with a closure, which may clear them at its own end.
    Certain."""
    for model, held, lost in _without_gradients(sample):
        if all(not one.has_grad for _, one in held):
            told = "" if sample.facts.get("has_brought", True) else (
                "gradients passed, by torch.autograd.grad or to leaves that the optimizer does not own, and no "
                "backward pass has left any for its step: nothing is learned from them")  # fmt: skip
            yield Hit((model, ""), told, weights=lost)


@rule(
    "zero_at_the_step",
    severity="error",
    means="gradients passed, and those of all parameters are exactly zero when the optimizer makes its step",
    cause="zero_grad(set_to_none=False) between backward() and step(), clipping to 0, a hook that multiplies by 0, or "
    "terms of the loss that cancel, as those of a ratio whose older part is not detached",
    remedy="look at what stands between backward() and step(); detach what is a constant of the loss",
    least=3,
    share=0.9,
    hides=("zero_gradient", "vanishing", "never_updated", "update_small"),
)
def zero_at_the_step(sample: Sample, past: Past) -> Iterator[Hit]:
    """As ``cleared_before_step``, of gradients that are there, and zero in each element. Certain."""
    for model, held, lost in _without_gradients(sample):
        if any(one.has_grad for _, one in held):
            most = (sample.facts.get("clipped") or {}).get("most", sample.facts.get("clipped_by_value"))
            told = "gradients passed, and were clipped to 0: nothing is learned from them" if most == 0 else ""
            yield Hit((model, ""), told, weights=lost)


@rule(
    "loss_gives_nothing",
    severity="error",
    means="the loss hands back a gradient that is zero in every element: the model learns nothing from it",
    cause="a loss of a tensor and itself, detached, or of a ratio that is always one; rounding, argmax or a comparison "
    "between the model and its loss, or a multiplication by zero; a hinge or clamp that all examples are beyond; a "
    "softmax over a single class",
    remedy="follow the loss back to what the model returned: every step must have a slope",
    least=5,
    share=0.5,
    hides=("zero_gradient", "vanishing", "never_updated", "update_small", "no_signal"),
)
def loss_gives_nothing(sample: Sample, past: Past) -> Iterator[Hit]:
    """All gradients at what a model returns are zero in each element, and have been at each look. Not where all losses
    are zero that were not so at first: what has a margin is solved then. Certain."""
    rows = sample.port("grad_output")
    ends = {key: row for key, row in rows.items() if key[1].startswith(":grad_output") and row.count}
    for model in dict.fromkeys(key[0] for key in ends) if not is_solved(sample, past) else ():
        zeros = [row.zeros == 1.0 for key, row in ends.items() if key[0] == model]
        if all(zeros) and (model, "slope") not in past.norms:
            yield Hit((model, ""), outputs=len(zeros))


@rule(
    "loss_holds_the_last",
    severity="error",
    means="the loss that backward runs from holds that of the step before: losses are added up over steps, with their "
    "graphs",
    cause="a running total, `total += loss`, that backward is called on, with retain_graph=True",
    remedy="call backward on the loss of this batch; add up loss.item() for a mean to print",
    least=3,
    share=0.5,
    hides=("exploding", "update_large", "loss_spike", "diverging"),
)
def loss_holds_the_last(sample: Sample, past: Past) -> Iterator[Hit]:
    """A node just behind the loss of the step before is among the first 64 behind this one's. Certain."""
    name = sample.facts.get("holds")
    if name:
        yield Hit(("", ""), f"the loss {name!r} holds that of the step before: losses are added up over steps, with "
                  "their graphs", loss=name)  # fmt: skip


@rule(
    "graphs_held",
    severity="warning",
    means="the autograd graphs of losses are held long after their backward pass: memory grows with each step",
    cause="a running total, `total += loss`, or a list, `losses.append(loss)`, of losses or outputs not detached",
    remedy="add up or keep `loss.item()` or `loss.detach()`",
    least=1,
    share=0.0,
)
def graphs_held(sample: Sample, past: Past) -> Iterator[Hit]:
    """Of steps that were looked at, at least ten apart, something near the loss is still there of each of the latest
    eight or more, over 200 steps, also after Python was made to collect what holds itself. Certain."""
    name = sample.facts.get("held")
    if name:
        told = f"the program holds what led to the loss {name!r} in each of the latest steps"
        yield Hit(("", ""), f"{told}: memory grows with each step, until that is let go", loss=name)


@rule(
    "eval_graphs_held",
    severity="warning",
    means="an evaluation runs with gradients, and the graph of each batch is held: memory grows with each batch",
    cause="no torch.no_grad() around an evaluation whose losses or outputs are added up, or kept in a list",
    remedy="evaluate under torch.no_grad() or torch.inference_mode()",
    least=1,
    share=0.0,
)
def eval_graphs_held(sample: Sample, past: Past) -> Iterator[Hit]:
    """The graphs of what a trained model returned in eight calls of an evaluation after one another are all there, also
    after Python was made to collect what holds itself, and no backward pass came by them to the end of the next step,
    or of all. Told when that is over. Certain."""
    yield from ()


@rule(
    "written_back",
    severity="error",
    means="what a step has changed is gone when the next one begins: the weights are written back",
    cause="an average (EMA) or a saved state is copied into the model after each step, or its weights are rounded",
    remedy="keep averages in a copy of the model; look for what writes to parameters after optimizer.step()",
    least=5,
    share=0.0,
)
def written_back(sample: Sample, past: Past) -> Iterator[Hit]:
    """Of the change that a step has made which was looked at, less than a twentieth is there as the very next one
    begins, as of all of the last eight such steps, in a run with one optimizer, and no loss has fallen by a tenth:
    inner loops that begin anew on purpose go on learning. Certain."""
    found = sample.facts.get("kept") if sample.facts.get("optimizers", 1) == 1 else None
    if (
        found
        and found["share"] < _KEPT
        and found["most"] < _KEPT
        and not any(has_fallen(past, name) for name in past.losses)
    ):
        told = f"{max(0.0, found['share']):.2g} of what a step of {found['optimizer']} has changed is there at the next"
        yield Hit(("", ""), f"{told}: weights are written back in between", kept=found["share"])


@rule(
    "schedule_not_stepped",
    severity="warning",
    means="the schedule of the learning rate never makes a step: the rate stays where it begins",
    cause="scheduler.step() is missing in the loop",
    remedy="scheduler.step() after each epoch, or after each step if the schedule counts steps",
    least=3,
    share=0.9,
)
def schedule_not_stepped(sample: Sample, past: Past) -> Iterator[Hit]:
    """The one scheduler of an optimizer has made no step, and a DataLoader of two batches or more has begun its third
    epoch. Looked for at step 64, and later."""
    epochs = sample.facts.get("batches", {}).get("begun", 0)
    for one in sample.facts.get("schedules", ()):
        if epochs >= 3 and one["made"] <= 0:
            told = f"the {one['schedule']} has made no step in {epochs - 1} epochs"
            yield Hit(("", ""), f"{told}: the learning rate stays where it begins", schedule=one["schedule"])


@rule(
    "schedule_over",
    severity="info",
    means="the schedule of the learning rate is stepped beyond its end: the rate rises again, and falls again",
    cause="T_max counts epochs and the scheduler is stepped after each batch, or T_max is too small",
    remedy="step the scheduler once an epoch, or set T_max to the number of all steps",
    least=3,
    share=0.5,
)
def schedule_over(sample: Sample, past: Past) -> Iterator[Hit]:
    """A CosineAnnealingLR has made more than twice as many steps as its T_max. Looked for at step 64, and later."""
    for one in sample.facts.get("schedules", ()):
        if 0 < 2 * one["length"] < one["made"]:
            told = f"the {one['schedule']} has made {one['made']} steps, and its T_max is {one['length']}"
            yield Hit(("", ""), f"{told}: the rate goes up and down", made=one["made"], length=one["length"])


def _without_gradients(sample: Sample) -> Iterator[tuple[str, list[tuple[Key, Parameter]], int]]:
    """Models that an optimizer steps with gradients that are None or zero throughout, though some passed their modules.

    With their parameters, and for how many of these gradients have passed."""
    passed = sample.port("grad_output")
    for model, held in stepped(sample).items():
        lost = sum(one.requires_grad and _has_passed(passed, key) for key, one in held)
        if lost and all(not one.has_grad or _is_zero(sample.of(key, "grad")) for key, one in held):
            yield model, held, lost


def _has_passed(passed: Mapping[Key, Numbers], key: Key) -> bool:
    """Whether a gradient that is not zero has passed the output of the module that has this parameter as its weight."""
    module, _, name = path_of(key[1]).rpartition(".")
    row = passed.get((key[0], f"{module}:grad_output")) if name == "weight" else None
    return row is not None and row.count > 0 and row.rms > 0


def _is_zero(row: Numbers | None) -> bool:
    return row is not None and row.count > 0 and row.zeros == 1.0
