"""``gaff report acts --html acts.html``: the page of a harvest, with the texts or pictures that it was made of."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaff.errors import PlanError

if TYPE_CHECKING:
    from gaff.harvesting.overview import Show, Shown
    from gaff.harvesting.store import Store

_AROUND = 12  # tokens before and after the one that is meant


def report_harvest(store: Any, options: argparse.Namespace) -> int:
    """Tell what a harvest holds, as a table or a page. Raises PlanError for what is neither run nor harvest."""
    from gaff.cli.harvest import print_store
    from gaff.harvesting.store import Store
    from gaff.views.text import bytes_text

    if not isinstance(store, Store):
        raise PlanError(f"{options.run[0]!r} is a {type(store).__name__}: expected a run or a harvest")
    if options.json:
        raise PlanError(f"{options.run[0]!r} is a harvest, which has no --json: expected --html, or nothing")
    _check_options(options)
    if not options.html:
        print_store(store)
        return 0
    from gaff.harvesting.overview import save_page

    size = save_page(store, options.html, show=_show(store, options))
    print(f"{options.html}: {bytes_text(size)}, open it in a browser; it needs no network")
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raises PlanError for options that are of no use with a harvest."""
    for name, default in (("live", False), ("rank", 0), ("port", 0), ("idle", None)):
        if getattr(options, name) != default:
            raise PlanError(f"--{name} is of a run: expected none with a harvest")
    for name in ("data", "tokenizer") if not options.html else ():
        if getattr(options, name):
            raise PlanError(f"--{name} is for the page of a harvest: expected --html FILE beside it")


def _show(store: Store, options: argparse.Namespace) -> Show | None:
    """What is to be shown of a row. Raises PlanError for data or a tokenizer that is none."""
    if options.tokenizer:
        from gaff.cli.inputs import tokenizer_of

        if "token" not in store.labels:
            raise PlanError("--tokenizer: the rows have no label 'token': expected a harvest of tokens, with input_ids")
        return _in_context(store, tokenizer_of(options.tokenizer, "--tokenizer"))
    if options.data is None:
        return None
    path = Path(options.data)
    if path.is_dir():
        return _images(path)
    if not path.is_file():
        raise PlanError(f"--data {options.data!r} is not there: expected the .txt file or the folder of images")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # as they were cut when they were harvested
    except UnicodeDecodeError:
        raise PlanError(f"--data {options.data!r} is no text in UTF-8: expected a text on each line") from None
    return lambda row, labels: lines[labels["sample"]] if labels["sample"] < len(lines) else None


def _in_context(store: Store, tokenizer: Any) -> Show:
    """The token of a row, and those beside it that are of the same sample; where some were not kept, three dots."""

    def text(tokens: list[tuple[int, int]]) -> str:
        runs: list[list[int]] = []
        for number, (token, position) in enumerate(tokens):
            if not number or position != tokens[number - 1][1] + 1:
                runs.append([])
            runs[-1].append(token)
        return " … ".join(map(tokenizer.decode, runs))

    def show(row: int, labels: Mapping[str, Any]) -> Shown:
        first = max(0, row - _AROUND)
        told = [store.labels[name][first : row + _AROUND + 1].tolist() for name in ("token", "position", "sample")]
        at, here = row - first, labels["position"]
        around = [one[:2] for one in zip(*told, strict=True) if one[2] == labels["sample"]]
        before = [one for one in around if one[1] < here]
        after = [one for one in around if one[1] > here]
        head, tail = text(before), text(after)
        head += " …" if before and before[-1][1] < here - 1 else ""
        tail = ("… " if after and after[0][1] > here + 1 else "") + tail
        return f"{head} ", tokenizer.decode([told[0][at]]) or "·", f" {tail}"

    return show


def _images(folder: Path) -> Show:
    """The image of a row's sample, by the order in which ``gaff harvest`` takes the files of a folder."""
    from gaff.cli.data import image_files
    from gaff.compat.extras import need

    opened, array = need("PIL.Image", "images", for_="--data"), need("numpy", "images", for_="--data")
    files = image_files(folder)

    def show(row: int, labels: Mapping[str, Any]) -> Shown:
        import torch

        if labels["sample"] >= len(files):
            return None
        with opened.open(files[labels["sample"]]) as image:
            image.thumbnail((96, 96))
            return torch.from_numpy(array.array(image.convert("RGB"))).movedim(-1, 0) / 255

    return show
