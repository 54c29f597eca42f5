"""Batches of sequences that are about as long, so that little is padded; and those of a data set of Hugging Face."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from gaff.address.resolve import unwrap
from gaff.errors import PlanError, whole_number

_TOKENS, _MASK = "input_ids", "attention_mask"
_KNOWN = (_TOKENS, _MASK, "token_type_ids", "position_ids")
_IGNORED = -100  # as a class: torch's losses pass over targets that are this number
_LABELS = re.compile(r"(.*_)?(labels?|label_ids|targets?|start_positions|end_positions|y)(_.*)?")  # of columns
_OF_LABELS = re.compile(r".*_(masks?|weights?|lengths?|lens?)")  # what is known of labels, and is none


def _is_label(name: str) -> bool:
    """Whether a column is called as classes are that a loss is given."""
    return _LABELS.fullmatch(name) is not None and _OF_LABELS.fullmatch(name) is None


def is_table(data: Any) -> bool:
    """Whether ``data`` is a data set of the package ``datasets``; imports nothing."""
    return type(data).__module__.startswith("datasets.") and hasattr(data, "column_names")


def table_loader(table: Any, batch: int, model: nn.Module) -> DataLoader[Any]:
    """Batches of a data set that has its tokens in the column ``input_ids``, by length.

    Tokens are padded with what ``model`` calls padding (``config.pad_token_id``, else 0), labels that are whole numbers
    with -100, which losses pass over, and all else with 0. A model that takes no ``attention_mask`` gets batches of
    samples of one length, without padding: nothing could tell it what is padding. ``attention_mask`` is made where it
    is not there. Columns of numbers come along, and those with a number, or numbers of one shape, for each token; all
    others (texts, where some sample has none, and what ``set_format`` leaves out) are left out. Raises PlanError for a
    data set that has no tokens, is streamed or consists of parts, and for a sequence of none.
    """
    if isinstance(table, dict):
        raise PlanError(f"data has the parts {', '.join(map(str, table))}: expected one of them, such as data['train']")
    if not hasattr(table, "__len__"):
        raise PlanError(f"data is a {type(table).__name__}, which is streamed: expected one with a length, or batches")
    has_transform = table.format["type"] == "custom"  # what set_transform makes of samples is what there is
    columns = table.column_names if table.format.get("output_all_columns") else table.format["columns"]
    if not has_transform:  # a format of all columns is none: the data set stays the one that it was
        table = table.with_format(None, **({} if columns == table.column_names else {"columns": columns}))
    columns = list(table[0]) if has_transform and len(table) else columns
    if _TOKENS not in columns:
        raise PlanError(
            f"the data set has the columns {', '.join(columns)} and no {_TOKENS!r}: expected one that a tokenizer has "
            "gone over, or a DataLoader"
        )
    samples = (table[number][_TOKENS] for number in range(len(table))) if has_transform else table[_TOKENS]
    lengths = [len(one) for one in samples]
    if 0 in lengths:
        raise PlanError(f"sample {lengths.index(0)} of the data set has no token: expected one or more in each")
    collate = partial(_padded, {} if has_transform else _short_floats(table.features), _padding(model))
    batches = by_length(lengths, batch, is_one_length=_MASK not in _inputs(model))
    return DataLoader(table, batch_sampler=batches, collate_fn=collate)


def _padding(model: nn.Module) -> int:
    """The token that a model, or the first module inside that says so, takes for padding; 0 where none does."""
    configs = (getattr(one, "config", None) for one in unwrap(model).modules())
    tokens = (getattr(one, "pad_token_id", None) for one in configs)
    return next((one for one in tokens if isinstance(one, int) and not isinstance(one, bool) and one >= 0), 0)


def _short_floats(features: Any) -> dict[str, torch.dtype]:
    """The columns whose floating numbers have less than 64 bits, with their type in torch."""
    kinds = {name: getattr(getattr(one, "feature", one), "dtype", "") for name, one in features.items()}
    known = {"float32": torch.float32, "float16": torch.float16}
    return {name: known[kind] for name, kind in kinds.items() if kind in known}


def tokens_of(known: Mapping[str, bool], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model is given of a batch of ``table_loader``: the columns that it knows, and none of the labels.

    ``known``: by name whether the data set has such a column. Numbers of 64 bits, as Python's are, are given in torch's
    default type. Raises PlanError for a column that is not in the batch.
    """
    lost = next((name for name, is_there in known.items() if is_there and name not in batch), None)
    if lost is not None:
        raise PlanError(
            f"the model takes {lost!r}, a column of the data set which is neither numbers nor as many as a sample has "
            "tokens: expected a DataLoader that makes tensors of it, or a data set without it"
        )
    given = {name: batch[name] for name in known if name in batch}
    return {
        name: one.to(torch.get_default_dtype()) if one.dtype == torch.float64 else one for name, one in given.items()
    }


