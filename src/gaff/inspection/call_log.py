"""What a trace notes of every call: shapes, time, statistics, gradients. Keeps no tensor.

A ``CallLog`` hears of calls as they begin and end, gradients come into the notes of their call through ``GradientLog``
as backward runs, and those of parameters into a ``ParameterLog`` each. The functions below turn tensors into numbers
and texts.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import Site, print_key
from gaff.address.nested import Arguments, iter_tensors, shape_text, size_bytes
from gaff.compat import distributed, elements
from gaff.compat.memory import version_of
from gaff.compat.modes import outside_modes
from gaff.engine.flops import FlopCount
from gaff.engine.gradients.pending import NOT_REACHED
from gaff.engine.ops.names import COMPOSITES
from gaff.engine.streams import Stream
from gaff.inspection.pictures import Album, are_probabilities
from gaff.inspection.sketches import TensorMarks, marks_of
from gaff.record.trace_rows import Fingerprint, Gradient, Statistics

_MOST_NODES = 500  # of the autograd graph between two calls


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call has returned, and at what cost; as it is without arguments, that of a call that did not.

    ``shapes`` are those of all tensors, ``dtype`` and ``statistics`` are of the first, ``memory_bytes`` and ``marks``
    (digest and sketch) of all of them. Statistics and marks are 0-dim and short tensors on the device, read when rows
    are made.
    """

    shapes: str = "did not return"
    dtype: str = ""
    time_s: float = 0.0
    flops: int = 0
    memory_bytes: int = 0
    statistics: tuple[Tensor, ...] | None = None
    marks: TensorMarks | None = None


NOT_YET = Returned()


@dataclass(slots=True)
class CallNotes:
    """One call while it is traced, and after it.

    ``call`` counts entries, as call numbers of inputs do; those of outputs count returns, and differ where a module
    calls itself. Made by ``CallLog.enter``; ``started`` and ``flops`` are what the clock and the counter showed
    when it began, and ``aside_s`` what looking had taken until then. ``makers`` are the calls whose values it is
    given, and whether that is known: else they came before, and who made it is not known. ``returned`` is ``NOT_YET``
    until ``CallLog.leave``, and stays so where an exception ended the call.
    """

    site: Site  # of the module or op, without call
    cls: str
    depth: int
    call: int
    run: Any
    flops: int
    input: str
    started: float = 0.0
    aside_s: float = 0.0
    makers: list[tuple[CallNotes, bool]] = field(default_factory=list)  # those that are known first
    returned: Returned = NOT_YET
    gradients: dict[str, Gradient] = field(default_factory=dict)


