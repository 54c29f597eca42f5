"""What holds for a step as a whole: the size of its batch, its precision, what is known of every parameter.

All functions but ``read`` are called on the thread that trains, and wait for no device. What they find goes into a
``Sample`` as facts, where rules read it, or into the record's event about a model.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.nested import flat_tensors, iter_tensors
from gaff.address.resolve import iter_modules, join, unwrap
from gaff.compat import distributed, elements, flat_shards, libraries
from gaff.compat.modes import frames_from
from gaff.record.sample import Key, Parameter, address_of
from gaff.training.watch.models import Models
from gaff.training.watch.ownership import owned_by
from gaff.training.watch.recorder import bytes_of
from gaff.training.watch.updates import Owned, Update, is_decoupled

_MOST_BYTES = 1 << 16  # of a tensor in a fingerprint
_MIXED = 0x9E3779B97F4A7C15 >> 1  # 2 ** 63 over the golden ratio, by which neighbouring places have distant weights


def rate_in(group: Mapping[str, Any]) -> float:
    """The learning rate of a parameter group, NaN where it has none: an optimizer may find its own."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)


def batch_size(args: Any, kwargs: Any) -> int:
    """The first dimension of the first tensor with a dimension that the model is given; 1 where there is none."""
    tensor = next((tensor for _, tensor in iter_tensors((args, kwargs)) if tensor.dim()), None)
    return int(tensor.size(0)) if tensor is not None else 1


def fingerprint(args: Any, kwargs: Any, most_bytes: int = _MOST_BYTES) -> str:
    """A checksum (CRC-32, as eight digits) of the beginning of every tensor of a batch; equal for equal batches.

    ``most_bytes`` of each are read, 65,536 if not said otherwise. Tensors on a device are left out, for they would have
    to be waited for, and so are wrappers of others; "" where there is no other.
    """
    return checksum(_tensors(args, kwargs), most_bytes)


