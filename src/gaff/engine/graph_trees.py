"""While a session is open, an exported graph runs as its tree of modules (``gaff.exported``), whose hooks then fire."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from gaff.engine.standin import StandIn
from gaff.engine.taps import CallTap, EditTap
from gaff.errors import PlanError
from gaff.exported import GraphPart, GraphTree

WHY_EAGER = "an exported graph runs node by node"
_NOT_KEPT = ("input", "input_grad", "grad_input")


def trees_of(modules: Iterable[nn.Module]) -> list[GraphTree]:
    """Those to which some of the modules belong."""
    found = {id(tree): tree for module in modules if isinstance(tree := getattr(module, "tree", None), GraphTree)}
    return list(found.values())


def run_as(trees: Iterable[GraphTree], opening: ExitStack) -> None:
    """Let the graphs run as their trees until ``opening`` closes."""
    for tree in trees:
        tree.check()
        opening.callback(StandIn(tree.graph(), _passing_to(tree)).remove)


def _passing_to(tree: GraphTree) -> Any:
    return lambda own, args, kwargs: tree(*args, **kwargs)


def is_untold(tap: Any) -> bool:
    """Whether a graph cannot tell what a pattern found, of which the tap's stream then hears.

    Raises PlanError for an edit of such a site, and for what needs the arguments that a module was called with.
    """
    found, is_edit = tap.found, isinstance(tap, EditTap)
    site, module = found.site, found.module
    if found.name or not isinstance(module, GraphPart) or isinstance(module, GraphTree) or isinstance(tap, CallTap):
        return False  # parameters are where they were
    if is_edit and site.op is None and (reason := module.why_untold or module.why_fixed):
        raise PlanError(f"{site} cannot be edited in an exported graph: {reason}")
    if site.op is None and (site.port in _NOT_KEPT or (is_edit and tap.is_skip)):
        raise PlanError(
            f"{site}: an exported graph does not keep what its modules were called with: expected an output, the "
            "gradient of one (:grad_output), or torch.export.unflatten(ep)"
        )
    if module.why_untold:
        tap.stream.skip(module.why_untold)
    return bool(module.why_untold)
