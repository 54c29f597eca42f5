"""Two records: where two trainings first part. Needs numpy (``gaff[page]``).

Two runs of the same code drift apart by rounding, and a site changes from look to look by itself, so a fixed tolerance
says little. Each site is measured by its own noise (``_noise``). Only the first process of each run is compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gaff.inspection.diff.difference import ROUNDOFF, Difference, DiffRow, shown, state_of
from gaff.inspection.diff.pairs import Pair
from gaff.inspection.diff.run_lines import NUMBERS, Line, lines_of, marked_apart, pairing_of
from gaff.record.run import Record
from gaff.record.summary import summary_of

_ODD = ("nan", "positive_inf", "negative_inf")
_LEAST = 1e-3  # of the median rms of a port: gradients below it are rounding of the others
_FAR_LESS = 1e-2  # of that: a gradient that is so small at all looks is nothing but rounding
_ROUNDING = 1e-5  # what another order of summation makes of single precision in a few steps
_DEVIATIONS = 4.0
_JUMP = 100.0  # times rounding: what the first number that differs at all cannot differ by, had rounding made it
_COARSE = 4.0  # roundings of one element that the numbers of a batch in another type may differ by: chosen
_CHECKED = "checksum of the first 64 KiB"
_PHASES = {"input": "forward", "output": "forward", "grad_output": "backward", "grad": "parameter",
           "update": "parameter", "param": "weights"}  # fmt: skip
_ORDER = ("batch", "weights", "forward", "loss", "backward", "parameter", "evaluation")


def part_records(
    a: Record, b: Record, names: tuple[str, str], tolerance: float | None, by_hand: Mapping[str, str]
) -> Difference:
    """The difference of two records, under these names: for each site the first step at which it is more than noise.

    The noise of a site is the median change of the logarithm of its rms from one look to the next, in the calmer of
    both; four standard deviations of it, and never less than rounding, are allowed, or ``tolerance`` where it is
    given. Of the weights before the first step no more than rounding is, by any number, and of the norm of the
    difference. ``by_hand``: modules of A and what they are called in B. Noise grows from rounding: where all was the
    same to the last bit, and the first number that is not differs by far more, that number has parted. Rows that parted
    come first, by step and then in the order of a step; the others follow.
    """
    lines_a, lines_b = lines_of(a), lines_of(b)
    pairing = pairing_of(lines_a, lines_b, (_classes(a), _classes(b)), by_hand)
    left_a, left_b = pairing.left()
    types = _types(a), _types(b)
    rounding = max([_ROUNDING, *(_COARSE * ROUNDOFF.get(one, 0.0) for one in types[0] | types[1])])
    least = _least([*lines_a, *lines_b])
    pairs, notes = _steady(pairing.pairs, lines_a, lines_b, least, rounding)
    looked = [_looked(record) for record in (a, b)]
    both = [(lines_a[pair.a], lines_b[pair.b]) for pair in pairs]
    first = _first_apart(both, least, 0.0)
    named = _losses_of_both(a, b)
    losses, of_loss = _losses(a, b, named, tolerance, rounding, first)
    rows = _batches(a, b, types, (lines_a, lines_b)) + losses
    alone = [
        *_without_gradients([lines_a[at] for at in left_a], b, ("there", "absent"), looked[0] & looked[1]),
        *_without_gradients([lines_b[at] for at in left_b], a, ("absent", "there"), looked[0] & looked[1]),
    ]
    rows += alone
    beyond = _first_apart(both, least, rounding) if tolerance is None else None
    is_sudden = first is not None and beyond is not None and first.line is beyond.line and first.step == beyond.step
    is_sudden = is_sudden and first is not None and first.delta > _JUMP * rounding
    unseen: list[str] = []
    for pair, (one, other) in zip(pairs, both, strict=True):
        is_jump = is_sudden and first is not None and one is first.line
        allowed = rounding if is_jump else tolerance
        row = _absent(one, other, pair.how, looked[0] & looked[1])
        row = row or _site(one, other, pair.how, allowed, rounding, least.get(one.port, 0.0))
        row = _weights(one, other, pair.how, row, rounding if tolerance is None else tolerance)
        if row is None:
            unseen.append(f"{lines_a[pair.a].name} was never looked at in the same step")
        else:
            rows.append(row)
    place = {line.name: at for at, line in enumerate(lines_a)}
    last = 1 << 60

    def order(row: DiffRow) -> tuple[int, int, int]:
        step = row.step if row.state == "parted" and row.step is not None else last
        return step, _ORDER.index(row.phase), place.get(row.site, 0)

    rows.sort(key=order)
    if len(unseen) > 3:
        unseen = [f"{len(unseen)} sites were never looked at in the same step"]
    notes += unseen
    shared = len(looked[0] & looked[1])
    notes[:0] = _settings(a, b)
    if a.steps != b.steps or looked[0] != looked[1]:
        notes.append(f"A made {a.steps} steps and B {b.steps}: the {shared} that were looked at in both were compared")
    if first is not None or of_loss:
        notes.append(f"the first number that differs at all is {of_loss or first}")
    if beyond is not None:
        notes.append(f"at sites the first beyond rounding, though it may be less than noise, is {beyond}")
    told = {row.site for row in alone} | {name for pair in named for name in pair}
    only = [
        tuple(name for name in [*(lines[at].name for at in left), *_names_of_losses(record)] if name not in told)
        for record, lines, left in ((a, lines_a, left_a), (b, lines_b, left_b))
    ]
    return Difference(*names, tuple(rows), only[0], only[1], tuple(notes))


def _classes(record: Record) -> dict[str, str]:
    """The classes of all modules of a run, by their paths as sites have them: of several models with each's name."""
    names = record.names()
    told = [one for _, one in record.events("model", record.ranks[0]) if isinstance(one.get("modules"), list)]
    is_one = all(name == address for name, (_, address) in names.items())
    return {".".join(part for part in ("" if is_one else str(one.get("name", "")), str(path)) if part): str(kind)
            for one in told for path, kind in one["modules"]}  # fmt: skip


