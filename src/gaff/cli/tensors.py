"""Tensors that commands make and keep: the loss that backward begins at, features in a file.

Imports torch; a command imports this when it runs.
"""

from __future__ import annotations

import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gaff.address.grammar import parse_single
from gaff.address.nested import iter_tensors
from gaff.cli.models import load_name
from gaff.compat.extras import need
from gaff.compat.files import replacing
from gaff.errors import PlanError
from gaff.sessions.receipt import Receipt
from gaff.sessions.saved_capture import write_values


def loss_of(options: Namespace) -> Callable[[Any], Tensor] | None:
    """The loss that ``--loss`` names, or that of ``--backward``; None where neither was given: no backward pass."""
    if options.loss:
        named: Callable[[Any], Tensor] = load_name(options.loss)[1]
        return named
    return mean_of_first if options.backward else None


def mean_of_first(output: Any) -> Tensor:
    """The loss of ``--backward``: the mean of the first floating tensor of the output."""
    for _, tensor in iter_tensors(output):
        if tensor.is_floating_point():
            return tensor.mean()
    raise PlanError("the output holds no floating tensor to run backward from: expected --loss file.py:function")


def save_values(values: Mapping[str, Any], receipt: Receipt, path: str, model: str) -> None:
    """Write values by address as a capture of one run, which ``gaff.load`` reads; ``model`` is noted in the file.

    The tensors alone, as arrays of NumPy, where the ending is ``.npz`` or ``.npy``. Makes the folders that are missing.
    Raises PlanError where the package that writes such files is not installed, for several tensors in one ``.npy``, and
    for types that NumPy does not have.
    """
    is_numpy = path.endswith((".npy", ".npz"))
    package: Any = need("numpy" if is_numpy else "safetensors.torch", "files", for_="--out")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if not is_numpy:
        write_values(path, values, receipt, model)
        return
    arrays = {address: _array(address, tensor) for address, tensor in tensors_of(values).items()}
    if path.endswith(".npy") and len(arrays) != 1:
        raise PlanError(f"--out {path!r} holds one array, and there are {len(arrays)} tensors: expected .npz")
    with replacing(path) as draft, draft.open("wb") as file:
        if path.endswith(".npy"):
            package.save(file, *arrays.values())
        else:
            with zipfile.ZipFile(file, "w") as archive:  # numpy.savez takes no array called "file"
                for address, array in arrays.items():
                    with archive.open(f"{address}.npy", "w", force_zip64=True) as member:
                        package.lib.format.write_array(member, array)


def tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor in values by address, each under its own address."""
    tensors = {}
    for address, value in values.items():
        site = parse_single(address)
        for key, tensor in iter_tensors(value):
            tensors[str(replace(site, key=(*site.key, *key))) if key else address] = tensor
    return tensors


def _array(address: str, tensor: Tensor) -> Any:
    """A tensor as an array. Raises PlanError where NumPy has no such thing."""
    try:
        return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:  # bfloat16 and float8, sparse, nested, quantized tensors
        raise PlanError(
            f"{address}: NumPy takes no {tensor.dtype} of {tensor.layout}: {error}; use .safetensors"
        ) from None
