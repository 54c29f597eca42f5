"""gaff shows, keeps and changes any tensor that flows through any PyTorch model, without editing the model.

Importing it has no effect on torch, and does not even import it; the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gaff.version import __version__ as __version__

_HOMES = {
    "capture": "gaff.api",
    "edit": "gaff.api",
    "anatomy": "gaff.api",
    "find_nonfinite": "gaff.api",
    "guard": "gaff.api",
    "harvest": "gaff.api",
    "clip_gradients": "gaff.api",
    "sample_norms": "gaff.api",
    "sites": "gaff.api",
    "take": "gaff.api",
    "trace": "gaff.api",
    "watch": "gaff.api",
    "diff": "gaff.inspection.diff.compare",
    "load": "gaff.inspection.saved",
    "maybe": "gaff.sessions.request",
    "Plan": "gaff.sessions.plan",
    "Site": "gaff.address.grammar",  # reachable by its short name, too; its place is gaff.address
    "GaffError": "gaff.errors",
    # reachable by their short names, too; their place is gaff.errors
    "SiteError": "gaff.errors",
    "PlanError": "gaff.errors",
    "NeverFiredError": "gaff.errors",
    "ExactnessError": "gaff.errors",
    "RecordError": "gaff.errors",
    "NonFiniteError": "gaff.errors",
}
_MODULES = ("edits", "errors", "keep")

__all__ = [
    "GaffError",
    "Plan",
    "anatomy",
    "capture",
    "clip_gradients",
    "diff",
    "edit",
    "edits",
    "errors",
    "find_nonfinite",
    "guard",
    "harvest",
    "keep",
    "load",
    "maybe",
    "sample_norms",
    "sites",
    "take",
    "trace",
    "watch",
]

if TYPE_CHECKING:
    from gaff import edits, errors, keep
    from gaff.api import (
        anatomy,
        capture,
        clip_gradients,
        edit,
        find_nonfinite,
        guard,
        harvest,
        sample_norms,
        sites,
        take,
        trace,
        watch,
    )
    from gaff.errors import GaffError
    from gaff.inspection.diff.compare import diff
    from gaff.inspection.saved import load
    from gaff.sessions.plan import Plan
    from gaff.sessions.request import maybe


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"gaff.{name}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'gaff' has no attribute {name!r}: expected one of {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
