"""``gaff anatomy MODEL INPUT [PATH]``: explain the backward pass of one module.

Every node of the autograd graph that the module's forward has made, with what it hands to which other node, and which
of torch's hooks would see which of these gradients.
"""

from __future__ import annotations

import argparse

from gaff.cli.options import INPUT_HELP, add_model, add_table

SUMMARY = "explain the backward pass of a module: which gradient is whose"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the model, one input, the module inside that is explained, and how."""
    add_model(parser)
    parser.add_argument("input", metavar="INPUT", help=INPUT_HELP)
    parser.add_argument("path", nargs="?", default="", metavar="PATH", help="a module inside, such as layer1.0.conv1")
    parser.add_argument("--tree", action="store_true", help="a tree instead of a table")
    parser.add_argument("--out", metavar="FILE", help="also write it, for gaff.load; or a picture (.svg)")
    add_table(parser)
    parser.epilog = "example: gaff anatomy net.py:model randn:1x3x224x224 layer1 --out backward.svg"


def run(options: argparse.Namespace) -> int:
    """Run the model forward, read its autograd graph, and print and draw it."""
    from gaff.cli.inputs import load_inputs, refuse_call
    from gaff.cli.models import load_model
    from gaff.cli.printing import print_cells, print_data, show
    from gaff.inspection.explanation import explain, explain_inside

    loaded = load_model(options.model)
    args, kwargs = load_inputs([options.input], loaded)
    try:
        if options.path:
            told = explain_inside(loaded.model, options.path, args, kwargs)
        else:
            told = explain(loaded.model, args, kwargs)
    except TypeError as error:
        refuse_call(loaded.model, [options.input], error)
        raise
    if options.out:
        told.save(options.out)
    if options.json:
        print_data(told.to_dict())
    elif options.tree:
        show(told.tree())
    elif options.plain:
        for row in told.nodes:
            handed = "; ".join(f"{edge.shape} {edge.whose}" for edge in row.outgoing)
            print_cells([(str(row.number), row.name, row.site, row.place, handed)])
    else:
        show(str(told))
    if options.out:
        print(f"written to {options.out}")
    return 0
