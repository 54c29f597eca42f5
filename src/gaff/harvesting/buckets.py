"""Batches of sequences that are about as long, so that little is padded; and those of a data set of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gaff.errors import PlanError

_TOKENS, _MASK = "input_ids", "attention_mask"
_KNOWN = (_TOKENS, _MASK, "token_type_ids")


def is_table(data: Any) -> bool:
    """Whether ``data`` is a data set of the package ``datasets``; imports nothing."""
    return type(data).__module__.startswith("datasets.") and hasattr(data, "column_names")


def table_loader(table: Any, batch: int, columns: Iterable[Any] | None = ()) -> DataLoader[Any]:
    """Batches of a data set that has its tokens in the column ``input_ids``, by length; padded with 0.

    ``attention_mask`` is made where it is not there. ``columns``: of numbers, that come along (None: all of them), one
    for each sample. Raises PlanError for a data set that has no tokens or is streamed, and for a column it has not.
    """
    if not hasattr(table, "__len__"):
        raise PlanError(f"data is a {type(table).__name__}, which is streamed: expected one with a length, or batches")
    if _TOKENS not in table.column_names:
        raise PlanError(
            f"the data set has the columns {', '.join(table.column_names)} and no {_TOKENS!r}: expected one that a "
            "tokenizer has gone over, or a DataLoader"
        )
    if columns is not None:
        wanted = [name for name in columns if isinstance(name, str)]
        missing = next((name for name in wanted if name not in table.column_names), None)
        if missing is not None:
            raise PlanError(f"the data set has no column {missing!r}: expected one of {', '.join(table.column_names)}")
        table = table.select_columns([name for name in table.column_names if name in (*_KNOWN, *wanted)])
    lengths = [len(one) for one in table[_TOKENS]]
    return DataLoader(table, batch_sampler=by_length(lengths, batch), collate_fn=_padded)


def by_length(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """The numbers of the samples of each batch, shortest first; samples of one length stay in their order."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise PlanError(f"batch={batch!r} is no number of samples: expected 1 or more")
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    return [order[start : start + batch] for start in range(0, len(order), batch)]


class OnDemand(Dataset[Any]):
    """Samples that are made when they are asked for. ``fingerprint`` tells their source from another."""

    def __init__(self, things: Sequence[Any], make: Callable[[Any], Any], fingerprint: str) -> None:
        self._things, self._make = things, make
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._things)

    def __getitem__(self, number: int) -> Any:
        return self._make(self._things[number])


def _padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Sequences as ``[samples, positions]`` with zeros behind them, and numbers as ``[samples]``."""
    sizes = [len(one[_TOKENS]) for one in samples]
    found: dict[str, Tensor] = {}
    for name, first in samples[0].items():
        values = [one[name] for one in samples]
        if isinstance(first, (bool, int, float)):
            found[name] = torch.tensor(values)
        elif not isinstance(first, str) and hasattr(first, "__len__"):
            tensors = [torch.as_tensor(one) for one in values]
            if [tuple(one.shape) for one in tensors] == [(size,) for size in sizes]:
                found[name] = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    if _MASK not in found:
        found[_MASK] = (torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)).long()
    return found
