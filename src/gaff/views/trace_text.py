"""A trace as text: a table and a tree.

Both draw the rows of ``gaff.record.trace_rows``, one for each call in the order of execution, and end with what
was never called, what has no influence on the output, and notes. Columns that are empty in every row are left out of
the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gaff.address.grammar import parse_site
from gaff.errors import PlanError, whole_number
from gaff.views.text import bytes_text, count_text, counted, fold, table

if TYPE_CHECKING:
    from gaff.record.trace_rows import CallRow, Gradient, Traced

_HEAD = ("site", "class", "input", "output", "params", "time", "flops", "memory", "mean", "std", "min", "max")
_GRADIENT_HEAD = ("grad out", "grad in")
_PARAMETER_HEAD = ("parameter", "shape", "elements", "gradient norm", "zeros")
_RIGHT = ("params", "time", "flops", "memory", "mean", "std", "min", "max", "elements")
_FIRST_TO_GO = ("grad in", "memory", "min", "max", "std", "flops", "input", "class", "params", "mean")


def render_table(trace: Traced, width: int | None = None, *, depth: int | None = None, is_plain: bool = False) -> str:
    """One line for each call, then parameters' gradients if there was a backward pass, then what was not used.

    ``width``: columns of the terminal, None for as wide as it needs; ``depth``: levels of modules below the model, None
    for all; ``is_plain``: cells separated by tabs and never cut, for other programs to read.
    """
    known, left_out = _down_to(trace, depth)
    head, rows = _cells(known, trace.has_backward)
    draw = (
        _tabs if is_plain else lambda head, rows: table(head, rows, width=width, right=_RIGHT, first_to_go=_FIRST_TO_GO)
    )
    parts = [summary(trace), draw(head, rows), *left_out]
    if trace.has_backward:
        parts += ["", draw(_PARAMETER_HEAD, _parameter_cells(trace))]
    parts += endings(trace)
    return "\n".join(parts)


def render_tree(trace: Traced, *, depth: int | None = None) -> str:
    """Calls indented by depth, each with the shapes in and out; three equal blocks in a row or more are told once."""
    known, left_out = _down_to(trace, depth)
    lines = fold(known, is_inside, likeness, tree_line)
    return "\n".join([summary(trace), *lines, *left_out, *endings(trace)])


def _down_to(trace: Traced, depth: int | None) -> tuple[Sequence[CallRow], list[str]]:
    """The calls down to a depth below the outermost, and a line about those that lie deeper, if there are any.

    A call whose inside is left out has the parameters of its module and of all modules inside, each counted once.
    """
    if depth is None:
        return trace.rows, []
    if (below := whole_number(depth, 0)) is None:
        raise PlanError(f"depth={depth!r}: expected 0 for the model alone, or a number of levels below it")
    deepest = below + min((row.depth for row in trace.rows), default=0)
    sizes = [(parse_site(one.site).path, one.elements) for one in trace.parameters]
    told_of = {one.path: one.parameters for one in trace.modules if one.parameters >= 0}
    known: list[CallRow] = []
    for row, after in zip(trace.rows, [*trace.rows[1:], None], strict=True):
        is_holder = row.depth == deepest and after is not None and after.depth > deepest
        if is_holder and not parse_site(row.site).op:
            inside = f"{row.path}." if row.path else ""
            total = sum(elements for path, elements in sizes if path.startswith(inside))  # in files of before
            known.append(replace(row, parameters=told_of.get(row.path, total)))
        elif row.depth <= deepest:
            known.append(row)
    count = len(trace.rows) - len(known)
    told = f"({counted(count, 'call')} deeper inside left out; params of what holds them are those of all inside)"
    return known, [told] if count else []


def summary(trace: Traced) -> str:
    """One line: the model, its device and size, what of it is frozen, the time of the watched run, and the mode.

    Time and flops are summed over the outermost calls only, since those of a call include what is inside it.
    """
    outermost = min((row.depth for row in trace.rows), default=0)
    top = [row for row in trace.rows if row.depth == outermost]
    whole = [one.parameters for one in trace.modules if not one.path and one.parameters >= 0]
    elements = whole[0] if whole else sum(row.elements for row in trace.parameters)
    frozen = sum(row.elements for row in trace.parameters if not row.requires_grad)
    told = f" ({'all' if frozen == elements else count_text(frozen)} frozen)" if frozen else ""
    modes = {row.mode for row in trace.modules}
    mode = "" if not modes else ", partly in eval mode" if len(modes) > 1 else f", in {modes.pop()} mode"
    flops = f"{count_text(sum(row.flops for row in top))} flops, " if trace.has_flops else ""
    return (
        f"{trace.model} on {trace.device}: {len(trace.rows)} calls, {count_text(elements)} parameters{told}, "
        f"{flops}{_milliseconds(sum(row.time_s for row in top))} "
        f"while watched{mode}"
    )


def _cells(rows: Sequence[CallRow], has_backward: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The heads and cells of the table of calls; the two columns of gradients are there after a backward pass."""
    head = _HEAD + (_GRADIENT_HEAD if has_backward else ())
    return head, [_call_cells(row, has_backward) for row in rows]


