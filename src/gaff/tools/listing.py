"""``gaff.sites``: what can be addressed in a model, as a tree and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from gaff.address import Site
from gaff.errors import SiteError
from gaff.plan import Plan
from gaff.select import is_container, iter_modules, need_module
from gaff.text import count_text, fold
from gaff.tools.trace_sink import shape_text
from gaff.tools.tracing import trace_run


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module. ``parameters`` and ``buffers`` are its own, from name to shape; ``input`` to ``calls`` of a run."""

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


class Sites(Sequence[ModuleRow]):
    """A sequence of rows; ``str`` is the tree, with repeated blocks told once, ``rows`` the data."""

    def __init__(self, model: str, rows: Sequence[ModuleRow], is_whole: bool) -> None:
        self.model = model
        self.rows = tuple(rows)
        self._is_whole = is_whole

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __contains__(self, item: object) -> bool:
        return item in self.rows or any(item in (row.site, row.path) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "modules": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        if not self._is_whole:
            return "\n".join(_line(row, row.site) for row in self.rows)
        return "\n".join(fold(self.rows, _is_inside, _likeness, _tree_line))

    __repr__ = __str__


def list_sites(model: nn.Module, what: Sequence[Any], inputs: dict[str, Any]) -> Sites:
    """See ``gaff.sites``."""
    need_module(model)
    patterns, args = _split(what)
    rows = list(_iter_rows(model))
    if args or inputs:
        rows = _with_shapes(model, rows, tuple(args), inputs)
    if patterns:
        found = Plan.of(*patterns).check(model)
        by_path = {row.path: row for row in rows}
        wanted = [(str(item.found.site), by_path[_module_path(item.found.site, item.found.name)]) for item in found]
        rows = [_renamed(row, site) for site, row in wanted]
    return Sites(type(model).__name__, rows, is_whole=not patterns)


def _split(what: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Texts, sites, predicates and modules are patterns; everything else is an example input."""
    patterns: list[Any] = []
    args: list[Any] = []
    for item in what:
        is_pattern = isinstance(item, (str, Site, nn.Module)) or hasattr(item, "matches") or callable(item)
        (patterns if is_pattern else args).append(item)
    if patterns and args and isinstance(what[0], type(args[0])):
        raise SiteError("patterns come before example inputs: expected gaff.sites(model, '**<Conv2d>', x)")
    return patterns, args


def _module_path(site: Site, name: str) -> str:
    return site.path.rpartition(".")[0] if name else site.path


def _iter_rows(model: nn.Module) -> Iterator[ModuleRow]:
    first: dict[int, str] = {}
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
) -> list[ModuleRow]:
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
    return shaped


def _renamed(row: ModuleRow, site: str) -> ModuleRow:
    return ModuleRow(**{**asdict(row), "site": site})


def _is_inside(row: ModuleRow, head: ModuleRow) -> bool:
    return not head.path or row.path.startswith(head.path + ".")


def _likeness(block: Sequence[ModuleRow]) -> tuple[Any, ...]:
    base = block[0].path
    return tuple(
        (
            row.path.removeprefix(base),
            row.cls,
            tuple(row.parameters.items()),
            row.input,
            row.output,
            row.calls,
            row.same_as,
        )
        for row in block
    )


def _tree_line(head: ModuleRow, last: ModuleRow | None, count: int) -> str:
    depth = head.path.count(".") + 1 if head.path else 0
    name = head.site if last is None else f"{head.site} ... {last.site.rpartition('.')[2]} ({count}x)"
    return "  " * depth + _line(head, name)


def _line(row: ModuleRow, name: str) -> str:
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
