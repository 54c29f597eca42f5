"""``gaff.sites``: what can be addressed in a model, as a tree and as data.

Modules are read from the model (``_iter_rows``); shapes and calls come from one traced run (``_with_shapes``), ops
from another (``list_ops``), where an example input is given. The tree folds blocks that are alike, by
``gaff.views.text``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from gaff.address.grammar import WEIGHTS, Site, fits_op, parse_site
from gaff.address.nested import iter_deep, shape_text
from gaff.address.resolve import is_container, iter_modules, need_initialised, need_module
from gaff.errors import PlanError, SiteError
from gaff.inspection.op_log import OpRow, list_ops
from gaff.inspection.tracer import trace_run
from gaff.sessions.plan import Plan
from gaff.views.notebook import Shown, cell, table_html, tree_html
from gaff.views.text import count_text, counted, fold


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module. ``parameters`` and ``buffers`` are its own, from name to shape; ``input`` to ``calls`` are of a run.

    Every name of a shared module has a row, and ``same_as`` tells the first of them. ``input``, ``output`` and
    ``dtype`` are of its first call; ``calls`` is None without a run.
    """

    site: str
    path: str
    cls: str
    parameters: dict[str, str]
    buffers: dict[str, str]
    elements: int  # of all parameters in and under it
    is_called: bool = True  # False for containers, which are never called themselves
    same_as: str = ""  # the first name of a shared module
    input: str = ""
    output: str = ""
    dtype: str = ""
    calls: int | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row for a table: site, class, parameters, input, output and dtype, as texts."""
        return self.site, self.cls, str(self.elements), self.input, self.output, self.dtype


class Sites(Sequence[ModuleRow | OpRow]):
    """A sequence of rows, of modules and (where asked for) of their ops, each followed by what is inside it.

    ``str`` is the tree, with repeated blocks told once, ``rows`` the data. ``in`` finds rows by their site or path.
    Where patterns were given it is a list of what they name, without a tree.
    """

    def __init__(
        self, model: str, rows: Sequence[ModuleRow | OpRow], is_whole: bool, notes: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.rows = tuple(rows)
        self.notes = tuple(notes)
        self._is_whole = is_whole

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __contains__(self, item: object) -> bool:
        return item in self.rows or any(item in (row.site, row.path) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """All rows as plain values that JSON takes, modules and ops apart."""
        parts = {
            "modules": [asdict(row) for row in self.rows if isinstance(row, ModuleRow)],
            "ops": [asdict(row) for row in self.rows if isinstance(row, OpRow)],
        }
        return {"model": self.model, **parts, "notes": list(self.notes)}

    def __str__(self) -> str:
        if self._is_whole:
            lines = fold(self.rows, _is_inside, _likeness, _tree_line)
        else:
            lines = [_line(row, row.site) for row in self.rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def view(self, depth: int = 2) -> Shown:
        """For notebooks: the tree, which folds, open down to ``depth`` levels; what patterns name is a table."""
        if self._is_whole:
            inside = tree_html(self.rows, _is_inside, _likeness, _tree_line, depth=depth)
        else:
            inside = table_html(("site", "what"), [(row.site, _line(row, "").strip()) for row in self.rows])
        return Shown(cell(f"{self.model}: {counted(len(self.rows), 'site')}", Shown(inside), *self.notes))

    def _repr_html_(self) -> str:
        return self.view().html


def list_sites(model: nn.Module, what: Sequence[Any], inputs: dict[str, Any], *, ops: bool = False) -> Sites:
    """What can be addressed in ``model``, or what of it patterns name; the work behind ``gaff.sites``.

    ``what`` and ``ops`` are those of ``gaff.sites``, ``inputs`` the keyword arguments of the run. Patterns are checked
    as for a capture. Raises SiteError for one that names nothing, also for an op that did not run, and PlanError for
    ops without an example input.
    """
    need_module(model)
    patterns, args = _split(what)
    rows = list(_iter_rows(model))
    told: list[str] = []
    if args or inputs:
        rows, told = _with_shapes(model, rows, tuple(args), inputs)
    elif ops:
        raise PlanError("ops are known only from a run: expected an example input, gaff.sites(model, x, ops=True)")
    by_module, notes = _ops_by_module(model, tuple(args), inputs) if ops else ({}, [])
    if patterns:
        found = Plan.of(*patterns).check(model)
        if any(item.found.site.op is not None for item in found) and not ops:
            raise PlanError("an op is known only from a run: expected an example input and ops=True")
        by_path = {row.path: row for row in rows}
        listed: list[ModuleRow | OpRow] = []
        for item in found:
            site = item.found.site
            inside = by_module.get(site.owner(item.found.name), [])
            if site.op is not None:
                listed += [row for row in inside if _names_op(site, row)]
            else:
                listed += [_renamed(by_path[site.owner(item.found.name)], str(site)), *inside]
        if not listed:
            raise SiteError(
                f"no op that {', '.join(map(repr, patterns))} names ran; see gaff.sites(model, x, ops=True)"
            )
    else:
        listed = []
        for row in rows:
            listed += [row, *by_module.get(row.path, [])]
    return Sites(type(model).__name__, listed, is_whole=not patterns, notes=list(dict.fromkeys([*told, *notes])))


def _ops_by_module(
    model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
) -> tuple[dict[str, list[OpRow]], list[str]]:
    """The ops of one run by the path of their module, in the order of their first calls; and the notes of that run."""
    rows, notes = list_ops(model, args, inputs)
    by_module: dict[str, list[OpRow]] = {}
    for row in rows:
        by_module.setdefault(row.path, []).append(row)
    return by_module, notes


def _names_op(site: Site, row: OpRow) -> bool:
    """Whether the op of a site, whose name may be a glob and whose number may be left out, is that of a row."""
    listed = parse_site(row.site)
    is_port = (site.port == WEIGHTS) == (listed.port == WEIGHTS)
    return is_port and fits_op(site.op or "", row.op) and site.op_index in (None, listed.op_index)


def _split(what: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What was given by position, as patterns and as example inputs.

    Texts, sites, predicates and modules are patterns; everything else is an example input. Raises SiteError where an
    input comes before a pattern.
    """
    patterns: list[Any] = []
    args: list[Any] = []
    for item in what:
        is_pattern = isinstance(item, (str, Site, nn.Module)) or hasattr(item, "matches")
        is_pattern |= callable(item) and next(iter_deep(item), None) is None  # data may be callable, as graphs are
        (patterns if is_pattern else args).append(item)
    if patterns and args and isinstance(what[0], type(args[0])):
        raise SiteError("patterns come before example inputs: expected gaff.sites(model, '**<Conv2d>', x)")
    return patterns, args


