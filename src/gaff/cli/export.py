"""``gaff export RUN --to PARTNER``: a watched run as a table, as event files, or in a tracker."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

from gaff.errors import PlanError
from gaff.integrations import rows, tables
from gaff.record.run import Record, load

WRITERS = {"csv": tables.to_csv, "jsonl": tables.to_jsonl, "parquet": tables.to_parquet}
TRACKERS = {"wandb": "Wandb", "mlflow": "MLflow", "trackio": "Trackio"}


def run(options: Namespace) -> int:
    record = load(options.run)
    has_histograms = options.to == "tensorboard"
    rows.check(record, options.site, [one for one in options.stat if not has_histograms or one != rows.MAGNITUDES])
    if options.to in WRITERS:
        _to_file(record, options)
    elif options.to == "tensorboard":
        _to_folder(record, options)
    else:
        _to_tracker(record, options)
    return 0


def _to_file(record: Record, options: Namespace) -> None:
    path = Path(options.out or f"{_stem(record)}.{options.to}")
    count = WRITERS[options.to](record, path, sites=options.site, stats=options.stat)
    print(f"wrote {count} rows to {path}, {len(record.findings)} findings to {tables.findings_path(path)}")


def _to_folder(record: Record, options: Namespace) -> None:
    from gaff.integrations.tensorboard import TensorBoard

    folder = options.out or f"{_stem(record)}-tensorboard"
    with TensorBoard(folder, **_chosen(options)) as sender:
        count = sender.send(record)
    print(f"wrote {count} numbers and histograms to {folder}; to look at them: tensorboard --logdir {folder}")


def _to_tracker(record: Record, options: Namespace) -> None:
    if options.out is not None:
        raise PlanError(
            f"--out {options.out!r}: {options.to} keeps its runs where it is set up to: expected its own variables, "
            "such as WANDB_DIR, MLFLOW_TRACKING_URI or TRACKIO_DIR"
        )
    name = TRACKERS[options.to]
    with getattr(import_module(f"gaff.integrations.{options.to}"), name)(**_chosen(options)) as sender:
        count = sender.send(record)
    print(f"sent {count} numbers to {options.to}")


def _chosen(options: Namespace) -> dict[str, Any]:
    """Without a choice of stats the sender's own."""
    return {"sites": options.site, **({"stats": options.stat} if options.stat else {})}


def _stem(record: Record) -> Path:
    """Beside the run."""
    return record.path if record.path.name not in ("", "..") else record.path.resolve()
