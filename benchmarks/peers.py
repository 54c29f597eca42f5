"""``python -m benchmarks.peers TOOL...``: what keeping the outputs of many modules costs with other tools.

Each tool is measured in the environment that ``make compare`` has set up for it, in turns with the bare model and with
hooks by hand in the same process, by the adapters of the comparison of answers.
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from benchmarks.harness import measure
from traps.against.run import TOOLS, tool, versions


class Small(nn.Module):
    """48 blocks of a few microseconds: the price of a site can be seen."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(48))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Large(nn.Module):
    """A transformer of 12 blocks: what people run."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0) for _ in range(12)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


WORKS = {
    "48 small blocks": (Small, (2, 16), 300),
    "a transformer of 12 blocks": (Large, (2, 64, 256), 30),
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


def elsewhere(name):
    """The same by the Python that has the tool, and the versions there."""
    own = ROOT / ".venv-compare" / name / "bin" / "python"
    command = [str(own) if own.exists() else sys.executable, "-W", "ignore", "-m", "benchmarks.peers", "--here", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{name} could not be measured: `make compare` sets up an environment for each tool")
    return json.loads(done.stdout.splitlines()[-1])


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
    found = {name: elsewhere(name) for name in given.tools or TOOLS}
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
