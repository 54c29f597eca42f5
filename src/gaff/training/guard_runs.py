"""The cheap look of a guard: what each run was given, and one number for every output of a module in it.

Such a number is finite if the output is, but for overflow. They stay on the device, with the batches that they belong
to, until ``are_finite`` reads them all at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from weakref import WeakMethod

import torch
from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.compat import autograd, modes
from gaff.compat.compiler import is_reduced
from gaff.engine.gradients.tensor_hooks import keep_gradient
from gaff.engine.streams import Stream
from gaff.inspection.nonfinite.ranges import numbers_of, probe
from gaff.inspection.nonfinite.rerun import Batch

_MOST_SUMS = 4096  # of runs without a step
KEPT = 16  # runs of one step whose inputs are kept, for gradients that come from several micro-batches


class KeptRuns:
    """The runs since the last step, 16 at most: their inputs, by reference, and the gradients of their outputs.

    ``current``: the run in progress. ``latest``: the tensor that was looked at last in it, and ``version`` how often it
    had been written to (-1 where torch does not count). ``is_traced``: whether the
    numbers are made inside compiled code. ``is_examining``: whether some guard in this process runs a batch again,
    which no other guard is to take for a run of its own.
    """

    is_examining: ClassVar[bool] = False

    def __init__(self, full: Callable[[], None], trained: int) -> None:
        """``full`` is called where more numbers have come than are to be kept; it must read and ``forget`` them.

        A method, held weakly: the model is let go of with the guard, and waits for no garbage collector. ``trained``:
        how many parameters of the model are.
        """
        self.current: Batch | None = None
        self.latest: Tensor | None = None
        self.version = -1
        self.is_traced = False
        self.batches: deque[Batch] = deque(maxlen=KEPT)
        self._used: list[Batch] = []  # for a step, while others of the same runs may follow
        self._trained = trained
        self._full = WeakMethod(full)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A run begins: keep its inputs and state, so that it can be run again."""
        self.current = Batch.of(args, kwargs)
        if self.current.has_grad:
            self._used.clear()
        self.batches.append(self.current)

    def end(self, batch: Batch, output: Any) -> None:
        """The run of ``batch`` has ended: listen for the gradients of what it returned, if it has any."""
        self.current = self.latest = None
        for at, (_, tensor) in enumerate(iter_tensors(output) if batch.has_grad else ()):
            if tensor.requires_grad and not tensor.is_leaf:
                batch.handles.append(keep_gradient(tensor, partial(_note, batch.gradients, at)))

    def unseen(self) -> Batch | None:
        """The batch of a run of which only compiled code tells, no call of the model having been seen; else None.

        It has no inputs, so such a run can be told of, but not run again.
        """
        if self.is_examining or not self.is_traced:
            return None
        if self.batches and len(self.batches[-1].sums) > _MOST_SUMS:
            full = self._full()
            if full is not None:
                full()
        if not self.batches or not self.batches[-1].is_unseen:
            self.batches.append(replace(Batch.of((), {}), is_unseen=True))
        return self.batches[-1]

    def sums(self) -> list[Tensor]:
        """All numbers that are kept, in the order in which they came. Nothing is waited for."""
        return [one for batch in self.batches for _, one in batch.sums]

    def hits(self) -> dict[Probe, Tensor]:
        """The probes that saw something that is not finite, each with the last such number. Waits for each of them."""
        return {one: value for batch in self.batches for one, value in batch.sums if not math.isfinite(value.item())}

    def to_run_again(self) -> list[Batch]:
        """The batches of which what is not finite may have come: where there was no run since the last step, its."""
        return list(self.batches) or list(self._used)

    def forget(self, *, is_last_alone: bool = False, stepped: int | None = None) -> None:
        """Let the kept batches go, or that of the last run, with the hooks that bring their gradients.

        ``stepped``: how many parameters an optimizer has that steps. Where these are not all that are trained, another
        may follow with gradients of theirs: they stay to be run again, until a run with gradients begins.
        """
        gone = [self.batches[-1]] if is_last_alone else list(self.batches)
        for batch in gone:
            for handle in batch.handles:
                handle.remove()
        if is_last_alone:
            self.batches.pop()
        else:
            self._used = (gone or self._used) if stepped is not None and stepped < self._trained else []
            self.batches.clear()
        self.current = self.latest = None


