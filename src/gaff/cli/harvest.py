"""``gaff harvest MODEL DATA SITE... --out acts/``: what passes at some sites for a whole data set, on disk.

The same command again, after whatever ended it, goes on where it was.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gaff.cli.options import add_debug, add_model
from gaff.errors import PlanError

if TYPE_CHECKING:
    from gaff.harvesting.store import Store

SUMMARY = "keep activations or gradients of a data set on disk; begun again, it goes on"
_DATA_HELP = (
    "file.py:name (a DataLoader, batches, or what makes them), a .txt file with a text on each line, for "
    "transformers:FOLDER, a data set that datasets has saved to disk, or a folder of images"
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare model, data, sites, the folder, and what is kept of each value."""
    add_model(parser)
    parser.add_argument("data", metavar="DATA", help=_DATA_HELP)
    parser.add_argument("sites", nargs="+", metavar="SITE", help="addresses, such as layer4 or 'encoder.layer.*'")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="a new folder, or the same again")
    parser.add_argument("--rows", choices=("sample", "token", "position"), default="sample",
                        help="what a row is: the first dimension; the first two, tokens without padding")  # fmt: skip
    parser.add_argument("--loss", metavar="FILE:NAME", help="of gradients: a function (output, batch) -> scalar loss")
    parser.add_argument("--mask", metavar="KEY", help="the mask in the batch for --rows token; else attention_mask")
    parser.add_argument("--label", action="append", default=[], metavar="NAME=KEY",
                        help="a column of labels from the batch, by key or place; may be repeated")  # fmt: skip
    parser.add_argument("--dtype", metavar="DTYPE", help="of the rows, such as bfloat16; else that of the model")
    parser.add_argument(
        "--top", type=int, metavar="K", help="keep the K numbers of the largest magnitude of each row, and their places"
    )
    parser.add_argument("--sample-norms", action="append", metavar="LAYER",
                        help="with --loss: norms of each sample's gradients; may be repeated")  # fmt: skip
    parser.add_argument("--nonfinite", choices=("count", "mark", "refuse"), default="count",
                        help="what becomes of rows with a NaN or an infinity")  # fmt: skip
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="samples in a batch of texts or images")
    parser.add_argument("--shard", type=int, default=64, metavar="N", help="batches in a shard")
    parser.add_argument("--engine", choices=("ranks", "ray"), default="ranks",
                        help="who makes the shards: this process, or ranks of torchrun; workers of Ray")  # fmt: skip
    parser.add_argument("--accept-changes", action="store_true",
                        help="go on although model, data or versions are others than at the beginning")  # fmt: skip
    parser.epilog = "example: gaff harvest net.py:model net.py:loader 'h.*.mlp' --rows token --out acts"
    add_debug(parser)


def run(options: argparse.Namespace) -> int:
    """Harvest what is not there yet, and tell what there is."""
    from gaff.api import harvest
    from gaff.cli.data import load_data
    from gaff.cli.models import load_model, load_name

    loaded = load_model(options.model)
    labels = dict(map(_label, options.label))
    data = load_data(options.data, loaded, options.batch, [key for key in labels.values() if isinstance(key, str)])
    loss: Any = load_name(options.loss)[1] if options.loss is not None else None
    try:
        store = harvest(
            loaded.model, data, *options.sites, out=options.out, rows=options.rows, loss=loss, mask=options.mask,
            labels=labels, top=options.top,
            sample_norms=options.sample_norms, dtype=options.dtype, nonfinite=options.nonfinite,
            batch=options.batch, shard=options.shard, accept_changes=options.accept_changes, engine=options.engine,
        )  # fmt: skip
    except KeyboardInterrupt:
        import sys

        print(_stopped(options.out), file=sys.stderr)
        raise
    print_store(store)
    return 0


def _stopped(out: str) -> str:
    """What to say after Ctrl-C: what is there, and how to go on."""
    from gaff.harvesting.folder import location_of

    return f"gaff: stopped, {len(location_of(out).shards())} shards are in {out}; the same command again goes on there"


def _label(text: str) -> tuple[str, str | int]:
    """A label's name, and the key or the place in the batch at which it is."""
    name, equals, key = text.partition("=")
    if not name or not equals or not key:
        raise PlanError(f"--label {text!r} is no column: expected NAME=KEY, such as target=1")
    number = key.removeprefix("-")
    return name, int(key) if number.isascii() and number.isdigit() else key


def print_store(store: Store) -> None:
    """A line for each site, and one for the whole."""
    from gaff.cli.printing import show
    from gaff.views.text import bytes_text, counted, table

    rows = [
        (site, "x".join(map(str, column.shape)), str(column.dtype).removeprefix("torch."),
         bytes_text(column.nbytes))
        for site, column in store.items()
    ]  # fmt: skip
    show(table(("site", "shape", "dtype", "on disk"), rows, right=("on disk",)))
    labels = f", with {', '.join(store.labels)}" if store.labels else ""
    print(f"{counted(store.rows, 'row')} in {counted(len(store.shards), 'shard')}{labels}; "
          f"read with gaff.load({str(store.place)!r})")  # fmt: skip
