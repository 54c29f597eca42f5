"""Each program of ``programs`` prints the same, bare and watched, and watching it does not fail."""

import contextlib
import io

import programs
import pytest
import torch

import gaff

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def printed(function):
    """What a program prints, from the same random numbers each time."""
    torch.manual_seed(0)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function()
    return out.getvalue()


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_program_prints_the_same_when_it_is_watched(name, tmp_path):
    bare = printed(programs.PROGRAMS[name])
    assert bare
    with gaff.watch(out=tmp_path, every=1) as watching:
        watched = printed(programs.PROGRAMS[name])
    assert watched == bare
    assert watching.failure is None


@pytest.mark.parametrize("every", [1, 1000])
def test_a_watched_program_gets_as_deep_as_a_bare_one(every):
    bare, limit = programs.depths()
    with gaff.watch(every=every) as watching:
        watched, seen = programs.depths()
    assert watching.failure is None
    assert seen == limit
    assert all(abs(one - other) <= 2 for one, other in zip(watched, bare, strict=True)), (watched, bare)
