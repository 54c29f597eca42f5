"""Rules about what an optimizer does with gradients: most are facts, not judgements.

Each check's docstring tells when it hits; ``docs/rules.md`` repeats it word for word. "Certain" says that there is no
threshold: what is told has happened. Rows of the port ``update`` hold what a step added to a parameter, and
``sample.parameters`` what was known of it at that step: its optimizer, learning rate, whether it had a gradient.

Sources of thresholds: TheDeepChecker is Ben Braiek & Khomh, "Testing feedforward neural networks training programs",
2023; SageMaker Debugger is Rauschmayr et al., "Amazon SageMaker Debugger: a system for real-time insights into machine
learning model training", 2021. Where none is named the limit was chosen on healthy and faulty runs (``benchmarks/``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from gaff.record.sample import Key, Parameter, Sample, path_of
from gaff.training.rules.layers import is_left_by_the_last
from gaff.training.rules.registry import Hit, Past, rule

_LEAST_USUAL = 8  # looks that tell what is usual
_SPIKE = 10.0

_SQUARES_OVERFLOW = 1e18  # gradients whose squares are near the end of float32


@rule(
    "nonfinite",
    severity="error",
    means="a NaN or inf has come into being",
    cause="a division by zero, a logarithm or root of what is not positive, an overflow, a step that was too large",
    remedy="gaff nan SCRIPT finds the op and its line: make that op safe for its input (clamp it, add an eps)",
    least=1,
    share=0.0,
    hides=("exploding", "update_large", "loss_spike", "output_constant", "never_updated", "scaler_stuck"),
)
def nonfinite(sample: Sample, past: Past) -> Iterator[Hit]:
    """A NaN in what a module returned, or a NaN or inf in a gradient, a parameter or a loss; the first of them.

    Infinite activations alone are no hit: masks are made of them; nor is a parameter that has held as many -inf since
    it was first seen (transitions that are forbidden), whose update there is -inf less -inf. Certain; no threshold.
    """
    for key, row in sample.rows.items():
        site, _, port = key[1].rpartition(":")
        kept = past.forbidden.get((key[0], f"{site}:param"), 0)
        if kept and {"param": row.negative_inf, "update": row.nan}.get(port) == row.nonfinite == kept:
            continue
        if row.nan or (port in ("param", "grad") and row.nonfinite):
            yield Hit(key, nan=row.nan, positive_inf=row.positive_inf, negative_inf=row.negative_inf,
                      of=row.count + row.nonfinite)  # fmt: skip
            return
    for name, value in sample.losses.items():
        if value - value != 0:
            yield Hit(("", ""), f"the loss {name!r} is {value}", loss=value)
            return


@rule(
    "wrong_parameters",
    severity="error",
    means="no parameter of the optimizer gets a gradient: what is trained is something else",
    cause="the model was made anew, or its layers replaced, after the optimizer was made; or it got another model's",
    remedy="make the optimizer after the model is complete, with the parameters of the model that runs",
    least=3,
    share=0.9,
    hides=("no_gradient", "not_owned", "never_updated", "update_small"),
)
def wrong_parameters(sample: Sample, past: Past) -> Iterator[Hit]:
    """All gradients of what the optimizers hold that make a step are None, while parameters of a model that is in none
    of them got gradients. Certain."""
    found = sample.facts.get("adrift")
    if found:
        model, count = next(iter(found["models"].items()))
        told = f"no parameter that {' or '.join(found['optimizers'])} holds gets a gradient"
        yield Hit(("", ""), f"{told}; {count} of {model!r} get one, and are in no optimizer", parameters=count)


@rule(
    "unregistered",
    severity="error",
    means="layers that a model calls are no part of it, and are trained by nobody",
    cause="layers kept in a Python list or dict: parameters(), to() and state_dict() do not see them",
    remedy="nn.ModuleList or nn.ModuleDict in place of the list or dict",
    least=3,
    share=0.9,
)
def unregistered(sample: Sample, past: Past) -> Iterator[Hit]:
    """Modules that are called while a model runs, that are no part of it, get gradients, and are in no optimizer."""
    for model, found in sample.facts.get("strays", {}).items():
        more = f" and {found['count'] - 1} more" if found["count"] > 1 else ""
        told = f"{found['class']}{more}, called in the forward of {model!r}, {'are' if more else 'is'} no part of it"
        yield Hit((model, ""), f"{told}: parameters in them get gradients, and are in no optimizer",
                  modules=found["count"])  # fmt: skip


@rule(
    "not_owned",
    severity="warning",
    means="a parameter gets gradients, but is in no optimizer: it never changes",
    cause="an optimizer that was not given it, or a module that was replaced after its optimizer was created",
    remedy="pass it to the optimizer, or set requires_grad=False if it is meant to stay as it is",
    least=3,
    share=0.5,
)
def not_owned(sample: Sample, past: Past) -> Iterator[Hit]:
    """Certain, once every optimizer of the run has made a step. A model of which none owns anything, such as a net that
    judges, counts where its weights lie as torch initialises them: nobody has trained it yet. So do tensors that are
    attributes of modules. What is written to by hand, as copies in half precision are, is left out."""
    trained = {key[0] for key, one in sample.parameters.items() if one.optimizer is not None}
    if sample.age < 2:
        return
    for key, one in sample.parameters.items():
        if one.optimizer is None and one.requires_grad and one.has_grad and key[0] in trained:
            yield Hit(key, elements=one.elements)
    yield from (Hit(key, f"{key[1]} is a tensor and no nn.Parameter: it gets gradients, and is in no optimizer")
                for key in sample.facts.get("plain", ()) if key[0] in trained)  # fmt: skip
    twice = "".join(f"; {one!r} is in two optimizers" for one in sample.facts.get("twice", ()))
    for model, count in sample.facts.get("untrained", {}).items():
        yield Hit((model, ""), f"{model!r} gets gradients, none of its parameters is in an optimizer, and its weights "
                  f"lie as torch initialises them{twice}", parameters=count)  # fmt: skip


@rule(
    "never_trained",
    severity="error",
    means="no parameter of a model that an optimizer steps gets a gradient: it never changes",
    cause="backward is not called, or the loss does not depend on it: its output is detached, made under no_grad, made "
    "numbers of, or not used",
    remedy="look where what the model returns is cut off on its way to the loss (detach, numpy, argmax, no_grad), or "
    "call loss.backward() ahead of the step; gaff.trace(model, x, backward=...) tells where the graph ends",
    least=3,
    share=0.1,
    hides=("no_gradient", "never_updated", "update_small"),
)
def never_trained(sample: Sample, past: Past) -> Iterator[Hit]:
    """``.grad`` of all parameters of a model is None whenever its optimizer steps, without a closure. Certain. Not of
    what is never called beside another model that is trained, as a layer that was replaced and is in a variable yet."""
    trained = stepped(sample)
    has_other = any(one.has_grad for held in trained.values() for _, one in held)
    for model, held in trained.items():
        if has_other and not any(one.was_called for _, one in held):
            continue
        if (
            model not in past.trained
            and all(not one.has_grad for _, one in held)
            and any(one.requires_grad for _, one in held)
        ):
            told = f"no parameter of {model!r} has a gradient when its optimizer steps"
            if not sample.facts.get("backwards"):
                told += ": no loss was seen to run backward"
            elif not has_other:
                told += (
                    ", though losses run backward: after the step, or past the model (zero_grad() clears what comes)"
                )
            yield Hit((model, ""), told, parameters=len(held))


@rule(
    "no_gradient",
    severity="warning",
    means="a parameter never gets a gradient: it never changes",
    cause="what its module makes does not reach the loss (detach, no_grad, an integer op, a call that is missing)",
    remedy="gaff.trace(model, x, backward=...) tells where the graph ends; or set requires_grad=False if it is meant",
    least=3,
    share=0.95,
)
def no_gradient(sample: Sample, past: Past) -> Iterator[Hit]:
    """``.grad`` is None when its optimizer makes a step, which does not change it. In nearly all looks, between which
    it has not changed either, as what is trained in turn has. Certain.

    What was not called is left out in a model with a router: ``dead_experts`` tells of experts that are never chosen;
    so are the poolers of encoders of transformers, which few losses use, and what was replaced by a layer that is in no
    optimizer, of which ``not_owned`` tells; and what the last of several blocks makes for one that would follow, where
    that has a gradient in all others, and the rest of that block has one.
    """
    routed = {model for model, _ in sample.loads}
    called = {key[0] for key, one in sample.parameters.items() if one.was_called}
    is_replaced = any(one.optimizer is None and one.has_grad for one in sample.parameters.values())
    for key, one in sample.parameters.items():
        is_left_out = not one.was_called and (key[0] in routed or (is_replaced and key[0] not in called))
        is_left_out = is_left_out or not one.elements  # all of it lies in other processes
        if is_left_out or key in past.moved or "pooler" in path_of(key[1]).split("."):
            continue
        moved = sample.of(key, "update")
        if moved is not None and moved.count and moved.zeros < 1.0:  # a closure has cleared it at its own end
            continue
        if one.requires_grad and one.optimizer is not None and not one.has_grad:
            if one.was_called and is_left_by_the_last(sample, key):
                continue
            why = "its module is called" if one.was_called else "its module is never called in forward"
            yield Hit(key, f"{key[1]} gets no gradient; {why}", was_called=one.was_called, elements=one.elements)


@rule(
    "zero_gradient",
    severity="warning",
    means="every element of a gradient is exactly zero",
    cause="dead or saturated units after it, a multiplication by zero, or gradients that underflow",
    remedy="look at the activations that follow it; under float16, use a GradScaler or bfloat16",
    least=5,
    share=0.5,
)
def zero_gradient(sample: Sample, past: Past) -> Iterator[Hit]:
    """100 % zeros in the gradient of a parameter (SageMaker Debugger, AllZero).

    Not of a bias whose weight gets one, or what that is made of (spectral_norm, weight_norm): a loss that asks for
    differences alone, as a Wasserstein critic's, has none. Nor where all losses of the step are zero that were not so
    at first: what has a margin is solved then; nor of a single number that has moved before: it is where it should be.
    """
    rows = {} if is_solved(sample, past) else sample.port("grad")
    reached = {(key[0], _owner_of_weight(key[1])) for key, row in rows.items() if row.count and row.zeros < 1.0}
    for key, row in rows.items():
        is_beside = key[1].endswith("bias:grad") and (key[0], key[1].removesuffix("bias:grad")) in reached
        is_alone = row.count == 1 and (key[0], f"{key[1].removesuffix('grad')}param") in past.moved
        if row.count and row.zeros == 1.0 and not (is_beside or is_alone):
            yield Hit(key, elements=row.count)


def _owner_of_weight(name: str) -> str:
    """What the names of a module's parameters begin with, of one of its weight, or of what that is made of."""
    owner, is_made, _ = name.partition("parametrizations.weight")
    last = name.rpartition(".")[2]
    return owner if is_made else name.removesuffix(last) if last.startswith("weight") else name


