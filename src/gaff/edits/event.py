"""What an edit is, and what it may know of the moment at which it acts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from gaff.address.grammar import Site
from gaff.compat import distributed, memory, modes
from gaff.errors import PlanError


class Event(NamedTuple):
    """One tensor passing one site, once. A gradient has the run, call and step of its forward."""

    site: Site = Site()
    run: int = 0
    call: int = 0
    step: int = 0  # optimizer steps completed when the run began

    @property
    def is_gradient(self) -> bool:
        return self.site.port not in ("output", "input", "param")


@runtime_checkable
class Edit(Protocol):
    """Returns the tensor that the model goes on with: of the same shape, dtype and device; never writes into its own.

    ``is_pure``: equal arguments give equal results, so that a recomputation needs no check.
    """

    @property
    def is_pure(self) -> bool: ...

    def change(self, tensor: Tensor, event: Event) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Call:
    """A function of the tensor alone, or a module (its parameters train through the model)."""

    function: Callable[[Tensor], Tensor]
    is_pure = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        return self.function(tensor)


@dataclass(frozen=True, eq=False)
class WithEvent:
    """A function of the tensor and of the event: where and when it passes."""

    function: Callable[[Tensor, Event], Tensor]
    is_pure = False

    def change(self, tensor: Tensor, event: Event) -> Tensor:
        return self.function(tensor, event)


def uses_event(edit: Edit) -> bool:
    """Whether an edit asks in which run, call or step it acts; those of arithmetic say that they do not."""
    return bool(getattr(edit, "uses_event", True))


def with_event(function: Callable[[Tensor, Event], Tensor]) -> WithEvent:
    """An edit that also knows the ``Event``: its ``site``, ``run``, ``call`` and ``step``."""
    return WithEvent(need_callable(function))


def need_callable(function: Any) -> Any:
    """Raises PlanError when ``function`` is no function."""
    if not callable(function):
        raise PlanError(f"edit {function!r} cannot be called: expected gaff.edits.scale(0.5), a function or a module")
    return function


def generator(event: Event, seed: int, device: torch.device) -> torch.Generator:
    """Random numbers that depend on seed, site, run, call and step alone, and leave every global state untouched."""
    text = f"{seed}|{event.site}|{event.run}|{event.call}|{event.step}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return torch.Generator(device=device).manual_seed(number)


def like(value: Tensor, tensor: Tensor, known: dict[Any, Tensor] | None = None) -> Tensor:
    """``value`` on the device and in the dtype of ``tensor``; converted once, as long as it is not written to.

    Of a tensor that is spread over processes ``value`` is the whole, or broadcast to it: this process takes its part.
    """
    if distributed.is_spread(tensor) and not distributed.is_spread(value):
        return distributed.part_of(like(value, distributed.local_of(tensor)), tensor)
    if value.device == tensor.device and value.dtype == tensor.dtype:
        return value
    if not torch.can_cast(value.dtype, tensor.dtype):
        raise PlanError(f"a constant of {value.dtype} would lose something as {tensor.dtype}, which passes")
    if known is None or value.requires_grad:
        return value.to(tensor.device, tensor.dtype)
    key = (tensor.device, tensor.dtype, memory.version_of(value))
    return remember(known, key, lambda: value.to(tensor.device, tensor.dtype))


def remember(known: dict[Any, Tensor], key: Any, make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` gives, made once for a key, as an ordinary tensor that no mode and no checkpoint has seen."""
    if key not in known:
        known.clear()
        with torch.inference_mode(False), torch.no_grad(), modes.outside_modes():
            known[key] = make()
    return known[key]
