"""``gaff.anatomy``: the backward pass of one module explained, node by node, and the legacy hook beside the truth.

The module runs once with an ``OpLog``, which tells the op and line of each autograd node, and a ``NodeWatch``, which
is called as backward runs the nodes. ``register_backward_hook`` hangs on the node of the output alone: what it calls
``grad_input`` is of that node's inputs, not of the module's, which is why both are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site, parse_site, print_key
from gaff.address.nested import Arguments, describe, iter_tensors, map_tensors, shape_text
from gaff.address.resolve import Found, find_site, need_module
from gaff.compat.leaves import kept_gradients, need_no_updates, others
from gaff.compat.modes import autocasts
from gaff.engine.gradients.nodes import Gradients, NodeWatch, Seen
from gaff.engine.ops.calls import OpCall
from gaff.engine.session import Session
from gaff.engine.stop import EarlyStop
from gaff.engine.taps import CallTap, OpTap
from gaff.errors import PlanError, SiteError
from gaff.inspection.anatomy import Anatomy
from gaff.inspection.call_log import gradient_of
from gaff.inspection.op_log import OpLog, OpNotes, code_at, place_text
from gaff.inspection.untouched import untouched
from gaff.record.node_rows import Edge, NodeRow

NOBODY = "nothing that needs it"
COPIED = "the module writes into its input: it was given a copy, whose node (CloneBackward0) stands before the input"


class _Explanation:
    """One run of the module and its backward pass, written down.

    Used once: ``run`` opens a session, and closes it before backward. Autograd nodes are given an owner when they are
    first seen, going backward from a tensor: the op that has just returned, or the path of the module inside which
    nodes turned up that no op has made. So inputs have to be followed before outputs.
    """

    def __init__(self, module: nn.Module, *, is_copied: bool = False) -> None:
        self._module = module
        self._is_copied = is_copied  # the module writes into its input, which no leaf allows
        self._log = OpLog(module)
        self._watch = NodeWatch(self._ran)
        self._passed: list[tuple[Seen, tuple[Edge, ...], tuple[Edge, ...]]] = []
        self._inside = [""]  # paths of the modules that run now

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Anatomy:
        """Run the module on ``args`` and ``kwargs``, run backward from ones at each output, and tell what happened.

        Floating inputs are replaced by leaves of their own, so that the backward pass ends at the module, and the
        user's tensors get no gradient. Raises PlanError where no output requires grad; errors of the module pass
        through.
        """
        leaves: list[Tensor] = []
        given = args, kwargs = map_tensors((args, kwargs), lambda tensor: _leaf(tensor, leaves))
        if self._is_copied:
            args, kwargs = map_tensors(given, lambda tensor: tensor.clone() if tensor.requires_grad else tensor)
        session = Session(self._module, list(self._taps()))
        with ExitStack() as stack:
            stack.enter_context(untouched(self._module))
            stack.enter_context(torch.enable_grad())
            stack.callback(self._watch.close)
            with session:
                output = self._module(*args, **kwargs)
            first = _first_of(output)
            named = [(key, tensor) for key, tensor in iter_tensors(output) if tensor.requires_grad]
            if not named:
                raise PlanError(
                    f"{type(self._module).__name__} returned {describe(output)} without a graph: nothing in it "
                    "requires grad, so there is no backward pass to explain"
                )
            self._watch.follow([tensor for _, tensor in named], None)
            last = self._watch.find(first) if first is not None else None
            roots = [tensor for _, tensor in named]
            stack.enter_context(kept_gradients(others(roots, [*self._module.parameters(), *leaves])))
            torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
            inputs = self._inputs(*given)
            outputs = [_edge(f":output{print_key(key)}", torch.ones_like(tensor)) for key, tensor in named]
            notes = [COPIED] if self._is_copied else []
            norms = [edge.norm for edge in inputs if edge.norm is not None]
            if norms and max(norms) < 1e-5 * max(edge.norm or 0.0 for edge in outputs):
                notes.append("a gradient of ones is one that a normalisation takes away: what is left is rounding")
            if any(seen.name == "CheckpointFunctionBackward" for seen, _, _ in self._passed):
                notes.append("a reentrant checkpoint runs its part of the backward pass apart: its nodes are not shown")
            return self._build(inputs, tuple(outputs), last, [*notes, *session.notes])

    def _taps(self) -> Iterator[OpTap | CallTap]:
        """The taps of the log, with the watch told first on entry: what is behind an input is not the op's."""
        for tap in self._log.taps():
            if isinstance(tap, OpTap):
                yield OpTap(tap.found, self._enter, self._leave)
            else:
                path = tap.found.site.path
                yield CallTap(
                    tap.found, partial(self._entered, path, tap.enter), partial(self._returned, path, tap.leave)
                )

    def _enter(self, call: OpCall) -> None:
        """An op begins: nodes behind its inputs that nobody owns yet are the module's, such as a custom Function's."""
        self._watch.follow([tensor for _, tensor in iter_tensors((call.args, call.kwargs))], call.site.path)
        self._log.enter(call)

    def _entered(self, path: str, enter: Any, given: Arguments, run: Any, call: int) -> None:
        """A module begins: nodes behind its inputs that nobody owns yet belong to the module around it."""
        self._watch.follow([tensor for _, tensor in iter_tensors(given)], self._inside[-1])
        self._inside.append(path)
        enter(given, run, call)

    def _returned(self, path: str, leave: Any, output: Any, run: Any, call: int) -> None:
        """A module returns: nodes that no op has made, but this module hands out, are its own.

        Modules that were left by an exception are still on the stack, and go with it.
        """
        self._watch.follow([tensor for _, tensor in iter_tensors(output)], path)
        while len(self._inside) > 1 and self._inside.pop() != path:
            pass
        leave(output, run, call)

    def _leave(self, call: OpCall, output: Any) -> None:
        """An op returned: the nodes between its inputs and its outputs are its own."""
        notes = self._log.leave(call, output)
        self._watch.follow([tensor for _, tensor in iter_tensors(output)], notes)

    def _inputs(self, args: Any, kwargs: Any) -> tuple[Edge, ...]:
        """The gradients of the inputs; one that was given twice gets the sum of its uses, and is told once."""
        by_tensor: dict[int, tuple[list[str], Tensor]] = {}
        for key, tensor in iter_tensors({**dict(enumerate(args)), **kwargs}):
            if tensor.requires_grad:
                by_tensor.setdefault(id(tensor), ([], tensor))[0].append(f":input{print_key(key)}")
        together = ", one tensor: the total of all its uses"
        return tuple(
            _edge(" = ".join(names) + (together if len(names) > 1 else ""), tensor.grad)
            for names, tensor in by_tensor.values()
        )

    def _ran(self, seen: Seen, incoming: Gradients, outgoing: Gradients) -> None:
        """Called by the watch as backward has run a node: note what came and what was handed on, as shapes and norms.

        No gradient is kept, only its numbers, for which the device is waited for. A leaf hands nothing on.
        """
        came = tuple(_edge("", gradient) for gradient in incoming)
        if seen.variable is not None:
            self._passed.append((seen, came, ()))
            return
        handed = []
        for at, gradient in enumerate(outgoing):
            onward = seen.onward[at] if at < len(seen.onward) else None
            handed.append(_edge(self._whose(seen, onward[0]) if onward is not None else NOBODY, gradient))
        self._passed.append((seen, came, tuple(handed)))

    def _whose(self, seen: Seen, onward: Seen) -> str:
        """What the gradient that goes to ``onward`` is the gradient of.

        A node of the same op is an inner result; where it has a single way on, as a transpose has, the gradient is
        named by what lies behind it.
        """
        if onward.variable is not None:
            return self._log.producers.of(onward.variable) or "a tensor from outside"
        if isinstance(onward.owner, OpNotes) and onward.owner is seen.owner:
            inner = [one for one in onward.onward if one is not None]
            if len(inner) != 1:
                return f"the result of {onward.name.partition('Backward')[0]} inside {_site_of(onward)}"
            return f"{self._whose(onward, inner[0][0])}, by way of {onward.name}"
        return _site_of(onward)

    def _build(
        self, inputs: tuple[Edge, ...], outputs: tuple[Edge, ...], last: Seen | None, notes: list[str]
    ) -> Anatomy:
        """The anatomy, from what was noted. ``last``: the node of the output on which the legacy hook hangs, if it ran.

        Nodes are numbered in the order in which they ran; an edge to a node that did not run has no number.
        """
        numbers = {id(seen): at for at, (seen, _, _) in enumerate(self._passed)}
        rows = []
        for at, (seen, came, handed) in enumerate(self._passed):
            owner = seen.owner if isinstance(seen.owner, OpNotes) else None
            to = [None if one is None else numbers.get(id(one[0])) for one in seen.onward]
            to += [None] * (len(handed) - len(to))
            edges = tuple(Edge(edge.whose, edge.shape, edge.norm, goal) for edge, goal in zip(handed, to, strict=False))
            leaf = seen.variable is not None
            whose = self._log.producers.of(seen.variable) if seen.variable is not None else _site_of(seen)
            rows.append(
                NodeRow(
                    at,
                    seen.name,
                    whose,
                    place_text(owner.place) if owner is not None and not leaf else "",
                    code_at(owner.place) if owner is not None and not leaf else "",
                    tuple(Edge(whose or "the output", edge.shape, edge.norm) for edge in came),
                    edges,
                )
            )
        at_last = next((row for row in rows if last is not None and row.number == numbers.get(id(last))), None)
        named = [(name, parameter) for name, parameter in self._module.named_parameters() if parameter.requires_grad]
        return Anatomy(
            type(self._module).__name__,
            tuple(rows),
            inputs,
            outputs,
            tuple(_edge(str(Site(name, port="param")), parameter.grad) for name, parameter in named),
            at_last.outgoing if at_last is not None else (),
            at_last.incoming if at_last is not None else (),
            tuple(notes),
            at_last.number if at_last is not None else -1,
        )


