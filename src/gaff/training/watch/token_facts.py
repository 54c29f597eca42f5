"""Sequences of tokens in a sampled step: whether targets are the model's own input, its next tokens or those after,
and whether what the model returns at a position depends on tokens that come later.

That is asked of torch's attention, by its mask, and of the model as a whole, by what passes anyway: sequences of a
batch that begin with the same token and go on with another must have the same output at their first position.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.nested import iter_tensors
from gaff.compat import elements

_LEAST = 4  # tokens of a sequence
_MOST = 256  # sequences that are compared
_ALLOWED = -30.0  # above which an additive mask lets a position be seen: e**-30 is nothing
_FAR = 0.05  # of the largest output: what no rounding explains, in half precision neither (chosen)
_NEAR = 0.01  # of the largest output: what rounding may explain, in half precision (chosen)


class TokenFacts:
    """Looks at the first run of a sampled step that trains; waits for no device, but for the state of random numbers.

    Holds the tokens until the step is over. Used on the thread that trains.
    """

    def __init__(self) -> None:
        self._given: list[Tensor] = []  # all that may be tokens, as those of a source and of what is made of it
        self._tokens: Tensor | None = None  # those that targets belong to: the first, until a target tells
        self._module: nn.Module | None = None  # that was called with them, until it has returned
        self._is_alone: Any = False  # nothing else is given that tells sequences apart
        self._drawn: list[Tensor] | None = None  # the state of random numbers when it was called
        self._targets: dict[str, Any] = {}
        self._sees: dict[int, Any] = {}  # by length: whether in all attention over so many a position sees the next one
        self._hides: dict[int, Any] = {}  # the same: whether none sees it, in any example
        self._compared: dict[int, dict[str, Any]] = {}  # by the dimension along which tokens follow each other

    def given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A model is called that trains: integers of two dimensions are taken for tokens."""
        if self._tokens is not None:
            return
        tensors = [one for _, one in iter_tensors((args, kwargs))]
        self._given = list(filter(_are_tokens, tensors))
        self._tokens = tokens = self._given[0] if self._given else None
        if tokens is not None:
            others = [one for one in tensors if one is not tokens]
            self._module, self._drawn = module, _random_state(tokens.device)
            with torch.no_grad():
                told = [_says_nothing(one, tokens) for one in others]
                self._is_alone = all(one is not False for one in told) and [one for one in told if one is not True]

    def returned(self, module: nn.Module, output: Any) -> None:
        """A module has returned: of the one that was given the tokens the first positions are compared.

        Not where random numbers were drawn meanwhile, as a dropout does: they tell sequences apart.
        """
        tokens, drawn = self._tokens, self._drawn
        if module is not self._module or tokens is None or drawn is None:
            return
        self._module = self._drawn = None
        found = (one for _, one in iter_tensors(output) if one.is_floating_point() and elements.is_plain(one))
        scores = next((one for one in found if one.dim() == 3 and one.shape[:2] == tokens.shape), None)
        is_told = scores is not None and scores.device == tokens.device and self._is_alone is not False
        if is_told and scores is not None and _is_state(drawn, tokens.device):
            with torch.no_grad():
                for along in (0, 1):
                    told = _compared(scores.detach().transpose(along, 1), tokens.transpose(along, 1))
                    for one in self._is_alone:
                        told = {name: value & one for name, value in told.items()}
                    self._compared[along] = told

    def target(self, target: Tensor) -> None:
        """A loss over classes is given these targets: note which part of them is the token at their place, or the next.

        Or the one after the next, in all such losses: a model may have one for each of several tokens to come.
        Sequences lie along either of the two dimensions; what is negative is ignored by losses, and left out.
        """
        given = {
            one.data_ptr(): one for one in self._given
        }  # labels that a model is given may be its tokens themselves
        fitting = [one for one in given.values() if target.numel() == one.numel()]
        fitting = [one for one in fitting if one.data_ptr() != target.data_ptr()] or fitting
        fitting = fitting or [one for one in given.values() if target.numel() == one.numel() - len(one)]
        if len(fitting) == 1 and fitting[0] is not self._tokens:
            self._tokens, self._compared = fitting[0], {}
        tokens = self._tokens
        if tokens is None or target.is_floating_point() or target.device != tokens.device or not len(tokens):
            return
        rows, length = tokens.shape
        after = self._targets.get("after_next", 1.0)
        with torch.no_grad():
            if target.numel() == tokens.numel():
                told = target.reshape(rows, length)
                self._targets = {"same": _share(told, tokens), "next": _share(told[:, :-1], tokens[:, 1:]),
                                 "next_row": _share(told[:-1], tokens[1:])}  # fmt: skip
                self._targets["begins"] = (told[:, 0] >= 0).all() | (told[0] >= 0).all()
                self._targets["after_next"] = after * _share(told[:, :-2], tokens[:, 2:])
            elif target.numel() == rows * (length - 1):
                told = target.reshape(rows, length - 1)
                self._targets = {"same": _share(told, tokens[:, :-1]), "next": _share(told, tokens[:, 1:]),
                                 "begins": (told[:, 0] >= 0).all(),
                                 "after_next": after * _share(told[:, :-1], tokens[:, 2:])}  # fmt: skip

    def attended(self, query: Any, key: Any, mask: Any, *, is_causal: bool) -> None:
        """torch's attention was called: of one over sequences as long as those of tokens note what a position sees."""
        if self._tokens is None or not isinstance(query, Tensor) or not isinstance(key, Tensor):
            return
        queries, keys = query.shape[-2], key.shape[-2]
        if queries == keys >= _LEAST:
            sees, is_hidden = _sees_next(mask, queries, is_causal=is_causal)
            self._sees[queries] = elements.both(sees, self._sees.get(queries, True))
            self._hides[queries] = elements.both(is_hidden, self._hides.get(queries, True))

    def take(self) -> dict[str, Any]:
        """The facts of the step; empty where no target was compared."""
        if not self._targets:
            return {}
        told = {
            "next_row": 0.0,
            "begins": True,
            **self._targets,
            "hides": self._over(self._lengths(1), self._hides),
            "shape": [] if self._tokens is None else list(self._tokens.shape),
        }
        for along, end in ((1, ""), (0, "_row")):
            told["lengths" + end] = lengths = self._lengths(along)
            told["sees" + end] = self._over(lengths, self._sees)
            found = self._compared.get(along, {})
            told |= {name + end: found.get(name, False) for name in ("leaks", "is_causal", "uses_own")}
        return {"tokens": told}

    def _lengths(self, along: int) -> tuple[int, ...]:
        """Over how many positions attention is that is taken for one over the tokens; a model may drop its last one.

        None where other sequences are as long: attention between the two looks the same.
        """
        if self._tokens is None:
            return ()
        size = self._tokens.shape[along]
        others = [one.shape[along] for one in self._given if one.shape != self._tokens.shape]
        if not others:
            return size - 1, size, size + 1
        return () if size in others else (size,)

    @staticmethod
    def _over(lengths: tuple[int, ...], known: dict[int, Any]) -> Any:
        """What holds of all attention over so many positions; None where there was none."""
        found = [known[length] for length in lengths if length in known]
        return functools.reduce(elements.both, found) if found else None


