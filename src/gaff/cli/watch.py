"""``gaff watch -- COMMAND``: run a command as it is, watch what it trains, and tell what was found.

The settings are those of ``gaff.training.watch.settings``, where each is declared once: its name, its default and its
help. This file reads and checks them, and ``gaff.cli.launch`` runs the command.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from gaff.cli.options import add_ascii, add_debug
from gaff.cli.parser import did_you_mean, number, whole
from gaff.cli.printing import has_boxes
from gaff.errors import PlanError

if TYPE_CHECKING:
    from gaff.training.watch.settings import Settings

SUMMARY = "run a training command unchanged, watch it, and tell what is wrong"
# How a setting is read from the command line, by the type that its declaration in ``Settings`` has.
_READ: dict[str, dict[str, Any]] = {
    "tuple[str, ...]": {"action": "append"},
    "bool": {"action": "store_true"},
    "int | None": {"type": whole},
    "float": {"type": number},
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the command that is watched, and an option for every setting of ``Settings`` that has a help text."""
    from dataclasses import fields

    from gaff.training.watch.settings import Settings

    parser.usage = "gaff watch [options] -- COMMAND ..."
    parser.description = (
        f"{SUMMARY}. The command runs as itself; its exit code is returned; all of gaff goes to stderr."
    )
    parser.add_argument("--out", metavar="FOLDER", help="where the record goes; a new folder (default: gaff-runs/...)")
    parser.add_argument("--force", action="store_true", help="remove a run that is in that folder")
    for one in fields(Settings):
        if "help" in one.metadata:
            is_many = isinstance(one.default, tuple)
            told = {**one.metadata, "help": f"{one.metadata['help']}{'; repeatable' if is_many else ''}"}
            default = [] if is_many else one.default
            parser.add_argument(_flag(one.name), dest=one.name, default=default, **_READ[str(one.type)], **told)
    parser.add_argument("--live", action="store_true", help="also serve a page that follows the run, on this machine")
    parser.add_argument("--quiet", action="store_true", help="tell nothing; the record has it all")
    add_ascii(parser)
    add_debug(parser)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, and its arguments")
    parser.epilog = "example: gaff watch --out runs/a -- python train.py --lr 0.1"


def run(options: argparse.Namespace) -> int:
    """Run the command. The exit code is its own; where a signal ended it, the same signal ends this process."""
    from gaff.cli.launch import command_of, launch

    command, program = command_of(options.rest, "watch")
    settings = _settings(options)
    if options.live:
        from gaff.cli.report import need_numpy

        need_numpy("--live")
    if options.keep_batch:
        from gaff.compat.extras import need

        need("safetensors", "files", for_="--keep-batch")
    return launch(
        command,
        program,
        settings,
        out=options.out,
        force=options.force,
        live=options.live,
        quiet=options.quiet,
        plain=options.plain or not has_boxes(sys.stderr),
    )


def _settings(options: argparse.Namespace) -> Settings:
    """The settings that were asked for. Raises PlanError, in the words of the command line, for what cannot be."""
    from gaff.address.grammar import parse
    from gaff.training.rules import known, registry  # noqa: F401  # the first registers all
    from gaff.training.watch.settings import Settings

    try:
        settings = Settings.from_json({**vars(options), "out": None})
    except PlanError as error:
        name, _, problem = str(error).partition("=")
        raise PlanError(f"{_flag(name)} {problem}" if hasattr(options, name) else str(error)) from None
    for rule in settings.rules_off:
        if rule not in registry.RULES:
            near = did_you_mean(rule, registry.RULES)
            names = "a name that docs/rules.md lists" if near else f"one of {', '.join(registry.RULES)}"
            raise PlanError(f"no rule {rule!r}: expected {names}{near}")
    for pattern in (*settings.only, *settings.skip):
        parse(pattern)
    return settings


def _flag(name: str) -> str:
    """The option of a setting: its name without the unit, ``--interval`` for ``interval_s``."""
    return f"--{name.removesuffix('_s').replace('_', '-')}"