@rule(
    "lr_zero",
    severity="error",
    means="the learning rate is zero: nothing is learned",
    cause="a scheduler that starts or has arrived at zero, or a wrong setting",
    remedy="look at the scheduler: its number of steps, and whether it counts epochs or batches",
    least=5,
    share=0.5,
    hides=("never_updated", "update_small"),
)
def lr_zero(sample: Sample, past: Past) -> Iterator[Hit]:
    """Within 1e-12 of zero in every group of an optimizer. In half of the looks: warm-ups begin, decays end at zero."""
    rates: dict[tuple[str, int], list[float]] = {}  # by model and optimizer
    for key, one in sample.parameters.items():
        if one.optimizer is not None:
            rates.setdefault((key[0], one.optimizer), []).append(one.lr)
    for (model, _), some in rates.items():
        if max(map(abs, some)) < 1e-12:
            told = "" if len(rates) == 1 else f"the learning rate of an optimizer of {model!r} is zero: {len(some)} "
            more = "parameters do not change" if told else ""
            yield Hit((model, ""), told + more, lr=max(some), parameters=len(some))


@rule(
    "never_updated",
    severity="error",
    means="a parameter has a gradient and a learning rate, and the step does not change it",
    cause="a learning rate so low that updates are lost to rounding, or code that restores the weights in the step",
    remedy="check the learning rate; keep weights in float32; try torch.optim.SGD, or another device",
    least=5,
    share=0.5,
    hides=("update_small",),
)
def never_updated(sample: Sample, past: Past) -> Iterator[Hit]:
    """The update is exactly zero in every element read, while the gradient is not (an MPS bug looked like this).

    Of a large parameter a sample is read: where most of its gradient is zero, as an embedding's, nothing is said of it.
    Gradients a thousand times smaller than the model's largest are left out: a bias before BatchNorm has only noise.
    So are steps that change nothing at all, of L-BFGS, whose line search finds nothing better once it has arrived, and
    in runs of which a loss has fallen to half; what has moved before in float32 or float64, for it has arrived, where a
    decay of weights may weigh out the gradient, or an update is lost to rounding; and gradients above 1e18, whose
    squares overflow in what Adam keeps, which divides by their root: they explode, and that is told.
    """
    has_arrived = sample.facts.get("searches") or any(has_fallen(past, name, 0.5) for name in past.losses)
    if has_arrived and _is_still(sample):
        return
    largest: dict[str, float] = {}
    for key, row in sample.port("grad").items():
        largest[key[0]] = max(largest.get(key[0], 0.0), row.rms if row.count else 0.0)
    for key, one in sample.parameters.items():
        update, gradient = sample.of(key, "update"), sample.of(key, "grad")
        if update is None or gradient is None or not one.lr or one.optimizer is None or not update.count:
            continue
        if gradient.rms > _SQUARES_OVERFLOW or (key in past.moved and one.dtype in ("float32", "float64")):
            continue
        is_read = gradient.zeros < 0.5 or (gradient.zeros < 1.0 and update.count == one.elements)  # where it has one
        if update.zeros == 1.0 and is_read and gradient.rms > 1e-3 * largest[key[0]]:
            yield Hit(key, gradient_rms=gradient.rms, lr=one.lr, dtype=one.dtype)


