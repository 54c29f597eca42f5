"""One file that tells of all shards of a large store, so that opening it does not read each of theirs.

It is a Parquet file (extra ``parquet``) that is written when a harvest with very many shards has come to its end. What
it says is what the shards say, which never change; a shard that it does not know is read as ever, and one that is not
there any more is left out.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch

from gaff.compat.extras import has, need
from gaff.errors import RecordError
from gaff.harvesting.location import TOLD, Location, shard_path
from gaff.harvesting.shard import Shard, parse_shard
from gaff.harvesting.tensor_file import checksum_of

_BEGIN, _END = "index-", ".parquet"  # between them a checksum of the content
WORTH = 100_000  # shards from which on it is written


def read_shards(out: Location) -> list[Shard]:
    """What all shards that are there say of themselves, in the order of their numbers."""
    numbers = out.shards()
    known = _read(out) if len(numbers) >= WORTH else {}
    found = []
    for number in numbers:
        told: str | bytes | None = known.get(number)
        told = out.read(shard_path(number, TOLD)) if told is None else told
        found.append(parse_shard(told, number, f"{out}/{shard_path(number, TOLD)}"))
    return found


def write_index(out: Location, shards: Sequence[Shard]) -> bool:
    """Write the index of a harvest that has ended, where it is worth it and pyarrow is there; whether it was."""
    if len(shards) < WORTH or not has("pyarrow"):
        return False
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    columns = {"shard": [one.number for one in shards], "told": [one.to_json() for one in shards]}
    file = io.BytesIO()
    parquet.write_table(arrow.table(columns), file, compression="zstd")
    return out.create(_name(file.getvalue()), file.getvalue())


def _read(out: Location) -> dict[int, str]:
    """What the index says of each shard; nothing where there is none, or no pyarrow.

    Raises RecordError for one whose content is not that of its name.
    """
    name = next((one for one in sorted(out.names()) if one.startswith(_BEGIN) and one.endswith(_END)), None)
    if name is None or not has("pyarrow"):
        return {}
    content = out.read(name)
    if name != _name(content):
        raise RecordError(f"{out}/{name}: is damaged: it may be removed, all it says stands in the shards as well")
    table = need("pyarrow.parquet").read_table(io.BytesIO(content))
    return dict(zip(table["shard"].to_pylist(), table["told"].to_pylist(), strict=True))


def _name(content: bytes) -> str:
    """The name of an index with this content."""
    return f"{_BEGIN}{checksum_of([torch.frombuffer(bytearray(content), dtype=torch.uint8)]):08x}{_END}"
