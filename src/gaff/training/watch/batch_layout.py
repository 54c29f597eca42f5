"""How a batch lies in its tensors, in a sampled step: whether its examples differ, and where its sequences are padded.

Padding is read from the tokens themselves: one number with which sequences end (or begin), some with more of it than
others, and which is found nowhere else in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.address.nested import iter_tensors
from gaff.address.resolve import unwrap
from gaff.compat import elements

_LEAST = 4  # examples of a batch, and tokens of a sequence
_MOST = 3  # tensors of one shape that may be tokens
_HIDE_BY_ZERO = ("transformers", "peft")  # whose models take an attention_mask of ones for what is seen
_HIGHEST = (1 << 31) - 1  # no class is
_ALLOWED = -30.0  # above which an additive mask lets a position be seen: e**-30 is nothing


class Padding(NamedTuple):
    """Where sequences are padded, ``[sequences, positions]``, and whether they are; tensors of bools on one device."""

    where: Tensor
    is_known: Tensor


class BatchLayout:
    """Looks at the first run of a sampled step that trains; waits for no device. Used on the thread that trains.

    Holds where padding is until the step is over.
    """

    def __init__(self) -> None:
        self._alike: Tensor | bool | None = None  # None before the first run
        self._paddings: dict[tuple[int, ...], Padding] = {}
        # by whether sequences attend to themselves; None: by the mask that the model is given
        self._seen: dict[bool | None, dict[str, Any]] = {}
        self._in_loss: dict[str, Any] = {}

    def given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A model is called that trains: padding is looked for in what it is given first in a step, and whether
        examples differ in all of its runs."""
        tensors = [one for _, one in iter_tensors((args, kwargs)) if one.dim() and _is_readable(one)]
        before = self._alike
        if before is not False:
            with torch.no_grad():
                alike = _are_alike(tensors)
                if isinstance(before, Tensor) and isinstance(alike, Tensor):
                    alike = before.to(alike.device) & alike
                self._alike = alike
        if before is not None:
            return
        with torch.no_grad():
            for shape in {tuple(one.shape) for one in tensors}:
                known = [_padding(one) for one in tensors if tuple(one.shape) == shape and _are_tokens(one)][:_MOST]
                for one in known:
                    self._paddings[shape] = _either(self._paddings.get(shape), one)
            is_known = type(unwrap(module)).__module__.partition(".")[0] in _HIDE_BY_ZERO
            self._masked(kwargs.get("attention_mask") if is_known and isinstance(kwargs, dict) else None)

    def attended(self, query: Any, key: Any, mask: Any, *, is_causal: bool) -> None:
        """torch's attention was called: note whether it sees padding, among keys that are as many as tokens."""
        if not isinstance(query, Tensor) or not isinstance(key, Tensor) or key.dim() < 3 or is_causal:
            return
        shape = (key.shape[0], key.shape[-2])
        padding = self._paddings.get(shape)
        if padding is None or padding.where.device != key.device:
            return
        is_own = query.shape[-2] == key.shape[-2]
        with torch.no_grad():
            seen = _seen(mask, padding.where, is_own=is_own)
            if seen is None:
                return
            all_of_it = (seen | ~padding.where).all() & padding.is_known
            nothing_else = ~(seen & ~padding.where).any() & padding.is_known
            known = self._seen.get(is_own)
            if known is not None:
                all_of_it, nothing_else = all_of_it & known["all"], nothing_else & known["nothing_else"]
            self._seen[is_own] = {"all": all_of_it, "nothing_else": nothing_else, "masked": isinstance(mask, Tensor),
                                  "share": padding.where.float().mean()}  # fmt: skip

    def _masked(self, mask: Any) -> None:
        """A model is given an ``attention_mask``, which is 1 for what is seen: note whether that is padding alone."""
        padding = self._paddings.get(tuple(mask.shape)) if isinstance(mask, Tensor) else None
        if padding is not None and padding.where.device == mask.device and not mask.is_floating_point():
            nothing_else = ((mask > 0) == padding.where).all() & padding.is_known
            self._seen[None] = {"all": False, "nothing_else": nothing_else, "masked": True,
                                "share": padding.where.float().mean()}  # fmt: skip

    def target(self, target: Tensor, known: Mapping[str, Any]) -> None:
        """A loss over classes is given these targets, and besides what is ``known`` of its arguments.

        Padding counts in it where all of the targets there are one class, and none of them is ignored.
        """
        is_whole = target.dtype in (torch.int64, torch.int32)
        if known.get("weight") is not None or known.get("reduction", "mean") == "none" or not is_whole:
            return
        for (rows, length), padding in self._paddings.items():
            if target.numel() not in (rows * length, rows * (length - 1)) or target.device != padding.where.device:
                continue
            told = target.reshape(rows, -1)
            inside = padding.where[:, :-1] & padding.where[:, 1:]
            if told.shape[1] == length:  # a target may be that of its position, or of the next one
                inside = torch.nn.functional.pad(inside, (0, 1))
            with torch.no_grad():
                counts = (told != known.get("ignore_index", -100)) & (told >= 0)
                highest, lowest = told.masked_fill(~inside, -1).max(), told.masked_fill(~inside, _HIGHEST).min()
                is_counted = (counts | ~inside).all() & inside.any() & (highest == lowest) & padding.is_known
                at = padding.where[:, length - told.shape[1] :]
                share = (at & counts).sum() / counts.sum().clamp(min=1)
            self._in_loss = {"is_counted": is_counted, "target": highest, "share": share}

    def take(self) -> dict[str, Any]:
        """The facts of the step; tensors in them may be on a device."""
        told: dict[str, Any] = {} if self._alike is None else {"alike": self._alike}
        if self._seen:
            told["padding_seen"] = tuple(self._seen.values())
        if self._in_loss:
            told["padding_in_loss"] = self._in_loss
        return told


