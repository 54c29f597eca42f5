"""While a session is open, an exported graph runs as its tree of modules (``gaff.address.exported``).

An exported graph calls no modules, so hooks on them would never fire. Its tree runs the same operations in the same
order and calls a module for the nodes of each; it takes the place of the exported graph's ``forward`` by a ``StandIn``
until the session closes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from gaff.address.exported import GraphCall, GraphPart, GraphTree
from gaff.engine.forwards import StandIn
from gaff.engine.taps import CallTap, EditTap
from gaff.errors import PlanError

WHY_EAGER = "an exported graph runs node by node"
_NOT_KEPT = ("input", "input_grad", "grad_input")


def trees_of(modules: Iterable[nn.Module]) -> list[GraphTree]:
    """The trees of exported graphs to which some of ``modules`` belong, each once."""
    found = {id(tree): tree for module in modules if isinstance(tree := vars(module).get("tree"), GraphTree)}
    return list(found.values())


def run_as(trees: Iterable[GraphTree], opening: ExitStack, notes: list[str], edited: Iterable[nn.Module] = ()) -> None:
    """Let the exported graphs run as their trees until ``opening`` closes.

    ``edited`` are modules whose outputs are changed: each counts its open edits, and refuses an output that is really
    its own input. ``notes`` is told where global module hooks of others now see modules that the graph alone does not
    call. Raises PlanError for a graph whose code is not that of its nodes; a graph that is changed later raises when
    it runs.
    """
    trees = list(trees)
    for tree in trees:
        tree.check()
        opening.callback(StandIn(tree.graph(), partial(_run, tree)).remove)
    around = (*module_hooks._global_forward_hooks.values(), *module_hooks._global_forward_pre_hooks.values())
    if trees and not all(getattr(hook, "__module__", "").startswith("gaff.") for hook in around):
        notes.append("hooks of others on all modules saw those of the exported graph too")
    for module in edited:
        if isinstance(module, GraphCall):
            module.edits += 1
            opening.callback(_leave, module)


def try_run_as(trees: Iterable[GraphTree], opening: ExitStack) -> None:
    """Let the exported graphs run as their trees for somebody who only looks, until ``opening`` closes.

    Unlike ``run_as`` it refuses nothing: a graph that was changed after its tree was made runs as it is, unseen.
    """
    for tree in trees:
        if tree.is_current():
            opening.callback(StandIn(tree.graph(), partial(_run_or_pass, tree)).remove)


def _leave(module: GraphCall) -> None:
    """The edit of what this module returns is over."""
    module.edits -= 1


def _run(tree: GraphTree, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The exported graph's forward while a session is open. Raises PlanError where the graph was changed meanwhile."""
    if not tree.is_current():
        raise PlanError("the exported graph was changed while a gaff session is open on it: close it first")
    return _run_or_pass(tree, own, args, kwargs)


def _run_or_pass(tree: GraphTree, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The exported graph's forward, by its tree; by its own code while torch compiles, or where it was changed."""
    is_hidden = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return own(*args, **kwargs) if is_hidden or not tree.is_current() else tree.forward(*args, **kwargs)


def is_untold(tap: Any) -> bool:
    """Whether an exported graph cannot tell what a pattern found: its tap is dropped, and the stream has been told.

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