class Probe(Stream):
    """Adds one number for each output of one module to the run in progress: finite if the output is, but for overflow.

    A stream of the engine, called inside hooks; it reads nothing. ``is_exact``: its sum has overflowed, for which the
    largest magnitude is asked from then on; ``has_meant``: infinite values there are meant, only NaN is looked for.
    ``in_graph``: what compiled code computes in its place, the largest magnitude, since only one
    number is to leave the compiled graph.
    """

    is_exact = has_meant = False
    in_graph = staticmethod(lambda tensor: _largest(tensor))

    def __init__(self, runs: KeptRuns, path: str) -> None:
        self.path = path
        self._runs = runs

    def add(self, value: Any, run: Any, call: int) -> None:
        """Take in what the module has returned: a tensor, or tensors nested in lists, tuples and dicts.

        Outside of a run of the model nothing is added, unless compiled code tells of one (``KeptRuns.unseen``), and
        nothing in what ``torch.cond`` and the like compile for themselves: it would become part of that.
        """
        if torch.compiler.is_compiling():
            return
        batch = self._runs.current or self._runs.unseen()
        if batch is None:
            return
        if type(value) is Tensor:
            self._add(value, batch)
        else:
            for _, tensor in iter_tensors(value):
                self._add(tensor, batch)

    def _add(self, tensor: Tensor, batch: Batch) -> None:
        """Add one tensor's number to the batch; compiled code may have computed that number already.

        What the last module did return just now is passed over, unless somebody has written to it: its own output was
        looked at a moment ago. Grad mode is set by hand, without a context manager's cost for each module of each step.
        """
        if is_reduced(tensor):
            batch.sums.append((self, _is_nan(tensor) if self.has_meant else tensor.clone()))
            return
        runs, version = self._runs, -1 if tensor.is_inference() else tensor._version
        is_known = tensor is runs.latest and version == runs.version != -1
        if not is_known and (value := numbers_of(tensor)) is not None:
            if not runs.is_traced:  # compiled code uses a tensor again for other values
                runs.latest, runs.version = tensor, version  # a container often returns what its last module did
            had_grad = autograd.is_grad_enabled()
            autograd.set_grad_enabled(False)
            try:
                with modes.outside_modes():  # a selective checkpoint counts operations
                    batch.sums.append((self, self._number(tensor, value)))
            finally:
                autograd.set_grad_enabled(had_grad)

    def _number(self, tensor: Tensor, value: Tensor) -> Tensor:
        """What is kept of a tensor, of which ``value`` are the numbers."""
        if self.has_meant:
            return _is_nan(tensor)
        return _largest(value) if self.is_exact else probe(value)


def are_finite(sums: Iterable[Tensor]) -> bool:
    """Whether all these numbers are finite. Waits for each device once, by adding up what lies on it."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in sums:
        by_device.setdefault(one.device, []).append(one.to(torch.float32) if one.dtype != torch.float32 else one)
    return all(math.isfinite(torch.stack(row).sum().item()) for row in by_device.values())


def _note(gradients: list[tuple[int, Tensor]], at: int, gradient: Tensor) -> None:
    gradients.append((at, gradient))


def _is_nan(tensor: Tensor) -> Tensor:
    """A number that is 0 where no element is NaN, else -inf: not finite, as the sums of other modules are on a hit."""
    return (~tensor.detach().isnan().any()).float().log()


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude of a plain tensor, NaN where there is one."""
    value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return value.abs().amax() if value.numel() else torch.zeros((), device=tensor.device)
