"""Runs something on a model and leaves the model as it was: buffers, gradients, random state, mode.

Weights are not restored, for a copy of them would double the memory of a model; ``gaff.trace`` tells where a run has
changed them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gaff.compat import elements


@contextmanager
def untouched(model: nn.Module, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restores buffers, ``.grad`` of parameters and ``inputs``, training flags and random states at the end.

    They are put back however the block is left. Every buffer is copied once. ``.grad`` is None inside, so that
    backward adds to nothing; afterwards the tensors from before are back, the same objects. Random states: torch on
    the CPU and on all GPUs where CUDA is initialised, generators that modules keep as attributes, Python's, and
    NumPy's where it is loaded.
    """
    modules = list(model.modules())
    buffers = [_Buffers(module) for module in modules]
    modes = [module.training for module in modules]
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
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state[0])
        if numpy is not None:
            numpy.random.set_state(state[1])
        for generator, known in zip(generators, generator_states, strict=True):
            generator.set_state(known)
        for tensor, grad in zip(leaves, gradients, strict=True):
            tensor.grad = grad
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        for saved in buffers:
            saved.restore()


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
            saved = self._copies[name]
            with torch.no_grad():
                if tensor.shape != saved.shape:
                    tensor.resize_(saved.shape)
                if not _has_bits(tensor, saved):
                    tensor.copy_(saved)


def _has_bits(one: Tensor, other: Tensor) -> bool:
    """Bitwise equality; False where it is not known. Version counters do not tell: batch norm writes without them."""
    if one.is_meta:
        return True
    if not elements.is_plain(one):
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor as bytes, flat: NaN are equal to themselves then, and -0 is not equal to 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
