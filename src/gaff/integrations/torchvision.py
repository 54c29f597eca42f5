"""torchvision's feature extraction by its own names: ``create_feature_extractor`` and ``get_graph_node_names``.

    from gaff.integrations.torchvision import create_feature_extractor, get_graph_node_names

The model runs as it is, with its branches and in the mode that it is in, where torchvision runs a graph that was traced
once. Names of nodes are those of torchvision: a module's path; ``layer1.0.add`` for a functional call, ``_1`` behind it
for the second; of a module that is called twice ``relu`` and ``relu_1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site, nearest
from gaff.address.resolve import is_container, iter_modules
from gaff.errors import PlanError, SiteError
from gaff.harvesting.mode import in_mode
from gaff.inspection.op_log import OpRow
from gaff.inspection.sites import list_sites
from gaff.inspection.tracer import trace_run
from gaff.record.trace_rows import CallRow
from gaff.sessions.take import take

_TRACING = ("tracer_kwargs", "suppress_diff_warning", "concrete_args")


class FeatureExtractor(nn.Module):
    """A module that returns a dict of features, by the names that they were asked by; see the function below."""

    def __init__(self, model: nn.Module, nodes: Mapping[str, str]) -> None:
        super().__init__()
        self.model = model
        self.nodes = dict(nodes)  # from torchvision's name to that in the result
        modules = {path: module for path, module, _ in iter_modules(model)}
        self._addresses = {node: _address_of(modules, node) for node in nodes}
        self.training = model.training
        self._of_runs: dict[bool, dict[str, str]] = {}  # by mode, addresses that a run tells

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model no further than it has to; features keep their autograd graph.

        The first call in each mode runs the model once more for what a run tells: which functional calls there are, and
        which call of a block is its last. Raises SiteError for a name by which torchvision may mean another one.
        """
        addresses = self._told(args, kwargs)
        found = take(self.model, tuple(dict.fromkeys(addresses.values())), {})(*args, **kwargs)
        return {name: found[addresses[node]] for node, name in self.nodes.items()}

    def _told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
        """The address of each node."""
        known = self._of_runs.get(self.model.training)
        if known is None:
            ops = {node: one for node, one in self._addresses.items() if isinstance(one, FunctionalCall)}
            blocks = {node: one for node, one in self._addresses.items() if isinstance(one, LastCall)}
            doubtful = [node for node in self._addresses if node not in ops and _may_be_function(node)]
            rows = list_sites(self.model, args, kwargs, ops=True).rows if ops or doubtful else ()
            made = [row for row in rows if isinstance(row, OpRow)]
            for node in doubtful:
                _need_no_function(node, made)
            calls = trace_run(self.model, args, kwargs, None, has_flops=False).rows if blocks else ()
            known = {node: _op_address(node, call, made) for node, call in ops.items()}
            known |= {node: _last_call(node, one.path, calls) for node, one in blocks.items()}
            self._of_runs[self.model.training] = known
        return {node: known[node] if node in known else str(one) for node, one in self._addresses.items()}


def create_feature_extractor(
    model: nn.Module, return_nodes: Sequence[str] | Mapping[str, str] | None = None, **tracing: Any
) -> FeatureExtractor:
    """A module that returns features of ``model`` by name, as torchvision's function of this name does.

    A feature is what the node has returned, also where the model overwrites it a line later, as ``ReLU(inplace=True)``
    does; torchvision returns what it has become.

    Args:
        model: any module; nothing of it is copied, and its parameters are trained through the extractor.
        return_nodes: names of nodes, or addresses, or a dict from these to names in the result.
        tracing: what torchvision's function needs to trace a graph (``tracer_kwargs``, ``suppress_diff_warning``,
            ``concrete_args``): nothing is traced here, and they are passed over.

    Raises PlanError for another keyword, nodes for each mode among them, since the model runs in the mode that it is
    in; SiteError for a node of a module that there is not; a functional call that does not run is told by the first
    call.
    """
    unknown = [name for name in tracing if name not in _TRACING]
    if unknown:
        raise PlanError(f"{unknown[0]}= is not known here: expected return_nodes, for the mode that the model is in")
    if return_nodes is None:
        raise PlanError(
            "return_nodes= is missing: expected names of nodes, or a dict from these to names in the result"
        )
    if isinstance(return_nodes, str):
        raise PlanError(f"return_nodes={return_nodes!r}: expected a list of names, such as [{return_nodes!r}]")
    wanted = return_nodes if isinstance(return_nodes, Mapping) else {name: name for name in return_nodes}
    return FeatureExtractor(model, wanted)


class FunctionalCall(NamedTuple):
    """The ``number``-th call of a function of this name in the own forward of the module at ``path``."""

    path: str
    op: str
    number: int


class LastCall(NamedTuple):
    """The last call of the module at ``path``, into which torchvision looks; of a container, of what is in it."""

    path: str


def _address_of(modules: Mapping[str, nn.Module], node: str) -> str | FunctionalCall | LastCall:
    """The address of a node of torchvision's, or which call it means, as a run tells. Raises SiteError for none."""
    if "/" in node or ":" in node or "@" in node:
        return node  # an address already
    base, number = _numbered(node)
    if node in modules:
        return str(Site(node, call=0)) if _is_leaf(modules[node]) else LastCall(node)
    if base in modules:
        return str(Site(base, call=number))
    path, _, op = base.rpartition(".")
    if path and path not in modules:
        near = ", ".join(nearest(node, list(modules))) or "none"
        raise SiteError(f"no node {node!r}: the model has no module {path!r}; nearest: {near}")
    return FunctionalCall(path, op, number)