def _weights(one: Line, other: Line, how: str, row: DiffRow | None, allowed: float) -> DiffRow | None:
    """The row of a parameter that was another one before the first step, though numbers may not tell it, as where its
    rows are permuted or one element differs; else ``row``, what the looks told."""
    delta, step = marked_apart(one, other), int(one.steps[0])
    is_told = row is not None and row.state == "parted" and row.step is not None and row.step <= step
    if delta <= allowed or is_told:
        return row
    return DiffRow(one.name, other.name, "weights", "parted", delta, allowed, "elements", how=how, step=step)


def _settings(a: Record, b: Record) -> list[str]:
    """A note about the settings in which the runs differ, four of them at most; the command is told by what it sets."""
    one, other = (summary_of(record, record.ranks[0]).settings for record in (a, b))
    both = {name: (_set(one, name), _set(other, name)) for name in {**one, **other} if name != "command"}
    told = [f"{name} is {here} in A and {there} in B" for name, (here, there) in both.items() if here != there]
    more = [f"and {len(told) - 4} more"] if len(told) > 4 else []
    return [f"other settings: {'; '.join([*told[:4], *more])}"] if told else []


def _set(settings: Mapping[str, str], name: str) -> str:
    """What was set; of a group of parameters what the first one has, where nothing else is told of it."""
    optimizer, _, rest = name.partition(", group ")
    number, _, key = rest.partition(", ")
    is_group = bool(key) and int(number) < int(settings.get(f"{optimizer}, groups", 1))
    return settings.get(name, settings.get(f"{optimizer}, {key}", "not there") if is_group else "not there")


def _looked(record: Record) -> frozenset[int]:
    """The training steps at which the first process of a run has looked."""
    return frozenset(step for step, one in record.events("look", record.ranks[0]) if one.get("phase") == "train")


def _least(lines: list[Line]) -> dict[str, float]:
    """For gradients and updates, by port: an rms below which they are rounding of the others.

    Some gradients are zero but for rounding, such as that of a bias before a norm layer, and would differ by any
    factor. Chosen: a thousandth of the median rms of the port, in both runs.
    """
    sizes: dict[str, list[float]] = {}
    for line in lines:
        if line.port in ("grad_output", "grad", "update") and len(line.steps):
            with np.errstate(invalid="ignore"):
                known = line.values["rms"][np.isfinite(line.values["rms"])]
            if len(known):
                sizes.setdefault(line.port, []).append(float(np.median(known)))
    return {port: _LEAST * float(np.median(known)) for port, known in sizes.items()}


def _steady(
    pairs: Sequence[Pair], lines_a: list[Line], lines_b: list[Line], least: Mapping[str, float], rounding: float
) -> tuple[list[Pair], list[str]]:
    """The pairs without those of parameters that rounding alone moves in both runs, and their updates; and a note.

    Where a gradient is rounding, see ``_least``, an optimizer that divides by its size, as Adam does, moves the
    parameter all the same. Where it was another one before the first step, or its marks do not tell, it stays in.
    """
    adrift = _adrift(lines_a, least), _adrift(lines_b, least)
    kept, moved = [], set()
    for pair in pairs:
        both = lines_a[pair.a], lines_b[pair.b]
        paths = [line.site.rpartition(":")[0] for line in both]
        is_moved = both[0].port in ("param", "update") and paths[0] in adrift[0] and paths[1] in adrift[1]
        is_told = both[0].port == "update" or all(line.marks for line in both)
        if is_moved and is_told and marked_apart(*both) <= rounding:
            moved.add(paths[0])
        else:
            kept.append(pair)
    some = ", ".join(sorted(moved)[:3]) + (", ..." if len(moved) > 3 else "")
    told = f"parameters whose gradients are rounding move by it, and were not compared after the first step: {some}"
    return kept, [told] if moved else []


