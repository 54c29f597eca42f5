"""Packages that gaff can use and does not need: loaded when somebody asks for what they do.

This is the one place where a module is imported by a text, and only modules of others are.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gaff.errors import PlanError


def has(package: str) -> bool:
    """Whether ``package`` is installed; imports nothing."""
    return find_spec(package) is not None


def need(module: str, extra: str = "", *, for_: str = "") -> Any:
    """The module of that name, imported now.

    Args:
        module: a package of others, or a module inside one, such as ``"safetensors.torch"``.
        extra: the extra of gaff that brings it along, such as ``"files"``; empty where none does.
        for_: what it is needed for, as the beginning of the message: ``"a page of a trace"``.

    Raises:
        PlanError: where the package is not installed, with the command that installs it. An error inside a package
            that is installed passes through as it is.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # it is there, and something that it needs is not
        what = f"{for_} needs the package {package!r}" if for_ else f"the package {package!r} is needed"
        how = f"'gaff[{extra}]'" if extra else package
        raise PlanError(f"{what}, which is not installed: pip install {how}") from None
