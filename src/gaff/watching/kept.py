"""A batch that did harm, with the weights and the random state that it met: kept to be run again (``--keep-batch``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gaff.errors import PlanError, RecordError
from gaff.health.rerun import Batch

FOLDER = "batches"
_MOST = 4  # of one run: the first ones tell most
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Kept:
    """What was kept, read back. ``weights``: the model's ``state_dict`` before the step; ``why``: the rule."""

    step: int
    why: str
    model: str
    batch: Batch
    weights: dict[str, Tensor]
    training: bool


class Keeper:
    """Writes the batches of steps in which something went wrong into ``folder``. Waits for devices and the disk."""

    def __init__(self, folder: Path) -> None:
        """Raises PlanError without safetensors."""
        _need_safetensors()
        self._folder = folder / FOLDER
        self.notes: list[str] = []
        self._written: set[tuple[int, str]] = set()

    def keep(self, step: int, why: str, name: str, model: nn.Module, batch: Batch) -> Path | None:
        """None where it was kept already, or where there are four. Raises OSError when the disk is full."""
        if (step, why) in self._written or len(self._written) >= _MOST:
            return None
        self._written.add((step, why))
        tensors: dict[str, Tensor] = {}
        structure = _packed((list(batch.args), batch.kwargs), "input", tensors, self.notes)
        for at, state in enumerate(batch.random):
            tensors[f"random.{at}"] = state
        shared: dict[int, str] = {}
        aliases = {}
        for key, value in model.state_dict().items():
            if not isinstance(value, Tensor):
                continue
            if id(value) in shared:
                aliases[key] = shared[id(value)]
            else:
                shared[id(value)] = key
                tensors[f"weights.{key}"] = value
        told = {
            "step": step, "why": why, "model": name, "class": type(model).__name__, "structure": structure,
            "training": model.training, "autocast": [[kind, str(dtype)] for kind, dtype in batch.autocast],
            "has_grad": batch.has_grad, "changed": _has_changed(batch),
        }  # fmt: skip
        from safetensors.torch import save_file

        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{step:08d}-{why}.safetensors"
        plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        save_file(plain, str(path), metadata={"gaff": json.dumps({**told, "aliases": aliases})})
        return path


def read_kept(path: Path) -> Kept:
    """Raises RecordError for what ``Keeper`` has not written."""
    _need_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            told = json.loads((file.metadata() or {})["gaff"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no dict
        args, kwargs = _unpacked(told["structure"], tensors)
        random = [tensors[f"random.{at}"] for at in range(len(tensors)) if f"random.{at}" in tensors]
        autocast = [(str(kind), _dtype(name)) for kind, name in told["autocast"]]
        batch = Batch(tuple(args), dict(kwargs), random, autocast, bool(told["has_grad"]), [])
        weights = {key.removeprefix("weights."): one for key, one in tensors.items() if key.startswith("weights.")}
        weights.update({str(alias): weights[str(key)] for alias, key in told["aliases"].items()})
        return Kept(int(told["step"]), str(told["why"]), str(told["model"]), batch, weights, bool(told["training"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{path}: is no batch that gaff has kept: {type(error).__name__}: {error}") from None


def kept_of(run: Path) -> list[Path]:
    """The batches that a run has kept, in the order of their steps."""
    return sorted((run / FOLDER).glob("*.safetensors"))


def _packed(value: Any, name: str, tensors: dict[str, Tensor], notes: list[str]) -> Any:
    """The structure as JSON, with the names of tensors in place of them."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            notes.append(f"{name} of the batch is a {value.layout} tensor, which was not kept")
            return {"missing": name}
        tensors[name] = value
        return {"tensor": name, "requires_grad": value.requires_grad}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_packed(one, f"{name}.{at}", tensors, notes) for at, one in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _packed(one, f"{name}.{key}", tensors, notes) for key, one in value.items()}}
    if isinstance(value, _PLAIN):
        return {"value": value}
    notes.append(f"{name} of the batch is a {type(value).__name__}, which was not kept")
    return {"missing": name}


def _unpacked(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    kind, inner = next(iter(value.items()))
    if kind == "tensor":
        tensor = tensors[inner]
        return tensor.requires_grad_() if value["requires_grad"] and tensor.is_floating_point() else tensor
    if kind in ("list", "tuple"):
        found = [_unpacked(one, tensors) for one in inner]
        return found if kind == "list" else tuple(found)
    if kind == "dict":
        return {key: _unpacked(one, tensors) for key, one in inner.items()}
    if kind == "value":
        return inner
    raise ValueError(f"{inner} was not kept when the batch was")


def _has_changed(batch: Batch) -> bool:
    from gaff import compat

    return any(compat.version_of(tensor) != version for tensor, version in batch.versions)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of torch's")
    return found


def _need_safetensors() -> None:
    from importlib.util import find_spec

    if find_spec("safetensors") is None:
        raise PlanError("keeping batches needs safetensors, which is not installed: pip install 'gaff[files]'")