@rule(
    "update_small",
    severity="warning",
    means="updates are tiny compared with the weights: the model hardly learns",
    cause="a learning rate that is too low, gradients that vanish, or weights that are too large",
    remedy="raise the learning rate; look at the gradients by depth",
    least=8,
    share=0.6,
)
def update_small(sample: Sample, past: Past) -> Iterator[Hit]:
    """The median over the weights of rms(update) / rms(weight) is below 1e-5, a tenth of TheDeepChecker's limit.

    Biases are left out, and embeddings where there are other weights; so is a step whose gradients are all zero, or a
    thousand times smaller than at first (or its updates, with weight decay), as of a model that has arrived, one of
    L-BFGS that changes nothing at all, a
    learning rate that is higher than ever before, and a run whose loss falls by a tenth all the same.
    """
    if (
        past.is_warming_up
        or (sample.facts.get("searches") and _is_still(sample))
        or any(has_fallen(past, name) for name in past.losses)
    ):
        return
    for model, ratios in ratios_of_updates(sample).items():
        middle = statistics.median(ratios.values())
        if middle < 1e-5 and not _has_arrived(sample, past, model):
            key = min(ratios, key=lambda one: ratios[one])
            yield Hit((model, ""), median_update_ratio=middle, smallest=key[1], lr=sample.parameters[key].lr)


