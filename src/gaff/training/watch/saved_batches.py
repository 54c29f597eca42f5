"""A batch that did harm, with the weights and the random state that it met: kept to be run again (``--keep-batch``).

One batch is one safetensors file in the folder ``batches`` of the record: tensors under names, and the rest as JSON in
the file's metadata. Nothing in it is executed when it is read. ``BatchSaver`` writes, ``read_kept`` reads, and ``gaff
replay`` puts what was read into a model that is built anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gaff.address.resolve import unwrap
from gaff.compat import distributed, elements, extras
from gaff.errors import PlanError, RecordError
from gaff.inspection.nonfinite.rerun import Batch

FOLDER = "batches"
_MOST_FAILED = 8  # attempts that fail one after another, of which each copies the model, until no more is made
_MOST = 4  # of one run: the first ones tell most
# What a file that somebody else has written may lead to.
_DAMAGES = (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, RuntimeError,
            StopIteration)  # fmt: skip
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """A batch that was kept, read back, with what its model was like before the step.

    ``weights``: the model's ``state_dict``; ``why``: the rule that was hit, or ``exception``; ``model``: the name that
    it was watched under.
    """

    step: int
    why: str
    model: str
    batch: Batch
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]  # those that are in no state_dict
    modes: dict[str, bool]  # of every module: whether it was in training mode
    was_changed: bool  # whether the run wrote into what it was given

    def restore(self, model: nn.Module) -> None:
        """Give ``model`` the weights, buffers and modes of then; weights keep the type that they were written in.

        Writes into the model, without a copy. Raises PlanError where the names or a shape tell that the model is
        another one; in the latter case it may have got some of the weights already.
        """
        known = {key for key in model.state_dict() if not key.endswith("_extra_state")}
        unlike = sorted(known ^ self.weights.keys())
        if unlike:
            raise PlanError(f"it is another model than {self.model} was: {', '.join(unlike[:4])} are not in both")
        for key, target in model.state_dict(keep_vars=True).items():
            value = self.weights.get(key)
            if value is not None and target.shape != value.shape:
                shapes = f"{tuple(target.shape)}, then {tuple(value.shape)}"
                raise PlanError(f"it is another model than {self.model} was: {key} is of shape {shapes}")
            if value is not None:
                target.data = value  # in its own type; tied parameters stay tied
        modules = dict(model.named_modules())
        for path, value in self.buffers.items():
            owner, _, name = path.rpartition(".")
            if owner in modules and name in modules[owner]._buffers:
                modules[owner]._buffers[name] = value
        for path, is_training in self.modes.items():
            if path in modules:
                modules[path].training = is_training


class BatchSaver:
    """Writes the batches of steps in which something went wrong into the folder ``batches`` of ``folder``.

    At most four of a run, since the first ones tell most. ``notes``: what of them could not be kept. Waits for devices
    and the disk.
    """

    def __init__(self, folder: Path) -> None:
        """Raises PlanError without safetensors."""
        extras.need("safetensors", "files", for_="keeping batches")
        self._folder = folder / FOLDER
        self.notes: list[str] = []
        self._written: set[tuple[int, str]] = set()
        self._left = _MOST_FAILED

    def keep(self, step: int, why: str, name: str, model: nn.Module, batch: Batch) -> Path | None:
        """Write a batch with the weights, buffers and modes of ``model``, as they are now, and return the file's path.

        None where the batch of this step was kept for the same reason already, where there are four, or where eight
        attempts have failed. ``name`` is that of the model in the record. All tensors are copied to the CPU for it.
        Raises OSError when the disk is full.
        """
        if (step, why) in self._written or len(self._written) >= _MOST or not self._left:
            return None
        self._left -= 1
        model = unwrap(model)  # by the names that the program's own model has
        tensors: dict[str, Tensor] = {}
        structure = _packed((list(batch.args), batch.kwargs), "input", tensors, self.notes)
        for at, state in enumerate(batch.random):
            tensors[f"random.{at}"] = state
        # by identity: tied weights are one tensor, and are one again when they are read
        weights = {key: one for key, one in model.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
        buffers = dict(nn.Module.named_buffers(model, remove_duplicate=False))
        buffers = {key: one for key, one in buffers.items() if key not in weights}
        aliases = {**_put(weights, "weights", tensors), **_put(buffers, "buffers", tensors)}
        told = {
            "step": step, "why": why, "model": name, "class": type(model).__name__, "structure": structure,
            "modes": {path: module.training for path, module in model.named_modules()},
            "autocast": [[kind, str(dtype)] for kind, dtype in batch.autocast],
            "has_grad": batch.has_grad, "changed": _has_changed(batch),
        }  # fmt: skip
        from safetensors.torch import save_file

        self._folder.mkdir(exist_ok=True)
        rank, count = distributed.place()
        which = f"-rank{rank}" if count > 1 else ""  # all processes write into one folder
        path = self._folder / f"{step:08d}-{why}{which}.safetensors"
        plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        save_file(plain, str(path), metadata={"gaff": json.dumps({**told, "aliases": aliases})})
        self._written.add((step, why))
        self._left = _MOST_FAILED
        return path


def read_kept(path: Path) -> SavedBatch:
    """Read back what ``BatchSaver`` has written; its tensors are on the CPU.

    Raises RecordError for any other file, however damaged, and PlanError without safetensors.
    """
    extras.need("safetensors", "files", for_="keeping batches")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            told = json.loads((file.metadata() or {})["gaff"])
            # cloned, so that they lie in memory as torch lays them: products of others are rounded differently
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118  # no dict
        tensors.update({str(alias): tensors[str(key)] for alias, key in told["aliases"].items()})
        args, kwargs = _unpacked(told["structure"], tensors)
        random = [tensors[f"random.{at}"] for at in range(len(tensors)) if f"random.{at}" in tensors]
        autocast = [(str(kind), elements.dtype_named(name)) for kind, name in told["autocast"]]
        batch = Batch(tuple(args), dict(kwargs), random, autocast, bool(told["has_grad"]), [])
        weights, buffers = (_under(start, tensors) for start in ("weights.", "buffers."))
        modes = {str(path): bool(is_training) for path, is_training in told["modes"].items()}
        why, model = str(told["why"]), str(told["model"])
        return SavedBatch(int(told["step"]), why, model, batch, weights, buffers, modes, bool(told["changed"]))
    except (*_DAMAGES, SafetensorError) as error:
        raise RecordError(f"{path}: is no batch that gaff has kept: {type(error).__name__}: {error}") from None


def kept_of(run: Path) -> list[Path]:
    """The batches that a run has kept, in the order of their steps."""
    return sorted((run / FOLDER).glob("*.safetensors"))


def _put(named: Mapping[str, Tensor], start: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Add ``named`` tensors to ``tensors``; return those that are others of them under a second name, with the first.

    One tensor with several names, told by identity, is written once, and is one again when it is read.
    """
    aliases: dict[str, str] = {}
    known: dict[int, str] = {}
    for key, tensor in named.items():
        name = f"{start}.{key}"
        first = known.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    return aliases


