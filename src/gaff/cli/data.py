"""DATA on the command line: batches for ``gaff harvest``. Imports torch.

A name in a Python file, a file of texts for a model with a tokenizer, a data set of Hugging Face that was saved to
disk, or a folder of images for a model that says how it wants them. Nothing is unpickled, and nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from gaff.cli.inputs import is_image, load_inputs, tokenizer_of
from gaff.cli.models import Loaded, load_name
from gaff.compat.extras import need
from gaff.errors import PlanError
from gaff.harvesting.sequences import OnDemand, by_length
from gaff.views.text import counted

_TABLE = "dataset_info.json"  # what a data set of Hugging Face on disk has beside its rows


def load_data(spec: str, loaded: Loaded, batch: int, columns: Sequence[str] = ()) -> Any:
    """What ``spec`` names, as ``gaff.harvest`` takes it.

    ``batch``: samples in a batch of texts or images; ``columns``: of a data set on disk, those that are to come along.
    Raises PlanError that says what was expected, or which package to install.
    """
    path = Path(spec)
    if path.suffix.lower() == ".txt":
        if not path.is_file():
            raise PlanError(f"{str(path)!r} is no file: expected one with a text on each line")
        return _texts(_lines(path), {}, path, loaded, batch)
    if (path / _TABLE).is_file():
        return _table(path, loaded, batch, columns)
    if path.is_dir():
        return _images(path, loaded, batch)
    others = " of a DataLoader or a list of batches, a .txt file of texts, a folder of images, or one of save_to_disk"
    _, value = load_name(spec, "data", others)
    if callable(value) and not isinstance(value, Iterable):
        value = value()
    return value


def _lines(path: Path) -> list[str]:
    """The lines of a file as editors count them: other marks that Unicode calls ends of lines stay in their texts."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise PlanError(f"{str(path)!r} is no UTF-8 at byte {error.start}: expected texts in UTF-8") from None
    return lines[:-1] if not lines[-1] else lines


def _table(path: Path, loaded: Loaded, batch: int, columns: Sequence[str]) -> Any:
    """A data set that ``save_to_disk`` has written, if it has tokens; else batches of its column ``text``."""
    table = need("datasets", for_=f"data {str(path)!r}").load_from_disk(str(path))
    if not hasattr(table, "column_names") or isinstance(table, dict):
        raise PlanError(f"{str(path)!r} holds several parts: expected the folder of one, such as {path / 'train'}")
    if "input_ids" in table.column_names:
        return table
    if "text" not in table.column_names:
        raise PlanError(
            f"{str(path)!r} has the columns {', '.join(table.column_names)}: expected 'text' or 'input_ids', or a "
            "DataLoader, by file.py:name"
        )
    missing = next((name for name in columns if name not in table.column_names), None)
    if missing is not None:
        raise PlanError(f"{str(path)!r} has no column {missing!r}: expected one of {', '.join(table.column_names)}")
    return _texts(list(table["text"]), {name: list(table[name]) for name in columns}, path, loaded, batch)


def _texts(lines: list[str], columns: dict[str, list[Any]], path: Path, loaded: Loaded, batch: int) -> DataLoader[Any]:
    """Batches of texts that have about as many tokens, so that little is padded; a line's number is its sample's."""
    if loaded.folder is None:
        raise PlanError(f"{str(path)!r} holds texts: expected a transformers:FOLDER model, whose tokenizer reads them")
    if not lines:
        raise PlanError(f"{str(path)!r} is empty: expected a text on each line")
    tokenizer = tokenizer_of(loaded.folder, f"data {str(path)!r}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"  # before a text it would move the positions that a model counts for itself
    most = tokenizer.model_max_length
    lengths = [len(ids) for ids in tokenizer(lines, verbose=False)["input_ids"]]
    if empty := lengths.count(0):
        print(f"gaff: {counted(empty, 'text')} of {len(lines)} without a token, left out: samples keep the numbers of "
              "their lines", file=sys.stderr)  # fmt: skip
    numbers = [number for number, length in enumerate(lengths) if length]
    if cut := sum(length > most for length in lengths):
        print(f"gaff: {counted(cut, 'text')} of {len(lines)} cut to {most} tokens, the most that this tokenizer gives",
              file=sys.stderr)  # fmt: skip

    labels = {name: _numbers(name, values, path) for name, values in columns.items()}

    def together(numbers: list[int]) -> dict[str, Any]:
        texts = [lines[number] for number in numbers]
        own = {name: values[numbers] for name, values in labels.items()}
        return {**tokenizer(texts, padding=True, truncation=True, return_tensors="pt"), **own}

    samples = OnDemand(range(len(lines)), int, _fingerprint("\n".join(lines)))
    batches = [[numbers[at] for at in some] for some in by_length([min(lengths[one], most) for one in numbers], batch)]
    return DataLoader(samples, batch_sampler=batches, collate_fn=together)


def _numbers(name: str, values: list[Any], path: Path) -> torch.Tensor:
    """A column as a tensor. Raises PlanError for one of text, or with a value that is missing."""
    try:
        return torch.tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        odd = next((one for one in values if not isinstance(one, (int, float, list))), values[0])
        raise PlanError(
            f"{str(path)!r}: column {name!r} holds {odd!r:.60}: expected numbers in every row, to be kept beside them"
        ) from None


def _images(path: Path, loaded: Loaded, batch: int) -> DataLoader[Any]:
    """Batches of the images in a folder and those below, by name, as the model wants them.

    The second part of a batch is the number of each image's folder, in the order of their names.
    """
    files = image_files(path)
    folders = sorted({one.parent for one in files})

    def sample(file: Path) -> Any:
        args, kwargs = load_inputs([str(file)], loaded)
        if kwargs:
            return {name: value[0] for name, value in kwargs.items()}, folders.index(file.parent)
        return args[0][0], folders.index(file.parent)

    source = "\n".join(f"{one} {one.stat().st_size} {one.stat().st_mtime_ns}" for one in files)
    return DataLoader(OnDemand(files, sample, _fingerprint(source)), batch_size=batch)


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and those below, by name. Raises PlanError where there is none."""
    files = sorted(one for one in folder.rglob("*") if is_image(one))
    if not files:
        raise PlanError(f"{str(folder)!r} holds no images: expected .png, .jpg and the like, also in folders below")
    return files


def _fingerprint(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]
