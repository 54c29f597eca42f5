"""``python -m traps --against TOOL...`` from the folder ``tests``: which tool answers what truly, and which one says so where it cannot.

A tool that is not installed beside this Python is asked in the environment that ``make compare`` sets up for it.
"""

import argparse
import json
import sys
from pathlib import Path

from traps.against.run import GROUPS, TESTS, TOOLS, apart, by_its_python, tool, traps, versions

SIGNS = {"right": "right", "wrong": "WRONG", "missing": "missing", "left": "LEFT", "refuses": "refuses", "cannot": "-"}


def main():
    parser = argparse.ArgumentParser(prog="python -m traps", description=__doc__.splitlines()[0])
    parser.add_argument("--against", nargs="+", choices=list(TOOLS), default=["gaff", "raw"], metavar="TOOL")
    parser.add_argument("--only", default="", metavar="PART", help="only traps whose name holds this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the answers as JSON, too")
    parser.add_argument("--here", action="store_true", help="ask in this environment, and print JSON")
    given = parser.parse_args()
    names = [name for name in traps() if given.only in name]
    if given.here:
        print(json.dumps(asked(given.against[0], names)))
        return 0
    question = ("-m", "traps", "--only", given.only, "--here", "--against")
    found = {name: by_its_python(name, *question, name, folder=TESTS) for name in TOOLS if name in given.against}
    for name in names:
        told = "  ".join(f"{one}: {SIGNS[answer['traps'][name][0]]:8}" for one, answer in found.items())
        print(f"{name:58} {told}")
    print()
    for one, answer in found.items():
        verdicts = [kind for kind, _ in answer["traps"].values()]
        told = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in SIGNS)
        print(f"{one} {answer['versions']}: {told}")
    if given.write:
        given.write.write_text(json.dumps({"groups": GROUPS, "tools": found}, indent=1) + "\n")
    return 0


def asked(name, names):
    """A tool's versions, and its answers."""
    one = tool(name)
    return {"versions": versions(one), "traps": {trap: apart(name, trap) for trap in names}}


if __name__ == "__main__":
    sys.exit(main())
