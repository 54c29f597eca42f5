"""``gaff anatomy MODEL INPUT [PATH]``: explain the backward pass of one module."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from gaff.cli.inputs import load_inputs, need_input
from gaff.cli.models import load_model
from gaff.inspection.anatomy import explain, explain_inside


def run(options: Namespace) -> int:
    loaded = load_model(options.model)
    args, kwargs = load_inputs([options.input], loaded)
    try:
        if options.path:
            told = explain_inside(loaded.model, options.path, args, kwargs)
        else:
            told = explain(loaded.model, args, kwargs)
    except TypeError as error:
        raise need_input([options.input], error) from error
    if options.svg:
        Path(options.svg).write_text(told.to_svg() + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(told.to_dict(), indent=1))
    elif options.tree:
        print(told.tree())
    elif options.plain:
        for row in told.nodes:
            handed = "; ".join(f"{edge.shape} {edge.whose}" for edge in row.outgoing)
            print("\t".join((str(row.number), row.name, row.site, row.place, handed)))
    else:
        print(told)
    if options.svg:
        print(f"written to {options.svg}")
    return 0