def _iter_rows(model: nn.Module) -> Iterator[ModuleRow]:
    """A row for each module under each of its names, as they are without a run."""
    first: dict[int, str] = {}
    need_initialised(model)
    for path, module, _ in iter_modules(model):
        known = first.setdefault(id(module), path)
        yield ModuleRow(
            str(Site(path)),
            path,
            type(module).__name__,
            {name: shape_text(tensor) for name, tensor in module._parameters.items() if tensor is not None},
            {name: shape_text(tensor) for name, tensor in module._buffers.items() if tensor is not None},
            sum(parameter.numel() for parameter in module.parameters()),
            not is_container(module),
            known if known != path else "",
        )


def _with_shapes(
    model: nn.Module, rows: list[ModuleRow], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[ModuleRow], list[str]]:
    """The rows with shapes, type and number of calls, of one traced run, and its notes; ``kwargs`` are the model's."""
    trace = trace_run(model, args, kwargs, None, has_flops=False)
    calls: dict[str, list[Any]] = {}
    for call in trace.rows:
        calls.setdefault(call.path, []).append(call)
    shaped = []
    for row in rows:
        seen = calls.get(row.same_as or row.path, [])
        one = seen[0] if seen else None
        texts = (one.input, one.output, one.dtype) if one is not None else ("", "", "")
        values = {**asdict(row), "input": texts[0], "output": texts[1], "dtype": texts[2], "calls": len(seen)}
        shaped.append(ModuleRow(**values))
    return shaped, list(trace.notes)


def _renamed(row: ModuleRow, site: str) -> ModuleRow:
    """The row of a module with another site, for a pattern that names one of its ports or parameters."""
    return ModuleRow(**{**asdict(row), "site": site})


def _is_inside(row: ModuleRow | OpRow, head: ModuleRow | OpRow) -> bool:
    """Whether a row stands under a head in the tree: under a module its ops, and modules further down the path."""
    if isinstance(head, OpRow):
        return False
    return not head.path or (isinstance(row, OpRow) and row.path == head.path) or row.path.startswith(head.path + ".")


def _likeness(block: Sequence[ModuleRow | OpRow]) -> tuple[Any, ...]:
    """What makes a block of rows equal to the next, so that both are told in one line.

    Paths count from the head of the block, for blocks alike differ in their numbers; ops never fold.
    """
    base = block[0].path
    if isinstance(block[0], OpRow):
        return (block[0].site,)  # each op has its own line
    return tuple(
        (row.path.removeprefix(base), row.op, row.place, row.inputs and row.inputs[0][0], row.output)
        if isinstance(row, OpRow)
        else (
            row.path.removeprefix(base),
            row.cls,
            tuple(row.parameters.items()),
            tuple(row.buffers.items()),
            row.input,
            row.output,
            row.dtype,
            row.calls,
            row.same_as,
        )
        for row in block
    )


def _tree_line(head: ModuleRow | OpRow, last: ModuleRow | OpRow | None, count: int) -> str:
    """The line of a row in the tree, indented by its path; with ``last`` it stands for ``count`` blocks."""
    depth = (head.path.count(".") + 1 if head.path else 0) + isinstance(head, OpRow)
    name = head.site if last is None else f"{head.site} ... {last.site.rpartition('.')[2]} ({count}x)"
    return "  " * depth + _line(head, name)


def _line(row: ModuleRow | OpRow, name: str) -> str:
    """The text of one row, under the name given: class, shapes, parameters, buffers."""
    if isinstance(row, OpRow):
        return _op_line(row, name)
    parts = [name, f"<{row.cls}>"]
    if row.same_as:
        return f"{name}  same module as {row.same_as}"
    if row.input or row.output:
        calls = f" ({row.calls} calls)" if row.calls and row.calls > 1 else ""
        dtype = f" {row.dtype}" if row.dtype not in ("", "float32") else ""
        parts.append(f"{row.input} -> {row.output}{dtype}{calls}")
    elif row.calls == 0 and row.is_called:
        parts.append("not called")
    parts += [f".{key} {shape}" for key, shape in row.parameters.items()]
    if row.buffers:
        parts.append("buffers: " + ", ".join(f".{key} {shape}" for key, shape in row.buffers.items()))
    if row.elements and not row.parameters:
        parts.append(f"({count_text(row.elements)} params)")
    return "  ".join(parts)


def _op_line(row: OpRow, name: str) -> str:
    """The text of an op, under the name given: what it was given and by whom, what it returned, and where it stands."""
    parts = [
        name,
        f"{row.cells[2] or 'nothing'} -> {row.output}" + (f" {row.dtype}" if row.dtype not in ("", "float32") else ""),
    ]
    parts += [f"({row.calls} calls)"] if row.calls > 1 else []
    parts += [row.place] + ([f"[{row.note}]"] if row.note else [])
    return "  ".join(parts)
