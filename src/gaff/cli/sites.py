"""``gaff sites MODEL [PATTERN...]``"""

from __future__ import annotations

import json
from argparse import Namespace

from gaff.api import sites
from gaff.cli.inputs import load_inputs
from gaff.cli.models import load_model
from gaff.errors import PlanError


def run(options: Namespace) -> int:
    if options.ops and not options.input:
        raise PlanError("--ops needs an input to run the model with: add --input, such as --input randn:1x3x224x224")
    loaded = load_model(options.model)
    args, kwargs = load_inputs(options.input, loaded) if options.input else ((), {})
    found = sites(loaded.model, *options.patterns, *args, ops=options.ops, **kwargs)
    if options.json:
        print(json.dumps(found.to_dict(), indent=1))
    elif options.plain:
        for row in found:
            print("\t".join(row.cells))
    else:
        print(found)
    return 0