class CallLog:
    """All calls of a traced run, in the order of entry. ``counter`` counts their operations, None: nobody does.

    The tracer makes one for a run. Modules and ops are both calls here, and nest: what is open is a stack, and the
    depth of a call is its height. Beside the calls it knows who made each tensor that passed, by weak references and
    version counters, for a tensor that was written to in place is another value, which another has made. Autograd
    nodes are held, and with them what they saved, as long as the log is: through them the calls behind a tensor are
    found.
    """

    def __init__(self, counter: FlopCount | None, device: torch.device, album: Album | None = None) -> None:
        self.calls: list[CallNotes] = []
        self.album = album
        self.given: TensorMarks | None = None  # of what the model was given
        self.class_name: Callable[[int], str] = str  # of a class of the model's output
        self.own: set[int] = set()  # identities of parameters and buffers, which no call has made
        # who made a tensor, by its identity, and its version then; by its autograd node; what came before others
        self._made: dict[int, tuple[weakref.ref[Tensor], CallNotes, int]] = {}
        self._nodes: dict[Any, CallNotes] = {}
        self._met: dict[int, tuple[weakref.ref[Tensor], CallNotes | None]] = {}
        self._by_number: dict[tuple[Site, int, bool], list[CallNotes]] = defaultdict(list)  # True: of what was returned
        self._latest: CallNotes | None = None  # the last call that ended
        self._open: list[CallNotes] = []
        self._aside_s = 0.0  # what looking has taken so far, which is no part of the calls that are open
        self._since: float | None = None  # the end of the latest look, if nothing of the model has run since
        self._counter = counter
        self._device = device

    def let_go(self) -> None:
        """Hold no autograd node any more.

        Hooks on these lead back here by ways that Python cannot follow: the graph and the model would stay for good.
        """
        self._nodes.clear()

    def forget_gradients(self) -> None:
        """Begin to note gradients: a pass that matters comes now, and what came before was of others."""
        for call in self.calls:
            came = [port for port, one in call.gradients.items() if one.norm is not None or one.shape]
            call.gradients.update({port: Gradient(reason=NOT_REACHED) for port in came})
        if self.album is not None:
            self.album.forget_gradients()

    def enter(self, site: Site, cls: str, given: Arguments, run: Any, call: int) -> CallNotes:
        """A module, or an op (``cls``: its place in the code), is called with these arguments.

        On a GPU it waits for the device first, so that the time of the call is its own. The first call of all tells
        what the model was given, of which digest and sketch are kept.
        """
        taken = self._taken_s
        with self.aside() as entered:
            self._forget_raised(site, run)
            shapes = shapes_text((*given.args, given.kwargs) if given.kwargs else given.args)
            notes = CallNotes(site, cls, len(self._open), call, run, self._flops, shapes, entered, taken)
            self._find_makers(notes, given)
            if not self.calls:
                self.given = marks_of([tensor for _, tensor in iter_tensors(given)])
            if self.album is not None and not self._open and not site.path and site.op is None:
                for key, tensor in iter_tensors(given):
                    if tensor.is_floating_point():
                        self.album.add_input(f":input{print_key(key)}", tensor)
            self.calls.append(notes)
            self._by_number[site, call, False].append(notes)
            self._open.append(notes)
        return notes

    @contextmanager
    def aside(self) -> Iterator[float]:
        """What is done inside is no part of the calls that are open: their times leave it out, and nobody counts it.

        Gives the time at which it began. On a GPU it waits for the device before and after.
        """
        self._settle()
        began = time.perf_counter()
        try:
            with outside_modes():
                yield began
        finally:
            self._settle()
            self._since = time.perf_counter()
            self._aside_s += self._since - began

    def go_on(self) -> None:
        """All hooks of the latest event have run: what came after the log's own is left out of the times, too."""
        if self._since is not None:
            self._settle()
            self._aside_s += time.perf_counter() - self._since
            self._since = None

    @property
    def _taken_s(self) -> float:
        """What all looking has taken so far, the counting of operations too."""
        return self._aside_s + (self._counter.own_s if self._counter is not None else 0.0)

    @property
    def _flops(self) -> int:
        return self._counter.total if self._counter is not None else 0

    def _forget_raised(self, site: Site, run: Any) -> None:
        """Close calls that an exception has left, and somebody has caught: they are no longer in progress.

        Modules are in progress by the frames of the run; an op that is the innermost call, in the module whose op
        begins now, has ended without returning, unless it is one that is opened to see the ops inside.
        """
        alive = {id(frame.notes.get(self)) for frame in run.frames}
        dead = (at for at, notes in enumerate(self._open) if notes.site.op is None and id(notes) not in alive)
        del self._open[next(dead, len(self._open)) :]
        inner = self._open[-1].site if self._open else None
        if site.op is None or inner is None or inner.op is None or inner.path != site.path:
            return
        if inner.op not in COMPOSITES:
            self._open.pop()

    def notes_of(self, site: Site, run: Any, call: int) -> CallNotes:
        """The notes of a call that was entered and is open."""
        return next(notes for notes in reversed(self._open) if (notes.site, notes.call, notes.run) == (site, call, run))

    def find(self, site: Site, run: Any, call: int, *, is_output: bool) -> CallNotes | None:
        """The notes of a call of this number among those of its site, as calls or as what they returned are counted."""
        return next((notes for notes in self._by_number.get((site, call, is_output), ()) if notes.run is run), None)

    def leave(self, notes: CallNotes, output: Any, call: int) -> None:
        """That call has returned ``output``, as number ``call`` of its site: note time, shape, statistics and marks.

        The time ends before any of these are computed, and what was noted of the calls inside is taken off. Calls above
        it on the stack were left by an exception that somebody has caught: they stay incomplete. On a GPU it waits for
        the device.
        """
        taken_s = self._taken_s - notes.aside_s
        with self.aside() as ended:
            while self._open.pop() is not notes:
                pass  # left by an exception
            self._by_number[notes.site, call, True].append(notes)
            self._left(notes, output, max(0.0, ended - notes.started - taken_s))

    def _left(self, notes: CallNotes, output: Any, time_s: float) -> None:
        """That call has returned ``output``, after so long."""
        tensors = [tensor for _, tensor in iter_tensors(output)]
        notes.returned = Returned(
            shapes_text(output),
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            time_s,
            self._flops - notes.flops,
            sum(size_bytes(tensor) for tensor in tensors),
            measure(tensors[0]) if tensors else None,
            marks_of(tensors),
        )
        if self.calls[-1] is notes:  # it holds no other
            self._latest = notes
        for tensor in tensors:
            self._note_maker(notes, tensor)
        if self.album is not None and notes.site.op is None:
            self._draw(notes, output, tensors)

    def _find_makers(self, notes: CallNotes, given: Any) -> None:
        """Note whose values a call is given, as edges of the data flow.

        Known makers are the calls that returned the very tensors, not written to since. Where nobody is known to have,
        since ops in between made them, it is the calls behind them. Parameters and buffers have no maker.
        """
        found: dict[int, tuple[CallNotes, bool]] = {}
        for _, tensor in iter_tensors(given):
            if id(tensor) in self.own:
                continue
            known = self._made.get(id(tensor))
            if known is not None and known[0]() is tensor and known[2] == version_of(tensor):
                found[id(known[1])] = known[1], True
                continue
            for maker in self._behind(tensor):
                found.setdefault(id(maker), (maker, False))
        notes.makers = sorted(found.values(), key=lambda pair: not pair[1])

    def _note_maker(self, notes: CallNotes, tensor: Tensor) -> None:
        """Note ``notes`` as the maker of a tensor that it returned, unless a call inside it was.

        The innermost call that returned a tensor is its maker: an edge then begins where the value was made, and not
        at a container of it. Where a module that holds others returns what none of these has made, it follows those
        behind it.
        """
        if self.calls[-1] is not notes:  # it holds others
            known = self._made.get(id(tensor))
            if known is not None and known[0]() is tensor and known[2] == version_of(tensor):
                return
            behind = [(one, False) for one in self._behind(tensor) if one is not notes]
            notes.makers = [pair for pair in notes.makers if pair[1]] + behind
        self._made[id(tensor)] = weakref.ref(tensor), notes, version_of(tensor)
        if tensor.grad_fn is not None:
            self._nodes[tensor.grad_fn] = notes

    def _behind(self, tensor: Tensor) -> list[CallNotes]:
        """The calls whose outputs ops have made a tensor of, as the autograd graph has it; without one the call before.

        The search goes back through at most 500 nodes, and past none that a call's output has. A tensor that came from
        outside, or was there before the first call ended, has none. What was said of a tensor without an autograd node
        is remembered: asked again later, the call before would be another one.
        """
        if tensor.grad_fn is None:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return []  # numbers of tokens and places, masks: what came before has seldom made them
            known = self._met.get(id(tensor))
            if known is None or known[0]() is not tensor:
                known = self._met[id(tensor)] = weakref.ref(tensor), self._latest
            return [] if known[1] is None or tensor.requires_grad else [known[1]]
        found: dict[int, CallNotes] = {}
        waiting, seen = [tensor.grad_fn], {tensor.grad_fn}
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            maker = self._nodes.get(node)
            if maker is not None:
                found.setdefault(id(maker), maker)
                continue
            onward = {one for one, _ in node.next_functions if one is not None} - seen
            seen |= onward
            waiting += onward
        return list(found.values())

    def _draw(self, notes: CallNotes, output: Any, tensors: list[Tensor]) -> None:
        """Give the album a module's output: the first tensor, and the second where it holds attention.

        Feature maps of the model and of its own children are kept as well, for their class activation maps.
        """
        assert self.album is not None
        name = str(replace(notes.site, call=notes.call))
        for at, tensor in enumerate(tensors[:2]):
            if tensor.is_floating_point() and (at == 0 or are_probabilities(tensor)):
                self.album.add(name, tensor, is_attention=are_probabilities(tensor))
        if tensors and notes.depth <= 1 and tensors[0].requires_grad:
            self.album.keep_maps(name, tensors[0])

    def _settle(self) -> None:
        """Wait for a GPU: the times of work that is only queued would mean nothing."""
        if self._device.type == "cuda":  # times of queued work would mean nothing
            torch.cuda.synchronize(self._device)


