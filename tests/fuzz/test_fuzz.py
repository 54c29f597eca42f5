"""Random programs against the truth: sixty fixed ones, those that once failed, and many more when it may take time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuzz.check import check
from fuzz.grammar import DRIVER, FORWARD, generate
from fuzz.known import KNOWN, known
from fuzz.program import Script
from fuzz.settings import SETTINGS
from fuzz.shrink import script
from fuzz.tally import Failure

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.py"))


def new_failures(seeds, edits=3):
    """What gaff gets wrong about these programs and nobody knows yet, as scripts."""
    for seed in seeds:
        program = generate(seed)
        for failure in check(program, edits=edits).failures:
            if known(program, failure) is None:
                yield f"seed {seed}: {failure}\n{script(program, failure)}"


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_sixty_programs_are_told_truly(first):
    assert list(new_failures(range(first, first + 10), edits=2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_two_thousand_programs_are_told_truly(first):
    assert list(new_failures(range(first, first + 100))) == []


def corpus():
    for path in CORPUS:
        text = path.read_text(encoding="utf-8")
        wrong = re.search(r"^# wrong today: (.*)$", text, re.MULTILINE)
        # a script may say in its first line what is still wrong: no one does now, and one that is mended fails here
        marks = [pytest.mark.xfail(strict=True, reason=wrong[1])] if wrong else []  # strict, with the script's reason
        yield pytest.param(text, id=path.stem, marks=marks)


@pytest.mark.parametrize("text", list(corpus()))
def test_what_once_failed_is_right(text):
    """Each script asks for one address: ``# ask capture ADDRESS``, ``# ask take ADDRESS``, ``# ask edit ADDRESS with EDIT``."""
    what, address, _, edit = re.search(r"^# ask (\w+) (\S+)( with (.*))?$", text, re.MULTILINE).groups()
    port = address.rpartition(":")[2].partition("[")[0]
    asked = Failure("taken" if what == "take" else "", port, address, "", "", edit or "")
    tally = check(Script.of(text), asked)
    assert tally.programs == 1, tally.rejected
    assert tally.values + tally.gradients + tally.edits + tally.taken > 0, "the address names nothing in the program"
    assert tally.failures == []


def test_every_production_is_generated():
    made = {kind for seed in range(400) for kind in generate(seed).has}
    assert set(FORWARD) | set(DRIVER) <= made


def test_known_failures_name_productions_that_exist():
    assert {name for productions, _ in KNOWN.values() for name in productions} <= {*FORWARD, *DRIVER}


@pytest.mark.slow
@pytest.mark.parametrize("setting", sorted({name.partition(":")[0] for name in SETTINGS}))
def test_programs_in_every_setting_are_told_truly(setting):
    if setting == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    count = {"aot_eager": 40, "inductor": 10, "2d": 50, "fsdp2": 120, "fsdp1": 120}.get(setting, 60)
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fuzz", "--seed", "7000", "--count", str(count), "--inside", setting],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-5000:] + told.stderr[-2000:]
    assert int(re.search(r"^programs +(\d+)", told.stdout, re.MULTILINE)[1]) > count / 6  # others fail bare, there
