"""What is noted of every op of a run: where it stands in the code, what came in from where, what came out.

``OpLog`` listens to one run, ``Producers`` tells who made a tensor, and ``rows_of`` gives each op site once. The log
is read by ``gaff.sites(..., ops=True)`` and by ``gaff.anatomy``, ``Producers`` also by the search for a NaN.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from gaff.address.exported_calls import place_in_model
from gaff.address.grammar import ATTENTIONS, WEIGHTS, Site, print_key
from gaff.address.nested import Arguments, iter_tensors, shape_text
from gaff.address.resolve import called_modules, iter_modules, join
from gaff.compat import memory
from gaff.engine.ops.attention import Weights
from gaff.engine.ops.calls import OpCall
from gaff.engine.session import Session
from gaff.engine.taps import CallTap, OpTap
from gaff.inspection.call_log import shapes_text
from gaff.inspection.untouched import untouched

# Ops that torch runs as one, with more inside than can be seen: what to do about it.
FUSED = {
    "lstm": "one fused call, its gates and time steps cannot be seen: an nn.LSTMCell in a loop shows them",
    "gru": "one fused call, its gates and time steps cannot be seen: an nn.GRUCell in a loop shows them",
    "rnn_tanh": "one fused call, its time steps cannot be seen: an nn.RNNCell in a loop shows them",
    "rnn_relu": "one fused call, its time steps cannot be seen: an nn.RNNCell in a loop shows them",
    **dict.fromkeys(ATTENTIONS, f"one fused call: what its softmax gives is :{WEIGHTS}"),
}


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op of one module, at its first call. ``inputs``: shape and producer of each tensor that came in."""

    site: str
    path: str
    op: str
    place: str  # file and line
    code: str  # that line
    inputs: tuple[tuple[str, str], ...]
    output: str
    dtype: str
    calls: int
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row for a table: site, place, inputs with what made them, output and dtype, as texts."""
        came = ", ".join(f"{shape} {producer}".rstrip() for shape, producer in self.inputs)
        return self.site, self.place, came, self.output, self.dtype


@dataclass(slots=True)
class OpNotes:
    """One call of one op; not ``is_complete`` where it raised, or turned out to be none. Holds no tensor."""

    site: Site
    run: Any
    place: tuple[str, int]  # file, line
    function: str
    inputs: tuple[tuple[str, str], ...]
    output: str = ""
    dtype: str = ""
    is_complete: bool = False
    weights: tuple[str, str, str] | None = None  # of an op of attention: their shape, dtype, and a note


def iter_state(model: nn.Module) -> Iterator[tuple[Tensor, Site]]:
    """Every parameter and buffer with its address, module by module; one that has several names comes under each."""
    for path, module, _ in iter_modules(model):
        for port, owned in (("param", module._parameters), ("buffer", module._buffers)):
            for name, tensor in owned.items():
                if tensor is not None:
                    yield tensor, Site(join(path, name), port=port)


class Producers:
    """Who made a tensor: a parameter, an input of the model, a module, an op. Holds none of them.

    Tensors are known by identity, with a weak reference beside it: another tensor may get the identity of one that is
    gone. The last who names a tensor wins, so that what an op returned, and then its module, is the module's; an op in
    place that wrote to it later, through a view or an alias, wins over both. Parameters and buffers keep their names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], str, int]] = {}  # the last: in which order they were named
        self._written: dict[int, list[_Write]] = {}  # by the address of the memory
        self._order = 0
        for tensor, site in iter_state(model):
            if not self._named(tensor):  # tied: the first of its names
                self.note(tensor, str(site))
        self._own = {id(tensor) for tensor, _ in iter_state(model)}

    def note(self, tensor: Tensor, name: str) -> None:
        """``name``, an address, has made ``tensor``."""
        self._order += 1
        self._known[id(tensor)] = weakref.ref(tensor), name, self._order

    def note_op(self, call: OpCall, output: Any) -> None:
        """Note an op as the maker of what it returned, but for what it was given and returns as it is."""
        site, given = Site(call.site.path, call.site.op, call.site.op_index), (call.args, call.kwargs)
        self.note_all(output, site, () if call.writes else given, is_write=call.writes)

    def note_all(self, value: Any, site: Site, given: Any = (), *, is_write: bool = False) -> None:
        """Note ``site`` as the maker of all tensors in ``value``; those inside a structure get their keys.

        Not of those in ``given``: others go on with them, too.
        """
        passed = {id(tensor) for _, tensor in iter_tensors(given) if self._named(tensor)}
        for key, tensor in iter_tensors(value):
            if id(tensor) in passed:
                continue
            port = ":output" if key and site.port == "output" else ""
            self.note(tensor, f"{site}{port}{print_key(key)}")
            if is_write and (address := memory.address_of(tensor)):
                write = _Write(memory.storage_life(tensor), memory.extent_of(tensor), self._known[id(tensor)][1:])
                self._written.setdefault(address, []).append(write)

    def of(self, tensor: Tensor) -> str:
        """The address of who made ``tensor``; empty for one that something else made, such as a constant."""
        name, order = self._named(tensor) or ("", 0)
        writes = self._written.get(memory.address_of(tensor), ()) if self._written else ()
        for write in reversed(writes if id(tensor) not in self._own else ()):
            if write.named[1] <= order:
                break
            if write.life() is not None and memory.overlaps(memory.extent_of(tensor), write.extent):
                return write.named[0]
        return name

    def _named(self, tensor: Tensor) -> tuple[str, int] | None:
        """The last name that was given to this very tensor, and when; None for one that has none."""
        found = self._known.get(id(tensor))
        return found[1:] if found is not None and found[0]() is tensor else None