class GradientLog(Stream):
    """The gradients at one port of one module or op: written into the notes of the call they belong to.

    A ``Stream`` of the engine, called as backward runs. ``port``: ``grad_output`` or ``grad_input``. Of several tensors
    inside the value the first that has a gradient is shown.
    """

    def __init__(self, log: CallLog, site: Site, port: str) -> None:
        self._log = log
        self._site = site
        self._port = port

    def add(self, value: Any, run: Any, call: int) -> None:
        """A gradient came: note its shape, norm and marks, and draw it. Waits for the device."""
        noted = self._note(run, call, gradient_of(value))
        album = self._log.album
        if album is not None and album.takes_gradients and self._port == "grad_output" and self._site.op is None:
            call = noted.call if noted is not None else call  # pictures are named by entries, as rows are
            if not self._site.path:
                album.note_class(value, self._log.class_name)
            album.add_class_activation(str(replace(self._site, call=call)), value)
            name = str(Site(self._site.path, call=call, port="grad_output"))
            album.add(name, value, is_gradient=True)

    def absent(self, run: Any, call: int, reason: str) -> None:
        """No gradient comes to this call, or it cannot be told exactly (``refuse``): the reason is in its place."""
        self._note(run, call, Gradient(reason=reason))

    refuse = absent

    def spawn(self, site: Site, known: Any) -> GradientLog:
        """The stream of one op, where this one's site names all ops of a module; it writes into the same log."""
        return GradientLog(self._log, Site(site.path, site.op, site.op_index), self._port)

    def _note(self, run: Any, call: int, gradient: Gradient) -> CallNotes | None:
        """Write a gradient into the notes of its call; where one with a norm is there already, that one stays."""
        notes = self._log.find(self._site, run, call, is_output=self._port == "grad_output")
        known = notes.gradients.get(self._port) if notes is not None else None
        # of several tensors the first that has a norm is shown
        if notes is not None and (known is None or known.norm is None):
            notes.gradients[self._port] = gradient
        return notes


