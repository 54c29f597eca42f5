"""``gaff sites MODEL [PATTERN...]``: what can be addressed in a model.

Modules, parameters and buffers by their addresses, as every other command and ``gaff.capture`` understand them.
"""

from __future__ import annotations

import argparse

from gaff.cli.options import INPUT_HELP, add_input_option, add_model, add_table
from gaff.errors import PlanError

SUMMARY = "list what can be addressed in a model"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the patterns that choose among its sites, and an input that gives them shapes."""
    add_model(parser)
    parser.add_argument("patterns", nargs="*", default=[], metavar="PATTERN", help="only these, such as '**<Conv2d>'")
    parser.add_argument("--ops", action="store_true", help="also the ops in the modules' own forwards; needs --input")
    parser.add_argument(
        "--names", action="store_true", help="standard names (resid_pre.3, attn.out.3 ...) with addresses"
    )
    add_input_option(parser, f"tell shapes as well: {INPUT_HELP}")
    add_table(parser)
    parser.epilog = "example: gaff sites net.py:model '**<Conv2d>' --input randn:1x3x224x224"


def run(options: argparse.Namespace) -> int:
    """Print the sites; with an input the model is run once for their shapes."""
    if options.ops and not options.input:
        raise PlanError("--ops needs an input to run the model with: add --input, such as --input randn:1x3x224x224")
    from gaff.api import sites
    from gaff.cli.inputs import load_inputs
    from gaff.cli.models import load_model
    from gaff.cli.printing import print_cells, print_data, show

    loaded = load_model(options.model)
    args, kwargs = load_inputs(options.input, loaded) if options.input else ((), {})
    if options.names:
        if options.patterns or options.ops:
            raise PlanError("--names lists standard names alone: expected no patterns and no --ops beside it")
        named = sites(loaded.model, *args, names=True, **kwargs)
        if options.json:
            print_data(named.to_dict())
        elif options.plain:
            print_cells((row.name, row.address, row.identity) for row in named.rows)
        else:
            show(str(named))
        return 0
    found = sites(loaded.model, *options.patterns, *args, ops=options.ops, **kwargs)
    if options.json:
        print_data(found.to_dict())
    elif options.plain:
        print_cells(row.cells for row in found)
    else:
        show(str(found))
    return 0
