"""The wheel as a user has it: installed where there is no compiler, in a fresh environment, and tried there.

    python tests/wheel.py dist/gaff-*.whl [PYTHON ...]

Each PYTHON is that of an environment with torch and the few packages of ``NEEDED``; without any, one is made. What is
printed is a line of the table in docs/install.md for each.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ["numpy", "safetensors", "pytest", "pytest-xdist", "hypothesis", "pillow", "rich"]
TESTS = ["address", "capture", "edits", "edit_sessions", "plan", "reading", "statistics", "take", "trace", "watch"]
TELL = """
import platform, sys, torch, gaff
from gaff.training.statistics import kernel
assert "site-packages" in gaff.__file__, gaff.__file__
print(f"{platform.python_version()} | {torch.__version__} | {platform.machine()} | {kernel.level()}")
"""


def without_compiler(python, cache):
    """The environment of a machine on which nothing can be compiled, and that has compiled nothing before."""
    there = str(Path(python).parent)
    kept = {name: one for name, one in os.environ.items() if name not in ("CXX", "CC", "PYTHONPATH", "GAFF_KERNEL")}
    return {**kept, "PATH": there, "GAFF_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


def fresh(folder, wheel):
    """A new environment with the wheel, and the seconds until it told a first picture of a model."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    began = time.perf_counter()
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, "torch", f"{wheel}[page]"], check=True)
    page = folder / "first.html"
    (folder / "model.py").write_text(
        "from torch import nn\nmodel = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    )
    trace = [folder / "bin" / "gaff", "trace", "model.py:model", "randn:3x4", "--html", page]
    subprocess.run(
        trace, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=without_compiler(python, folder / "no")
    )
    print(
        f"from nothing to the first page of a model: {time.perf_counter() - began:.0f} s, {page.stat().st_size} bytes"
    )
    subprocess.run([*install, *NEEDED], check=True)
    return python


def tried(python, wheel, cache):
    """Whether the tests pass there, with the wheel instead of what is in this folder."""
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--force-reinstall",
    ]
    subprocess.run([*install, str(wheel)], check=True)
    environment = without_compiler(python, cache)
    told = subprocess.run([python, "-c", TELL], check=True, env=environment, capture_output=True, text=True, cwd=cache)
    files = [f"tests/test_{name}.py" for name in TESTS] + ["tests/traps"]
    ran = subprocess.run(
        [python, "-m", "pytest", *files, "-m", "not slow", "-n", "2", "-W", "ignore", "-p", "no:cacheprovider"],
        cwd=ROOT, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    count = ran.stdout.strip().rpartition("\n")[2]
    print(f"{told.stdout.strip()} | {count}", flush=True)
    if ran.returncode:
        print(ran.stdout[-6000:])
    return ran.returncode == 0


def main(wheel, *pythons):
    wheel = Path(wheel).resolve()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        chosen = pythons or [fresh(Path(folder) / "env", wheel)]
        results = [tried(Path(one).absolute(), wheel, cache) for one in chosen]
        return int(not all(results))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
