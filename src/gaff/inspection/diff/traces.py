"""Two traces: one run of each of two models, or of one model in two ways.

A pair of calls with equal digests is the same to the last bit. Others are compared by their sketches, which tell the
norm of the difference, or where there are none by their moments. What rounding explains grows with the ops before
(``_allowed``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from gaff.address.grammar import parse_site
from gaff.inspection.diff.difference import Difference, DiffRow, elements_of, is_beginning, shown, sketched, state_of
from gaff.inspection.diff.order import has_no_calls, when_made
from gaff.inspection.diff.pairs import Pair, Pairing, is_in_lists, moves, renaming
from gaff.inspection.diff.remarks import notes_of
from gaff.inspection.diff.rounding import LITTLE, Drift, allowance, has_kinks, in_sums
from gaff.inspection.trace import Trace
from gaff.record.trace_rows import CallRow, Gradient, ParameterRow

_NEAR = 64  # calls: how far rounding may have come where two calls are taken for one by what they return
_LEAST = 1e-3  # of the median norm of gradients
_NUMBERS = ("mean", "std", "min", "max")
_GUESSED = ("class and shapes", "shape")  # what may be another thing after all
_BY_HAND = "pairs"  # that were given
_EXACT = 1e-3  # how far outputs may differ that no fault inside can have made


class _Reach(NamedTuple):
    """What came to a module backward: the largest norm of gradients before, the norm of its own, and the shape."""

    largest: float = 0.0
    came: float = 0.0
    shape: str = ""


def part_traces(
    a: Trace, b: Trace, names: tuple[str, str], tolerance: float | None, renamed: Mapping[str, str]
) -> Difference:
    """The difference of two traces, under these names; ``tolerance`` None: what rounding explains.

    ``renamed``: modules of A by the names that they have in B. Calls that were only guessed to be the same, by their
    order and shapes, are not where two models part that return the same in the end. Rows come in the order in which
    values were made: the input, forward, backward from the end, then the gradients of parameters. Gradients are
    compared where both traces have a backward pass.
    """
    pairing = _paired(a, b, renamed)
    pairs, rows, drift = _forwards(a, b, pairing, tolerance)
    pairing.pairs = sorted(pairs)
    left_a, left_b = pairing.left()
    parameters = _paired_parameters(a, b, pairing)
    if (a.given.digest and b.given.digest) or [row.input for row in a.rows[:1]] != [row.input for row in b.rows[:1]]:
        rows.insert(0, _input(a, b, tolerance))
    if a.has_backward and b.has_backward:
        least = _LEAST * _middle([row.grad_output for row in (*a.rows, *b.rows)])
        largest = 0.0  # of the gradients that came before: what cancels leaves the rounding of these
        drift = drift._replace(has_kinks=has_kinks(a.rows))
        reach: dict[str, _Reach] = {}  # by module
        for pair in reversed(pairs):
            one, other = a.rows[pair.a], b.rows[pair.b]
            allowed = allowance(tolerance, drift, one, other)
            left = largest / drift.steps if drift.calls else 0.0  # where all bits were the same nothing has cancelled
            sites, gradients = (one.site, other.site), (one.grad_output, other.grad_output)
            found = _backward(sites, gradients, "backward", pair.how, allowed, max(least, left))
            drift = drift.after(found, one, other)
            rows += found
            came = _middle(gradients)
            largest = max(largest, came) if tolerance is None else 0.0  # who gives one means it of each value
            shape = one.grad_output.shape if one.grad_output is not None else ""
            reach[parse_site(one.site).path] = _Reach(largest, came, shape)
        rows += _parameters(a, b, parameters, tolerance, drift, reach)
    notes = notes_of(a, b, pairs, parameters, rows)
    only_a, only_b = tuple(a.rows[at].site for at in left_a), tuple(b.rows[at].site for at in left_b)
    return Difference(*names, tuple(rows), only_a, only_b, tuple(notes))


def _paired(a: Trace, b: Trace, renamed: Mapping[str, str]) -> Pairing[CallRow]:
    """Which calls are the same thing: by address, by weights, by what they return, then by order and shapes.

    Where something was put in between, so that layers are called what others are called in the other model, addresses
    come after weights and what is returned, and members of a list are called what those beside them say. The last are
    guesses, between two calls that are known to be the same; what has calls inside is none that has none.
    """
    pairing = Pairing(a.rows, b.rows)
    paths = _paths(a), _paths(b)
    if renamed:
        pairing.by_name(lambda row: row.site, renaming(renamed, paths), _BY_HAND)
    weights = [_weights_of_calls(trace) for trace in (a, b)]
    is_shifted = _is_shifted(a, b, weights)
    if not is_shifted:
        pairing.by_name(lambda row: row.site)
    pairing.by_likeness("weights", *weights)
    moved = moves(((a.rows[one].path, b.rows[other].path) for one, other, _ in pairing.pairs), paths)
    if is_shifted and moved:
        pairing.by_name(lambda row: row.site, renaming(moved, paths), "neighbours")
    pairing.by_likeness("what they return", *_returned(pairing))
    if is_shifted:
        pairing.by_name(lambda row: row.site, lambda site: None if is_in_lists(site, moved) else site)
    leaves = [has_no_calls(trace) for trace in (a, b)]
    shapes = [
        [(row.output, is_leaf) for row, is_leaf in zip(trace.rows, known, strict=True)]
        for trace, known in zip((a, b), leaves, strict=True)
    ]
    classes = [
        [(row.cls, row.input, *key) for row, key in zip(trace.rows, keys, strict=True)]
        for trace, keys in zip((a, b), shapes, strict=True)
    ]
    pairing.by_likeness(_GUESSED[0], *classes, is_between=True)
    pairing.by_likeness(_GUESSED[1], *shapes, is_between=True)
    return pairing


def _paths(trace: Trace) -> set[str]:
    """The modules that were called, and those around them, such as a ModuleList."""
    parts = [row.path.split(".") for row in trace.rows]
    return {".".join(one[:depth]) for one in parts for depth in range(1, len(one) + 1)} | {""}


def _weights_of_calls(trace: Trace) -> list[Hashable]:
    """For each call the digests of its module's own parameters; None of ops, and where another module has the same."""
    known: dict[str, list[str]] = {}
    for row in trace.parameters:
        known.setdefault(_owner(row), []).append(row.digest)
    own = {path: tuple(sorted(digests)) for path, digests in known.items() if all(digests)}
    count = Counter(own.values())  # layers that are as new, such as norms, are alike
    found = [own.get(row.path) if row.parameters else None for row in trace.rows]
    return [one if one is not None and count[one] == 1 else None for one in found]