def checksum(tensors: Iterable[Tensor], most_bytes: int) -> str:
    """The same of the tensors of a batch, in their order."""
    crc = None
    for tensor in tensors:
        if not (elements.is_plain(tensor) and elements.is_readable(tensor) and tensor.is_cpu):
            continue
        if tensor.is_contiguous():
            crc = zlib.crc32(bytes_of(tensor, most_bytes), crc or 0)
        elif tensor.numel():
            crc = zlib.crc32(bytes_of(_beginning(tensor.detach(), most_bytes // tensor.element_size())), crc or 0)
    return "" if crc is None else f"{crc:08x}"


def device_checksum(args: Any, kwargs: Any) -> Tensor | None:
    """The same of the tensors of a batch that lie on one device, the first of them: a number there, as int64.

    The sum of all bytes, each with an odd weight by its place. None where nothing lies on a device. Waits for nothing.
    """
    told: Tensor | None = None
    for tensor in _tensors(args, kwargs):
        is_readable = elements.is_plain(tensor) and elements.is_readable(tensor)
        if (
            not is_readable
            or tensor.is_cpu
            or not tensor.numel()
            or (told is not None and told.device != tensor.device)
        ):
            continue
        told = summed_bytes(tensor.detach(), 31 * told if told is not None else 0)
    return told


@torch.no_grad()
def summed_bytes(tensor: Tensor, start: Tensor | int = 0, most_bytes: int = _MOST_BYTES) -> Tensor:
    """``start`` and the sum of the first bytes of a tensor, each with an odd weight by its place, modulo 2 ** 64."""
    beginning = _beginning(tensor, most_bytes // tensor.element_size()).resolve_conj().resolve_neg()
    values = beginning.contiguous().view(torch.uint8).long()
    places = torch.arange(1, values.numel() + 1, dtype=torch.int64, device=tensor.device)
    return start + ((values + 1) * (places * _MIXED | 1)).sum()


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    flat = flat_tensors(args, kwargs)
    return [tensor for _, tensor in iter_tensors((args, kwargs))] if flat is None else flat


def digests(module: nn.Module) -> list[str]:
    """A checksum of the beginning of each parameter of a module, of those that lie on the CPU."""
    return [fingerprint((one,), {}) for one in module.parameters()]


def _beginning(tensor: Tensor, most: int) -> Tensor:
    """The first elements of ``tensor``, ``most`` at the most, as a flat tensor.

    Each dimension is narrowed first, so that no more than a few times as many are copied, whatever the strides are.
    """
    for dimension, size in enumerate(tensor.shape):
        inside = tensor.numel() // size  # elements of one index of this dimension
        if tensor.numel() > most:
            tensor = tensor.narrow(dimension, 0, max(1, min(size, -(-most // inside))))
        if tensor.shape[dimension] > 1:  # less of a further one would leave out some in the middle
            break
    return tensor.reshape(-1)[:most]


def precision(module: nn.Module) -> str:
    """The type in which a module computes, such as ``float16``: autocast's where it is on, else its first parameter's.

    Empty for a module without parameters. Autocast is asked about the device that the module is on.
    """
    parameter = next(module.parameters(), None)
    kind = libraries.device_of(module).type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return str(parameter.dtype).removeprefix("torch.") if parameter is not None else ""


def renews_statistics(module: nn.Module) -> bool:
    """Whether the call in progress takes statistics of BatchNorm anew: in training mode, and yet no evaluation.

    So does torch's ``update_bn``, and whoever sets a momentum of 1 for it, by which only the last batch counts, or of
    None, by which all count alike, where nothing else is in training mode.
    """
    acting = [one for one in _with_modes(module) if one.training]
    if acting and all(getattr(one, "momentum", 0.1) in (1.0, None) for one in acting):
        return True
    codes = (frame.f_code for frame in frames_from(sys._getframe(1)))
    return any(code.co_name == "update_bn" and code.co_filename.endswith("swa_utils.py") for code in codes)


def has_modes(module: nn.Module) -> bool:
    """Whether something inside is in training mode and acts otherwise for it: a dropout, BatchNorm with statistics."""
    return any(one.training for one in _with_modes(module))


def is_all_in_eval(module: nn.Module) -> bool:
    """Whether all that acts otherwise in training mode is in eval mode, apart from a BatchNorm that is frozen.

    Whoever has some of it in training mode has chosen the modes, as for the head of a frozen model.
    """
    found = _with_modes(module)
    is_frozen = [[weight.requires_grad for weight in one.parameters(recurse=False)] for one in found]
    return not any(one.training for one in found) and any(any(one) or not one for one in is_frozen)


def _with_modes(module: nn.Module) -> list[nn.Module]:
    """Modules inside that act otherwise in training mode: dropouts, BatchNorm with statistics."""
    dropout, norm = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase
    return [
        one
        for one in module.modules()
        if (isinstance(one, dropout) and one.p > 0) or (isinstance(one, norm) and one.track_running_stats)
    ]


def batch_norms(module: nn.Module) -> list[tuple[str, int]]:
    """The path and the number of channels of what normalises over the batch inside, being in training mode."""
    kind = nn.modules.batchnorm._BatchNorm
    return [(path, one.num_features) for path, one, _ in iter_modules(module) if one.training and isinstance(one, kind)]


def inventory(model: nn.Module) -> dict[str, Any]:
    """What a model is made of, for the record.

    ``modules``: path and class of each; ``weights``: path, shape, type, and whether it is trained; ``devices``: where
    they are. A shared parameter is told under its first name, one that is not initialised yet (lazy) is left out.
    """
    found = [(path, module) for path, module, _ in iter_modules(model)]
    seen: set[int] = set()  # of a shared parameter the first name
    weights = [
        [join(path, name), list(parameter.shape), str(parameter.dtype).removeprefix("torch."), parameter.requires_grad]
        for path, module in found
        for name, parameter in module._parameters.items()
        if parameter is not None
        and not isinstance(parameter, nn.UninitializedParameter)
        and not (id(parameter) in seen or seen.add(id(parameter)))  # type: ignore[func-returns-value]
    ]
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    return {"modules": [[path, type(module).__name__] for path, module in found], "weights": weights,
            "devices": devices}  # fmt: skip


def optimizer(optimizer: Any) -> dict[str, Any]:
    """Class, parameters and settings of an optimizer, as they were when this was asked, for the record.

    ``settings``: for each parameter group whatever is a number, a text, or a pair of numbers (``betas``), by name; a
    number that is a tensor is read, which waits for its device.
    """
    groups = optimizer.param_groups
    return {"class": type(optimizer).__name__, "settings": [_settings(group) for group in groups],
            "parameters": sum(len(group["params"]) for group in groups)}  # fmt: skip


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a parameter group can be told as JSON."""
    kept: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            kept[str(name)] = value.item()
        elif isinstance(value, (int, float, str)):
            kept[str(name)] = value
        elif isinstance(value, tuple) and all(isinstance(one, (int, float)) for one in value):
            kept[str(name)] = list(value)
    return kept


def parameters(
    models: Models, updates: Iterable[Update], optimizers: Mapping[Any, int], called: set[Key]
) -> dict[Key, dict[str, Any]]:
    """Every parameter of every model that trains, by key, as arguments of ``Parameter``; some values still are tensors.

    ``updates``: the optimizer steps of this window, ``optimizers`` all that count with the number of their steps,
    ``called`` the modules that ran, by model and path. Parameters of an optimizer that made no step in this window are
    left out: nothing is known of their gradients. Those that no optimizer owns are told with a learning rate of 0,
    those of an optimizer that has none by that name with NaN.
    """
    found: dict[Key, dict[str, Any]] = {}
    numbers = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
    for key, (one, update) in _stepped(updates).items():
        found[key] = {
            **_plain(one.parameter),
            "optimizer": numbers.get(id(update.optimizer)),
            "lr": rate_in(one.group),
            "decay": float(one.group.get("weight_decay", 0.0) or 0.0),
            "is_decoupled": is_decoupled(update.optimizer, one.group),
            "was_cleared": update.was_cleared,
            "adam_rms": one.adam_rms,
            "momentum": one.momentum,
            "had_grad": one.had_grad,
            "step": update.number,
        }
    owned = owned_by(optimizers)
    trained = {key[0] for key in found}
    for model in models.all:
        root = model.root()
        if root is None or model.name not in trained:
            continue
        for path, module, _ in iter_modules(root):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                key = model.name, address_of(join(path, name), "param")
                if key in found:
                    found[key]["kind"] = _kind(module, parameter)
                    found[key]["was_called"] = (model.name, path) in called
                elif id(parameter) not in owned and models.name_of(parameter) == (model.name, join(path, name)):
                    found[key] = {**_plain(parameter), "optimizer": None, "lr": 0.0, "kind": _kind(module, parameter),
                                  "had_grad": id(parameter) in models.unowned.newly_fed}  # fmt: skip
    return found


def _stepped(updates: Iterable[Update]) -> dict[Key, tuple[Owned, Update]]:
    """Each parameter with the step that it was in; of several optimizers that hold it, of one that had its gradient."""
    found: dict[Key, tuple[Owned, Update]] = {}
    for update in updates:
        for key, one in update.keys.items():
            if one.had_grad or key not in found:
                found[key] = one, update
    return found


def read(known: Mapping[str, Any]) -> Parameter:
    """What ``parameters`` tells of one parameter, in which plain numbers have taken the place of tensors."""
    given = {**known, "has_grad": known["had_grad"]}
    del given["had_grad"]
    if "was_cleared" in given:
        given["was_cleared"] = bool(given["was_cleared"])
    return Parameter(**given)


def _plain(parameter: Tensor) -> dict[str, Any]:
    """What a parameter tells of itself, whoever owns it."""
    return {
        "kind": "weight" if parameter.dim() > 1 else "bias",
        "elements": parameter.numel(),
        "shape": tuple(parameter.shape),
        "requires_grad": parameter.requires_grad,
        "dtype": str(parameter.dtype).removeprefix("torch."),
    }


def _kind(module: nn.Module, parameter: Tensor) -> str:
    """The kind of a parameter, as of ``Parameter.kind``, by the module that holds it; rules treat embeddings apart."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    return "weight" if parameter.dim() > 1 else "bias"


def spread_over(root: nn.Module) -> dict[str, Any]:
    """Which parts of a model this process has, where it is spread over several; empty where it is not.

    ``places`` is that of ``distributed.places_of``; ``same_rows``: the processes that compute on the same rows of a
    batch as this one, each with a part of the weights, this one among them; none where each has rows of its own.
    """
    model = unwrap(root)
    places = {**distributed.places_of(model), **flat_shards.place_of(root)}
    ranks = {rank for mesh in distributed.meshes_of_rows(model) for rank in mesh.mesh.flatten().tolist()}
    return {"places": places, "same_rows": sorted(ranks)} if places else {}
