"""Runs something on a model and leaves the model as it was: buffers, gradients, random state, mode."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restores buffers (content and identity), ``.grad`` of parameters and ``inputs``, training flags, random states.

    Copies every buffer once. Random states: torch on the CPU and on all initialised GPUs, Python's, NumPy's.
    """
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    contents = {
        id(tensor): tensor.detach().clone() for _, owned in buffers for tensor in owned.values() if tensor is not None
    }
    modes = [(module, module.training) for module in model.modules()]
    leaves = [tensor for tensor in (*model.parameters(), *inputs) if tensor.is_leaf and tensor.requires_grad]
    gradients = [(tensor, tensor.grad) for tensor in leaves]
    numpy = sys.modules.get("numpy")
    state = random.getstate(), numpy.random.get_state() if numpy is not None else None
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
        for tensor, grad in gradients:
            tensor.grad = grad
        for module, training in modes:
            module.training = training
        _restore(buffers, contents)


def _restore(buffers: list[tuple[nn.Module, dict[str, Tensor | None]]], contents: dict[int, Tensor]) -> None:
    for module, owned in buffers:
        for name, tensor in owned.items():
            if module._buffers.get(name) is not tensor:
                module._buffers[name] = tensor
            if tensor is not None and not _is_same(tensor, contents[id(tensor)]):
                with torch.no_grad():
                    tensor.copy_(contents[id(tensor)])


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Bitwise, so that a NaN equals itself."""
    if one.is_meta or one.shape != other.shape:
        return one.is_meta
    if one.is_floating_point() or one.is_complex():
        return bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))) and bool(
            torch.equal(torch.isnan(one), torch.isnan(other))
        )
    return torch.equal(one, other)
