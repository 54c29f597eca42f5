"""The calls of modules that the nodes of an exported graph were made in, read from their metadata.

A graph keeps, node by node, the stack of calls in which its program ran the operation. ``Calls`` puts the nodes of each
call together and asks whether they can stand for it: they must lie side by side, and one tensor must leave them. What
does not qualify is told as a reason, never guessed: decomposition and functionalisation can lose which tensor a module
returned, and graphs can be changed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch._ops import OpOverload

from gaff.compat.modes import frames_from

_INTERPRETER = fx.Interpreter.run_node.__code__
_LINE = re.compile(r'File "(.+?)", line (\d+)')
_IN_PLACE = re.compile(r"aten\.\w*[a-z0-9]_(\.|$)")
_WORDS = (
    "alias as_strided chunk detach diagonal expand flatten lift_fresh movedim narrow permute real reshape select "
    "slice split squeeze t transpose unbind unflatten unfold unsqueeze view view_as_complex view_as_real"
)
_VIEWS = frozenset(_WORDS.split())  # operations that return a view

_GENERATED = "<eval_with_key>"  # the file of code that torch.fx writes
_INSIDE = 2  # calls around a node of a module: the root's, and the module's
_INLINED = (
    "a call of it may be among the nodes that a no_grad or autocast block was decomposed into, which name no modules: "
    "expected the exported program before run_decompositions()"
)

Chain = tuple[str, ...]  # keys of the calls around a node, outermost first: the same for all nodes of a call


class Place(NamedTuple):
    """A module as a node's metadata names it: its path, and its class's name."""

    path: str
    kind: str


class Region:
    """One call of a module: what it runs, as positions of nodes and calls inside it, in order.

    ``first`` and ``last``: its span of positions. ``depth``: how many calls are around it, itself and the root's
    included. ``entering``: nodes from outside that it uses; ``leaving``: the one node that others use, ``uses``: how
    often; ``is_given_again``: it is a tensor that came from outside. ``Calls`` makes it; the tree adds ``steps`` and
    ``module``, the module that is called for it.
    """

    __slots__ = ("depth", "entering", "first", "is_given_again", "last", "leaving", "module", "path", "steps", "uses")

    def __init__(
        self,
        place: Place,
        depth: int,
        span: tuple[int, int],
        entering: Sequence[int] = (),
        leaving: tuple[int, int] = (-1, 0),
        *,
        is_given_again: bool = False,
    ) -> None:
        self.path = place.path
        self.depth = depth
        self.first, self.last = span
        self.entering = entering
        self.leaving, self.uses = leaving
        self.is_given_again = is_given_again
        self.steps: list[int | Region] = []
        self.module: Any = None


def place_in_model(frame: FrameType) -> tuple[str, int] | None:
    """File and line of the model for the node that torch's interpreter runs in ``frame``; None in any other frame.

    An op that a tree runs is called from torch's interpreter: the user's line is in the node's own stack trace, where
    ``torch.export`` keeps it. None where the node has none.
    """
    if frame.f_code.co_filename != _INTERPRETER.co_filename:
        return None
    at = next((one for one in frames_from(frame) if one.f_code is _INTERPRETER), None)
    node = at.f_locals.get("n") if at is not None else None
    lines = _LINE.findall(node.meta.get("stack_trace") or "") if isinstance(node, fx.Node) else []
    return (lines[-1][0], int(lines[-1][1])) if lines else None


def _stack(node: fx.Node) -> dict[str, tuple[str, str]]:
    """The calls around a node by their keys, the root's too, outermost first: path and class name of each."""
    found = node.meta.get("nn_module_stack") or {}
    return {
        key: (path, kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2])
        for key, (path, kind) in found.items()
    }


def _chain(graph: fx.GraphModule, node: fx.Node, *, has_root: bool = True) -> dict[Chain, Place] | None:
    """The calls around a node whose modules are gone, outermost first; None for nodes that belong to no place.

    ``has_root``: nodes of the whole model say so, as those of torch.export do, and no others say nothing.
    """
    stack = _stack(node)
    if node.op in ("placeholder", "get_attr", "output") or (has_root and not stack):
        return None
    if node.op == "call_module" and node.target not in [path for path, _ in stack.values()]:
        return None  # what torch.export adds to check its inputs
    found: dict[Chain, Place] = {}
    keys: Chain = ()
    for key, (path, kind) in stack.items():
        keys = (*keys, key)
        own = module_at(graph, path) if path else graph
        if own is None or type(own) is nn.Module:  # which only holds parameters
            found[keys] = Place(path, kind)
    return found


def module_at(graph: nn.Module, path: str) -> nn.Module | None:
    """The module at ``path`` below an exported graph, by its own ``_modules`` alone; None where there is none."""
    module: nn.Module | None = graph
    for name in path.split("."):
        module = module._modules.get(name) if module is not None else None
    return module


