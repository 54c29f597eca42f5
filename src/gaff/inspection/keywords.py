"""Keywords that are meant for gaff and would get lost in a model which takes any, as those of transformers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from torch import nn

from gaff.address.resolve import unwrap
from gaff.errors import PlanError


def need_models_own(model: nn.Module, given: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise PlanError for a keyword that is nearly one of ``options``, where the model's forward names what it takes,
    not this, and takes any other. A forward that names nothing may be given anything."""
    try:
        own = signature(unwrap(model).forward).parameters
    except (TypeError, ValueError, AttributeError):  # written in C++, or no module, as is told later
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
