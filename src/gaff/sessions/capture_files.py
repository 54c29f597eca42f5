"""The file of a saved capture: tensors by address, and what they are a part of as JSON in its metadata.

Everything is taken apart before the disk is touched, and the file is put in place as a whole. ``saved_capture`` reads
it.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from os import PathLike
from typing import Any

from torch import Tensor

from gaff.compat import elements, extras
from gaff.compat.files import replacing
from gaff.errors import PlanError
from gaff.sessions.reading import Reading, ReadSite
from gaff.sessions.receipt import Receipt
from gaff.sessions.saved_values import Packing
from gaff.version import __version__

ENDING = ".safetensors"
FORMAT = 1
_MOST_HEADER = 90 * 10**6  # bytes; safetensors reads 100 MB of names and text, no more


def library() -> tuple[Any, Any]:
    """The package that reads and writes tensors, and the error that it raises. Raises PlanError without it."""
    failure = extras.need("safetensors", "files", for_="a saved capture").SafetensorError
    return extras.need("safetensors.torch"), failure


def write(
    path: str | PathLike[str],
    reading: Reading,
    receipt: Receipt,
    model: str,
    classes: Mapping[int, Sequence[str]],
    ranks: Mapping[int, int],
) -> None:
    """Write what ``reading`` finds to ``path``; ``classes`` are those of each site's module, by identity of its stream,
    ``ranks`` the places of these modules in the model.

    Raises PlanError, before anything is written, for another ending, for a value that cannot be written, and without
    safetensors; RecordError where the file cannot be written.
    """
    if not str(path).endswith(ENDING):
        raise PlanError(f"{str(path)!r} has another ending: expected a file name ending in {ENDING}")
    package, failure = library()
    packing = Packing()
    streams = reading.streams.all
    numbers = {id(stream): at for at, stream in enumerate(streams)}
    rows = [
        {
            "site": list(astuple(stream.site)), "name": stream.name, "also": list(stream.also),
            "is_plain": reading.by_name.get(stream.name) is stream,
            "classes": list(classes.get(id(stream), ())), "rank": ranks.get(id(stream), -1), "evicted": stream.evicted,
            "inner": [numbers[id(one)] for one in stream.inner.values()], "events": _events(stream, packing),
        }
        for stream in streams
    ]  # fmt: skip
    told = {"format": FORMAT, "sites": rows, "receipt": {**asdict(receipt), "optional": sorted(receipt.optional)}}
    text = json.dumps(told)
    metadata = {"gaff": __version__, "model": model, "gaff_capture": text}
    metadata["gaff_checksum"] = checksum_of(text, packing.tensors)
    if len(metadata["gaff_capture"]) + sum(len(name) + 120 for name in packing.tensors) > _MOST_HEADER:
        raise PlanError(f"{len(packing.tensors)} tensors are too many for one file: keep fewer events, as by last=")
    with replacing(path, failure, ValueError) as made:
        package.save_file(packing.tensors, str(made), metadata=metadata)


def checksum_of(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A checksum (CRC-32, eight digits) of the text of a saved capture and of the elements of its tensors."""
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        plain = elements.words(tensors[name])
        crc = zlib.crc32(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode(), crc)
        memory = (ctypes.c_char * plain.numel()).from_address(plain.data_ptr()) if plain.numel() else b""
        crc = zlib.crc32(memory, crc)
    return f"{crc:08x}"


def _events(stream: ReadSite, packing: Packing) -> list[Any]:
    """The events of a site as JSON. A tensor is named by the address, one of several events by run and call, too."""
    name, is_one = stream.name or str(stream.site), len(stream.records) == 1
    return [
        [run.index, run.step, call,
         packing.kept(kept, stream.site, name, "" if is_one else f" run {run.index} call {call}")]
        for run, call, kept in stream.records
    ]  # fmt: skip
