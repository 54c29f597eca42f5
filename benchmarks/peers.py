"""``python -m benchmarks.peers TOOL...``: what keeping the outputs of many modules costs with other tools.

Each tool is measured in the environment that ``make compare`` has set up for it, in turns with the bare model and with
hooks by hand in the same process, by the adapters of the comparison of answers.
"""

import argparse
import json
import sys
import warnings
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from benchmarks.harness import measure
from benchmarks.models import Blocks, transformer
from traps.against.run import TOOLS, by_its_python, tool, versions

WORKS = {
    "48 small blocks": (Blocks, (2, 16), 300),
    "a transformer of 12 blocks": (transformer, (2, 64, 256), 30),
}


def priced(name):
    """By work: medians of seconds for the bare model, for hooks by hand, and for the tool."""
    found = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title, (make, shape, rounds) in WORKS.items():
            torch.manual_seed(0)
            models = [make() for _ in range(3)]
            for one in models:
                one.load_state_dict(models[0].state_dict())
            x, paths = torch.randn(shape), [f"blocks.{number}" for number in range(len(models[0].blocks))]
            keepers = {"raw": tool("raw").keeper(models[1], paths), "tool": tool(name).keeper(models[2], paths)}
            ways = {way: partial(run, x) for way, run in {"bare": models[0], **keepers}.items()}
            found[title] = measure(ways, rounds)
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}; all of them without a name")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("--here", action="store_true", help="measure in this environment, and print JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.here:
        (name,) = given.tools
        print(json.dumps({"versions": versions(tool(name)), "works": priced(name)}))
        return 0
    found = {
        name: by_its_python(name, "-m", "benchmarks.peers", "--here", name, folder=ROOT)
        for name in given.tools or TOOLS
    }
    for title in WORKS:
        print(f"\n### {title}, every block's output kept\n")
        print("| tool | x the bare model | x hooks by hand |\n|---|---|---|")
        for name, one in found.items():
            seconds = one["works"][title]
            print(f"| {name} | {seconds['tool'] / seconds['bare']:.2f} | {seconds['tool'] / seconds['raw']:.2f} |")
    if given.write:
        given.write.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
