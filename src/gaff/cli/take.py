"""``gaff take MODEL SITE... --out features.safetensors``"""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import print_key
from gaff.address.nested import iter_tensors
from gaff.api import take
from gaff.cli.inputs import load_inputs, need_input
from gaff.cli.models import load_model
from gaff.cli.trace import terminal_width
from gaff.errors import PlanError
from gaff.inspection.call_log import shape_text
from gaff.version import __version__
from gaff.views.text import bytes_text, table


def run(options: Namespace) -> int:
    if options.out is not None and not options.out.endswith(".safetensors"):
        raise PlanError(f"--out {options.out!r} has another ending: expected a file name ending in .safetensors")
    inputs = [site for site in options.sites if ".py:" in site or site.startswith(("randn:", "zeros:", "ones:"))]
    if inputs:
        raise PlanError(f"{inputs[0]!r} looks like an input, where a site is expected: give it as --input {inputs[0]}")
    loaded = load_model(options.model)
    extractor = take(loaded.model, *options.sites)
    args, kwargs = load_inputs(options.input, loaded)
    try:
        with torch.no_grad():
            features = _flat(extractor(*args, **kwargs))
    except TypeError as error:
        raise need_input(options.input, error) from error
    if options.out is not None:
        save_tensors(features, options.out, options.model)
    rows = [
        (name, shape_text(x), str(x.dtype).removeprefix("torch."), bytes_text(x.nbytes)) for name, x in features.items()
    ]
    if options.json:
        print(
            json.dumps(
                {
                    name: {"shape": list(x.shape), "dtype": dtype}
                    for (name, x), (_, _, dtype, _) in zip(features.items(), rows, strict=True)
                },
                indent=1,
            )
        )
    elif options.plain:
        print("\n".join("\t".join(row) for row in rows))
    else:
        print(table(("site", "shape", "dtype", "memory"), rows, width=terminal_width(), right=("memory",)))
        if options.out is not None:
            print(f"written to {options.out}")
    return 0


def _flat(features: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor under its own address."""
    tensors = {}
    for address, value in features.items():
        for key, tensor in iter_tensors(value):
            port = ":output" if key and ":" not in address else ""
            tensors[f"{address}{port}{print_key(key)}"] = tensor
    return tensors


def save_tensors(features: dict[str, Tensor], path: str, model: str) -> None:
    """Write tensors by name, contiguous and on the CPU, as safetensors. Raises PlanError without that package."""
    from pathlib import Path

    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError:
        raise PlanError("--out needs the package safetensors: install gaff[files]") from None
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in features.items()}
    safetensors.save_file(whole, path, metadata={"gaff": __version__, "model": model})