def _op_address(node: str, call: FunctionalCall, rows: Sequence[OpRow]) -> str:
    """The address of a functional call, by what has run: ``x += y`` is an addition, too. Raises SiteError for none."""
    start = f"{call.path}/"
    inside = [row.site for row in rows if row.site.startswith(start)]
    fitting = [site for site in inside if site[len(start) :].partition("#")[0] in (call.op, f"{call.op}_")]
    if len({site[len(start) :].partition("#")[0] for site in fitting}) > 1:
        raise SiteError(f"no node {node!r} can be told: torchvision tells x.{call.op}_(y) from +=, which are both "
                        f"{call.op}_ here; it ran {', '.join(fitting)}: expected one of these")  # fmt: skip
    if call.number >= len(fitting):
        told = ", ".join(inside) or "none"
        raise SiteError(
            f"no node {node!r}: {call.path or 'the model'!r} made {len(fitting)} calls of {call.op}; it ran {told}"
        )
    return fitting[call.number]


def _may_be_function(node: str) -> bool:
    """Whether the last name of a node is that of a function or method of torch's, too."""
    name = _numbered(node)[0].rpartition(".")[2]
    return any(hasattr(one, name) for one in (torch, nn.functional, Tensor))


def _need_no_function(node: str, rows: Sequence[OpRow]) -> None:
    """Raises SiteError where the module around the one that is meant calls a function of its name, too.

    torchvision numbers both in the order in which they run.
    """
    path, _, op = _numbered(node)[0].rpartition(".")
    inside = [row.site for row in rows if row.site.startswith(f"{path}/{op}#")]
    if inside:
        raise SiteError(f"no node {node!r} can be told: it is a module, and {path or 'the model'!r} calls a function "
                        f"of this name, too: expected {node}:output, or {inside[0]}")  # fmt: skip


def _is_leaf(module: nn.Module) -> bool:
    """Whether torchvision does not look into a module: torch's own, but for a Sequential, and what is never called."""
    is_torchs = type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    return is_torchs and not isinstance(module, nn.Sequential) and not is_container(module)


def _last_call(node: str, path: str, calls: Sequence[CallRow]) -> str:
    """The address of the last call of a module, or in a container. Raises SiteError where there was none.

    What a called one has inside is not looked at: its end is that of what it returns.
    """
    called = {row.path for row in calls}
    names = path.split(".")

    def is_wanted(row: CallRow) -> bool:
        inner = row.path.split(".")
        around = (".".join(inner[:count]) for count in range(len(names), len(inner)))
        return inner[: len(names)] == names and called.isdisjoint(around)

    last = next((row for row in reversed(calls) if is_wanted(row)), None)
    if last is None:
        raise SiteError(f"no node {node!r}: nothing at {path!r} was called in the run")
    return str(Site(last.path, call=last.call))


def _numbered(node: str) -> tuple[str, int]:
    """A name without ``_k`` at its end, and k; 0 where there is none."""
    found = re.fullmatch(r"(.+)_(\d+)", node)
    return (found[1], int(found[2])) if found else (node, 0)


def get_graph_node_names(model: nn.Module, *inputs: Tensor, **tracing: Any) -> tuple[list[str], list[str]]:
    """The names of all nodes in training and in evaluation mode, module by module.

    With an example input, for which the model runs twice, functional calls are listed, too; without one modules alone.
    torchvision lists nodes in the order in which they run, ``x += y`` as an ``add``, which here is an ``add_``, and
    blocks of its own (``Conv2dNormActivation``) as one; names in its way are understood all the same. The model is left
    as it was. ``tracing`` as for ``create_feature_extractor``.
    """
    unknown = [name for name in tracing if name not in _TRACING]
    if unknown:
        raise PlanError(f"{unknown[0]}= is not known here: expected example inputs, and nothing else")
    if not inputs:
        names = [path for path, module, _ in iter_modules(model) if path and not module._modules]
        return names, list(names)
    return _nodes(model, inputs, training=True), _nodes(model, inputs, training=False)


def _nodes(model: nn.Module, inputs: Sequence[Tensor], *, training: bool) -> list[str]:
    with in_mode(model, training=training):
        rows = list_sites(model, inputs, {}, ops=True).rows
    found: list[str] = []
    for row in rows:
        if not isinstance(row, OpRow):
            inside = any(one.site.startswith(f"{row.path}.") for one in rows if not isinstance(one, OpRow) and row.path)
            found += [] if not row.path or inside or not row.calls else _repeated(row.path, row.calls)
            continue
        path, _, op = row.site.partition("/")
        name, _, number = op.partition("#")
        full = f"{path}.{name}" if path else name
        owner = next((one for one in rows if not isinstance(one, OpRow) and one.path == path), None)
        is_leaf = owner is not None and path and not any(
            one.path.startswith(f"{path}.") for one in rows if not isinstance(one, OpRow))  # fmt: skip
        if not is_leaf:
            found.append(full if number.partition("@")[0] == "0" else f"{full}_{number.partition('@')[0]}")
    return found


def _repeated(path: str, calls: int) -> list[str]:
    return [path, *(f"{path}_{number}" for number in range(1, calls))]
