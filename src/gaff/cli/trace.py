"""``gaff trace MODEL [INPUT...]``: one run of a model, told call by call.

The model is left as it was: weights, statistics of BatchNorm, gradients, flags and random state.
"""

from __future__ import annotations

import argparse
from typing import Any

from gaff.cli.options import add_backward, add_inputs, add_model, add_table

SUMMARY = "run a model once and tell every call as a table"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the model, its inputs, whether backward runs, and how the trace is told."""
    add_model(parser)
    add_inputs(parser)
    add_backward(parser)
    parser.add_argument("--ops", action="store_true", help="also every op in the modules' own forwards")
    parser.add_argument("--tree", action="store_true", help="a tree instead of a table")
    parser.add_argument("--depth", type=_depth, metavar="N", help="only calls at most N levels below the model")
    parser.add_argument(
        "--no-flops", action="store_true", help="do not count operations; times are closer to bare ones"
    )
    parser.add_argument("--out", metavar="FILE", help="also write it, for gaff.load and gaff diff; or a page (.html)")
    parser.add_argument("--html", metavar="FILE", help="also write a page: table, tree, graph, activations as pictures")
    add_table(parser)
    parser.epilog = "example: gaff trace net.py:model randn:1x3x224x224 --backward"


def run(options: argparse.Namespace) -> int:
    """Run the model once, and print and save the trace."""
    from gaff.api import trace
    from gaff.cli.inputs import load_inputs, refuse_call
    from gaff.cli.models import load_model
    from gaff.cli.printing import print_text, show
    from gaff.cli.report import need_page
    from gaff.cli.tensors import loss_of
    from gaff.inspection.writing import ending

    if options.html:
        need_page("--html", options.html)
    if options.out:
        ending(options.out, ".json", ".html", ".htm")
    loaded = load_model(options.model)
    args, kwargs = load_inputs(options.input, loaded)
    backward: Any = loss_of(options)
    try:
        told = trace(
            loaded.model,
            *args,
            backward=backward,
            flops=not options.no_flops,
            ops=options.ops,
            pictures=bool(options.html) or str(options.out).endswith((".html", ".htm")),
            **kwargs,
        )
    except TypeError as error:
        refuse_call(loaded.model, options.input, error)
        raise
    for path in (options.out, options.html):
        if path:
            told.save(path)
    if options.json:
        print_text(told.to_json())
    elif options.tree:
        show(told.tree(depth=options.depth))
    else:
        (print_text if options.plain else show)(told.table(depth=options.depth, is_plain=options.plain))
    return 0


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of levels: expected 0, 1, 2, ...")
    return int(text)