def _call_cells(row: CallRow, has_backward: bool) -> tuple[str, ...]:
    """The cells of one call; ``dtype``, of the first output, stands behind its shape where it is not float32."""
    first, comma, others = row.output.partition(",")
    numbers = row.statistics
    values = () if numbers is None else (numbers.mean, numbers.std, numbers.min, numbers.max)
    cells = (
        row.site,
        row.cls,
        row.input,
        f"{first} {row.dtype}".strip() + comma + others if row.dtype not in ("", "float32") else row.output,
        count_text(row.parameters) if row.parameters else "",
        _milliseconds(row.time_s),
        count_text(row.flops) if row.flops else "",
        bytes_text(row.memory_bytes) if row.memory_bytes else "",
        *(f"{value:.3g}" for value in values),
        *("" for _ in range(4 - len(values))),
    )
    if numbers is not None and numbers.nonfinite:
        cells = (*cells[:-1], f"{cells[-1]} ({numbers.nonfinite} non-finite)")
    return (*cells, _gradient(row.grad_output), _gradient(row.grad_input)) if has_backward else cells


def _parameter_cells(trace: Traced) -> list[tuple[str, ...]]:
    """The cells of each parameter: its gradient's norm, or why it has none, and the share of exact zeros."""
    rows: list[tuple[str, ...]] = []
    for row in trace.parameters:
        grad = row.grad
        norm = "" if grad is None else f"{grad.norm:.4g}" if grad.norm is not None else f"None: {grad.reason}"
        zeros = f"{grad.zeros:.0%}" if grad is not None and grad.zeros else ""
        rows.append((row.site, row.shape, count_text(row.elements), norm, zeros))
    return rows


def endings(trace: Traced) -> list[str]:
    """What stands below the tables: what was not used, and notes; begins with an empty line if there is something."""
    lines = []
    if trace.unused_modules:
        lines.append(f"never called: {', '.join(trace.unused_modules)}")
    if trace.unused_parameters:
        way = "no gradient came to" if trace.has_backward else "no gradient would come from the output to"
        lines.append(f"{way}: {', '.join(trace.unused_parameters)}")
    lines += [f"note: {note}" for note in trace.notes]
    return ["", *lines] if lines else []


def is_inside(row: CallRow, head: CallRow) -> bool:
    """Whether a row that follows a head was called inside it."""
    return row.depth > head.depth


def likeness(block: Sequence[CallRow]) -> tuple[object, ...]:
    """What makes blocks equal to a reader: sites below the block's own path, classes, shapes and sizes of all rows, and
    whether gradients came, were zero or not finite.

    The number of a call counts only as first or not, so that blocks which are called again fold as well.
    """
    base = block[0].path
    return tuple(
        (row.site.removeprefix(base).partition("@")[0], row.cls, row.input, row.output, row.parameters, row.call == 0,
         _kind(row.grad_output))
        for row in block
    )  # fmt: skip


def _kind(gradient: Gradient | None) -> str:
    """Of which kind a gradient is to a reader: not asked for, none, zero, not finite or another."""
    if gradient is None or gradient.norm is None:
        return "" if gradient is None else "none"
    return "zero" if not gradient.norm else "finite" if math.isfinite(gradient.norm) else "nonfinite"


def tree_line(head: CallRow, last: CallRow | None, count: int) -> str:
    """The line of one call, or of ``count`` equal ones from ``head`` to ``last``."""
    name = head.site if last is None else f"{head.site} ... {last.site.rpartition('.')[2]} ({count}x)"
    parameters = f"  {count_text(head.parameters)} params" if head.parameters else ""
    of_first = "" if last is None else " (the first)"
    grad = f"  grad {_gradient(head.grad_output)}{of_first}" if head.grad_output is not None else ""
    return f"{'  ' * head.depth}{name}  {head.cls}  {head.input} -> {head.output}{parameters}{grad}"


def _gradient(gradient: Gradient | None) -> str:
    return "" if gradient is None else str(gradient)


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.3g}s" if seconds >= 0.9995 else f"{seconds * 1000:.3g}ms"


def _tabs(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join("\t".join(row) for row in [head, *rows])
