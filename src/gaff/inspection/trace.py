"""The numbers of a run, without tensors: plain values that save, load and print without torch.

``gaff.inspection.tracer`` makes a ``Trace``; ``gaff.views.trace_text`` and ``gaff.views.page.trace`` draw it, and
``gaff.diff`` compares two of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from gaff.compat import extras
from gaff.compat.files import write_text
from gaff.errors import PlanError, RecordError, SiteError
from gaff.inspection.writing import ending, number_of, worded
from gaff.record.picture import Picture
from gaff.record.trace_rows import (
    CallRow,
    Fingerprint,
    Gradient,
    ModuleSetting,
    ParameterRow,
    build_row,
    call_row,
    optional_row,
    row_dict,
)
from gaff.views import trace_text
from gaff.views.notebook import Shown, framed
from gaff.views.trace_html import trace_cell

_FORMAT = 3
_MOST_BYTES = 500 * 2**20


@dataclass(frozen=True, slots=True)
class Trace:
    """One run, told: ``rows`` in the order in which modules were entered. ``str`` is the table, ``tree()`` the tree.

    ``given``: what stands for the inputs. ``edges``: (row, row, known): the second was given what the first has made;
    where nobody is known to have made it, for it was an op, the first is the call before. ``pictures``: with
    ``gaff.trace(..., pictures=True)``. ``unused_modules`` were not called; ``unused_parameters`` require grad and got
    none, or, without a backward pass, no gradient would come to them from the output: they may act on it all the same,
    as under ``no_grad``. ``tokens``: of the first text that the model was given, in order; numbers, until
    ``with_tokens`` names them. ``modules``: how those were set that were called.
    """

    model: str
    rows: tuple[CallRow, ...]
    parameters: tuple[ParameterRow, ...] = ()
    unused_modules: tuple[str, ...] = ()
    unused_parameters: tuple[str, ...] = ()
    has_backward: bool = False
    has_flops: bool = True
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    given: Fingerprint = field(default_factory=Fingerprint)
    edges: tuple[tuple[int, int, bool], ...] = ()
    pictures: tuple[Picture, ...] = ()
    tokens: tuple[str, ...] = ()
    modules: tuple[ModuleSetting, ...] = ()

    def __str__(self) -> str:
        return trace_text.render_table(self)

    __repr__ = __str__

    def table(self, width: int | None = None, *, depth: int | None = None, is_plain: bool = False) -> str:
        """The table cut to ``width`` characters; ``is_plain`` separates cells by tabs.

        ``depth``: how many levels of calls below the model are told, 0 for the model alone, None for all. Of a call
        whose inside is left out, ``params`` are those of all modules inside, and time, flops and memory what they are
        in the full table. Raises PlanError for a negative depth.
        """
        return trace_text.render_table(self, width, depth=depth, is_plain=is_plain)

    def tree(self, *, depth: int | None = None) -> str:
        """The calls as a tree, indented by module; repeated blocks are folded. ``depth``: as for ``table``."""
        return trace_text.render_tree(self, depth=depth)

    def with_tokens(self, names: Callable[[list[int]], Sequence[str]]) -> Trace:
        """The same trace with the tokens of its input by name, as its page shows them.

        ``names``: from numbers to as many texts, such as ``tokenizer.convert_ids_to_tokens``. Raises PlanError where
        the model was given no tokens, or it returns another number of texts.
        """
        if not self.tokens:
            raise PlanError("this trace has no tokens: its model was given no tensor of whole numbers [texts, tokens]")
        found = names([int(one) for one in self.tokens])
        if not isinstance(found, Sequence):
            raise PlanError(f"names returned a {type(found).__name__}: expected a list of {len(self.tokens)} texts")
        named = tuple(map(str, found))
        if len(named) != len(self.tokens):
            raise PlanError(f"{len(named)} names for {len(self.tokens)} tokens: expected one for each")
        return replace(self, tokens=named)

    def _repr_html_(self) -> str:
        """For notebooks: totals, the calls as a tree that folds, a few pictures; ``page()`` shows all of it."""
        return trace_cell(self)

    def page(self, height: int = 640) -> Shown:
        """The page inside a notebook, ``height`` pixels high: some 130 kB, and the pictures. Raises as ``to_html``."""
        return framed(self.to_html(), height)

    def to_html(self) -> str:
        """A page with the table, the tree, the data flow between calls and the pictures.

        Raises PlanError without numpy.
        """
        extras.need("numpy", "page", for_="a page of a trace")
        from gaff.views.page.trace import document

        return document(self).to_html()

    def to_json(self) -> str:
        """Everything as JSON, with the number of the format; pictures as base64. ``from_json`` reads it back.

        A number that is not finite, for which JSON has no word, is an object: ``{"number": "nan"}``.
        """
        told = asdict(replace(self, rows=(), parameters=(), modules=(), pictures=()))
        told |= {name: [row_dict(row) for row in getattr(self, name)] for name in ("rows", "parameters", "modules")}
        told["pictures"] = [one.to_dict() for one in self.pictures]
        return json.dumps(worded({"gaff_trace": _FORMAT, **told}), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Inverse of ``to_json``. Raises RecordError when ``text`` is no trace."""
        try:
            data = json.loads(text, object_hook=number_of)
            if data.pop("gaff_trace") not in (_FORMAT, _FORMAT - 1):
                raise ValueError(f"another format, expected {_FORMAT}")
            data["rows"] = tuple(call_row(row) for row in data["rows"])
            data["parameters"] = tuple(
                build_row(ParameterRow, {**row, "grad": optional_row(Gradient, row["grad"])})
                for row in data["parameters"]
            )
            data["modules"] = tuple(build_row(ModuleSetting, row) for row in data.get("modules", ()))
            for name in ("unused_modules", "unused_parameters", "notes", "tokens"):
                data[name] = tuple(str(item) for item in data.get(name, ()))
            data["given"] = _fingerprint(data.get("given", ""))
            data["edges"] = tuple((int(one), int(other), bool(known)) for one, other, known in data.get("edges", ()))
            data["pictures"] = tuple(Picture.from_dict(one) for one in data.get("pictures", ()))
            return build_row(cls, data)
        except (SiteError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RecordError(f"trace cannot be read: {error!r}; expected what Trace.to_json wrote") from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write a page where the name ends in ``.html``, else JSON, which ``load`` reads.

        A page needs numpy: PlanError without, as for a name of another format, such as ``.csv``. Raises RecordError
        where the file cannot be written.
        """
        is_page = ending(path, ".json", ".html", ".htm") in (".html", ".htm")
        text = self.to_html() if is_page else self.to_json()
        write_text(path, text + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """The trace in a file that ``save`` wrote as JSON. Raises RecordError for any other, and above 500 MiB."""
        file = Path(path)
        if not file.is_file():
            raise RecordError(f"trace {str(path)!r} is no file: expected one that Trace.save wrote")
        if file.stat().st_size > _MOST_BYTES:
            raise RecordError(f"trace {str(path)!r} is larger than {_MOST_BYTES} bytes: not read")
        return cls.from_json(file.read_text(encoding="utf-8", errors="replace"))


def _fingerprint(told: Any) -> Fingerprint:
    """What stands for the inputs, of a dict in JSON; format 2 had the digest alone, as text."""
    if isinstance(told, str):
        return Fingerprint(told)
    return Fingerprint(str(told["digest"]), tuple(map(float, told["sketch"])), str(told["odd"]),
                       str(told.get("whole", "")), str(told.get("types", "")))  # fmt: skip