def _is_shifted(a: Trace, b: Trace, weights: Sequence[Sequence[Hashable]]) -> bool:
    """Whether a layer of one is found in the other by its weights elsewhere, where its namesake is another layer.

    Not where both have the same calls and the same weights: that some lie at one another's places is what is wrong.
    """
    known = [
        {key: row.site for row, key in zip(trace.rows, keys, strict=True) if key is not None}
        for trace, keys in zip((a, b), weights, strict=True)
    ]
    if known[0].keys() == known[1].keys() and {row.site for row in a.rows} == {row.site for row in b.rows}:
        return False
    namesakes = [
        {row.site: key for row, key in zip(trace.rows, keys, strict=True)}
        for trace, keys in zip((a, b), weights, strict=True)
    ]
    return any(
        key in known[other] and known[other][key] != site and namesakes[other].get(site, key) != key
        for one, other in ((0, 1), (1, 0))
        for key, site in known[one].items()
    )


def _owner(row: ParameterRow) -> str:
    """The path of the module that has a parameter."""
    return parse_site(row.site).path.rpartition(".")[0]


def _returned(pairing: Pairing[CallRow]) -> tuple[list[Hashable], list[Hashable]]:
    """For each call that is left a key that is equal where two have returned the same, but for rounding; else None."""
    keys: tuple[list[Hashable], list[Hashable]] = [None] * len(pairing.a), [None] * len(pairing.b)
    known: dict[Hashable, list[tuple[CallRow, float, int]]] = {}  # by shape: one of each kind, its norm, its number
    for rows, left, found in zip((pairing.a, pairing.b), pairing.left(), keys, strict=True):
        for at in left:
            mark = rows[at].fingerprint
            if not mark.digest:
                continue
            size, alike = math.hypot(*mark.sketch), known.setdefault((rows[at].output, mark.odd), [])
            found[at] = next((number for one, norm, number in alike if _is_near(one, norm, rows[at], size)), None)
            if found[at] is None:
                found[at] = sum(map(len, known.values()))
                alike.append((rows[at], size, sum(map(len, known.values()))))
    return keys


