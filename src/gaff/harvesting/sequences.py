"""Batches of sequences that are about as long, so that little is padded; and those of a data set of Hugging Face."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gaff.errors import PlanError

_TOKENS, _MASK = "input_ids", "attention_mask"
_KNOWN = (_TOKENS, _MASK, "token_type_ids", "position_ids")


def is_table(data: Any) -> bool:
    """Whether ``data`` is a data set of the package ``datasets``; imports nothing."""
    return type(data).__module__.startswith("datasets.") and hasattr(data, "column_names")


def table_loader(table: Any, batch: int) -> DataLoader[Any]:
    """Batches of a data set that has its tokens in the column ``input_ids``, by length; padded with 0.

    ``attention_mask`` is made where it is not there. Columns of numbers come along, and those of as many numbers as a
    sequence has tokens; all others (texts, and where some sample has none) are left out. Raises PlanError for a data
    set that has no tokens, is streamed or consists of parts, and for a sequence of none.
    """
    if isinstance(table, dict):
        raise PlanError(f"data has the parts {', '.join(map(str, table))}: expected one of them, such as data['train']")
    if not hasattr(table, "__len__"):
        raise PlanError(f"data is a {type(table).__name__}, which is streamed: expected one with a length, or batches")
    if _TOKENS not in table.column_names:
        raise PlanError(
            f"the data set has the columns {', '.join(table.column_names)} and no {_TOKENS!r}: expected one that a "
            "tokenizer has gone over, or a DataLoader"
        )
    table = table.with_format(None)
    lengths = [len(one) for one in table[_TOKENS]]
    if 0 in lengths:
        raise PlanError(f"sample {lengths.index(0)} of the data set has no token: expected one or more in each")
    return DataLoader(table, batch_sampler=by_length(lengths, batch), collate_fn=_padded)


def tokens_of(known: tuple[str, ...], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model is given of a batch of ``table_loader``: the columns that it knows, and none of the labels."""
    return {name: batch[name] for name in known if name in batch}


def known_inputs(model: nn.Module) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """``tokens_of`` for the arguments of a model's ``forward``."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return partial(tokens_of, tuple(name for name in _KNOWN if takes_all or name in parameters))


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
    for name in samples[0]:
        values = [one[name] for one in samples]
        if all(isinstance(one, (bool, int, float)) for one in values):
            found[name] = torch.tensor(values, device="cpu")
        elif all(isinstance(one, list) for one in values) and [len(one) for one in values] == sizes:
            tensors = [_numbers(one) for one in values]
            if all(one is not None and one.dim() == 1 for one in tensors):
                found[name] = torch.nn.utils.rnn.pad_sequence([one for one in tensors if one is not None], True)
    if _MASK not in found:
        found[_MASK] = (torch.arange(max(sizes), device="cpu") < torch.tensor(sizes, device="cpu").unsqueeze(1)).long()
    return found


def _numbers(values: list[Any]) -> Tensor | None:
    """A list of numbers as a tensor; None for any other list."""
    try:
        return torch.tensor(values, device="cpu")
    except (TypeError, ValueError):
        return None
