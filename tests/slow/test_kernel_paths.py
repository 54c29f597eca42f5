"""The statistics kernel in each form that a wheel carries, and what a choice of one is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaff.errors import GaffError
from gaff.training.statistics import kernel

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("level", kernel.levels_here())
def test_every_form_counts_as_plain_torch_does(level):
    """In a process of its own: a library registers its ops once."""
    kernel.build(level)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_statistics.py", "-q", "-p", "no:cacheprovider",
         "-k", "not path and not build"],
        cwd=ROOT, env={**os.environ, "GAFF_KERNEL": level}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    told = [sys.executable, "-c", "from gaff.training.statistics import kernel; print(kernel.level())"]
    known = subprocess.run(told, env={**os.environ, "GAFF_KERNEL": level}, check=True, capture_output=True, text=True)
    assert known.stdout.strip() == level


def test_a_choice_that_was_not_built_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("GAFF_CACHE", str(tmp_path))
    monkeypatch.setenv("GAFF_KERNEL", "native")
    kernel.forget()
    with pytest.raises(GaffError, match="GAFF_KERNEL='native': there is no such build here: python -m"):
        kernel.load()
    with pytest.raises(GaffError, match="no level 'fast': expected one of native"):
        kernel.build("fast")
    kernel.forget()


def test_a_choice_that_is_none_is_told(monkeypatch):
    monkeypatch.setenv("GAFF_KERNEL", "fast")
    kernel.forget()
    with pytest.raises(GaffError, match="GAFF_KERNEL='fast': expected one of native, plain, .*baseline"):
        kernel.load()
    monkeypatch.setattr(kernel, "levels_here", lambda: ("baseline",))
    monkeypatch.setattr(kernel, "LEVELS", {"avx2": ((), "AVX2"), "baseline": ((), "")})
    monkeypatch.setenv("GAFF_KERNEL", "avx2")
    with pytest.raises(GaffError, match="'avx2': this processor cannot run it: expected one of baseline"):
        kernel.load()
    kernel.forget()
