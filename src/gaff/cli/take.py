"""``gaff take MODEL SITE... --out features.safetensors``: features of a model, by address.

The model runs without gradients, and no further than the last of the sites.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from gaff.cli.options import (
    INPUT_HELP,
    add_input_option,
    add_model,
    add_table,
    add_tensor_file,
    check_tensor_file,
)
from gaff.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gaff.sessions.receipt import Receipt

SUMMARY = "extract features; the model runs only as far as it must"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the sites to take, and where they are written."""
    add_model(parser)
    parser.add_argument("sites", nargs="+", metavar="SITE", help="addresses, such as layer4 or 'encoder.layer.*'")
    add_input_option(parser, f"{INPUT_HELP}; may be repeated")
    add_tensor_file(parser, "features")
    add_table(parser)
    parser.epilog = "example: gaff take net.py:model layer4 --input cat.png --out cat.safetensors"


def run(options: argparse.Namespace) -> int:
    """Run the model as far as the sites need, and print and save what passed there."""
    check_tensor_file(options.out)
    inputs = [site for site in options.sites if ".py:" in site or site.startswith(("randn:", "zeros:", "ones:"))]
    if inputs:
        raise PlanError(f"{inputs[0]!r} looks like an input, where a site is expected: give it as --input {inputs[0]}")
    from gaff.cli.tensors import save_values, tensors_of

    features, receipt = _taken(options)
    if options.out is not None:
        save_values(features, receipt, options.out, options.model)
    _print(tensors_of(features), options)
    return 0


def _taken(options: argparse.Namespace) -> tuple[dict[str, Any], Receipt]:
    """The features by address, and the receipt of the run."""
    import torch

    from gaff.api import take
    from gaff.cli.inputs import load_inputs, refuse_call
    from gaff.cli.models import load_model

    loaded = load_model(options.model)
    _tell_mode(loaded.model)
    extractor = take(loaded.model, *options.sites)
    args, kwargs = load_inputs(options.input, loaded)
    try:
        with torch.no_grad():
            found: dict[str, Any] = extractor(*args, **kwargs)
    except TypeError as error:
        refuse_call(loaded.model, options.input, error)
        raise
    return found, extractor.receipt


def _tell_mode(model: nn.Module) -> None:
    """Say on stderr if the model is in training mode and computes otherwise for it."""
    from gaff.training.watch.step_facts import has_modes

    if has_modes(model):
        print(
            "gaff: the model is in training mode: dropout draws, and batch norm takes the statistics of this input; "
            "for the features of a trained model call .eval() in what builds it",
            file=sys.stderr,
        )


def _print(features: dict[str, Tensor], options: argparse.Namespace) -> None:
    """Tell the shape, dtype and size of each tensor; with ``--out`` also where they were written."""
    from gaff.address.nested import shape_text
    from gaff.cli.printing import print_cells, print_data, show
    from gaff.views.text import bytes_text, table

    dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in features.items()}
    rows = [(name, shape_text(x), dtypes[name], bytes_text(x.nbytes)) for name, x in features.items()]
    if options.json:
        print_data({name: {"shape": list(x.shape), "dtype": dtypes[name]} for name, x in features.items()})
    elif options.plain:
        print_cells(rows)
    else:
        show(table(("site", "shape", "dtype", "memory"), rows, right=("memory",)))
        if options.out is not None:
            print(f"written to {options.out}")
