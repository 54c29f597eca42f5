"""Keywords of a model: in the order of its forward, and those meant for gaff, which get lost where it takes any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from torch import nn

from gaff.address.nested import Arguments
from gaff.address.resolve import unwrap
from gaff.errors import PlanError


def in_order(model: nn.Module, given: Arguments) -> Arguments:
    """What a model is given, with its keywords as its forward names them, others by name: their order is no matter."""
    places = {name: at for at, name in enumerate(_taken_by(model) or ())}
    names = sorted(given.kwargs, key=lambda name: (places.get(name, len(places)), name))
    return Arguments(given.args, {name: given.kwargs[name] for name in names})


def _taken_by(model: nn.Module) -> Mapping[str, Parameter] | None:
    """What the model's forward takes; None where that cannot be read: written in C++, or no module."""
    try:
        return signature(unwrap(model).forward).parameters
    except (TypeError, ValueError, AttributeError):
        return None


def need_models_own(model: nn.Module, given: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise PlanError for a keyword that is nearly one of ``options``, where the model's forward names what it takes,
    not this, and takes any other. A forward that names nothing may be given anything."""
    own = _taken_by(model)
    if own is None:
        return
    kinds = [one.kind for one in own.values()]
    if Parameter.VAR_KEYWORD not in kinds or not set(kinds) - {Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL}:
        return  # the model itself refuses it, or hands on what it is given
    known = tuple(options)
    for name in (name for name in given if name not in own):
        near = get_close_matches(name, known, 1, 0.8)
        if near:
            raise PlanError(f"{name}= is no option here, and the model would pass over it: expected {near[0]}=, or a "
                            "keyword that its forward names")  # fmt: skip