def explain(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Anatomy:
    """Run ``module`` once, forward and backward, and explain its backward pass; the work behind ``gaff.anatomy``.

    A module that writes into its input cannot be given a leaf, on which autograd refuses that: where torch says so it
    is run again on copies, and a note tells of the node that each copy adds. Raises PlanError in inference mode, or
    where nothing requires grad.
    """
    need_module(module)
    if torch.is_inference_mode_enabled():
        raise PlanError("anatomy cannot run in torch.inference_mode: there is no backward pass to explain; leave it")
    need_no_updates(module.named_parameters(), "explain a copy of the module")
    try:
        return _Explanation(module).run(args, kwargs)
    except RuntimeError as error:
        if "in-place" not in str(error) and "inplace" not in str(error):
            raise
    return _Explanation(module, is_copied=True).run(args, kwargs)


def explain_inside(model: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Anatomy:
    """Explain the module at ``path``, with what it is given in the first call of a run of ``model``, and its autocast.

    The run is stopped when the module is entered, by an exception that is caught here. Raises SiteError for a path
    that names no module, and where the module was not called.
    """
    wanted = parse_site(path)
    if wanted != Site(wanted.path):
        raise SiteError(f"{path!r} is no module: anatomy explains modules, such as {wanted.path!r}")
    found = find_site(model, wanted)[0]
    given: list[tuple[Arguments, dict[str, torch.dtype]]] = []
    early = EarlyStop()

    def enter(inner: Arguments, run: Any, call: int) -> None:
        given.append((inner, dict(autocasts())))
        early.stop()

    session = Session(model, [CallTap(Found(Site(path), found.module, found.chain), enter, lambda *_: None)])
    with untouched(model), session, early:
        model(*args, **kwargs)
    if not given:
        raise SiteError(f"{path}: was not called in this run: there is nothing to explain")
    inner, dtypes = given[0]
    with ExitStack() as stack:
        for kind in {"cpu", *dtypes}:
            stack.enter_context(torch.autocast(kind, dtypes.get(kind), enabled=kind in dtypes))
        return explain(found.module, inner.args, inner.kwargs)


def _leaf(tensor: Tensor, leaves: list[Tensor]) -> Tensor:
    """A leaf of its own that requires grad, for a floating or complex input; any other tensor as it is.

    ``leaves``: tensors given and their leaves in turn, for a tensor that is given twice has to stay one.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    known = next((leaf for given, leaf in zip(leaves[::2], leaves[1::2], strict=True) if given is tensor), None)
    if known is None:
        known = tensor.detach().clone().requires_grad_()
        leaves += [tensor, known]
    return known


def _edge(whose: str, gradient: Tensor | None) -> Edge:
    """One gradient as a row: shape and norm, or nothing where there is none. Waits for the device."""
    if gradient is None:
        return Edge(whose, "", None)
    return Edge(whose, shape_text(gradient), gradient_of(gradient).norm)


def _site_of(seen: Seen) -> str:
    """The op that made a node; of a custom Function its name in the module that called it."""
    if isinstance(seen.owner, OpNotes):
        return str(Site(seen.owner.site.path, seen.owner.site.op, seen.owner.site.op_index))
    return f"{seen.owner or ''}/{seen.name.removesuffix('Backward')}"


def _first_of(output: Any) -> Tensor | None:
    """The tensor on whose node the legacy hook hangs, by torch's own rule; None where it is never called."""
    while not isinstance(output, Tensor):
        if isinstance(output, dict):
            output = next((one for one in output.values() if isinstance(one, Tensor)), None)
        elif isinstance(output, (tuple, list)) and output:
            output = output[0]
        else:
            return None
    return output
