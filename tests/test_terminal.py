"""Tables fit the terminal: columns go, addresses stay whole; ``--columns`` chooses; colours where they can be shown."""

import os
import pty
import subprocess
import sys

import pytest
import torch
from torch import nn

import gaff
from gaff.cli import main
from gaff.views import run_text
from gaff.views.text import fitting, table

HEAD = ("site", "class", "time", "why")
ROWS = [("encoder.layer.10.attention.self.query", "Linear", "1.5 ms", "a reason of many words that goes on and on"),
        ("head", "Linear", "12 ms", "")]  # fmt: skip


def test_a_table_gives_up_texts_then_columns_but_no_address():
    whole = table(HEAD, ROWS, right=("time",))
    assert max(map(len, whole.splitlines())) > 90
    cut = table(HEAD, ROWS, right=("time",), width=80).splitlines()
    assert max(map(len, cut)) <= 80
    assert cut[1].endswith("~")
    less = table(HEAD, ROWS, right=("time",), width=60).splitlines()
    assert max(map(len, less)) <= 60
    assert "a reason" not in "".join(less)
    assert less[1] == "encoder.layer.10.attention.self.query  Linear  1.5 ms"
    assert less[-1] == "(not shown for want of room: why)"
    least = table(HEAD, ROWS, right=("time",), width=10, first_to_go=("class",)).splitlines()
    assert least[1] == "encoder.layer.10.attention.self.query"
    assert least[-1] == "(not shown for want of room: class, time, why)"


def test_which_columns_go_first_is_the_table_s_to_say():
    shown = table(HEAD, ROWS, right=("time",), width=50, first_to_go=("class",)).splitlines()
    assert shown[0].split() == ["site", "time"]


def test_columns_are_chosen_by_their_heads_and_unknown_ones_refused():
    with fitting(None, ["time"]):
        assert table(HEAD, ROWS).splitlines()[0].split() == ["site", "time"]
        assert table(("a", "b"), [("1", "2")]).splitlines()[0] == "a  b"  # a table that has none of them
    with fitting(None, ["tme"]) as tables:
        table(HEAD, ROWS)
    assert tables.complaint == "there is no column 'tme': expected some of site, class, time, why"
    with fitting(None, ["why"]) as tables:
        table(HEAD, ROWS[1:])  # there is such a column, though nothing is in it
    assert tables.complaint == ""
    with fitting(None, ["x"]) as tables:
        pass
    assert tables.complaint == "there is no column 'x': no table was printed"


def test_sites_of_receipts_stay_whole():
    model = nn.Sequential()
    model.add_module("a_rather_long_name_of_a_module", nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
    with gaff.capture(model, "**<Linear>", "**<Sequential>") as got:
        model(torch.rand(1, 2))
    with fitting(40):
        text = str(got.receipt)
    words = text.split()
    assert "a_rather_long_name_of_a_module.0.0" in words
    assert "a_rather_long_name_of_a_module.0" in words


def test_the_command_line_chooses_columns(capsys):
    assert main(["trace", "examples/digits.py:model", "examples/digits.py:image", "--columns", "time,flops"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["site", "time", "flops"]
    assert main(["trace", "examples/digits.py:model", "examples/digits.py:image", "--columns", "flop"]) == 1
    assert "gaff: there is no column 'flop': expected some of site, class" in capsys.readouterr().err
    for whole in ("--json", "--plain"):
        assert main(["trace", "examples/digits.py:model", "examples/digits.py:image", "--columns", "time", whole]) == 1
        assert capsys.readouterr() == ("", f"gaff: --columns is about tables, and {whole} prints everything: leave one of "
                                           "the two out\n")  # fmt: skip


def in_terminal(columns, *words, **more):
    """What a command writes to a terminal of so many columns."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **more}
    environment = {name: value for name, value in environment.items() if value}
    with subprocess.Popen(
        [sys.executable, "-m", "gaff", *words], stdout=follower, stderr=follower, env=environment
    ) as child:
        os.close(follower)
        told = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:
                break
            if not piece:
                break
            told += piece
    os.close(leader)
    assert child.returncode == 0
    return told.decode()


@pytest.mark.slow
def test_a_terminal_gets_colours_and_lines_that_fit():
    words = ("trace", "examples/digits.py:model", "examples/digits.py:image")
    colored = in_terminal(70, *words, NO_COLOR="")
    assert "\x1b[" in colored
    plain = in_terminal(70, *words, NO_COLOR="1")
    assert "\x1b[" not in plain
    rows = plain.splitlines()[1:]
    assert max(map(len, rows)) <= 70 or "not shown" in rows[-1]
    assert any("head.classes" in row for row in rows)
    assert "not shown for want of room" in plain


def test_a_line_of_progress_says_what_is_judged():
    few = run_text.line(3, {"loss:loss": 0.5}, [], 0.01, 1, 2)
    assert (
        few
        == "gaff: step 3 · loss 0.5 · 2 steps looked at, too few to judge · looking at every step, which takes 1.0% of the time"
    )
    enough = run_text.line(300, {}, [], 0.012, 10, 40)
    assert "nothing wrong in the 40 steps that were looked at" in enough
    assert "looking at one step in 10" in enough
