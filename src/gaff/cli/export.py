"""``gaff export RUN --to PARTNER``: a watched run as a table, as event files, or in a tracker; a harvest as files.

A run needs no torch, and is read while it goes on. CSV and JSON lines need no other package; every other partner needs
its own, and the message says which where it is missing.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gaff.cli.options import RUN_HELP, add_debug
from gaff.cli.parser import one_of
from gaff.errors import PlanError

if TYPE_CHECKING:
    from pathlib import Path

    from gaff.integrations.partners import Sender
    from gaff.record.run import Record

SUMMARY = "write a watched run or a harvest as files of others, or send a run to a tracker"
WRITERS = ("csv", "jsonl", "parquet")
STORES = ("numpy", "parquet", "datasets", "zarr")  # what a harvest can be written as


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the run, the partner it goes to, and which numbers of it go there."""
    partners = [*WRITERS, "tensorboard", *TRACKERS, *(one for one in STORES if one not in WRITERS)]
    parser.add_argument("run", metavar="RUN", help=f"{RUN_HELP}; or a harvest")
    parser.add_argument(
        "--to",
        required=True,
        type=one_of(partners),
        metavar="PARTNER",
        help=f"one of {', '.join(partners)}; all but csv and jsonl need its package; of a harvest {', '.join(STORES)}",
    )
    parser.add_argument("--out", metavar="PATH", help="the file or folder (default: beside the run)")
    parser.add_argument("--site", action="append", default=[], metavar="PATTERN", help="sites, such as '**:grad'")
    parser.add_argument("--stat", action="append", default=[], metavar="NAME", help="numbers of a site, such as rms")
    add_debug(parser)
    parser.epilog = "example: gaff export runs/a --to csv --site 'layer4**' --stat rms"


def run(options: argparse.Namespace) -> int:
    """Read the run, check what is asked of it, and send it on."""
    from gaff.inspection.saved import load
    from gaff.integrations import rows
    from gaff.record.run import Record

    record = load(options.run)
    if not isinstance(record, Record):
        return _harvest(record, options)
    if options.to not in (*WRITERS, "tensorboard", *TRACKERS):
        raise PlanError(f"--to {options.to} is for a harvest, and {options.run!r} is a run: expected another")
    has_histograms = options.to == "tensorboard"
    rows.check(record, options.site, [one for one in options.stat if not has_histograms or one != rows.MAGNITUDES])
    if options.to in WRITERS:
        _to_file(record, options)
    elif options.to == "tensorboard":
        _to_folder(record, options)
    else:
        _to_tracker(record, options)
    return 0


def _harvest(store: Any, options: argparse.Namespace) -> int:
    """Write a harvest as files; tells where they are. Raises PlanError for what is none, or goes elsewhere."""
    from pathlib import Path

    from gaff.harvesting.store import Store
    from gaff.integrations import harvests
    from gaff.views.text import counted

    if not isinstance(store, Store):
        raise PlanError(f"{options.run!r} is a {type(store).__name__}: expected a run or a harvest")
    if options.to not in STORES or options.stat:
        what = "--stat" if options.stat else f"--to {options.to}"
        raise PlanError(f"{what} is for a run, and {options.run!r} is a harvest: expected --to {', '.join(STORES)}")
    ending = {"parquet": ".parquet"}.get(options.to, f"-{options.to}")
    place = Path(Path(options.run).name) if "://" in options.run else Path(options.run).resolve()
    path = Path(options.out or place.with_name(f"{place.name}{ending}"))
    getattr(harvests, f"to_{options.to}")(store, path, sites=options.site)
    print(f"wrote {counted(store.rows, 'row')} to {path}")
    if not store.is_complete:
        print("the harvest is not complete: the same gaff harvest again goes on")
    return 0


def _to_file(record: Record, options: argparse.Namespace) -> None:
    """Write a table, and its findings beside it; tells where they are."""
    from pathlib import Path

    from gaff.integrations import tables

    write = {"csv": tables.to_csv, "jsonl": tables.to_jsonl, "parquet": tables.to_parquet}[options.to]
    path = Path(options.out or f"{_stem(record)}.{options.to}")
    count = write(record, path, sites=options.site, stats=options.stat)
    print(f"wrote {count} rows to {path}, {len(record.findings)} findings to {tables.findings_path(path)}")


def _to_folder(record: Record, options: argparse.Namespace) -> None:
    """Write event files of TensorBoard, histograms among them; tells how to look at them."""
    from gaff.integrations.tensorboard import TensorBoard

    folder = options.out or f"{_stem(record)}-tensorboard"
    with TensorBoard(folder, **_chosen(options)) as sender:
        count = sender.send(record)
    print(f"wrote {count} numbers and histograms to {folder}; to look at them: tensorboard --logdir {folder}")


def _to_tracker(record: Record, options: argparse.Namespace) -> None:
    """Send numbers to a run of a tracker. Raises PlanError for ``--out``: each has its own way to say where."""
    if options.out is not None:
        raise PlanError(
            f"--out {options.out!r}: {options.to} keeps its runs where it is set up to: expected its own variables, "
            "such as WANDB_DIR, MLFLOW_TRACKING_URI or TRACKIO_DIR"
        )
    with TRACKERS[options.to](_chosen(options)) as sender:
        count = sender.send(record)
    print(f"sent {count} numbers to {options.to}")


def _wandb(chosen: dict[str, Any]) -> Sender:
    """A sender to Weights & Biases of the sites and stats that were chosen."""
    from gaff.integrations.wandb import Wandb

    return Wandb(**chosen)


def _mlflow(chosen: dict[str, Any]) -> Sender:
    """A sender to MLflow of the sites and stats that were chosen."""
    from gaff.integrations.mlflow import MLflow

    return MLflow(**chosen)


def _trackio(chosen: dict[str, Any]) -> Sender:
    """A sender to trackio of the sites and stats that were chosen."""
    from gaff.integrations.trackio import Trackio

    return Trackio(**chosen)


TRACKERS = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Which sites and stats a sender is asked for; without a choice of stats it sends its own."""
    return {"sites": options.site, **({"stats": options.stat} if options.stat else {})}


def _stem(record: Record) -> Path:
    """The name of the run's folder, to which an ending is added: what is written lies beside the run."""
    return record.path if record.path.name not in ("", "..") else record.path.resolve()
