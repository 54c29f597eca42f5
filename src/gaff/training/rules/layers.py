"""What a sampled step tells of layers one after the other, for rules: in which order they were called, what goes in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from gaff.record.sample import Key, Sample, path_of
from gaff.record.statistics import Numbers


def clips_an_explosion(sample: Sample) -> bool:
    """Whether ``clip_grad_norm_`` was given a norm above 1,000 with a usual limit: people clip to 0.1 and more."""
    found = sample.facts.get("clipped")
    return bool(found and found["norm"] > 1e3 * found.get("factor", 1.0) and found["most"] >= 0.1)


def weights_by_depth(sample: Sample) -> dict[str, list[tuple[Key, Numbers]]]:
    """The gradients of the weights of each model, from the first layer that was called to the last.

    Embeddings, biases and norms are left out: their gradients are of another size whatever the depth. A weight whose
    module was not seen to be called comes last.
    """
    order: dict[Key, int] = {}
    for at, (model, address) in enumerate(sample.port("output")):
        order.setdefault((model, path_of(address)), at)
    found: dict[str, list[tuple[int, Key, Numbers]]] = {}
    for key, row in sample.port("grad").items():
        known = sample.parameters.get((key[0], f"{key[1].removesuffix(':grad')}:param"))
        if known is not None and known.kind == "weight" and row.count:
            module = key[0], path_of(key[1]).rpartition(".")[0]
            found.setdefault(key[0], []).append((order.get(module, len(order)), key, row))
    return {model: [(key, row) for _, key, row in sorted(one, key=lambda it: it[0])] for model, one in found.items()}


def is_left_by_the_last(sample: Sample, key: Key) -> bool:
    """Whether a parameter belongs to the last of blocks in a row, all before which have a gradient there, as others of
    its own block have: what it makes is for a block that would follow."""
    parts = path_of(key[1]).split(".")
    names = {path_of(name): one.has_grad for (model, name), one in sample.parameters.items() if model == key[0]}
    for at, part in enumerate(parts):
        if not part.isdecimal() or part == "0":
            continue
        before, after = [*parts[:at], ""], ["", *parts[at + 1 :]]
        own, following = (f"{'.'.join(before)}{int(part) + more}." for more in (0, 1))
        others = [names.get(f"{'.'.join(before)}{number}{'.'.join(after)}") for number in range(int(part))]
        is_last = not any(name.startswith(following) for name in names)
        if is_last and all(others) and any(has for name, has in names.items() if name.startswith(own)):
            return True
    return False


def in_branches(gradients: Sequence[tuple[Key, Numbers]]) -> bool:
    """Whether the gradients of a model grow by nearly all that they do, ten times at most left out, from one weight to
    the next, and that is in a part of another name: an actor and a critic, called one after the other."""
    norms = [max(row.norm, 1e-30) for _, row in gradients]
    steps = [later / before for before, later in itertools.pairwise(norms)]
    at = max(range(len(steps)), key=steps.__getitem__)
    names = [
        [part for part in path_of(key[1]).split(".")[:-2] if not part.isdigit()] for key, _ in gradients[at : at + 2]
    ]
    return steps[at] > 0.1 * norms[-1] / norms[0] and names[0] != names[1]


def zeros_behind(sample: Sample, key: Key) -> tuple[str, float] | None:
    """What the module called after the layer of a weight returns, where at least two fifths of it are zeros."""
    module = path_of(key[1]).rpartition(".")[0]
    outputs = [(address, row) for (model, address), row in sample.port("output").items() if model == key[0]]
    at = next((at for at, (address, _) in enumerate(outputs) if address == module), len(outputs))
    address, row = outputs[at + 1] if at + 1 < len(outputs) else ("", None)
    return (address, row.zeros) if row is not None and row.zeros >= 0.4 else None


def zeros_of_input(sample: Sample, key: Key) -> float:
    """The share of zeros in what the layer of a weight was given; 0 where that is not known.

    Looked up are the layer's own input, the model's input, and else the output of the module that was called before it.
    """
    module = path_of(key[1]).rpartition(".")[0]
    for address in (f"{module}:input", ":input"):
        row = sample.rows.get((key[0], address))
        if row is not None:
            return row.zeros
    outputs = list(sample.port("output").items())
    before = [row for (model, address), row in outputs if model == key[0] and address != module]
    at = next((at for at, ((model, address), _) in enumerate(outputs) if (model, address) == (key[0], module)), 0)
    return outputs[at - 1][1].zeros if at and before else 0.0


def is_normalised(sample: Sample, key: Key) -> bool:
    """Whether a model brings its input, which is at ``key``, to another scale before its first layer with weights.

    That is the first layer which is called, or one that is given the very numbers of the input, after others that are
    given something else, such as a time. What it is given itself tells, where that was looked at, as differences of
    positions, or what an embedding has made of numbers of categories.

    Else weights as torch initialises them, uniform and with a deviation of one over the root of three times the inputs
    of a unit, make rms / sqrt(3) of it. Embeddings are given other inputs, and are passed over. Of a layer whose
    weights have other names, a recurrent one, nothing is known by what it returns, which may be bounded.
    """
    model, given = key[0], sample.port("input")[key]
    rms = given.rms
    fed = {
        path_of(address)
        for (owner, address), row in sample.port("input").items()
        if owner == model and path_of(address) != path_of(key[1]) and _is_same(row, given)
    }
    matrices = {
        path_of(address).rpartition(".")[0]
        for (owner, address), known in sample.parameters.items()
        if owner == model and known.kind == "weight"
    }
    for (owner, address), row in sample.port("output").items():
        path = path_of(address)
        known = sample.parameters.get((model, f"{path}.weight:param"))
        if owner != model or (known is not None and known.kind == "embedding") or (fed and path not in fed):
            continue
        own = sample.port("input").get((model, f"{path}:input")) if path else None
        if (path in matrices or known is not None) and own is not None and own.count and path not in fed:
            return not is_far_from_standard(own)
        if known is not None:
            return known.kind != "weight" or (row.count > 0 and row.rms < 0.1 * rms / math.sqrt(3))
        if path in matrices:
            return False
    return False


def is_far_from_standard(row: Numbers) -> bool:
    """|mean| above 5, or a standard deviation outside [0.01, 10], if any; less where most are 0, by how many are."""
    return abs(row.mean) > 5 or row.std > 10 or 0 < row.std < 0.01 * math.sqrt(1 - row.zeros)


def _is_same(one: Numbers, other: Numbers) -> bool:
    """Whether two tensors hold the same numbers, as far as their statistics tell."""
    return (one.count, one.mean, one.min, one.max) == (other.count, other.mean, other.min, other.max)