class _Write(NamedTuple):
    """A write in place: whether its memory still lives, which part of it was written, and by whom and when."""

    life: Callable[[], object]
    extent: memory.Extent
    named: tuple[str, int]


class OpLog:
    """All ops of a run, in the order in which they began.

    For one run of one model: whoever makes it opens a session with ``taps``, runs the model, and reads ``ops`` and
    ``producers``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ops: list[OpNotes] = []
        self.producers = Producers(model)
        self._open: list[OpNotes] = []
        self._model = model

    def taps(self) -> Iterator[OpTap | CallTap]:
        """The taps to open a session with: for the ops of every module, and for who returned what."""
        for found in called_modules(self._model):
            yield OpTap(found, self.enter, self.leave)
            yield CallTap(found, self._entered, self._returned(found.site.path))

    def enter(self, call: OpCall) -> OpNotes:
        """Note that an op begins; called by the engine before it runs. Shapes and makers of its inputs are noted here.

        Afterwards it would be too late: an op in place returns its input, which is its own output from then on.
        """
        tensors = [tensor for _, tensor in iter_tensors((call.args, call.kwargs))]
        notes = OpNotes(
            call.site,
            call.run,
            place_of(call.place),
            call.place.f_code.co_name,
            tuple((shape_text(tensor), self.producers.of(tensor)) for tensor in tensors),
        )
        self.ops.append(notes)
        self._open.append(notes)
        return notes

    def leave(self, call: OpCall, output: Any) -> OpNotes:
        """Note what an op returned; called by the engine after it ran.

        Notes above it that are still open are of ops that raised, or were none: their end is not told.
        """
        while self._open and self._open[-1].site != call.site:
            self._open.pop()  # ended by an exception, or no op after all
        notes = self._open.pop()
        tensors = [tensor for _, tensor in iter_tensors(output)]
        notes.output = shapes_text(output)
        notes.dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        notes.weights = _weights_of(call) if call.site.op in ATTENTIONS else None
        notes.is_complete = True
        self.producers.note_op(call, output)
        return notes

    def done(self) -> list[OpNotes]:
        """The notes of the ops that returned; an op that raised has nothing to show."""
        return [notes for notes in self.ops if notes.is_complete]

    def _entered(self, given: Arguments, run: Any, call: int) -> None:
        """Note the arguments of the outermost call as inputs of the model: ``:input[0]``, ``:input[mask]``."""
        if len(run.frames) == 1:  # what the model itself was given
            for key, tensor in iter_tensors(given):
                if not self.producers.of(tensor):  # a parameter that is passed in keeps its own name
                    self.producers.note(tensor, f":input{print_key(key)}")

    def _returned(self, path: str) -> Any:
        """The tap for when the module at ``path`` returns: what it returns is its output from here on.

        The model's has no name.
        """

        def returned(output: Any, run: Any, call: int) -> None:
            if path:
                self.producers.note_all(output, Site(path))

        return returned


def place_of(frame: FrameType) -> tuple[str, int]:
    """File and line at which ``frame`` is; for a node of an exported graph where the model has that operation."""
    return place_in_model(frame) or (frame.f_code.co_filename, frame.f_lineno)


def place_text(place: tuple[str, int]) -> str:
    """A place in the code as messages show it: ``resnet.py:103``."""
    return f"{Path(place[0]).name}:{place[1]}"


def code_at(place: tuple[str, int]) -> str:
    """The line of source at a place, without its indentation; empty where the file cannot be read."""
    return linecache.getline(*place).strip()


def _weights_of(call: OpCall) -> tuple[str, str, str]:
    """Shape, dtype and a note of the weights of an op of attention; only the note where they cannot be told."""
    weights = Weights(call.site.op or "", call.func, call.args, call.kwargs)
    if weights.untold:
        return "", "", weights.untold
    shape = "x".join(map(str, weights.shape))
    return shape, str(weights.dtype).removeprefix("torch."), "computed when they are asked for"


def rows_of(log: OpLog) -> list[OpRow]:
    """One row for each op site that returned, in the order of the first calls, with the shapes of the first call.

    An op of attention has a second row, for its weights.
    """
    counts: dict[Site, int] = {}
    first: dict[Site, OpNotes] = {}
    for notes in log.done():
        site = Site(notes.site.path, notes.site.op, notes.site.op_index)
        counts[site] = counts.get(site, 0) + 1
        first.setdefault(site, notes)
    rows = []
    for site, notes in first.items():
        told = [(site, notes.output, notes.dtype, FUSED.get(site.op or "", ""))]
        if notes.weights is not None:
            told.append((replace(site, port=WEIGHTS), *notes.weights))
        rows += [
            OpRow(
                str(one),
                site.path,
                site.op or "",
                place_text(notes.place),
                code_at(notes.place),
                notes.inputs,
                output,
                dtype,
                counts[site],
                note,
            )
            for one, output, dtype, note in told
        ]
    return rows


def list_ops(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[OpRow], list[str]]:
    """Run the model once, leave it as it was, and tell its ops; also why they are not those of a bare run.

    The second part are the notes of the session. Errors of the model pass through.
    """
    log = OpLog(model)
    session = Session(model, list(log.taps()))
    with untouched(model, [tensor for _, tensor in iter_tensors((args, kwargs))]), session:
        model(*args, **kwargs)
    return rows_of(log), session.notes