def _are_alike(tensors: list[Tensor]) -> Tensor | bool:
    """Whether all examples of a batch are the same in each of these tensors, and not one number everywhere.

    Tensors that have no row for each of four examples or more, as what is shared by all of them, do not count. The
    answer lies on their device; False where there is none to ask, or where one is trained, which may tell them apart.
    On the CPU a few rows are compared first, and nearly always tell.
    """
    size = max((len(one) for one in tensors), default=0)
    told: Tensor | bool = False
    rows = [one for one in tensors if len(one) == size]
    if size < _LEAST or any(one.requires_grad for one in rows):
        return False
    varies: Tensor | bool = False
    for one in rows:
        if one.is_cpu and not bool((one[[1, size // 2, size - 1]] == one[:1]).all()):
            return False
        same, differs = (one == one[:1]).all(), (one[0] != one[0].flatten()[:1].squeeze()).any()
        told = same if isinstance(told, bool) else told & same.to(told.device)
        varies = differs if isinstance(varies, bool) else varies | differs.to(varies.device)
    return told & varies


def _is_readable(tensor: Tensor) -> bool:
    is_small_float = tensor.is_floating_point() and tensor.dtype.itemsize < 2  # which torch compares with nothing
    return type(tensor) is Tensor and not is_small_float and elements.is_plain(tensor) and elements.is_readable(tensor)


def _are_tokens(tensor: Tensor) -> bool:
    is_whole = tensor.dtype in (torch.int64, torch.int32)
    return is_whole and tensor.dim() == 2 and len(tensor) > 1 and tensor.shape[1] >= _LEAST


def _padding(tokens: Tensor) -> Padding:
    """Where sequences of tokens, ``[sequences, positions]``, are padded at their end, or else at their beginning."""
    return _either(_padded_end(tokens), Padding(*(one.flip(-1) if one.dim() else one
                                                  for one in _padded_end(tokens.flip(-1)))))  # fmt: skip


def _padded_end(tokens: Tensor) -> Padding:
    """Where sequences end with one number two times or more, which is found nowhere else in any of them.

    The longest run at an end tells the number. No padding is one below zero, nor one that is as long in all of them,
    nor one of two numbers in all, as a mask has them.
    """
    is_last = (tokens == tokens[:, -1:]).flip(-1).cumprod(-1).flip(-1).bool()
    lengths = is_last.sum(-1)
    number = tokens[lengths.argmax(), -1]
    where = is_last & (tokens[:, -1:] == number)
    counts = where.sum(-1)
    others = tokens.masked_fill(where, -1).max(), tokens.masked_fill(where, _HIGHEST).min()
    is_elsewhere = ((tokens == number) & ~where).any()
    is_known = (counts.max() > 1) & (counts.max() > counts.min()) & (counts.max() < tokens.shape[1])
    is_sorted = (tokens.diff() >= 0).all() | (tokens.diff() <= 0).all()  # numbers of segments, or levels
    return Padding(where, is_known & ~is_elsewhere & ~is_sorted & (others[0] > others[1]) & (tokens.min() >= 0))


def _either(known: Padding | None, other: Padding) -> Padding:
    """The first of the two that is padding."""
    if known is None:
        return other
    return Padding(torch.where(known.is_known, known.where, other.where), known.is_known | other.is_known)


def _seen(mask: Any, padded: Tensor, *, is_own: bool) -> Tensor | None:
    """Which keys are seen by some query, ``[sequences, keys]``; None where a mask is of something else.

    Of sequences that attend to themselves, by one that is no padding.
    """
    rows, keys = padded.shape
    if not isinstance(mask, Tensor):
        return torch.ones_like(padded) if mask is None else None
    if mask.dim() not in (2, 3, 4) or mask.shape[-1] != keys:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > _ALLOWED
    allowed = allowed.any(1) if allowed.dim() == 4 else allowed if allowed.dim() == 3 else allowed[None]
    if allowed.shape[0] not in (1, rows) or allowed.shape[1] not in (1, keys if is_own else allowed.shape[1]):
        return None
    if is_own:
        allowed = allowed & ~padded[:, :, None]
    return allowed.any(1).expand(rows, keys)