def _is_near(one: CallRow, norm: float, other: CallRow, size: float) -> bool:
    """Whether two calls have returned the same, but for rounding; ``norm`` and ``size`` are those of their sketches."""
    if one.fingerprint.digest == other.fingerprint.digest:
        return True
    allowed = allowance(None, Drift(_NEAR), one, other)
    return abs(norm - size) <= 2 * allowed * size and sketched(one.fingerprint, other.fingerprint) <= allowed


def _forwards(
    a: Trace, b: Trace, pairing: Pairing[CallRow], tolerance: float | None
) -> tuple[list[Pair], list[DiffRow], Drift]:
    """The pairs in the order in which values were made, a row for each that can be compared, and how far they drifted.

    Guesses that part are left out where the whole models, or what they return, agree: such a pair is none. Where they
    agree to a thousandth, nor is one of other layers at one address, as of those that were fused. What was paired by
    hand stays a pair.
    """
    made = when_made(a)
    told, drift = [], Drift()
    for pair in sorted(pairing.pairs, key=lambda pair: made[pair.a]):
        one, other = a.rows[pair.a], b.rows[pair.b]
        rows = _forward(one, other, pair.how, allowance(tolerance, drift, one, other))
        drift = drift.after(rows, one, other)
        told.append((pair, rows))
    ends = told[-1][1] if told else []
    if ends and told[-1][0].how not in _GUESSED and all(row.state != "parted" for row in ends):
        is_exact = max(row.delta for row in ends) < _EXACT
        told = [
            (pair, rows)
            for pair, rows in told
            if all(row.state != "parted" for row in rows)
            or pair.how == _BY_HAND
            or not (pair.how in _GUESSED or (is_exact and _is_elsewhere(a, b, pair, rows[0].tolerance)))
        ]
    return [pair for pair, _ in told], [row for _, rows in told for row in rows], drift


def _is_elsewhere(a: Trace, b: Trace, pair: Pair, tolerance: float) -> bool:
    """Whether what one of two calls returned is what another call of the other model did, as where layers are fused."""
    one, other = a.rows[pair.a], b.rows[pair.b]
    pairs = [(one, row) for row in b.rows if row is not other] + [(row, other) for row in a.rows if row is not one]
    found = (_forward(*both, pair.how, tolerance) for both in pairs if both[0].output == both[1].output)
    return any(rows and all(row.state != "parted" for row in rows) for rows in found)


def _input(a: Trace, b: Trace, tolerance: float | None) -> DiffRow:
    """The row of what the two models were given, all tensors together."""
    place = "the input", "the input", "input"
    shapes = [", ".join(row.input for row in trace.rows[:1]) for trace in (a, b)]
    marks = [trace.given for trace in (a, b) if trace.given.types or trace.given.whole]
    allowed = allowance(tolerance, Drift(), *(marks if len(marks) == 2 else (*a.rows[:1], *b.rows[:1])))
    if shapes[0] != shapes[1]:
        return DiffRow(*place, "parted", math.inf, allowed, "shape", shapes[0], shapes[1])
    if a.given.is_same_as(b.given):
        return DiffRow(*place, "same", 0.0, allowed)
    delta = max(sketched(a.given, b.given), LITTLE)
    return DiffRow(*place, state_of(delta, allowed), delta, allowed, "elements")


