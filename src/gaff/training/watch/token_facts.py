"""Sequences of tokens in a sampled step: whether targets are the model's own input, or its next tokens, and whether the
attention that torch computes lets a position see the next one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.compat import elements

_LEAST = 4  # tokens of a sequence
_ALLOWED = -1e4  # above which an additive mask lets a position be seen
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class TokenFacts:
    """Compares the targets of cross entropies with the tokens that a model was given; waits for no device.

    Holds the tokens of the first run of a sampled step until that is over. Used on the thread that trains.
    """

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._same: Any = None
        self._next: Any = None
        self._sees: Any = None  # whether in all attention so far a position sees the next one

    def given(self, args: Any, kwargs: Any) -> None:
        """A model is called that trains: its first integers of two dimensions are taken for tokens."""
        if self._tokens is None:
            found = (one for _, one in iter_tensors((args, kwargs)) if _are_tokens(one))
            self._tokens = next(found, None)

    def target(self, target: Tensor) -> None:
        """A loss over classes is given these targets: note which part of them is the token at their place, or the next.

        Sequences lie along either of the two dimensions; what is negative is ignored by losses, and left out.
        """
        tokens = self._tokens
        if tokens is None or target.is_floating_point() or target.device != tokens.device:
            return
        rows, length = tokens.shape
        with torch.no_grad():
            if target.numel() == tokens.numel():
                told = target.reshape(rows, length)
                later = torch.maximum(_share(told[:, :-1], tokens[:, 1:]), _share(told[:-1], tokens[1:]))
                self._same, self._next = _share(told, tokens), later
            elif target.numel() == rows * (length - 1):
                told = target.reshape(rows, length - 1)
                self._same, self._next = _share(told, tokens[:, :-1]), _share(told, tokens[:, 1:])

    def attended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's attention was called: of one over sequences as long as those of tokens note what a position sees."""
        known = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        query, key = known.get("query"), known.get("key")
        if self._tokens is None or not isinstance(query, Tensor) or not isinstance(key, Tensor):
            return
        queries, keys = query.shape[-2], key.shape[-2]
        if queries == keys >= _LEAST and any(abs(queries - size) <= 1 for size in self._tokens.shape):
            sees = _sees_next(known.get("attn_mask"), queries, is_causal=bool(known.get("is_causal", False)))
            self._sees = sees if self._sees is None else self._sees & sees

    def take(self) -> dict[str, Any]:
        """The facts of the step; empty where no target was compared."""
        if self._same is None:
            return {}
        return {"tokens": {"same": self._same, "next": self._next, "sees": False if self._sees is None else self._sees}}


def _are_tokens(tensor: Tensor) -> bool:
    is_whole = tensor.dtype in (torch.int64, torch.int32) and tensor.dim() == 2 and tensor.shape[1] >= _LEAST
    return is_whole and type(tensor) is Tensor and elements.is_plain(tensor) and elements.is_readable(tensor)


def _share(told: Tensor, tokens: Tensor) -> Tensor:
    """The part of the targets that count which are the token beside them; 0 where none counts."""
    counts = told >= 0
    return ((told == tokens) & counts).sum() / counts.sum().clamp(min=1)


def _sees_next(mask: Any, length: int, *, is_causal: bool) -> Any:
    """Whether in some example every position sees the one after it: a bool, or one on the device of the mask."""
    if is_causal:
        return False
    if not isinstance(mask, Tensor):
        return True
    with torch.no_grad():
        allowed = mask if mask.dtype == torch.bool else mask > _ALLOWED
        if allowed.dim() < 2:
            return False
        square = allowed.expand(*allowed.shape[:-2], length, length)
        return square.diagonal(1, -2, -1).all(-1).any()