@rule(
    "update_large",
    severity="warning",
    means="each step changes most weights by more than a tenth of their size: what was learned is overwritten",
    cause="a learning rate that is too high",
    remedy="lower the learning rate, warm it up, or clip gradients",
    least=8,
    share=0.3,
)
def update_large(sample: Sample, past: Past) -> Iterator[Hit]:
    """rms(update) / rms(weight) above 0.1 (TheDeepChecker) in more than half of the weights.

    Parameters of one dimension (biases, norms) and embeddings are left out; so is a run of which a loss has fallen to
    half of what it was.
    """
    if any(has_fallen(past, name, 0.5) for name in past.losses):
        return
    for key, ratio, tensors in _largest_updates(sample, 0.1) if sample.age >= 3 else ():
        yield Hit(key, update_ratio=ratio, lr=sample.parameters[key].lr, weight_tensors=tensors)


@rule(
    "first_steps_large",
    severity="info",
    means="the first steps changed most weights by a third of their size or more: what they held at first is gone",
    cause="a learning rate that is too high, or no warm-up",
    remedy="lower the learning rate, or warm it up",
    least=2,
    share=0.0,
)
def first_steps_large(sample: Sample, past: Past) -> Iterator[Hit]:
    """rms(update) / rms(weight) above 0.3 in more than half of the weights, in two looks at the first ten steps. As for
    ``update_large``, parameters of one dimension and embeddings are left out, and what began at zero."""
    for key, ratio, _ in _largest_updates(sample, 0.3, past) if sample.age <= 10 else ():
        yield Hit(("", ""), update_ratio=ratio, lr=sample.parameters[key].lr)