class ParameterLog(Stream):
    """The gradient of one parameter: that of the last call of ``add``, or why there is none.

    A ``Stream`` of the engine, one for each parameter. ``grad`` stays None where backward did not come by at all.
    """

    def __init__(self) -> None:
        self.grad: Gradient | None = None

    def add(self, value: Any, run: Any, call: int) -> None:
        """A gradient came: note its shape, norm and marks. Waits for the device."""
        self.grad = gradient_of(value)

    def absent(self, run: Any, call: int, reason: str) -> None:
        """No gradient comes, or it cannot be told exactly (``refuse``): note the reason."""
        self.grad = Gradient(reason=reason)

    refuse = absent


def measure(tensor: Tensor) -> tuple[Tensor, ...] | None:
    """Mean, population std, min, max and non-finite count as 0-dim tensors; None where they mean nothing.

    None of complex, empty and sparse tensors, and of those that hold none. Half precision is summed in float32,
    integers in float64; of a tensor that is spread over processes it is this one's part. Waits for the device to see
    whether all is finite and nothing overflowed on the way: only if not, elements are counted, and scaled by their
    largest.
    """
    if tensor.is_complex() or tensor.layout != torch.strided:
        return None
    with torch.no_grad():
        x = elements.elements(tensor)
        if x is None or not x.numel():
            return None
        if not x.is_floating_point():
            x = x.double()
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        std, mean = torch.std_mean(wide, correction=0)
        low, high = torch.aminmax(wide)
        count = torch.zeros((), device=x.device)
        is_odd = ~torch.isfinite(mean + low + high + std) | ((std == 0) & (low < high))
        if bool(is_odd):
            count = (~torch.isfinite(wide)).sum()
            if count:
                mean = wide.double().mean()  # of infinite numbers the other way makes NaN
            else:
                size = torch.maximum(low.abs(), high.abs()).double()
                std, mean = (one * size for one in torch.std_mean(wide.double() / size, correction=0))
        return mean, std, low, high, count


