"""``gaff try -- COMMAND``: run a training command again with one thing changed each time, and tell what helps.

``gaff.cli.trials`` runs the command, ``gaff.training.diagnosis`` changes things inside it, ``gaff.record`` compares.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gaff.cli.options import add_debug, add_json
from gaff.cli.parser import whole
from gaff.errors import PlanError, RecordError

if TYPE_CHECKING:
    from gaff.cli.trials import Trials
    from gaff.record.run import Record

SUMMARY = "run a training command again with one thing changed each time, and tell what is wrong by what helps"
_FOUND = 3
_LEAST_STEPS = 5
_LAST = ("decay=0", "unfreeze", "train-mode", "lr=0.1x", "lr=100x")  # where the loss hardly falls
_USUAL = ("lr=0.1x", "lr=10x", "scramble", "one-batch")  # where nothing is suspected


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare how long and how often the command runs, and which things are changed."""
    from gaff.record.experiments import KINDS

    parser.usage = "gaff try [options] -- COMMAND ..."
    parser.description = (
        f"{SUMMARY}. Each run is the command from its beginning, ended after --steps: what it writes until then it "
        "writes each time, over what was there. Compiled code runs eagerly. Exit code 3 where something is wrong."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [f"  {name:<11} {kind.text}" for name, kind in KINDS.items()]
    parser.description = "\n".join([_wrapped(parser.description), "", "experiments:", *lines])
    parser.add_argument("--steps", type=whole, default=200, metavar="N", help="of each run (default: 200)")
    parser.add_argument("--only", action="append", default=[], metavar="NAMES",
                        help="make these experiments, such as lr=0.1x,scramble; repeatable")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="make every experiment")
    parser.add_argument("--jobs", type=whole, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--out", metavar="FOLDER", help="where the records go; a new folder (default: gaff-runs/...)")
    parser.add_argument("--force", action="store_true", help="remove a run that is in that folder")
    add_json(parser, "print data instead of a table")
    add_debug(parser)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, and its arguments")
    parser.epilog = "example: gaff try --steps 100 -- python train.py --lr 0.1"


def run(options: argparse.Namespace) -> int:
    """Run the command as it is, choose experiments by what that shows, make them, and tell the verdict."""
    from gaff.cli.launch import command_of
    from gaff.cli.trials import Trials
    from gaff.inspection.saved import load
    from gaff.record.experiments import Experiment

    command, program = command_of(options.rest, "try")
    if options.steps < 2 * _LEAST_STEPS:
        raise PlanError(f"--steps {options.steps}: expected {2 * _LEAST_STEPS} or more, or no loss can be compared")
    if options.jobs < 1:
        raise PlanError(f"--jobs {options.jobs}: expected 1 or more")
    asked = [Experiment.parse(word) for words in options.only for word in words.split(",") if word]
    if asked and options.all:
        raise PlanError("--only and --all: expected one of them")
    trials = Trials(command, program, options.out, options.steps, force=options.force)
    _tell(f"each run is the whole command, ended after {options.steps} steps; first it runs as it is")
    code = trials.as_it_is()
    try:
        record = load(trials.folder, "run")
    except RecordError as error:
        ended = f"it ended with exit code {code}, and" if code else "it"
        raise RecordError(
            f"nothing can be compared: the run as it is has trained no model of torch; {ended} printed last: "
            f"{trials.output() or 'nothing'}"
        ) from error
    _need_steps(record, trials, code)
    names = _chosen(record, [one.name for one in asked], everything=options.all)
    _tell(f"as it is: {record.verdict}")
    runs = -(-len(names) // options.jobs)
    _tell(f"{len(names)} runs follow, about {runs * trials.seconds:.0f} s: {', '.join(names)}")
    trials.run(names, options.jobs)
    more = [] if options.only or options.all else _more(load(trials.folder, "run"))
    if more:
        _tell(f"none of that helps, and the loss hardly falls; {len(more)} more runs: {', '.join(more)}")
        trials.run(more, options.jobs)
    return _print(load(trials.folder, "run"), as_data=options.json)


def _chosen(record: Record, asked: list[str], *, everything: bool) -> list[str]:
    """What is to be run besides the command as it is: it again, with another seed, and the experiments.

    Without ``asked`` those that would tell what is suspected; where nothing is, or it is certain, the usual ones.
    """
    from gaff.record.experiments import AGAIN, KINDS, Experiment

    verdict = record.verdict
    if everything:
        asked = [Experiment.parse(name).name for name in KINDS if name != "seed"]
        asked.insert(1, "lr=10x")
    if not asked:
        suspected = [*verdict.experiments, *(one for other in verdict.alternatives[:2] for one in other.experiments)]
        if not verdict.experiments:
            suspected += _USUAL
        asked = [Experiment.parse(name).name for name in suspected]
    always = [AGAIN] if any(name.startswith("seed") for name in asked) else [AGAIN, "seed=1"]
    return list(dict.fromkeys([*always, *asked]))


def _more(record: Record) -> list[str]:
    """What else is worth a try where the loss hardly falls and nothing that was changed has helped so far."""
    known = record.experiments
    if known is None or known.bare.loss is None or record.verdict.state == "wrong":
        return []
    is_stuck = known.bare.start - known.bare.loss < 0.1 * abs(known.bare.start)
    made = {one.name for one in known.changed}
    return [name for name in _LAST if name not in made] if is_stuck else []


def _need_steps(record: Record, trials: Trials, code: int) -> None:
    """Raises RecordError where the run as it is has shown too little to compare anything with."""
    losses = [name for name in record.scalars if name.startswith("loss:")]
    if record.steps >= _LEAST_STEPS and losses:
        return
    seen = f"{record.steps} steps of a torch.optim.Optimizer were seen" if losses else "no loss was seen"
    ended = f"; it ended with exit code {code}" if code else ""
    raise RecordError(
        f"nothing can be compared: in the run as it is {seen}{ended}, expected {_LEAST_STEPS} or more with a loss. It "
        f"printed last: {trials.output() or 'nothing'}"
    )


def _print(record: Record, *, as_data: bool) -> int:
    """The table and the verdict; returns the exit code."""
    from gaff.cli.printing import print_data, show
    from gaff.views import run_text
    from gaff.views.text import printable
    from gaff.views.trials_text import trials_table

    known, verdict = record.experiments, record.verdict
    assert known is not None  # ``_need_steps`` has seen a loss, and runs were made
    if as_data:
        print_data({**verdict.to_dict(), "experiments_made": known.to_dict()})
    else:
        told = [trials_table(known), "", f"{record.path}: {run_text.verdict(record)}", *run_text.reasons(record)]
        show(printable("\n".join(told)))
    return _FOUND if verdict.state == "wrong" else 0


def _tell(text: str) -> None:
    from gaff.training.watch.settings import to_stderr

    to_stderr(f"gaff: {text}")


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 100)
