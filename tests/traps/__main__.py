"""``python -m traps`` from the folder ``tests``: which tool falls into which trap. Name a tool of yours in TOOLS."""

import importlib
import pkgutil
import sys
import warnings

import traps
from traps.tools import TOOLS


def falls(trap, tool):
    """The error that a tool ends with, or None when its answers are true."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trap(tool())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:70] if str(error) else ''}"
    return None


def main():
    names = sorted(info.name for info in pkgutil.iter_modules(traps.__path__) if info.name.startswith("test_"))
    for name in names:
        trap = getattr(importlib.import_module(f"traps.{name}"), "trap", None)
        if trap is None:
            continue
        results = {tool: falls(trap, cls) for tool, cls in TOOLS.items()}
        line = "  ".join(f"{tool}: {'right' if fault is None else 'WRONG'}" for tool, fault in results.items())
        print(f"{name.removeprefix('test_'):38} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