def _adrift(lines: list[Line], least: Mapping[str, float]) -> frozenset[str]:
    """The parameters of a run whose gradients are rounding at all looks, far below what ``_least`` tells: a layer may
    have small ones that mean something."""
    found = set()
    for line in lines:
        sizes = line.values["rms"][np.isfinite(line.values["rms"])]
        if line.port == "grad" and len(sizes) and float(sizes.max()) < _FAR_LESS * least.get("grad", 0.0):
            found.add(line.site.rpartition(":")[0])
    return frozenset(found)


def _absent(one: Line, other: Line, how: str, looked: frozenset[int]) -> DiffRow | None:
    """A row for a site that only one of both runs has at a step at which both looked; None where there is no such step.

    ``looked``: the training steps that both have looked at.
    """
    if one.phase != "train" or (one.port in ("param", "grad", "update") and not looked):
        return None
    a, b = ({int(step) for step in line.steps} & looked for line in (one, other))
    unlike = sorted(a ^ b)
    if not unlike:
        return None
    step = unlike[0]
    told = ("there", "absent") if step in a else ("absent", "there")
    phase = _PHASES.get(one.port, "forward")
    return DiffRow(one.name, other.name, phase, "parted", math.inf, 0.0, "presence", *told, how, step)


def _without_gradients(left: list[Line], other: Record, told: tuple[str, str], looked: frozenset[int]) -> list[DiffRow]:
    """Rows for gradients and updates that the other run never has, of parameters of both, as where one is frozen.

    ``left``: lines of one run without a partner; ``told``: of A and of B; ``looked``: the training steps of both.
    """
    models = [model.get("weights") for _, model in other.events("model", other.ranks[0])]
    parameters = {str(weight[0]) for weights in models if isinstance(weights, list) for weight in weights}
    rows, alone = [], {line.name for line in left if line.port == "param"}  # those of no partner are of one run
    for line in left:
        steps = sorted({int(step) for step in line.steps} & looked)
        name = line.name.removesuffix(f":{line.port}")  # with the name of its model before it, where these are several
        is_known = name in parameters or name.partition(".")[2] in parameters
        is_known = is_known and f"{name}:param" not in alone
        if line.phase == "train" and line.port in ("grad", "update") and is_known and steps:
            place = line.name, line.name, "parameter"
            rows.append(DiffRow(*place, "parted", math.inf, 0.0, "presence", *told, step=steps[0]))
    return rows


def _site(one: Line, other: Line, how: str, tolerance: float | None, rounding: float, least: float) -> DiffRow | None:
    """How one site differs, at the first look of both at which it does by more than is allowed.

    Where it never does, the look with the largest difference is told. None where both were never looked at in the same
    step. ``rounding``: what is allowed in any case without a ``tolerance``; ``least``: see ``_least``; ``how``: what
    they were matched by.
    """
    steps, here, there = np.intersect1d(one.steps, other.steps, return_indices=True)
    if not len(steps):
        return None
    deltas = {name: _deltas(one, other, name, here, there, least) for name in NUMBERS}
    allowed = tolerance if tolerance is not None else _noise(one.values["rms"], other.values["rms"], rounding)
    table = np.stack([deltas[name] for name in NUMBERS])
    worst = table.max(0)
    limits = np.full(len(steps), allowed)
    if tolerance is None and one.port == "param" and one.phase == "train":
        limits[steps == 0] = rounding  # before the first step nothing can have drifted
    parted = np.flatnonzero(worst > limits)
    at = int(parted[0]) if len(parted) else int(worst.argmax())
    allowed = float(limits[at])
    number = NUMBERS[int(table[:, at].argmax())]
    delta = float(worst[at])
    a, b = (float(values[number][places[at]]) for values, places in ((one.values, here), (other.values, there)))
    return DiffRow(one.name, other.name, _phase(one), state_of(delta, allowed), delta, allowed, number,
               shown(a), shown(b), how, int(steps[at]))  # fmt: skip