class Calls:
    """All calls in an exported graph: ``regions``, outer ones first, and ``untold``, by path why others cannot be told.

    ``nodes`` are the graph's in order, ``numbers`` their positions, ``chains`` the calls around each and ``kinds`` the
    class name for each path. Reads the graph when made, changes nothing, and does not follow later changes.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.nodes = list(graph.graph.nodes)
        self.numbers = {node: number for number, node in enumerate(self.nodes)}
        has_root = any(not path for node in self.nodes for path, _ in _stack(node).values())
        self.chains = [_chain(graph, node, has_root=has_root) for node in self.nodes]
        self.kinds = {place.path: place.kind for chain in self.chains for place in (chain or {}).values()}
        self.regions: list[Region] = []
        self.untold: dict[str, str] = {}
        calls: dict[Chain, tuple[Place, list[int]]] = {}
        for number, chain in enumerate(self.chains):
            for keys, place in (chain or {}).items():
                calls.setdefault(keys, (place, []))[1].append(number)
        for keys, (place, own) in calls.items():
            found = self._region(keys, place, own)
            if isinstance(found, str):
                self.untold[place.path] = found
            else:
                self.regions.append(found)
        self.untold.update(_hidden(graph, frozenset(), ""))
        self._part_inlined(graph)
        self._part_names(graph)
        self.regions = [region for region in self.regions if region.path not in self.untold]
        self.regions.sort(key=lambda region: (region.first, -region.last, region.depth))

    def _region(self, keys: Chain, place: Place, own: list[int]) -> Region | str:
        """The call made of the nodes ``own``, or why it cannot be told.

        It needs nodes that stand together, users that are known, one tensor that leaves, and certainty which that is.
        Of a value that is one from outside returned again and one that was made inside, the latter is the output.
        """
        first, last = own[0], own[-1]
        if any(chain is not None and keys not in chain for chain in self.chains[first:last]):
            return "its operations do not stand together in the graph"
        uses = {number: self._uses_after(number, last) for number in own if _is_tensor(self.nodes[number])}
        if None in uses.values():
            return "what follows it belongs to no module: the graph was changed after it was made"
        leaving = [number for number, count in uses.items() if count]
        made = [number for number in leaving if not self._is_given_again(number, first)]
        if len(made or leaving) != 1:
            return f"{len(leaving) or 'no'} values leave it, and the graph keeps no structure of them"
        [out] = made or leaving
        if any(map(_wrote_in_place, own_nodes := [self.nodes[number] for number in own])) and self._is_base(out, last):
            return "it wrote in place, and the decomposed graph does not tell which view of that it returned"
        given = {one for node in own_nodes for one in node.all_input_nodes if one.op != "get_attr" and _is_tensor(one)}
        entering = sorted(number for one in given if (number := self.numbers[one]) < first)
        leaves = out, uses[out] or 0
        return Region(place, len(keys), (first, last), entering, leaves, is_given_again=not made)

    def _uses_after(self, number: int, last: int) -> int | None:
        """How often a value is used later, but for writes into buffers; None where nobody knows by whom.

        Nodes that belong to no module and whose result nobody uses are assertions that ``torch.export`` adds: no use
        either.
        """
        count = 0
        for user in self.nodes[number].users:
            at = self.numbers[user]
            if at <= last or _is_buffer_write(user):
                continue
            if self.chains[at] is None and user.op != "output":
                if user.users:
                    return None
                continue  # a check
            count += _occurrences(self.nodes[number], user)
        return count

    def _is_given_again(self, number: int, first: int) -> bool:
        """Whether the value is the very tensor that came from outside, so that later uses of that are uses of it.

        Follows operations that return their argument, in place or because there was nothing to do, back to its origin.
        """
        while _returns_its_argument(self.nodes[number]):
            number = self.numbers[self.nodes[number].args[0]]
            if number < first:
                return True
        return False

    def _is_base(self, number: int, last: int) -> bool:
        """Whether a later view of the value was made by an operation that is none: what was written in place is so.

        Functionalisation turns a write into a view into a new base from which the view is cut again.
        """
        users = [user for user in self.nodes[number].users if self.numbers[user] > last]
        return any(_is_view(str(user.target)) and not any(map(_is_view, _origins(user))) for user in users)

    def _part_inlined(self, graph: fx.GraphModule) -> None:
        """Fill ``untold`` for modules of which a call may be among nodes that an inner graph was decomposed into.

        ``run_decompositions`` puts the graph of a ``no_grad`` or ``autocast`` block into the one around it, and its
        nodes name the root alone; their line is one of generated code. Meant are modules whose parameters such nodes
        use, those around them, and those without parameters.
        """
        is_made = [isinstance(node.target, OpOverload) and _is_of_graph(node) for node in self.nodes]
        lost = [node for node, chain, made in zip(self.nodes, self.chains, is_made, strict=True)
                if made and chain is not None and len(chain) < _INSIDE]  # fmt: skip
        is_all = any(made and len(chain or ()) >= _INSIDE for chain, made in zip(self.chains, is_made, strict=True))
        if not lost or is_all:  # else the program itself was generated code
            return
        held = {str(one.target) for node in lost for one in node.all_input_nodes if one.op == "get_attr"}
        for path in filter(None, self.kinds):
            own = module_at(graph, path)
            has_some = own is not None and any(True for _ in own.parameters())
            if not has_some or any(name.startswith(f"{path}.") for name in held):
                self.untold.setdefault(path, _INLINED)

    def _part_names(self, graph: fx.GraphModule) -> None:
        """One module under several names has its calls under each: where that may be so, none of them is told.

        It may be so where two paths have the same class name and the very same parameters. Fills ``untold``, for what
        is below these paths as well.
        """
        alike: dict[object, list[str]] = {}
        for path in self.kinds:
            own = module_at(graph, path)
            held = tuple((name, id(one)) for name, one in own.named_parameters()) if own is not None else ()
            if held:
                alike.setdefault((self.kinds[path], held), []).append(path)
        for paths in alike.values():
            for path in paths if len(paths) > 1 else ():
                others = ", ".join(other for other in paths if other != path)
                for inner in self.kinds:
                    if f"{inner}.".startswith(f"{path}."):
                        self.untold[inner] = f"{path} has the parameters of {others}, and may be the same module"


def _is_of_graph(node: fx.Node) -> bool:
    """Whether the line that a node comes from is one of an exported graph's own code."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    at = max((number for number, one in enumerate(lines) if 'File "' in one), default=None)
    return at is not None and _GENERATED in lines[at] and any("torch.ops.aten." in one for one in lines[at + 1 :])


