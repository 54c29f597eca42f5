"""Options that several commands have, each declared once: what a model and its input are, how results are printed.

A function adds one option or a few that belong together; the command that calls it reads them by the names told here.
Nothing here imports torch.
"""

from __future__ import annotations

import argparse

from gaff.errors import PlanError

MODEL_HELP = (
    "file.py:name, package.module:name (a module, or what builds one), torchvision:NAME or timm:NAME "
    "(random weights; those of a file: timm:NAME@weights.pth), transformers:FOLDER, or a "
    "torch.export file ending in .pt2"
)
INPUT_HELP = (
    "randn:1x3x224x224 (also zeros:, ones:, randint:1x16:100), an image file, .npy, .safetensors, file.py:name, "
    "or a text for a model with a tokenizer"
)
RUN_HELP = "the folder that gaff watch --out has written"
_ENDINGS = ".safetensors, .npz (arrays of NumPy by address), .npy (a single one)"


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model that a command works on, as its next word: ``options.model``."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """What the model is called with, as the words after it: ``options.input``, a list."""
    parser.add_argument("input", nargs="*", default=[], metavar="INPUT", help=INPUT_HELP)


def add_input_option(parser: argparse.ArgumentParser, told: str) -> None:
    """What the model is called with, as ``--input``, for commands whose words are sites; ``told``: its help."""
    parser.add_argument("--input", action="append", default=[], metavar="INPUT", help=told)


def add_backward(parser: argparse.ArgumentParser) -> None:
    """Whether a backward pass is run, and from which loss; ``gaff.cli.tensors.loss_of`` reads both options."""
    parser.add_argument("--backward", action="store_true", help="also run backward, from the mean of the first output")
    parser.add_argument(
        "--loss", metavar="FILE:NAME", help="a function from the output to a scalar loss; runs backward"
    )


def add_tensor_file(parser: argparse.ArgumentParser, what: str) -> None:
    """The file that ``what`` is written to: ``options.out``; ``check_tensor_file`` refuses other kinds of files."""
    parser.add_argument("--out", metavar="FILE", help=f"write the {what} to this file: {_ENDINGS}")


def check_tensor_file(out: str | None) -> None:
    """Raises PlanError for a file of another kind, before a model is built for it."""
    if out is not None and not out.endswith((".safetensors", ".npy", ".npz")):
        raise PlanError(f"--out {out!r} has another ending: expected a file name ending in {_ENDINGS}")


def add_table(parser: argparse.ArgumentParser) -> None:
    """How a command that prints a table prints it: ``--json`` or ``--plain`` in its place."""
    add_json(parser, "print data instead of a table")
    parser.add_argument("--plain", action="store_true", help="cells separated by tabs, nothing cut")
    parser.set_defaults(whole_if=("json", "plain"))
    add_columns(parser)
    add_debug(parser)


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Which columns of tables are printed; ``gaff.cli._run`` reads it, and fits all tables to the terminal."""
    parser.add_argument("--columns", metavar="NAMES", help="only the columns with these heads, separated by commas")


def columns_of(options: argparse.Namespace) -> list[str]:
    """The columns that a command line asks for. Raises PlanError where it asks for no table that could be cut."""
    columns = [one.strip() for one in (getattr(options, "columns", None) or "").split(",") if one.strip()]
    whole = next((one for one in getattr(options, "whole_if", ("json",)) if getattr(options, one, False)), None)
    if columns and whole is not None:
        raise PlanError(f"--columns is about tables, and --{whole} prints everything: leave one of the two out")
    return columns


def add_json(parser: argparse.ArgumentParser, told: str = "print data instead") -> None:
    """The option that prints JSON in place of text."""
    parser.add_argument("--json", action="store_true", help=told)


def add_ascii(parser: argparse.ArgumentParser) -> None:
    """The option of reports for terminals that show no more than ASCII."""
    parser.add_argument("--plain", action="store_true", help="no characters beyond ASCII, no boxes, no colours")


def add_debug(parser: argparse.ArgumentParser) -> None:
    """The option that every command has: an error passes with its traceback, in place of one line."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
