"""Tensors that commands make and keep: the loss that backward begins at, features in a file.

Imports torch; a command imports this when it runs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.cli.models import load_name
from gaff.compat.extras import need
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

    Makes the folders that are missing. Raises PlanError where the package safetensors is not installed.
    """
    need("safetensors.torch", "files", for_="--out")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_values(path, values, receipt, model)