@rule(
    "gradient_spike",
    severity="info",
    means="gradients were far larger than usual at some step",
    cause="an example that is wrong or rare, or a steep region of the loss",
    remedy="clip gradients; look at the batch of that step",
    least=1,
    share=0.0,
)
def gradient_spike(sample: Sample, past: Past) -> Iterator[Hit]:
    """The norm of all gradients above ten times the median one of the last 32 looks, of eight at the least.

    Told at the parameter whose gradient has grown most over its own median.
    """
    yield from _spikes(sample, past, "grad")


@rule(
    "update_spike",
    severity="info",
    means="a step was far larger than usual",
    cause="a gradient far larger than usual, a jump of the learning rate, or moments of Adam that lag behind",
    remedy="clip gradients, or limit updates; look at the learning rate's schedule",
    least=1,
    share=0.0,
)
def update_spike(sample: Sample, past: Past) -> Iterator[Hit]:
    """As ``gradient_spike``, of what a step adds to the parameters."""
    yield from _spikes(sample, past, "update")


def _spikes(sample: Sample, past: Past, port: str) -> Iterator[Hit]:
    """A hit for each model in which the norm over all rows of a port is far above its usual one."""
    for model, norm in sample.norms(port).items():
        before = past.norms.get((model, port), ())
        expected = statistics.median(before) if len(before) >= _LEAST_USUAL else math.inf
        if norm > _SPIKE * expected > 0:
            pairs = [(key, sample.norm_of_all(key, row)) for key, row in sample.port(port).items() if key[0] == model]
            usual = {key: statistics.median(past.norms.get(key, (0.0,))) for key, _ in pairs}
            key, value = max(pairs, key=lambda pair: pair[1] / usual[pair[0]] if usual[pair[0]] else 0.0)
            what = "gradients" if port == "grad" else "updates"
            yield Hit(key, f"the norm of all {what} is {norm:.4g}, usually {expected:.3g}; {key[1]} grew most: "
                      f"{value:.4g}, usually {usual[key]:.3g}", norm=norm, usual=expected)  # fmt: skip


@rule(
    "adam_stale",
    severity="info",
    means="gradients have grown faster than Adam's second-moment estimate follows: a spike of the loss may come",
    cause="a change in the data, or beta2 so close to 1 that the moment lags behind",
    remedy="lower beta2, or limit the update by its RMS as StableAdamW does",
    least=5,
    share=0.2,
)
def adam_stale(sample: Sample, past: Past) -> Iterator[Hit]:
    """RMS of g / sqrt(v) above 2.3 (Wortsman et al., 2023, "Stable and low-precision training", section 3.4)."""
    for key, one in sample.parameters.items():
        if one.adam_rms is not None and one.adam_rms > 2.3 and one.kind != "embedding":
            yield Hit(key, adam_rms=one.adam_rms)