def statistics_of(measured: tuple[Tensor, ...] | None) -> Statistics | None:
    """What ``measure`` returned, as numbers. Synchronises with the device."""
    if measured is None:
        return None
    mean, std, low, high, count = (value.item() for value in measured)
    return Statistics(mean, std, low, high, int(count))


def gradient_of(tensor: Tensor) -> Gradient:
    """Shape, norm (added up in float64) and share of zeros of a gradient. Synchronises with the device.

    Of a tensor that is spread over processes those of this one's part. What a sparse gradient leaves out counts as
    zero; a complex number is zero where both of its parts are.
    """
    tensor = distributed.local_of(tensor)
    if not elements.is_readable(tensor):
        return Gradient(shape_text(tensor), reason=f"a {'meta' if tensor.is_meta else 'fake'} tensor has no values")
    with torch.no_grad():
        x = elements.elements(tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor)
        if x is None:
            return Gradient(shape_text(tensor), reason=f"a {type(tensor).__name__} has no values")
        norm = torch.linalg.vector_norm(x, dtype=torch.float64).item()
        if x.dtype == torch.float64 and x.numel() and norm in (0.0, math.inf):  # squares that float64 cannot hold
            largest = x.abs().max()
            norm = (largest * torch.linalg.vector_norm(x / largest)).item() if 0 < largest < math.inf else norm
        is_nonzero = (x.reshape(-1, 2) != 0).any(-1) if tensor.is_complex() else x != 0  # of pairs, where either is
        count = is_nonzero.numel() if tensor.layout == torch.strided else tensor.numel()  # of a sparse one all
        zeros = 1 - is_nonzero.sum().item() / max(count, 1)
        fingerprint = fingerprint_of(marks_of([tensor]))
    return Gradient(shape_text(tensor), norm, zeros, "", fingerprint)


def fingerprint_of(marks: TensorMarks | None) -> Fingerprint:
    """What ``marks_of`` returned, as plain values. Synchronises with the device."""
    if marks is None:
        return Fingerprint()
    odd = int(marks.odd.item())
    whole = f"{marks.whole.item():x}" if marks.whole is not None else ""
    return Fingerprint(f"{marks.digest.item():x}", tuple(marks.sketch.tolist()), f"{odd:x}" if odd else "", whole,
                       ", ".join(marks.types))  # fmt: skip


def shapes_text(value: Any) -> str:
    """The shapes in a value: ``1x3x8x8``, or ``2x5x8, 2x8`` for several tensors; other values by their type.

    Of more than four tensors the first four are told, with the number of all.
    """
    tensors = [shape_text(tensor) for _, tensor in iter_tensors(value)]
    if not tensors:
        is_empty = isinstance(value, (tuple, list, dict)) and not value
        return "" if is_empty else "None" if value is None else type(value).__name__
    return ", ".join(tensors[:4]) + (f", ... ({len(tensors)})" if len(tensors) > 4 else "")