def _deltas(one: Line, other: Line, name: str, here: Any, there: Any, least: float) -> Any:
    """The differences of one number at the looks of both, [looks], to be held against a tolerance of a relative size.

    Of the rms the difference of logarithms; of shares the difference; of others relative to the larger rms, for a mean
    is near zero as a rule. Counts of non-finite elements are equal, or infinitely different. ``here``, ``there``: the
    places of the common looks in both lines. Both NaN, or both the same infinity, is no difference.
    """
    a, b = one.values[name][here], other.values[name][there]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if name in _ODD:
            return np.where(a == b, 0.0, math.inf)
        if name == "rms":
            found = np.abs(np.log(np.maximum(a, least)) - np.log(np.maximum(b, least)))
        elif name == "zeros":
            found = np.abs(a - b)
        else:
            size = np.maximum(np.maximum(one.values["rms"][here], other.values["rms"][there]), least)
            found = np.abs(a - b) / np.maximum(size, 1e-300)
    found = np.where(a == b, 0.0, found)
    return np.where(np.isnan(found), np.where(np.isnan(a) == np.isnan(b), 0.0, math.inf), found)


def _noise(a: Any, b: Any, rounding: float) -> float:
    """How much a number changes from look to look by itself, as a bound on the difference of its logarithms.

    The smaller of both runs' median change, turned into a standard deviation as of a normal distribution (whose median
    magnitude is 0.6745 of it), times four, which is chosen; never less than what ``rounding`` makes in a few steps.
    """
    found = []
    for values in (a, b):
        known = np.log(values[(values > 0) & np.isfinite(values)])
        if len(known) > 2:
            found.append(float(np.median(np.abs(np.diff(known)))))
    spread = min(found, default=0.0) / 0.6745  # the median of |normal| is 0.6745 deviations
    return max(rounding, _DEVIATIONS * spread)


class _Apart(NamedTuple):
    """A number of one site that differs at one look by ``delta``."""

    line: Line
    number: str
    step: int
    delta: float

    def __str__(self) -> str:
        return f"{self.number} of {self.line.name} at step {self.step}"


def _first_apart(pairs: list[tuple[Line, Line]], least: Mapping[str, float], allowed: float) -> _Apart | None:
    """The earliest number that differs by more than ``allowed``: of 0, where the runs cease to be bitwise equal.

    Of one step the first in the order in which things happen, of one site the number that differs most. ``least``:
    see ``_least``; of an ``allowed`` of 0 all numbers count.
    """
    best: tuple[tuple[int, int], _Apart] | None = None
    for one, other in pairs:
        steps, here, there = np.intersect1d(one.steps, other.steps, return_indices=True)
        smallest = least.get(one.port, 0.0) if allowed else 0.0
        table = np.stack([_deltas(one, other, name, here, there, smallest) for name in NUMBERS])
        unlike = np.flatnonzero((table > allowed).any(0))
        if not len(unlike):
            continue
        at = int(unlike[0])
        number = int(table[:, at].argmax())
        place = int(steps[at]), _ORDER.index(_phase(one))
        if best is None or place < best[0]:
            best = place, _Apart(one, NUMBERS[number], int(steps[at]), float(table[number, at]))
    return best[1] if best is not None else None


def _phase(line: Line) -> str:
    """What a row of a line is a part of."""
    return _PHASES.get(line.port, "forward") if line.phase == "train" else "evaluation"


def _batches(
    a: Record, b: Record, types: tuple[set[str], set[str]], lines: tuple[list[Line], list[Line]]
) -> list[DiffRow]:
    """Whether both were given the same batches, by the checksums of looks: one row, or none without checksums.

    Runs in other types are given other bits: their batches are alike where the numbers of what the models were given
    differ by no more than rounding.
    """
    prints = [
        {step: one["fingerprint"] for step, one in record.events("look", record.ranks[0])
         if one.get("phase") == "train" and isinstance(one.get("fingerprint"), (str, int))}
        for record in (a, b)
    ]  # fmt: skip
    both = prints[0].keys() & prints[1].keys()
    common = sorted(step for step in both if type(prints[0][step]) is type(prints[1][step]))  # a device's are numbers
    if not common:
        return []
    step = next((step for step in common if prints[0][step] != prints[1][step]), None)
    if step is None:
        return [DiffRow("the batch", "the batch", "batch", "same", 0.0, 0.0, _CHECKED, step=common[-1])]
    allowed = _COARSE * max((ROUNDOFF.get(one, 2.0**-24) for one in types[0] | types[1]), default=0.0)
    if types[0] != types[1] and (delta := _given_apart((a, b), lines)) <= allowed:
        told = ", ".join(sorted(types[0])), ", ".join(sorted(types[1]))
        return [DiffRow("the batch", "the batch", "batch", "close", delta, allowed, "type", *told, step=step)]
    a_print, b_print = (str(one[step]) for one in prints)
    return [DiffRow("the batch", "the batch", "batch", "parted", math.inf, 0.0, _CHECKED, a_print, b_print, step=step)]


