"""What is worth knowing of two traces beside where they part, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gaff.address.grammar import parse_site
from gaff.inspection.diff.difference import DiffRow
from gaff.inspection.diff.order import has_no_calls, when_made
from gaff.inspection.diff.pairs import Pair
from gaff.inspection.trace import Trace

_EAGERLY = "compiled code ran eagerly"  # how the note of a trace begins of which no compiler had a part


def notes_of(
    a: Trace, b: Trace, pairs: Sequence[Pair], parameters: Sequence[Pair], rows: Sequence[DiffRow]
) -> list[str]:
    """All notes. ``pairs``: of calls that were taken for the same, ``parameters``: likewise, ``rows``: of both."""
    notes = [
        *_of_each(a, b),
        *_settings(a, b, pairs),
        *_remarks(a, b, pairs, rows),
        *_weights(a, b, parameters),
        *_between(a, b, pairs, rows),
        *_incomparable(a, pairs, rows),
    ]
    if a.has_backward != b.has_backward:
        notes.append("only one of them has a backward pass: gradients were not compared")
    others = [pair.how for pair in pairs if pair.how != "address"]
    if others:
        ways = ", ".join(f"{others.count(how)} by {how}" for how in dict.fromkeys(others))
        notes.append(f"{len(others)} of {len(pairs)} calls are matched by other than their address: {ways}")
    return notes


def _of_each(a: Trace, b: Trace) -> Iterator[str]:
    """What was noted of one of the two runs alone, and of both that what a compiler makes was not compared."""
    for note in a.notes:
        if note in b.notes and note.startswith(_EAGERLY):
            yield f"of both: {note}"
    for name, one, other in (("A", a, b), ("B", b, a)):
        yield from (f"of {name}: {note}" for note in one.notes if note not in other.notes and "flops" not in note)


def _incomparable(a: Trace, pairs: Sequence[Pair], rows: Sequence[DiffRow]) -> list[str]:
    """A note about calls of which no number was there to compare, such as those that return numbers of Python."""
    known = {row.site for row in rows if row.phase == "forward"}
    left = [a.rows[pair.a] for pair in pairs if a.rows[pair.a].site not in known]
    if not left:
        return []
    calls = "1 call" if len(left) == 1 else f"{len(left)} calls"
    first = f"{left[0].site} ({left[0].output or 'no tensor'})"
    return [f"{calls} returned nothing that can be compared, no real elements: {first}{' ...' if left[1:] else ''}"]


def _between(a: Trace, b: Trace, pairs: Sequence[Pair], rows: Sequence[DiffRow]) -> list[str]:
    """A note about what either model does between the last place that agrees and the first that does not, alone."""
    forward = [row for row in rows if row.phase == "forward"]
    parted = next((at for at, row in enumerate(forward) if row.state == "parted"), 0)
    if not parted or any(row.state == "parted" for row in rows[: rows.index(forward[parted])]):
        return []
    told = []
    for name, trace, taken, sites in (
        ("A", a, {pair.a for pair in pairs}, [row.site for row in forward[parted - 1 : parted + 1]]),
        ("B", b, {pair.b for pair in pairs}, [row.other for row in forward[parted - 1 : parted + 1]]),
    ):
        made = when_made(trace)
        first, last = (made[next(at for at, row in enumerate(trace.rows) if row.site == site)] for site in sites)
        alone = [row.site for at, row in enumerate(trace.rows) if first < made[at] < last and at not in taken]
        told += [f"{', '.join(alone[:4])}{' ...' if alone[4:] else ''} in {name}"] if alone else []
    return [f"between {forward[parted - 1].site}, which agrees, and that: {'; '.join(told)}"] if told else []


def _weights(a: Trace, b: Trace, pairs: Sequence[Pair]) -> list[str]:
    """A note about parameters that are not the same in both, though most are: the first of them."""
    both = [(a.parameters[pair.a], b.parameters[pair.b]) for pair in pairs]
    known = [(one, other) for one, other in both if one.digest and other.digest]
    apart = [(one, other) for one, other in known if one.digest != other.digest and one.dtype == other.dtype]
    if not apart or 2 * len(apart) > len(known):
        return []
    one, other = (parse_site(row.site).path for row in apart[0])
    where = one if one == other else f"{one} ({other} in B)"
    held = {row.site: row.digest for row in a.parameters}
    sought = apart[0][0].digest
    found = (row.site for row in b.parameters if row.digest == sought and held.get(row.site, sought) != sought)
    elsewhere = parse_site(site).path if (site := next(found, "")) else ""
    moved = f" (B has those of A in {elsewhere})" if elsewhere else ""
    return [
        f"the values of {where} are not the same in both{moved}, the first of {len(apart)} of {len(known)} parameters"
    ]


def _settings(a: Trace, b: Trace, pairs: Sequence[Pair]) -> Iterator[str]:
    """What was set otherwise in modules that were taken for the same: the mode, the class, the settings of a class.

    Classes and settings are compared of modules without calls inside: of others the parts say what differs.
    """
    inner_a, inner_b = has_no_calls(a), has_no_calls(b)
    set_a, set_b = ({row.path: row for row in trace.modules} for trace in (a, b))
    modes, classes, settings = [], [], []
    for pair in pairs:
        one, other = a.rows[pair.a], b.rows[pair.b]
        known = set_a.get(one.path), set_b.get(other.path)
        if known[0] is None or known[1] is None or "/" in one.site + other.site:  # of an op
            continue
        modes.append((one.site, known[0].mode, known[1].mode))
        if inner_a[pair.a] and inner_b[pair.b]:
            classes.append((one.site, one.cls, other.cls))
            settings += [(one.site, known[0].settings, known[1].settings)] * (one.cls == other.cls)
    for found, form in ((modes, "in {} mode"), (classes, "a {}"), (settings, "{}")):
        odd = [(site, one, other) for site, one, other in found if one != other]
        for site, here, there in odd[:1]:
            count = "all" if len(odd) == len(found) > 1 else str(len(odd))
            words = f"{form.format(here or 'plain')} in A and {form.format(there or 'plain')} in B"
            yield f"{site} is {words}" + (f", the first of {count} calls so" if len(odd) > 1 else "")


def _remarks(a: Trace, b: Trace, pairs: Sequence[Pair], rows: Sequence[DiffRow]) -> list[str]:
    """What is worth knowing where nothing has parted yet: the first bits that differ, a type among others.

    A type is told only where not all calls differ in it: else the two were meant to.
    """
    notes = []
    first = next((row for row in rows if row.state != "same"), None)
    if first is not None and first.state == "close":
        notes.append(f"the first bits that differ are those of {first.site}, {first.phase}, by {first.delta:.2g}")
    types = {pair: (a.rows[pair.a].dtype, b.rows[pair.b].dtype) for pair in pairs}
    odd = [pair for pair, (one, other) in types.items() if one != other and one and other]
    if odd and len(odd) < len(pairs):
        site, (here, there) = a.rows[odd[0].a].site, types[odd[0]]
        notes.append(f"{site} is {here} in A and {there} in B, the first of {len(odd)} such calls")
    more = [row for row in rows if row.number == "shape" and row.state == "close" and row.phase == "forward"]
    if more:
        count = f", the first of {len(more)} such calls" if len(more) > 1 else ""
        notes.append(
            f"{more[0].site} returns {more[0].a} in A and {more[0].b} in B{count}: their moments agree, as far as both "
            "have them"
        )
    return notes