def _under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``start``, by the rest of their names."""
    return {key.removeprefix(start): one for key, one in tensors.items() if key.startswith(start)}


def _packed(value: Any, name: str, tensors: dict[str, Tensor], notes: list[str]) -> Any:
    """What a model was given, as JSON, with the names of tensors in place of them; the tensors go into ``tensors``.

    ``name`` is what ``notes`` call it. Containers of other classes than Python's own are kept as plain ones; other
    objects, and tensors that are not plain, are left out. Both is noted, and a batch that lacks something cannot be
    read again.
    """
    if isinstance(value, Tensor):
        if not elements.is_plain(value) or value.is_complex():
            notes.append(f"{name} of the batch is a {value.dtype} of layout {value.layout}, which was not kept")
            return {"missing": name}
        key = f"input.{len(tensors)}"
        tensors[key] = value
        return {"tensor": key, "requires_grad": value.requires_grad}
    if isinstance(value, (list, tuple, Mapping)) and type(value) not in (list, tuple, dict):
        plain = "dict" if isinstance(value, Mapping) else "tuple" if isinstance(value, tuple) else "list"
        notes.append(f"{name} of the batch is a {type(value).__name__}, which was kept as a plain {plain}")
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_packed(one, f"{name}[{at}]", tensors, notes) for at, one in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, _PLAIN) for key in value):
        return {"pairs": [[key, _packed(one, f"{name}[{key!r}]", tensors, notes)] for key, one in value.items()]}
    if isinstance(value, _PLAIN):
        return {"value": value}
    notes.append(f"{name} of the batch is a {type(value).__name__}, which was not kept")
    return {"missing": name}


def _unpacked(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``_packed``. Raises ValueError where something was left out, other errors for damaged JSON."""
    kind, inner = next(iter(value.items()))
    if kind == "tensor":
        tensor = tensors[inner]
        return tensor.requires_grad_() if value["requires_grad"] and tensor.is_floating_point() else tensor
    if kind in ("list", "tuple"):
        found = [_unpacked(one, tensors) for one in inner]
        return found if kind == "list" else tuple(found)
    if kind == "pairs":
        return {key: _unpacked(one, tensors) for key, one in inner}
    if kind == "value":
        return inner
    raise ValueError(f"{inner} was not kept when the batch was")


def _has_changed(batch: Batch) -> bool:
    """Whether somebody has written into the inputs since the run was given them: the file has what they are now."""
    from gaff.compat import memory

    return any(memory.version_of(tensor) != version for tensor, version in batch.versions)