def is_solved(sample: Sample, past: Past) -> bool:
    """Whether all losses of the step are zero, and one was not at the first looks: nothing is left to be learned."""
    is_zero = bool(sample.losses) and not any(sample.losses.values())
    return is_zero and any(one[0] for one in past.losses.values())


def stepped(sample: Sample) -> dict[str, list[tuple[Key, Parameter]]]:
    """By model the parameters whose optimizer has made a step in the sampled one; none where a closure may clear."""
    found: dict[str, list[tuple[Key, Parameter]]] = {}
    for key, one in sample.parameters.items():
        if one.optimizer is not None and not sample.facts.get("has_closure"):
            found.setdefault(key[0], []).append((key, one))
    return found


def _largest_updates(sample: Sample, limit: float, past: Past | None = None) -> Iterator[tuple[Key, float, str]]:
    """Of each model of which most weights have a ratio of update to weight above ``limit``: the largest; how many.

    Where ``past`` is given those are left out that began at zero, and had nothing to lose.
    """
    empty = {key for key, norms in past.norms.items() if norms and norms[0] == 0.0} if past is not None else set()
    for told in ratios_of_updates(sample).values():
        ratios = {key: ratio for key, ratio in told.items() if sample.parameters[key].kind == "weight"}
        ratios = {key: ratio for key, ratio in ratios.items() if key not in empty}
        large = {key: ratio for key, ratio in ratios.items() if ratio > limit}
        if len(large) > len(ratios) / 2:
            key = max(large, key=lambda one: large[one])
            yield key, large[key], f"{len(large)} of {len(ratios)}"


def ratios_of_updates(sample: Sample) -> dict[str, dict[Key, float]]:
    """rms(update) / rms(weight), by model and parameter, of weights that got a gradient.

    Left out are biases, parameters without a learning rate, and those whose gradient is zero everywhere, or so large
    that its square overflows: of none of them does a small ratio say that too little is learned. Embeddings count only
    in a model that has no other weights, and there those of their elements that the step has changed, if any.
    """
    found: dict[str, dict[Key, float]] = {}
    weights = {key: one for key, one in sample.parameters.items() if one.kind == "weight"}
    others = {key[0] for key in weights}
    for key, one in sample.parameters.items():
        if key not in weights and (one.kind != "embedding" or key[0] in others):
            continue
        weight, update, gradient = sample.rows.get(key), sample.of(key, "update"), sample.of(key, "grad")
        if not one.lr or weight is None or update is None or gradient is None:
            continue
        if (
            weight.count
            and weight.rms > 0
            and gradient.count
            and gradient.zeros < 1.0
            and gradient.rms < _SQUARES_OVERFLOW
        ):
            changed = 1.0 - update.zeros if one.kind == "embedding" and update.zeros < 1.0 else 1.0
            found.setdefault(key[0], {})[key] = update.rms / changed**0.5 / weight.rms
    return found


def _has_arrived(sample: Sample, past: Past, model: str) -> bool:
    """Whether a model's gradients together are a thousandth of what they were at first; or, where weights decay, which
    may weigh gradients out, its updates, at the learning rate of the first look."""
    decays = any(one.decay for key, one in sample.parameters.items() if key[0] == model)
    rates = past.norms.get(("", "lr"), ())
    ports = ["grad", "update"] if decays and rates and rates[-1] >= rates[0] else ["grad"]
    return any(
        sample.norms(port).get(model, math.inf) <= 1e-3 * past.norms.get((model, f"first {port}"), (0.0,))[0]
        for port in ports
    )


def _is_still(sample: Sample) -> bool:
    """Whether the step changed no element that was read, of any parameter."""
    return all(row.zeros == 1.0 for row in sample.port("update").values() if row.count)


def has_fallen(past: Past, name: str, to: float = 0.9) -> bool:
    """Whether a loss is below that share of what it was at first, by the medians of the first and of the latest looks.

    It is a tenth below if nothing else is said; of one that is negative as far below as it would be above zero.
    """
    first, recent = past.losses[name], past.recent.get(name)
    if not recent or len(first) < 3:
        return False
    began = statistics.median(first)
    return statistics.median(recent) < began - (1 - to) * abs(began)
