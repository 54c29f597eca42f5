"""Whether a model acts: between steps that learn from many examples it is asked about single ones, other each time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gaff.address.nested import iter_tensors
from gaff.training.watch.step_facts import fingerprint


class Acting:
    """Notes what models are asked without gradients, and tells whether that was to act; used on the training thread."""

    def __init__(self) -> None:
        # by model the shape of what was given last since it was trained, and a checksum of what was given last: what is
        # shown one example again and again does not act
        self._asked: dict[str, tuple[int, ...]] = {}
        self._seen: dict[str, str] = {}

    def asked(self, model: str, args: Any, kwargs: Any) -> None:
        """A call of a model that does not train begins."""
        first = _first(args, kwargs)
        if first is None or (first.dim() > 1 and first.size(0) > 1):
            return
        checksum = fingerprint((first,), {})
        if checksum != self._seen.get(model) or not first.is_cpu:
            self._asked[model] = tuple(first.shape)
        self._seen[model] = checksum

    def trains(self, model: str, args: Any, kwargs: Any) -> bool:
        """A call of a model that trains begins: whether it was asked about a single one of such examples before."""
        shape = self._asked.pop(model, None)
        first = _first(args, kwargs) if shape is not None else None
        if first is None or first.dim() == 0 or first.size(0) < 2:
            return False
        return shape in (tuple(first.shape[1:]), (1, *first.shape[1:]))


def _first(args: Any, kwargs: Any) -> Tensor | None:
    return next((tensor for _, tensor in iter_tensors((args, kwargs))), None)