def _random_state(device: torch.device) -> list[Tensor] | None:
    """The state of torch's generators on the CPU and on a device; None where it cannot be asked for."""
    if device.type == "cpu":
        return [torch.get_rng_state()]
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        return [torch.get_rng_state(), torch.cuda.get_rng_state(device)]
    return None


def _is_state(known: list[Tensor], device: torch.device) -> bool:
    """Whether no random number has been drawn since that state."""
    now = _random_state(device)
    return now is not None and all(torch.equal(one, other) for one, other in zip(now, known, strict=True))


def _are_tokens(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and elements.is_plain(tensor) and elements.is_readable(tensor)
    is_whole = tensor.dtype in (torch.int64, torch.int32) and tensor.dim() == 2
    return is_plain and is_whole and tensor.shape[1] >= _LEAST


def _says_nothing(other: Tensor, tokens: Tensor) -> Any:
    """Whether another argument tells sequences apart no further: positions, a mask of ones, labels, the next tokens,
    which are what must not be seen; may be a tensor."""
    is_plain = type(other) is Tensor and elements.is_plain(other) and elements.is_readable(other)
    if not is_plain or other.is_floating_point() or other.is_complex():
        return False
    if other.dim() == 2 and other.shape[1] == 1 and len(other) == len(tokens):
        return (other == other[:1]).all().to(tokens.device)
    if other.dim() < 2 or (other.dim() == 2 and 1 in other.shape):
        return other.dim() != 1 or len(other) != len(tokens)
    if other.shape != tokens.shape or other.device != tokens.device:
        return False
    is_next = (_share(other[:, :-1], tokens[:, 1:]) == 1) | (_share(other[:-1], tokens[1:]) == 1)
    return ((other == 1) | (other == tokens) | (other < 0)).all() | is_next


def _share(told: Tensor, tokens: Tensor) -> Tensor:
    """The part of the targets that count which are the token beside them; 0 where none counts."""
    counts = told >= 0
    return ((told == tokens) & counts).sum() / counts.sum().clamp(min=1)


def _compared(scores: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """What first positions of sequences tell, each compared with the next one in the order of their first tokens.

    ``scores``: ``[sequences, positions, width]``. ``leaks``: two differ that begin with the same token, and go on with
    another; ``is_causal``: there are such, and none differs by more than rounding; ``uses_own``: two differ that begin
    with other tokens. Empty of a single sequence, or one of a single token.
    """
    if min(tokens.shape) < 2 or not scores.numel():
        return {}
    order = tokens[:_MOST, 0].argsort(stable=True)
    first, second, out = tokens[order, 0], tokens[order, 1], scores[order, 0].float()
    is_alike = first[1:] == first[:-1]
    is_pair = is_alike & (second[1:] != second[:-1])
    away, size = (out[1:] - out[:-1]).abs().amax(-1), out.abs().amax()
    far, apart = away > _FAR * size, away > _NEAR * size
    is_causal = is_pair.any() & ~(is_pair & apart).any()
    return {"leaks": (is_pair & far).any(), "is_causal": is_causal, "uses_own": (~is_alike & far).any()}


def _sees_next(mask: Any, length: int, *, is_causal: bool) -> tuple[Any, Any]:
    """Whether in all examples every position sees the one after it, and whether none does: bools, or on a device.

    A mask of keys alone, as of padding, hides none of those that are there.
    """
    if is_causal:
        return False, True
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return not isinstance(mask, Tensor), False
    with torch.no_grad():
        allowed = mask if mask.dtype == torch.bool else mask > _ALLOWED
        if mask.shape[-2] == 1:
            return allowed[..., 1:].any(), False
        square = allowed.expand(*allowed.shape[:-2], length, length)
        after = square.diagonal(1, -2, -1)
        return after.all(), ~after.any()