def _middle(gradients: Sequence[Gradient | None]) -> float:
    """The median norm of those gradients that have a finite one; 0 where none has."""
    norms = sorted(
        one.norm for one in gradients if one is not None and one.norm is not None and math.isfinite(one.norm)
    )
    return norms[len(norms) // 2] if norms else 0.0


def _forward(one: CallRow, other: CallRow, how: str, tolerance: float) -> list[DiffRow]:
    """The row of a pair of calls, in a list; empty where one has neither numbers nor a sketch.

    Digests decide first, then sketches; where the shapes differ, only moments can be compared, of as many elements (a
    batch of another size is another one, whatever its mean) or of the first tensor, where one returns more of them. A
    pair that is not the same to the last bit, but shows no difference, gets the smallest one, so that it does not count
    as the same.
    """
    if one.fingerprint.is_same_as(other.fingerprint) and (one.dtype, one.output) == (other.dtype, other.output):
        return [DiffRow(one.site, other.site, "forward", "same", 0.0, tolerance, how=how)]
    if one.statistics is None or other.statistics is None:
        return _without_moments(one, other, how, tolerance)
    number, delta = _farthest(one, other)
    values = [getattr(row.statistics, number) for row in (one, other)]
    if one.output != other.output:
        is_comparable = _has_as_many(one, other) or is_beginning(one.output, other.output)
        number, delta = "shape", max(delta, LITTLE) if is_comparable else math.inf
        state = state_of(delta, tolerance)
        return [
            DiffRow(one.site, other.site, "forward", state, delta, tolerance, number, one.output, other.output, how)
        ]
    if delta < math.inf and one.fingerprint.sketch and other.fingerprint.sketch:
        delta = sketched(one.fingerprint, other.fingerprint)
        if one.fingerprint.odd != other.fingerprint.odd:
            number, values = "nonfinite", [one.statistics.nonfinite, other.statistics.nonfinite]
    delta = max(delta, LITTLE)  # the bits differ, or the type
    state = state_of(delta, tolerance)
    told = shown(values[0]), shown(values[1])
    return [DiffRow(one.site, other.site, "forward", state, delta, tolerance, number, *told, how)]


def _has_as_many(one: CallRow, other: CallRow) -> bool:
    """Whether outputs of other shapes have as many elements; never of whole models: the program around gets these."""
    is_root = one.site.startswith(":") and other.site.startswith(":")
    return elements_of(one.output) == elements_of(other.output) and not is_root


def _without_moments(one: CallRow, other: CallRow, how: str, tolerance: float) -> list[DiffRow]:
    """The row of calls of which one has no moments, such as of complex numbers, or without an element at all.

    Empty where both have the same shapes, or as many elements, and there is not even a sketch.
    """
    if one.output != other.output and not _has_as_many(one, other):
        a, b = (row.output or "no tensor" for row in (one, other))
        return [DiffRow(one.site, other.site, "forward", "parted", math.inf, tolerance, "shape", a, b, how)]
    if not one.fingerprint.sketch or not other.fingerprint.sketch:
        return []
    delta = max(sketched(one.fingerprint, other.fingerprint), LITTLE)
    state, sites = state_of(delta, tolerance), (one.site, other.site)
    if delta == math.inf:
        a, b = ("some" if row.fingerprint.odd else "none" for row in (one, other))
        return [DiffRow(*sites, "forward", state, delta, tolerance, "nonfinite", a, b, how)]
    return [DiffRow(*sites, "forward", state, delta, tolerance, "sketch", how=how)]


def _farthest(one: CallRow, other: CallRow) -> tuple[str, float]:
    """The moment that differs most, and by how much, relative to the larger rms; infinite where one is not finite."""
    a, b = one.statistics, other.statistics
    assert a is not None
    assert b is not None
    if a.nonfinite != b.nonfinite:
        return "nonfinite", math.inf
    size = max(math.hypot(a.mean, a.std), math.hypot(b.mean, b.std))
    deltas = {name: abs(getattr(a, name) - getattr(b, name)) for name in _NUMBERS}
    known = {name: delta for name, delta in deltas.items() if not math.isnan(delta)}
    if not known:
        return "mean", 0.0
    worst = max(known, key=lambda name: known[name])
    if math.isinf(known[worst]):
        return worst, math.inf
    return worst, known[worst] / size if size else float(known[worst] > 0)


def _backward(
    sites: tuple[str, str],
    gradients: tuple[Gradient | None, Gradient | None],
    phase: str,
    how: str,
    tolerance: float,
    least: float,
) -> list[DiffRow]:
    """The row of two gradients, in a list; empty where there is nothing to compare.

    A gradient that one of them does not have parts at once. ``least``: a norm below which a gradient counts as
    rounding of the others, such as that of a key's bias in attention, or of a bias before batch norm.
    """
    one, other = gradients
    if one is None or other is None or (one.norm is None and other.norm is None):
        return []
    a, b = _told(one), _told(other)
    if one.norm is None or other.norm is None:
        return [DiffRow(*sites, phase, "parted", math.inf, tolerance, "gradient", a, b, how)]
    if one.fingerprint.is_same_as(other.fingerprint) and one.shape == other.shape:
        return [DiffRow(*sites, phase, "same", 0.0, tolerance, how=how)]
    is_finite = math.isfinite(one.norm), math.isfinite(other.norm)
    if is_finite[0] != is_finite[1]:
        delta = math.inf
    elif one.fingerprint.sketch and other.fingerprint.sketch and one.shape == other.shape:
        delta = sketched(one.fingerprint, other.fingerprint, least)
    else:
        size = max(one.norm, other.norm, least)
        delta = abs(one.norm - other.norm) / size if size else 0.0
        delta = math.inf if math.isnan(delta) else delta
    delta = max(delta, LITTLE)  # the bits differ
    return [DiffRow(*sites, phase, state_of(delta, tolerance), delta, tolerance, "norm", a, b, how)]


def _told(gradient: Gradient) -> str:
    """The norm of a gradient as a table shows it, or why there is none."""
    return f"None: {gradient.reason}" if gradient.norm is None else shown(gradient.norm)


def _paired_parameters(a: Trace, b: Trace, calls: Pairing[CallRow]) -> list[Pair]:
    """Parameters that are the same thing: of modules that are by name, those of one address, of modules by shape."""
    pairing = Pairing(a.parameters, b.parameters)
    owners: tuple[dict[str, int], dict[str, int]] = {}, {}
    for at, pair in enumerate(calls.pairs):
        owners[0].setdefault(a.rows[pair.a].path, at)
        owners[1].setdefault(b.rows[pair.b].path, at)
    held = [[known.get(_owner(row)) for row in trace.parameters] for trace, known in zip((a, b), owners, strict=True)]
    for how in ("name", "shape"):
        keys = [
            [None if owner is None else (owner, row.shape, row.site.rpartition(".")[2] if how == "name" else "")
             for row, owner in zip(trace.parameters, known, strict=True)]
            for trace, known in zip((a, b), held, strict=True)
        ]  # fmt: skip
        pairing.by_likeness(how, *keys)
        if how == "name":
            pairing.by_name(lambda row: row.site)
    return pairing.pairs


def _parameters(
    a: Trace,
    b: Trace,
    pairs: Sequence[Pair],
    tolerance: float | None,
    drift: Drift,
    reach: Mapping[str, _Reach],
) -> list[DiffRow]:
    """Rows for the gradients of parameters that are the same thing.

    ``drift``: that of all calls, both ways. ``reach``: by the path of a module what came to it: where that is no more
    than rounding, its parameters get no more, whatever they multiply it by, and they add it up over all places.
    """
    whole = _Reach(max((one.largest for one in reach.values()), default=0.0))
    rows: list[DiffRow] = []
    least = _LEAST * _middle([row.grad for row in (*a.parameters, *b.parameters)])
    for pair in pairs:
        one, other = a.parameters[pair.a], b.parameters[pair.b]
        sites = tuple(row.site.removesuffix(":param") + ":grad" for row in (one, other))
        allowed = allowance(tolerance, drift, one, other)
        came = reach.get(_owner(one), whole)
        left = came.largest / drift.steps if drift.calls else 0.0
        left = max(least, left, _middle([one.grad, other.grad]) * left / came.came if came.came else 0.0)
        if drift.calls and tolerance is None:
            allowed = in_sums(allowed, drift, one.shape, came.shape, came.came, _middle([one.grad, other.grad]))
        rows += _backward((sites[0], sites[1]), (one.grad, other.grad), "parameter", pair.how, allowed, left)
    return rows