def _occurrences(node: fx.Node, user: fx.Node) -> int:
    """How many times ``node`` stands among the arguments of ``user``: ``x + x`` uses it twice."""
    found: list[fx.Node] = []

    def note(one: fx.Node) -> fx.Node:
        found.append(one)
        return one

    fx.map_arg((user.args, user.kwargs), note)
    return sum(one is node for one in found)


def _is_buffer_write(node: fx.Node) -> bool:
    """Whether a node copies a new value into a buffer, as that of batch norm's statistics."""
    is_copy = node.op == "call_function" and str(node.target).startswith("aten.copy_")
    return is_copy and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"


def _returns_its_argument(node: fx.Node) -> bool:
    """Whether an op returns the tensor that it was given: in place, or because there was nothing to convert."""
    if not isinstance(node.target, OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    alias = node.target._schema.returns[0].alias_info if node.target._schema.returns else None
    if (alias is not None and alias.is_write) or _wrote_in_place(node):
        return True
    given, value = node.args[0].meta.get("val"), node.meta.get("val")
    if node.target._schema.name not in ("aten::to", "aten::contiguous") or not isinstance(given, Tensor):
        return False
    return isinstance(value, Tensor) and _layout(given) == _layout(value)


def _origins(node: fx.Node) -> list[str]:
    """The operations that a node was made of in the program before its decomposition; none where there was none."""
    sources = list(node.meta.get("from_node") or ())  # what made the node as it is
    waiting = [before for source in sources for before in source.from_node]
    for source in waiting:
        waiting += source.from_node
    return [str(source.target) for source in waiting]


def _wrote_in_place(node: fx.Node) -> bool:
    """Whether a decomposed node stands for an operation that wrote into its argument."""
    return _IN_PLACE.match(str(node.target)) is None and any(map(_IN_PLACE.match, _origins(node)))


def _is_view(target: str) -> bool:
    return target.partition(".")[2].partition(".")[0] in _VIEWS


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tuple(map(str, tensor.shape)), tuple(map(str, tensor.stride()))


def _is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, as far as is known."""
    return "val" not in node.meta or isinstance(node.meta["val"], Tensor)


def _hidden(graph: fx.GraphModule, around: frozenset[Chain], at: str) -> Iterator[tuple[str, str]]:
    """Modules of which a call is in a graph inside this one, called as a function: their path, and what to say.

    Such are the branches of ``torch.cond`` and the bodies of other higher-order operations. ``around``: the calls that
    are known to be around this graph, ``at``: its path. Goes down to any depth.
    """
    for node in graph.graph.nodes:
        for given in node.all_input_nodes:
            inner = graph._modules.get(str(given.target)) if given.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                path = f"{at}.{given.target}" if at else str(given.target)
                inside = around | (_chain(graph, node) or {}).keys()
                for hidden in _named_in(inner, inside):
                    yield hidden, f"a call of it is in {path!r}, a graph inside this one: see {path}.{hidden}"
                calls = (one for one in inner.graph.nodes if one.op.startswith("call"))
                if any(not one.meta.get("nn_module_stack") for one in calls):  # as in the branches of torch.cond
                    held = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
                    reason = f"a call of it may be in {path!r}, a graph inside this one that names no modules"
                    yield from ((name.rpartition(".")[0], reason) for name in held if "." in name)
                yield from _hidden(inner, inside, path)


def _named_in(graph: fx.GraphModule, inside: frozenset[Chain]) -> Iterator[str]:
    """Paths of the modules that the nodes of an inner graph name, but for the calls around that graph (``inside``)."""
    for node in graph.graph.nodes:
        yield from (place.path for keys, place in (_chain(graph, node) or {}).items() if keys not in inside)
