"""Runs something on a model and leaves the model as it was: buffers, gradients, random state, mode.

Of weights those are restored that torch's own modules write to in their forward (``nn.Embedding(max_norm=)``), and
those with a hook on their gradient, which may update them. A copy of all of them would double the memory of a model:
where its own code writes to others, that is told.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gaff.compat.leaves import hooked, put_gradient, write_back
from gaff.compat.memory import version_of
from gaff.engine.process.calls import unseen
from gaff.inspection.sketches import digests_of_some

WRITTEN = "this run itself changed parameters: {}; they are not restored"


@contextmanager
def untouched(model: nn.Module, inputs: Iterable[Tensor] = (), notes: list[str] | None = None) -> Iterator[None]:
    """Restores buffers, ``.grad`` of parameters and ``inputs``, training flags and random states at the end.

    So are weights that a ``max_norm`` shortens, and parameters with tensor hooks. Other parameters that were written to
    are told by a note in ``notes``, or without these by a warning.

    They are put back however the block is left. Every buffer is copied once. ``.grad`` is None inside, so that
    backward adds to nothing; afterwards the tensors from before are back, the same objects. Random states: torch on
    the CPU and on all GPUs where CUDA is initialised, Python's, NumPy's where it is loaded, and generators of all three
    that modules keep as attributes, by themselves or in a list or dict.
    """
    modules = list(model.modules())
    buffers = [_Buffers(module) for module in modules]
    embeddings = [one for one in modules if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    shortened = {one.weight: one.weight.detach().clone() for one in embeddings if one.max_norm is not None}
    shortened |= {one: one.detach().clone() for one in hooked(model.parameters())}
    weights = _Weights(model, shortened)
    modes = [(module, module.training) for module in modules if hasattr(module, "training")]  # frozen TorchScript: none
    leaves = [tensor for tensor in (*model.parameters(), *inputs) if tensor.is_leaf and tensor.requires_grad]
    gradients = [tensor.grad for tensor in leaves]
    known = [_random_state(source) for source in (random, *_kept_by(modules))]
    random_states = [put_back for put_back in known if put_back is not None]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    for tensor in leaves:
        tensor.grad = None
    try:
        with unseen(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for put_back in random_states:
            put_back()
        for tensor, grad in zip(leaves, gradients, strict=True):
            put_gradient(tensor, grad)
        for module, training in modes:
            module.training = training
        lost = [name for saved in buffers for name in saved.restore()]
        for weight, before in shortened.items():
            write_back(weight, before)
        if changed := [*weights.changed(), *lost]:
            told = WRITTEN.format(", ".join(changed[:5]))
            warnings.warn(f"gaff: {told}", stacklevel=3) if notes is None else notes.append(told)


def _kept_by(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What may draw random numbers: NumPy, and all that modules have as attributes, in their lists and dicts too."""
    yield getattr(sys.modules.get("numpy"), "random", None)
    for value in (value for module in modules for value in vars(module).values()):
        yield from value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)


def _random_state(source: Any) -> Callable[[], object] | None:
    """What puts a source of random numbers back to where it is now; None for anything else."""
    if isinstance(source, torch.Generator):
        return partial(source.set_state, source.get_state())
    if source is random or isinstance(source, random.Random):
        return partial(source.setstate, source.getstate())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and (source is numpy or isinstance(source, numpy.RandomState)):
        return partial(source.set_state, source.get_state())
    if numpy is not None and isinstance(source, numpy.Generator):
        return partial(setattr, source.bit_generator, "state", source.bit_generator.state)
    return None


class _Weights:
    """The parameters of a model but for some, as they are now: by version, and by some of their elements, since what
    goes by ``.data`` counts up no version."""

    def __init__(self, model: nn.Module, without: Iterable[Tensor]) -> None:
        left_out = {id(one) for one in without}
        self._model = model
        named = list(model.named_parameters())
        self._known = {name: one for name, one in named if id(one) not in left_out and not is_lazy(one)}
        self._marks = self._marks_now()

    def changed(self) -> list[str]:
        """The names of those that have other values by now, or whose place another parameter of this kind has taken.

        Those that are sharded are other objects while they are gathered: these do not count.
        """
        now = dict(self._model.named_parameters())
        pairs = zip(self._known.items(), self._marks, self._marks_now(), strict=True)
        written = [name for (name, _), before, after in pairs if before != after and before[2] == after[2]]
        return written + [
            name
            for name, one in self._known.items()
            if name in now and now[name] is not one and type(now[name]) is type(one) and name not in written
        ]

    def _marks_now(self) -> list[tuple[int, str, torch.Size]]:
        """Version, a digest of some elements, and shape of each. Waits once for each device."""
        known = list(self._known.values())
        return [(version_of(one), some, one.shape) for one, some in zip(known, digests_of_some(known), strict=True)]


class _Buffers:
    """The buffers of one module. Those that still hold the same bits are not written to.

    A write would count up the version of a buffer that nobody has changed, and autograd could then refuse a backward
    pass of the user's that has saved it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owned = dict(module._buffers)
        self._hidden = set(module._non_persistent_buffers_set)
        self._copies = {name: _copied(tensor) for name, tensor in self._owned.items() if tensor is not None}
        owned = [(name, tensor) for name, tensor in self._owned.items() if tensor is not None]
        self._versions = [(name, one, version_of(one)) for name, one in owned if self._copies[name] is None]

    def restore(self) -> list[str]:
        """Take away buffers that are new, put back those that were replaced, and write back those whose bits differ.

        Returns the names of those that were written to, and cannot be copied.
        """
        owned = self._module._buffers
        for name in [name for name in owned.keys() if name not in self._owned]:  # noqa: SIM118  # TorchScript's
            del owned[name]
        self._module._non_persistent_buffers_set.intersection_update(self._hidden)
        self._module._non_persistent_buffers_set.update(self._hidden)
        for name, tensor in self._owned.items():
            owned[name] = tensor
            copy = self._copies.get(name)
            if tensor is not None and copy is not None:
                write_back(tensor, copy)
        return [name for name, one, version in self._versions if version_of(one) != version]


def _copied(tensor: Tensor) -> Tensor | None:
    """A copy; None of a kind that torch cannot copy, as some quantised ones, or numbers of four bits."""
    try:
        return tensor.detach().clone()
    except (RuntimeError, NotImplementedError):  # as torch raises of either kind; who calls tells of it
        return None
