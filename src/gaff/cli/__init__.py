"""The command line. Importing it, and ``gaff --help``, load neither torch nor any model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from gaff.errors import GaffError
from gaff.version import __version__

_MODEL_HELP = (
    "file.py:name, package.module:name (a module, or what builds one), torchvision:NAME, timm:NAME, "
    "transformers:FOLDER, or a torch.export file ending in .pt2"
)
_INPUT_HELP = (
    "randn:1x3x224x224 (also zeros:, ones:, randint:1x16:100), an image file, .npy, .safetensors, file.py:name, "
    "or a text for a model with a tokenizer"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: an error, told in one line; 2: the command was not understood."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not hasattr(options, "command"):
        parser.print_help()
        return 2
    try:
        code: int = import_module(f"gaff.cli.{options.command}").run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # whatever a model or a file does, the user gets one line
        if options.debug:
            raise
        print(_one_line(error), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gaff",
        description="See, keep and change any tensor that flows through any PyTorch model, without editing the model.",
    )
    parser.add_argument("--version", action="version", version=f"gaff {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_trace(commands)
    _add_take(commands)
    _add_sites(commands)
    _add_apply(commands)
    _add_anatomy(commands)
    _add_nan(commands)
    _add_watch(commands)
    _add_report(commands)
    _add_runs(commands)
    _add_diff(commands)
    _add_export(commands)
    _add_replay(commands)
    return parser


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "trace", "run a model once and tell every call as a table")
    parser.add_argument("input", nargs="*", metavar="INPUT", help=_INPUT_HELP)
    parser.add_argument("--backward", action="store_true", help="also run backward, from the mean of the first output")
    parser.add_argument(
        "--loss", metavar="FILE:NAME", help="a function from the output to a scalar loss; runs backward"
    )
    parser.add_argument("--ops", action="store_true", help="also every op in the modules' own forwards")
    parser.add_argument("--tree", action="store_true", help="a tree instead of a table")
    parser.add_argument(
        "--no-flops", action="store_true", help="do not count operations; times are closer to bare ones"
    )
    parser.add_argument("--save", metavar="FILE", help="also write the trace, as JSON")
    parser.add_argument("--html", metavar="FILE", help="also write a page: table, tree, graph, activations as pictures")


def _add_take(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "take", "extract features; the model runs only as far as it must")
    parser.add_argument("sites", nargs="+", metavar="SITE", help="addresses, such as layer4 or 'encoder.layer.*'")
    parser.add_argument("--input", action="append", default=[], metavar="INPUT", help=f"{_INPUT_HELP}; may be repeated")
    parser.add_argument("--out", metavar="FILE", help="write the features to this .safetensors file")


def _add_sites(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "sites", "list what can be addressed in a model")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="only these, such as '**<Conv2d>'")
    parser.add_argument("--ops", action="store_true", help="also the ops in the modules' own forwards; needs --input")
    parser.add_argument(
        "--input", action="append", default=[], metavar="INPUT", help=f"tell shapes as well: {_INPUT_HELP}"
    )


def _add_apply(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "run a model under a saved plan of edits, and tell what it changed"
    parser = commands.add_parser("apply", help=summary, description=summary)
    parser.add_argument("plan", metavar="PLAN", help="a file that plan.save('plan.json') wrote")
    _add_common(parser, "apply")
    parser.add_argument("input", nargs="*", metavar="INPUT", help=_INPUT_HELP)
    parser.add_argument("--backward", action="store_true", help="also run backward, from the mean of the first output")
    parser.add_argument(
        "--loss", metavar="FILE:NAME", help="a function from the output to a scalar loss; runs backward"
    )
    parser.add_argument("--out", metavar="FILE", help="write the edited outputs to this .safetensors file")


def _add_anatomy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "anatomy", "explain the backward pass of a module: which gradient is whose")
    parser.add_argument("input", metavar="INPUT", help=_INPUT_HELP)
    parser.add_argument("path", nargs="?", default="", metavar="PATH", help="a module inside, such as layer1.0.conv1")
    parser.add_argument("--tree", action="store_true", help="a tree instead of a table")
    parser.add_argument("--svg", metavar="FILE", help="also write the graph as a picture")


def _add_nan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "find the op in which the first NaN or inf of a step or of a training script began"
    parser = commands.add_parser("nan", help=summary, description=f"{summary}; exit code 3 where there is one")
    parser.add_argument("--loss", metavar="FILE:NAME", help="of a model: a function from the output to a scalar loss")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="SITE", help="an op whose infinite values are meant; repeatable"
    )
    parser.add_argument(
        "--again", action="store_true", help="of a script: where it began outside its models, run it once more and look"
    )
    _add_common(parser, "nan")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="of a model its INPUT; of a script its arguments"
    )


def _add_watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "run a training command unchanged, watch it, and tell what is wrong"
    parser = commands.add_parser(
        "watch",
        help=summary,
        description=f"{summary}. The command runs as itself; its exit code is returned; all of gaff goes to stderr.",
        usage="gaff watch [options] -- COMMAND ...",
    )
    parser.set_defaults(command="watch")
    parser.add_argument("--out", metavar="FOLDER", help="where the record goes; a new folder (default: gaff-runs/...)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="modules to look at, such as 'layer4.*'"
    )
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="modules not to look at")
    parser.add_argument("--every", type=int, metavar="N", help="look at each nth step (default: as the budget allows)")
    parser.add_argument(
        "--budget", type=float, default=0.01, metavar="SHARE", help="of the time that looking may take (default: 0.01)"
    )
    parser.add_argument(
        "--rules-off", action="append", default=[], metavar="RULE", help="a health rule that is not asked; repeatable"
    )
    parser.add_argument(
        "--interval", type=float, default=10.0, metavar="SECONDS", help="between lines of progress (default: 10)"
    )
    parser.add_argument(
        "--keep-batch",
        action="store_true",
        help="keep batch and weights of a step that goes wrong, for gaff replay",
    )
    parser.add_argument("--live", action="store_true", help="also serve a page that follows the run, on this machine")
    parser.add_argument("--quiet", action="store_true", help="tell nothing; the record has it all")
    parser.add_argument("--plain", action="store_true", help="no characters beyond ASCII, no boxes")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, and its arguments")


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "tell what was found in a watched run"
    parser = commands.add_parser("report", help=summary, description=summary)
    parser.set_defaults(command="report")
    parser.add_argument("run", nargs="+", metavar="RUN", help="the folder that gaff watch --out has written")
    parser.add_argument("--json", action="store_true", help="print data instead")
    parser.add_argument("--all", action="store_true", help="every site in the table, however many there are")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures instead; several runs in one")
    parser.add_argument("--live", action="store_true", help="serve the page on this machine, and follow the run")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of --live (default: any that is free)")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the process whose tables a page shows")
    parser.add_argument(
        "--idle",
        type=float,
        metavar="SECONDS",
        help="end --live after the run, when nobody has looked for so long",
    )
    parser.add_argument("--plain", action="store_true", help="no characters beyond ASCII, no boxes")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_runs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "list the runs of a folder, with their verdicts"
    parser = commands.add_parser("runs", help=summary, description=summary)
    parser.set_defaults(command="runs")
    parser.add_argument("folder", nargs="?", default="gaff-runs", metavar="FOLDER", help="(default: gaff-runs)")
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "tell where two runs, or two traces, first part"
    parser = commands.add_parser("diff", help=summary, description=f"{summary}; exit code 3 where they do")
    parser.set_defaults(command="diff")
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a watched run, or a file of gaff trace --save")
    parser.add_argument("--tolerance", type=float, metavar="SHARE", help="the relative difference that is allowed")
    parser.add_argument("--json", action="store_true", help="print data instead")
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "run a batch that a watched run has kept once more, and look at every op"
    parser = commands.add_parser(
        "replay", help=summary, description=f"{summary}; exit code 3 where it finds a NaN or inf"
    )
    parser.set_defaults(command="replay")
    parser.add_argument("run", metavar="RUN", help="a run of gaff watch --keep-batch")
    parser.add_argument("--model", required=True, metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("--step", type=int, metavar="N", help="whose batch (default: the first that was kept)")
    parser.add_argument("--html", metavar="FILE", help="also write a page of the run: ops, graph, pictures")
    parser.add_argument("--json", action="store_true", help="print data instead")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "write a watched run as a table or event files, or send it to a tracker"
    parser = commands.add_parser("export", help=summary, description=summary)
    parser.set_defaults(command="export")
    parser.add_argument("run", metavar="RUN", help="the folder that gaff watch --out has written")
    parser.add_argument(
        "--to",
        required=True,
        choices=["csv", "jsonl", "parquet", "tensorboard", "wandb", "mlflow", "trackio"],
        help="the partner; all but csv and jsonl need its package",
    )
    parser.add_argument("--out", metavar="PATH", help="the file or folder (default: beside the run)")
    parser.add_argument("--site", action="append", default=[], metavar="PATTERN", help="sites, such as '**:grad'")
    parser.add_argument("--stat", action="append", default=[], metavar="NAME", help="numbers of a site, such as rms")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary)
    _add_common(parser, name)
    return parser


def _add_common(parser: argparse.ArgumentParser, name: str) -> None:
    parser.set_defaults(command=name)
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    parser.add_argument("--plain", action="store_true", help="cells separated by tabs, nothing cut")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _one_line(error: Exception) -> str:
    kind = "" if isinstance(error, GaffError) else f"{type(error).__name__}: "
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) or "no message"
    return f"gaff: {kind}{text if len(text) <= 500 else text[:499] + '~'}"
