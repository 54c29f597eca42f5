"""Keywords that are meant for gaff and would get lost in a model which takes any, as those of transformers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from torch import nn

from gaff.address.resolve import unwrap
from gaff.errors import PlanError

_OF_OTHERS = ("depth", "patterns", "backward", "flops", "ops", "pictures", "names")  # of these functions and their like


def need_models_own(model: nn.Module, given: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise PlanError for a keyword that is nearly one of ``options``, or one of a function like this one, where the
    model's forward names none like it and takes any."""
    try:
        own = signature(unwrap(model).forward).parameters
    except (TypeError, ValueError, AttributeError):  # written in C++, or no module, as is told later
        return
    if not any(one.kind is Parameter.VAR_KEYWORD for one in own.values()):
        return  # the model itself refuses it
    known = tuple(options)
    for name in (name for name in given if name not in own):
        near = get_close_matches(name, (*known, *_OF_OTHERS), 1, 0.8)
        if near:
            meant = "".join(f"{one}=, or " for one in (near if near[0] in known else known))
            raise PlanError(
                f"{name}= is no option here, and the model would pass over it: "
                f"expected {meant}a keyword that its forward names"
            )
