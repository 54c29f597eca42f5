"""Spring every trap on a tool, each in a process of its own, and tell how it ended."""

import importlib
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import torch

from traps.against.suite import Cannot, Missing

GROUPS = ("values", "gradients", "edits", "traceless")
TOOLS = {
    "gaff": ("gaff_itself", "Gaff"),
    "raw": ("raw_hooks", "RawHooks"),
    "baukit": ("with_baukit", "Baukit"),
    "nnsight": ("with_nnsight", "Nnsight"),
    "torchlens": ("with_torchlens", "TorchLens"),
    "transformer_lens": ("with_transformer_lens", "TransformerLens"),
    "pyvene": ("with_pyvene", "Pyvene"),
    "captum": ("with_captum", "Captum"),
    "torchvision": ("with_torchvision", "Torchvision"),
}
SECONDS = 120
QUIET = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning)
HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]


def traps():
    """Name -> function of every trap, in the order of the files: ``values.value_before_an_in_place_op``."""
    found = {}
    for group in GROUPS:
        module = importlib.import_module(f"traps.against.{group}")
        for name, function in vars(module).items():
            if name.startswith("trap_") and inspect.getmodule(function) is module:
                found[f"{group}.{name.removeprefix('trap_')}"] = function
    return found


def tool(name):
    """A tool by its name. Raises ImportError where its packages are not installed here."""
    file, cls = TOOLS[name]
    return getattr(importlib.import_module(f"traps.against.tools.{file}"), cls)()


def versions(one):
    """The versions of a tool's packages, and of torch."""
    return {name: metadata.version(name) for name in (*one.distributions, "torch")}


def by_its_python(name, *arguments, folder):
    """What a command says in JSON, in its last line, run by the Python of the tool: that of ``make compare``, else this one."""
    own = TESTS.parent / ".venv-compare" / name / "bin" / "python"
    command = [str(own) if own.exists() else sys.executable, "-W", "ignore", *arguments]
    around = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=around)
    if done.returncode:
        sys.exit(f"{name} could not be asked by {command[0]}: `make compare` sets up an environment for each tool")
    return json.loads(done.stdout.splitlines()[-1])


def verdict(trap, one):
    """How a tool comes out of a trap, as ``suite`` tells the ways, and what was said."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trap(one)
        except Cannot:
            return "cannot", ""
        except AssertionError as error:
            where = Path(inspect.getinnerframes(error.__traceback__)[-1].filename)
            if where.parent != HERE:  # the tool's own
                return "refuses", f"AssertionError: {_line(error)}"
            said = [str(one.message) for one in told if not issubclass(one.category, QUIET)]
            kind = "left" if trap.__module__.endswith(".traceless") else "wrong"
            return "missing" if isinstance(error, Missing) else kind, _line(error) + "".join(
                f"; warned: {line[:120]}" for line in dict.fromkeys(said)
            )
        except Exception as error:  # that it says something is the answer
            return "refuses", f"{type(error).__name__}: {_line(error)}"
    return "right", ""


def apart(name, trap):
    """The same in a process of its own, so that no tool is judged by what it did to the one before."""
    reading, writing = os.pipe()
    child = os.fork()  # no `multiprocessing`, in whose children some tools refuse to work
    if child == 0:
        os.close(reading)
        torch.set_num_threads(1)
        with os.fdopen(writing, "w") as file:
            json.dump(verdict(traps()[trap], tool(name)), file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        is_there = select.select([file], [], [], SECONDS)[0]
        told = file.read() if is_there else json.dumps(("refuses", f"no answer within {SECONDS} s"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(told) if told else ("refuses", "the process died")


def _line(error):
    lines = str(error).strip().splitlines()
    return re.sub(r"\d{9,}|0x[0-9a-f]+", "...", lines[0])[:200] if lines else ""  # addresses are others each time
