"""Each ending of ``endings`` prints the same and ends the same, bare and watched."""

import json
import os
import re
import subprocess
import sys

import endings
import pytest

import gaff

pytestmark = pytest.mark.slow
PROGRAM = endings.__file__
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
UNRECORDED = ("no_room_for_files", "every_file_is_closed")  # what is written to is taken away
OURS = re.compile(r'  File ".*/gaff/.*\n(    .*\n)*')  # frames in the traceback of an exception that goes through
STOPS = "the record is not written any further, training goes on"


@pytest.fixture(scope="module")
def ended(tmp_path_factory, request):
    """The folder in which every ending that is asked for has left what it printed, and how it ended, bare and watched."""
    folder = tmp_path_factory.mktemp("endings")
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    command = [sys.executable, PROGRAM, "--every", str(folder), *wanted]
    subprocess.run(command, env=ENVIRONMENT, check=True, timeout=1200)
    return folder


@pytest.mark.parametrize("name", endings.ENDINGS)
def test_a_watched_program_ends_as_a_bare_one(name, ended):
    codes = json.loads((ended / "ended.json").read_text())
    bare, watched = (
        (codes[f"{name}.{how}"], *((ended / f"{name}.{how}.{one}").read_text() for one in ("out", "err")))
        for how in ("bare", "watched")
    )
    assert bare[0] != "did not end"
    told = [line for line in watched[2].splitlines() if line.startswith("gaff:")]
    rest = "".join(line for line in watched[2].splitlines(keepends=True) if not line.startswith("gaff:"))
    assert (watched[0], watched[1], OURS.sub("", rest)) == (bare[0], bare[1], bare[2])
    if name in UNRECORDED:
        assert len(told) == 1
        assert STOPS in told[0]
    else:
        assert not told
        assert gaff.load(ended / name).ranks == [0]