def _types(record: Record) -> set[str]:
    """The types of the parameters of a run's models."""
    models = [one.get("weights") for _, one in record.events("model", record.ranks[0])]
    return {str(weight[2]) for weights in models if isinstance(weights, list) for weight in weights}


def _given_apart(records: tuple[Record, Record], lines: tuple[list[Line], list[Line]]) -> float:
    """The largest difference of numbers of what models were given, over all common looks; infinite without any.

    What modules inside were given counts only where the models themselves were never called: it drifts apart.
    """
    given = [{one.name: one for one in side if one.port == "input" and one.phase == "train"} for side in lines]
    roots = {name for record in records for name, (_, address) in record.names().items() if address == ":input"}
    if roots & given[0].keys() & given[1].keys():
        given = [{name: one for name, one in side.items() if name in roots} for side in given]
    found = []
    for name in given[0].keys() & given[1].keys():
        one, other = given[0][name], given[1][name]
        _, here, there = np.intersect1d(one.steps, other.steps, return_indices=True)
        found += [float(_deltas(one, other, number, here, there, 0.0).max(initial=0.0)) for number in NUMBERS]
    return max(found, default=math.inf)


def _names_of_losses(record: Record) -> list[str]:
    """The losses that a run has noted, such as ``loss:loss``: each is called what its tensor is called."""
    return [name for name in record.scalars if name.startswith("loss:")]


def _losses_of_both(a: Record, b: Record) -> list[tuple[str, str]]:
    """Which losses are the same thing: those of one name, and where each run has one more, that with that."""
    one, other = _names_of_losses(a), _names_of_losses(b)
    pairs = [(name, name) for name in one if name in other]
    left = [name for name in one if name not in other], [name for name in other if name not in one]
    return [*pairs, (left[0][0], left[1][0])] if len(left[0]) == len(left[1]) == 1 else pairs


def _losses(
    a: Record,
    b: Record,
    named: list[tuple[str, str]],
    tolerance: float | None,
    rounding: float,
    first: _Apart | None,
) -> tuple[list[DiffRow], str]:
    """A row for each loss that both have noted, at the first step at which it differs by more than is allowed.

    ``named``: its name in both runs. ``first``: where the sites cease to be equal. A loss that differs before that,
    while all was the same to the last bit, and by far more than rounding, has parted there. The text names the loss
    that differs before ``first``, if any.
    """
    rows: list[DiffRow] = []
    earliest = (1 << 60, 0) if first is None else (first.step, _ORDER.index(_phase(first.line)))
    told = ""
    for name, partner in named:
        one, other = dict(a.scalar(name, a.ranks[0])), dict(b.scalar(partner, b.ranks[0]))
        common = sorted(one.keys() & other.keys())
        if not common:
            continue
        values = [np.array([run[step] for step in common]) for run in (one, other)]
        size = np.maximum(np.maximum(np.abs(values[0]), np.abs(values[1])), 1e-300)
        with np.errstate(invalid="ignore", over="ignore"):
            delta = np.where(values[0] == values[1], 0.0, np.abs(values[0] - values[1]) / size)
        is_nan = np.isnan(values[0]), np.isnan(values[1])
        delta = np.where(is_nan[0] & is_nan[1], 0.0, np.where(is_nan[0] | is_nan[1], math.inf, delta))
        delta = np.where(np.isnan(delta), math.inf, delta)
        noise = _noise(np.abs(values[0]), np.abs(values[1]), rounding)  # of logarithms
        allowed = tolerance if tolerance is not None else -math.expm1(-noise)
        unlike = np.flatnonzero(delta > 0)
        place = (common[unlike[0]] if len(unlike) else 1 << 60), _ORDER.index("loss")
        if place < earliest:
            earliest, told = place, f"{name} at step {place[0]}"
            allowed = rounding if tolerance is None and delta[unlike[0]] > _JUMP * rounding else allowed
        parted = np.flatnonzero(delta > allowed)
        at = int(parted[0]) if len(parted) else int(delta.argmax())
        rows.append(
            DiffRow(name, partner, "loss", state_of(float(delta[at]), allowed), float(delta[at]), allowed, "loss",
                shown(float(values[0][at])), shown(float(values[1][at])),
                "address" if name == partner else "order", step=common[at])
        )  # fmt: skip
    return rows, told