def known_inputs(model: nn.Module, loader: DataLoader[Any]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """``tokens_of`` for the arguments of a model's ``forward``: the columns of ``table_loader`` that it names.

    Of a compiled or wrapped model those that the first module inside names which takes tokens.
    """
    table: Any = loader.dataset
    columns = list(table[0]) if len(table) else []
    parameters = _inputs(model)
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    names = dict.fromkeys((*_KNOWN, *(name for name in columns if name in parameters and not _is_label(name))))
    return partial(tokens_of, {one: one in columns for one in names if takes_all or one in parameters})


def _inputs(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of the ``forward`` that gets the tokens; ``attention_mask`` is there where it takes anything."""
    inner = unwrap(model)
    found = next((one for one in map(_parameters, inner.modules()) if _TOKENS in one), _parameters(inner))
    others = next((one for one in found.values() if one.kind is one.VAR_KEYWORD), None)
    return found if others is None or _MASK in found else {**found, _MASK: others}


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's ``forward``; none where it does not tell them, as of TorchScript."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


def by_length(lengths: Sequence[int], batch: int, *, is_one_length: bool = False) -> list[list[int]]:
    """The numbers of the samples of each batch, shortest first; samples of one length stay in their order.

    ``is_one_length``: no batch has samples of several lengths.
    """
    if (size := whole_number(batch, 1)) is None:
        raise PlanError(f"batch={batch!r} is no number of samples: expected 1 or more")
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    groups = [list(some) for _, some in groupby(order, lambda number: lengths[number])] if is_one_length else [order]
    return [some[start : start + size] for some in groups for start in range(0, len(some), size)]


class OnDemand(Dataset[Any]):
    """Samples that are made when they are asked for. ``fingerprint`` tells their source from another."""

    def __init__(self, things: Sequence[Any], make: Callable[[Any], Any], fingerprint: str) -> None:
        self._things, self._make = things, make
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._things)

    def __getitem__(self, number: int) -> Any:
        return self._make(self._things[number])


def _padded(types: Mapping[str, torch.dtype], token: int, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Sequences as ``[samples, positions]`` with padding behind them, and numbers as ``[samples]``.

    Floating numbers have 64 bits, as Python's have, but for the columns of ``types``. ``token``: what tokens are padded
    with; see ``table_loader``.
    """
    samples = [{name: _listed(value) for name, value in one.items()} for one in samples]
    sizes = [len(one[_TOKENS]) for one in samples]
    found: dict[str, Tensor] = {}
    for name in samples[0]:
        values: list[Any] = [one.get(name) for one in samples]
        tensors: list[Tensor | None] = []
        if all(isinstance(one, (bool, int, float)) for one in values):
            tensors = [_numbers(values)]
        elif all(isinstance(one, list) for one in values) and [len(one) for one in values] == sizes:
            tensors = list(map(_numbers, values))
        known = _alike([one for one in tensors if one is not None])
        if not known or len(known) != len(tensors) or len({one.shape[1:] for one in known}) > 1:
            continue
        is_class = _is_label(name) and known[0].dtype == torch.int64
        filler = token if name == _TOKENS else _IGNORED if is_class else 0
        made = pad_sequence(known, True, filler) if isinstance(values[0], list) else known[0]
        found[name] = made.to(types[name]) if name in types and made.is_floating_point() else made
    if _MASK not in found:
        found[_MASK] = (torch.arange(max(sizes), device="cpu") < torch.tensor(sizes, device="cpu").unsqueeze(1)).long()
    return found


def _alike(tensors: list[Tensor]) -> list[Tensor]:
    """The same in one type: floating where one is; of whole numbers unsigned where one holds such as need that."""
    types = {one.dtype for one in tensors}
    if len(types) < 2:
        return tensors
    wanted = torch.uint64 if torch.uint64 in types else torch.int64
    has_less = any(one.numel() and int(one.min()) < 0 for one in tensors if one.dtype == torch.int64)
    if torch.float64 in types or (has_less and wanted == torch.uint64):
        wanted = torch.float64
    return [one.to(wanted) for one in tensors]


def _listed(value: Any) -> Any:
    """Tensors and arrays as lists of numbers; anything else is left as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _numbers(values: list[Any]) -> Tensor | None:
    """A list of numbers as a tensor, integers above those of 64 bits with a sign as unsigned; None for any other."""
    for dtype in (None, torch.uint64):
        try:
            found = torch.tensor(values, dtype=dtype, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError):
            continue
        return torch.tensor(values, dtype=torch.float64, device="cpu") if found.is_floating_point() else found
    return None
