"""torch's own test programs, bare and under ``gaff watch``: the same tests must pass.

``python torch_tests.py FOLDER [FILE ...]``, where FOLDER is the folder ``test`` of torch's sources, which its wheels do not
have. A package of sources has it, such as Debian's (``apt-get source --download-only pytorch``); a version next to the
installed one will do, since only what passes bare is compared. Needs the package ``expecttest``, as torch's tests do.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

FILES = ("nn/test_module_hooks.py", "nn/test_parametrization.py", "nn/test_pruning.py", "nn/test_lazy_modules.py",
         "nn/test_load_state_dict.py", "nn/test_init.py", "nn/test_dropout.py", "nn/test_packed_sequence.py",
         "nn/test_multihead_attention.py", "test_module_tracker.py", "test_stateless.py", "test_modules.py", "test_nn.py",
         "test_autograd.py", "autograd/test_functional.py", "optim/test_swa_utils.py", "optim/test_lrscheduler.py",
         "optim/test_optim.py")  # fmt: skip


def passing(file, results, prefix=()):
    """The tests of one file that pass, by class and name, and what the run has told on standard error."""
    command = [
        *prefix,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
        file.name,
    ]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, env=environment(), check=False)
    if not results.exists():
        raise SystemExit(f"{file}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    cases = ElementTree.parse(results).iter("testcase")
    return {f"{one.get('classname')}.{one.get('name')}" for one in cases if not list(one)}, done.stderr


def environment():
    """One thread, so that numbers do not depend on how many there are."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def compare(file, folder):
    """Run one file both ways; the tests that pass bare, and those of them that do not pass watched."""
    name = file.stem
    bare, _ = passing(file, folder / f"{name}.bare.xml")
    watch = [sys.executable, "-m", "gaff", "watch", "--every", "1", "--quiet", "--out", str(folder / name), "--"]
    watched, told = passing(file, folder / f"{name}.watched.xml", watch)
    lost = bare - watched
    if lost:  # some do not pass each time
        lost &= passing(file, folder / f"{name}.again.xml")[0]
    failures = [line for line in told.splitlines() if "training goes on" in line]
    return bare, lost, failures


def main(arguments):
    """Compare the files named, by default all of ``FILES`` that are there; returns the exit code."""
    root = Path(arguments[0]).resolve()
    files = [root / one for one in (arguments[1:] or FILES)]
    found = [one for one in files if one.is_file()]
    if not found:
        raise SystemExit(f"no test of torch in {root}: expected the folder test of torch's sources, with {FILES[0]}")
    is_same = True
    with tempfile.TemporaryDirectory() as folder:
        for file in found:
            bare, lost, failures = compare(file, Path(folder))
            print(f"{file.relative_to(root)}: {len(bare)} pass bare, {len(bare) - len(lost)} watched", flush=True)
            for line in (*sorted(lost), *failures):
                print(f"  {line}", flush=True)
            is_same = is_same and not lost and not failures
    return 0 if is_same else 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(sys.argv[1:]))
