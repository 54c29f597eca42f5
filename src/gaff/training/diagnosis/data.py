"""What an experiment changes about data: the batch, the rows of inputs against labels, the inputs themselves."""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gaff.address.grammar import Key
from gaff.address.nested import Arguments, iter_tensors, map_tensors, put
from gaff.address.resolve import unwrap
from gaff.compat.elements import is_plain
from gaff.compat.memory import memory_of
from gaff.engine.process.functions import loss_calls
from gaff.training.diagnosis.changes import Change, Given

# Names of arguments that are the truth, or say which part of the input counts; all others are input.
_TRUTH = re.compile(r"(^|_)(labels?|targets?|y|ground_truth|gt|answers?|(start|end)_positions)$")
_MADE = 64  # tensors that were returned last
_GOES_WITH = re.compile(r"mask|lengths?$|position_ids|token_type")


class OneBatch(Change):
    """The first batch again and again.

    Of every DataLoader, while grad mode is on; the loader itself goes on, so that there are as many batches as before.
    One that takes the place of another, as where a loader is made anew for each epoch, has the batch of that. In a
    script without one: what each call of a model in a step was given in the first one, and the targets that torch's
    loss functions were given there, as long as their shapes stay. A step ends with that of the first optimizer.
    """

    why_not = "there is no DataLoader, and no loss function of torch's was given targets of one shape"

    def __init__(self) -> None:
        super().__init__()
        self._batches: list[tuple[ref[Any], Any, Any]] = []  # loader, what it is like, its first batch
        self._inputs: WeakKeyDictionary[nn.Module, dict[int, Given]] = WeakKeyDictionary()  # by the number of the call
        self._targets: dict[tuple[str, int], Tensor] = {}
        self._count: Counter[Any] = Counter()  # calls of each loss function and model in this step
        self._leader: ref[Any] | None = None  # the optimizer that stepped first

    def install(self) -> None:
        """Stand before the iterators of DataLoaders, and before torch's loss functions."""
        iterate = DataLoader.__iter__

        @wraps(iterate)
        def iterated(loader: Any) -> Any:
            return _Repeated(self, loader, iterate(loader))

        DataLoader.__iter__ = iterated  # type: ignore[method-assign]
        loss_calls(self._target).switch(is_on=True)

    def batch(self, loader: Any, batch: Any) -> Any:
        """The batch to be used instead of ``batch``: a copy of the loader's first one; outside of training itself."""
        if not torch.is_grad_enabled():
            return batch
        like = type(loader.dataset), loader.batch_size, _shapes(((batch,), {}))
        known = [one for one in self._batches if one[0]() is loader]
        known = known or [one for one in self._batches if one[0]() is None and one[1] == like]
        if not known:
            self._batches.append((ref(loader), like, copy.deepcopy(batch)))
            return batch
        self._batches[self._batches.index(known[0])] = ref(loader), *known[0][1:]
        self.acted += 1
        return copy.deepcopy(known[0][2])

    def around(self, module: nn.Module, given: Given, stack: ExitStack) -> Given:
        """Without a DataLoader: what the model was given in this call of the first step."""
        if self._batches or not any(_is_data(one) for _, one in iter_tensors(given)):
            return given
        number = self._count[id(module)]
        self._count[id(module)] += 1
        calls = self._inputs.setdefault(module, {})
        first = calls.get(number)
        if first is None:
            calls[number] = map_tensors(given, _copied, opaque=lambda one: one)
            return given
        return map_tensors(first, _copied, opaque=lambda one: one) if _shapes(first) == _shapes(given) else given

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count calls anew in each step."""
        if self._leader is None or self._leader() is None:
            self._leader = ref(optimizer)
        if self._leader() is optimizer:
            self._count.clear()

    def _target(self, name: str, output: Any, target: Tensor, known: dict[str, Any]) -> Tensor:
        """The target that this call of the step was given in the first one."""
        if self._batches or not torch.is_grad_enabled() or target.requires_grad:
            return target
        number = self._count[name]
        self._count[name] += 1
        first = self._targets.setdefault((name, number), target.clone())
        if first.shape != target.shape or first.dtype != target.dtype:
            return target
        self.acted += 1
        return first.clone()


class _Repeated:
    """The iterator of a DataLoader whose batches are all its first; in everything else it is that iterator."""

    def __init__(self, change: OneBatch, loader: Any, iterator: Any) -> None:
        self._change = change
        self._loader = loader
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._change.batch(self._loader, next(self._iterator))

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class OfInputs(Change):
    """A change of what models are given, and not of what one of them has made, as a frozen body for its head."""

    def __init__(self) -> None:
        super().__init__()
        self._made: deque[ref[Tensor]] = deque(maxlen=_MADE)

    def returned(self, output: Any) -> None:
        """Note what was made, weakly."""
        self._made.extend(ref(tensor) for _, tensor in iter_tensors(output))

    def inputs_of(self, module: nn.Module, given: Given) -> list[tuple[Key, str, Tensor]]:
        """As the function of this name, without what another model has returned, or a view of that."""
        made = {memory_of(one) for known in self._made if (one := known()) is not None and is_plain(one)}
        return [told for told in inputs_of(module, given) if not is_plain(told[2]) or memory_of(told[2]) not in made]


class Scramble(OfInputs):
    """Rows of the model's first input tensor, and of the masks that go with it, are permuted; labels stay.

    No row stays in its place. Permutations come from a generator of gaff's own, so that the script's random numbers are
    those that it would have.
    """

    why_not = "no batch has two rows or more"

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def around(self, module: nn.Module, given: Given, stack: ExitStack) -> Given:
        """Permute the first input and what goes with it, along the first dimension."""
        found = self.inputs_of(module, given)
        first = next((one for _, name, one in found if not _GOES_WITH.search(name) and one.dim()), None)
        if first is None or len(first) < 2:
            return given
        circle = torch.randperm(len(first), generator=self._generator, device="cpu")
        order = torch.empty_like(circle)
        order[circle] = circle.roll(1)
        self.acted += 1
        value = Arguments(*given)
        for key, name, tensor in found:
            goes_with = bool(_GOES_WITH.search(name)) and tensor.dim() and len(tensor) == len(first)
            if tensor is first or goes_with:
                value = put(value, key, tensor[order.to(tensor.device)])
        return value.args, value.kwargs


class Blind(OfInputs):
    """Zeros in place of every input of the model; labels and masks stay."""

    why_not = "the model is given no tensor"

    def around(self, module: nn.Module, given: Given, stack: ExitStack) -> Given:
        """Replace all tensors that are input."""
        value = Arguments(*given)
        for key, name, tensor in self.inputs_of(module, given):
            if not _GOES_WITH.search(name):
                value = put(value, key, torch.zeros_like(tensor))
                self.acted += 1
        return value.args, value.kwargs


def inputs_of(module: nn.Module, given: Given) -> list[tuple[Key, str, Tensor]]:
    """The tensors of a call that are data and no labels: key, name, tensor.

    What requires grad comes from another module. The name is that of the dict's entry or the argument, in lower case;
    for positions it is read from the signature of ``forward``.
    """
    try:
        names = list(inspect.signature(unwrap(module).forward).parameters)
    except (TypeError, ValueError):  # nothing in Python, nothing to read
        names = []
    found = []
    for key, tensor in iter_tensors(Arguments(*given)):
        words = [part for part in key if isinstance(part, str)]
        at = key[0]
        named = names[at] if isinstance(at, int) and at < len(names) else ""
        name = (words[-1] if words else named).lower()
        if _is_data(tensor) and not _TRUTH.search(name):
            found.append((key, name, tensor))
    return found


def _is_data(tensor: Tensor) -> bool:
    return not tensor.requires_grad


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _shapes(given: Given) -> list[Any]:
    return [(key, one.shape, one.dtype, one.requires_grad) for key, one in iter_tensors(given)]
