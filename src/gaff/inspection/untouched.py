"""Runs something on a model and leaves the model as it was: buffers, gradients, random state, mode.

Of weights those are restored that torch's own modules write to in their forward (``nn.Embedding(max_norm=)``), and
those with a hook on their gradient, which may update them. A copy of all of them would double the memory of a model:
where its own code writes to others, that is told.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
    the CPU and on all GPUs where CUDA is initialised, generators that modules keep as attributes, Python's, and
    NumPy's where it is loaded.
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
    numpy = sys.modules.get("numpy")
    state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    generators = [value for module in modules for value in vars(module).values() if isinstance(value, torch.Generator)]
    generator_states = [generator.get_state() for generator in generators]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    for tensor in leaves:
        tensor.grad = None
    try:
        with unseen(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state[0])
        if numpy is not None:
            numpy.random.set_state(state[1])
        for generator, known in zip(generators, generator_states, strict=True):
            generator.set_state(known)
        for tensor, grad in zip(leaves, gradients, strict=True):
            put_gradient(tensor, grad)
        for module, training in modes:
            module.training = training
        for saved in buffers:
            saved.restore()
        for weight, before in shortened.items():
            write_back(weight, before)
        if changed := weights.changed():
            told = WRITTEN.format(", ".join(changed[:5]))
            warnings.warn(f"gaff: {told}", stacklevel=3) if notes is None else notes.append(told)


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
        self._copies = {name: tensor.detach().clone() for name, tensor in self._owned.items() if tensor is not None}

    def restore(self) -> None:
        """Take away buffers that are new, put back those that were replaced, and write back those whose bits differ."""
        owned = self._module._buffers
        for name in [name for name in owned.keys() if name not in self._owned]:  # noqa: SIM118  # TorchScript's
            del owned[name]
        self._module._non_persistent_buffers_set.intersection_update(self._hidden)
        self._module._non_persistent_buffers_set.update(self._hidden)
        for name, tensor in self._owned.items():
            owned[name] = tensor
            if tensor is None:
                continue
            write_back(tensor, self._copies[name])
