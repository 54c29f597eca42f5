"""DATA on the command line: batches for ``gaff harvest``. Imports torch.

A name in a Python file, a file of texts for a model with a tokenizer, or a folder of images for one that says how it
wants them. Nothing is unpickled, and nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from gaff.cli.inputs import is_image, load_inputs, tokenizer_of
from gaff.cli.models import Loaded, load_name
from gaff.errors import PlanError


def load_data(spec: str, loaded: Loaded, batch: int) -> Any:
    """What ``spec`` names, as ``gaff.harvest`` takes it; ``batch``: samples in a batch of texts or images.

    Raises PlanError that says what was expected, or which package to install.
    """
    path = Path(spec)
    if path.suffix.lower() == ".txt":
        return _texts(path, loaded, batch)
    if path.is_dir():
        return _images(path, loaded, batch)
    _, value = load_name(spec)
    if callable(value) and not isinstance(value, Iterable):
        value = value()
    return value


class _Made(Dataset[Any]):
    """Samples that are made when they are asked for. ``fingerprint`` tells their source from another."""

    def __init__(self, things: list[Any], make: Callable[[Any], Any], source: str) -> None:
        self._things, self._make = things, make
        self.fingerprint = hashlib.sha256(source.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._things)

    def __getitem__(self, number: int) -> Any:
        return self._make(self._things[number])


def _texts(path: Path, loaded: Loaded, batch: int) -> DataLoader[Any]:
    """Batches of lines that have about as many tokens, so that little is padded; a line's number is its sample's."""
    if loaded.folder is None:
        raise PlanError(f"{str(path)!r} holds texts: expected a transformers:FOLDER model, whose tokenizer reads them")
    if not path.is_file():
        raise PlanError(f"{str(path)!r} is no file: expected one with a text on each line")
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise PlanError(f"{str(path)!r} is empty: expected a text on each line")
    tokenizer = tokenizer_of(loaded.folder, f"data {str(path)!r}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    lengths = [len(ids) for ids in tokenizer(lines, truncation=True)["input_ids"]]
    order = sorted(range(len(lines)), key=lambda number: lengths[number])
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]

    def together(texts: list[str]) -> dict[str, Any]:
        return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

    return DataLoader(_Made(lines, str, "\n".join(lines)), batch_sampler=batches, collate_fn=together)


def _images(path: Path, loaded: Loaded, batch: int) -> DataLoader[Any]:
    """Batches of the images in a folder and those below, by name, as the model wants them.

    The second part of a batch is the number of each image's folder, in the order of their names.
    """
    files = sorted(one for one in path.rglob("*") if is_image(one))
    if not files:
        raise PlanError(f"{str(path)!r} holds no images: expected .png, .jpg and the like, also in folders below")
    folders = sorted({one.parent for one in files})

    def sample(file: Path) -> Any:
        args, kwargs = load_inputs([str(file)], loaded)
        if kwargs:
            return {name: value[0] for name, value in kwargs.items()}, folders.index(file.parent)
        return args[0][0], folders.index(file.parent)

    source = "\n".join(f"{one} {one.stat().st_size} {one.stat().st_mtime_ns}" for one in files)
    return DataLoader(_Made(files, sample, source), batch_size=batch)
