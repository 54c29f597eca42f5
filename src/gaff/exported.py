"""Exported graphs (``torch.export``, fx) as the trees of modules that they were made from.

Such a graph calls no modules any more, but each of its nodes knows the calls in which it was made
(``node.meta["nn_module_stack"]``). A tree with the original paths and class names stands for it: its root runs the
graph node by node, the same operations in the same order, and each module in it is called for the nodes of its own.
Nothing is put on the graph here: whoever uses the tree lets its root run in place of the graph's ``forward``.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx import _pytree as fx_pytree
from torch.fx.graph import _PyTreeCodeGen

from gaff.errors import PlanError

Chain = tuple[str, ...]  # keys of the calls around a node, outermost first: the same for all nodes of a call


class Place(NamedTuple):
    """A module as a node's metadata names it."""

    path: str
    kind: str


class Region:
    """One call of a module: what it runs, as positions of nodes and calls inside it, in order.

    ``entering``: nodes from outside that it uses; ``leaving``: the one node that others use; ``is_shared``: that one is
    a tensor which came from outside, and the graph does not tell its uses from those of what the module returned.
    """

    __slots__ = ("depth", "entering", "first", "is_shared", "last", "leaving", "module", "path", "steps")

    def __init__(
        self,
        place: Place,
        depth: int,
        span: tuple[int, int],
        entering: Sequence[int] = (),
        leaving: int = -1,
        *,
        is_shared: bool = False,
    ) -> None:
        self.path = place.path
        self.depth = depth
        self.first, self.last = span
        self.entering = entering
        self.leaving = leaving
        self.is_shared = is_shared
        self.steps: list[int | Region] = []
        self.module: Any = None


class GraphPart(nn.Module):
    """A module of a tree that is never called.

    ``why_untold``: though the original was. ``why_fixed``: why what it returns can be told, and cannot be edited.
    """

    why_untold = ""
    why_fixed = ""

    def hold(self, own: nn.Module) -> None:
        """Have the parameters and buffers of a module of the graph: not copies, but the same dictionaries."""
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = own.__dict__[name]


class GraphCall(GraphPart):
    """A module of a tree that is called. Hooks see which tensors it uses, not the arguments of the original."""

    tree: GraphTree

    def forward(self, *entering: Any) -> Any:
        """Run the nodes of the call that is due, and return what leaves it."""
        run: _GraphRun = self.__dict__["tree"].now.run
        region = run.due
        run.go(region)
        return run.values[run.nodes[region.leaving]]


class GraphTree(GraphCall):
    """The root of the tree that stands for a graph, which it does not keep alive."""

    def __init__(self, graph: fx.GraphModule, regions: list[Region], untold: dict[str, str]) -> None:
        super().__init__()
        self.__dict__["tree"] = self
        self.hold(graph)
        self.code = graph.code
        self.untold = untold
        self.now = threading.local()
        self._graph = weakref.ref(graph)
        nodes = list(graph.graph.nodes)
        self._whole = Region(Place("", ""), 0, (0, len(nodes) - 1))
        _nest(self._whole, regions)
        self._frees = _frees(nodes)

    def graph(self) -> fx.GraphModule:
        """The graph that it stands for."""
        graph = self._graph()
        if graph is None:
            raise PlanError("the exported graph that this session is about is gone")
        return graph

    def check(self) -> None:
        """Raises PlanError when the graph's code does not say what its nodes do."""
        graph = self.graph()
        if graph.graph.python_code("self").src != graph.code:
            raise PlanError("the graph was changed after its code was made: call .recompile() on it first")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph's own ``forward`` returns, bit for bit."""
        graph = self.graph()
        before = getattr(self.now, "run", None)
        self.now.run = run = _GraphRun(graph, self._frees, _flat(graph, args, kwargs))
        try:
            run.go(self._whole)
        finally:
            self.now.run = before
        return graph.graph.process_outputs(run.output)


class _GraphRun:
    """One run of a graph. ``values``: of nodes that are still needed; ``due``: the call that is about to be made."""

    def __init__(self, graph: fx.GraphModule, frees: list[list[int]], given: list[Any]) -> None:
        self._each = fx.Interpreter(graph, garbage_collect_values=False)
        self._frees = frees
        self._given = iter(given)
        self.nodes = list(graph.graph.nodes)
        self.values = self._each.env
        self.due: Region
        self.output: Any = None

    def go(self, region: Region) -> None:
        """Run the nodes of a call, and the calls inside it."""
        for step in region.steps:
            if isinstance(step, int):
                self._node(step)
            else:
                self.due = step
                entering = [self.values[self.nodes[place]] for place in step.entering]
                self.values[self.nodes[step.leaving]] = step.module(*entering)

    def _node(self, place: int) -> None:
        node = self.nodes[place]
        if node.op == "output":
            self.output = self._each.run_node(node)
            return
        self.values[node] = next(self._given) if node.op == "placeholder" else self._each.run_node(node)
        for done in self._frees[place]:
            del self.values[self.nodes[done]]


_trees: weakref.WeakKeyDictionary[nn.Module, GraphTree] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def tree_of(module: nn.Module) -> nn.Module:
    """The tree that stands for a graph; any other module, and a graph that knows of no calls, as it is."""
    if not isinstance(module, fx.GraphModule):
        return module
    with _lock:
        known = _trees.get(module)
        if known is None or known.code is not module.code:
            found = _build(module)
            if found is None:
                return module
            known = _trees[module] = found
    return known


def class_of(module: nn.Module) -> type:
    """A module's class; of one in a tree the class of torch that has its name, if there is one."""
    cls = type(module)
    known = getattr(nn, cls.__name__, cls) if isinstance(module, GraphPart) else cls
    return known if isinstance(known, type) else cls


def _build(graph: fx.GraphModule) -> GraphTree | None:
    nodes = list(graph.graph.nodes)
    if not _takes_plain_arguments(graph, nodes):
        return None
    chains = [_chain(graph, node) for node in nodes]
    regions, untold = _regions(nodes, chains)
    for path, inner in _hidden(graph, frozenset(), ""):
        untold[path] = f"a call of it is in {inner!r}, a graph inside this one: see {inner}.{path}"
    regions = [region for region in regions if region.path not in untold]
    if not regions and not untold:
        return None
    kinds = {place.path: place.kind for chain in chains for place in (chain or {}).values()}
    root = next((kind for node in nodes for path, kind in _stack(node).values() if not path), "GraphModule")
    tree: GraphTree = _class(root, GraphTree)(graph, regions, untold)
    _plant(tree, graph, kinds, {region.path for region in regions})
    for region in regions:
        region.module = tree.get_submodule(region.path)
        if region.is_shared:
            region.module.why_fixed = "it returns the tensor that it was given, which others use too"
    return tree


def _takes_plain_arguments(graph: fx.GraphModule, nodes: list[fx.Node]) -> bool:
    """Whether what the graph is called with can be handed to its nodes: by name, or as torch.export flattens it."""
    if any(node.op == "placeholder" and str(node.target).startswith("*") for node in nodes):
        return False
    spec = getattr(graph, "_in_spec", None)
    if not isinstance(graph.graph._codegen, _PyTreeCodeGen):
        return True
    return spec is not None and spec.type is tuple and spec.num_children == 2 and spec.child(1).type is dict


def _flat(graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """One value for each placeholder."""
    bound = inspect.signature(type(graph).forward).bind(graph, *args, **kwargs)
    bound.apply_defaults()
    given = list(bound.arguments.values())[1:]
    if not isinstance(graph.graph._codegen, _PyTreeCodeGen):
        return given
    spec: Any = graph._in_spec
    names = spec.child(1).context
    count = len(given) - len(names)
    flat: list[Any] = fx_pytree.tree_flatten_spec((given[:count], dict(zip(names, given[count:], strict=True))), spec)
    return flat


def _stack(node: fx.Node) -> dict[str, tuple[str, str]]:
    """The calls around a node by their keys, the root's too: path and class name of each."""
    found = node.meta.get("nn_module_stack") or {}
    return {
        key: (path, kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2])
        for key, (path, kind) in found.items()
    }


def _chain(graph: fx.GraphModule, node: fx.Node) -> dict[Chain, Place] | None:
    """The calls around a node whose modules are gone, outermost first; None for nodes that belong to no place."""
    stack = _stack(node)
    if not stack or node.op in ("placeholder", "get_attr", "output"):
        return None
    if node.op == "call_module" and node.target not in [path for path, _ in stack.values()]:
        return None  # what torch.export adds to check its inputs
    found: dict[Chain, Place] = {}
    keys: Chain = ()
    for key, (path, kind) in stack.items():
        keys = (*keys, key)
        own = _get(graph, path) if path else graph
        if own is None or type(own) is nn.Module:  # which only holds parameters
            found[keys] = Place(path, kind)
    return found


def _get(graph: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = graph
    for name in path.split("."):
        module = module._modules.get(name) if module is not None else None
    return module


def _regions(nodes: list[fx.Node], chains: list[dict[Chain, Place] | None]) -> tuple[list[Region], dict[str, str]]:
    """The calls that can be told, outer ones first, and why the modules of the others cannot."""
    calls: dict[Chain, tuple[Place, list[int]]] = {}
    for number, chain in enumerate(chains):
        for keys, place in (chain or {}).items():
            calls.setdefault(keys, (place, []))[1].append(number)
    numbers = {node: number for number, node in enumerate(nodes)}
    regions: list[Region] = []
    untold: dict[str, str] = {}
    for keys, (place, own) in calls.items():
        first, last = own[0], own[-1]
        if any(chain is not None and keys not in chain for chain in chains[first:last]):
            untold[place.path] = "its operations do not stand together in the graph"
            continue
        uses = {number: _uses_after(nodes[number], numbers, last) for number in own if _is_tensor(nodes[number])}
        leaving = [number for number, count in uses.items() if count]
        made = [number for number in leaving if not _is_given_again(nodes[number], numbers, first)]
        if len(made or leaving) != 1:
            untold[place.path] = f"{len(leaving) or 'no'} values leave it, and the graph keeps no structure of them"
            continue
        [out] = made or leaving
        used = {numbers[given]: given for number in own for given in nodes[number].all_input_nodes}
        entering = [number for number, node in sorted(used.items()) if number < first and _is_value(node)]
        regions.append(Region(place, len(keys), (first, last), entering, out, is_shared=not made and uses[out] > 1))
    return sorted(regions, key=lambda region: (region.first, -region.last, region.depth)), untold


def _uses_after(node: fx.Node, numbers: dict[fx.Node, int], last: int) -> int:
    """How many nodes use a value later, those apart that write it into a buffer."""
    return sum(numbers[user] > last and not _is_buffer_write(user) for user in node.users)


def _is_buffer_write(node: fx.Node) -> bool:
    is_copy = node.op == "call_function" and str(node.target).startswith("aten.copy_")
    return is_copy and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"


def _is_given_again(node: fx.Node, numbers: dict[fx.Node, int], first: int) -> bool:
    """Whether the value is the very tensor that came from outside, so that later uses of that one are uses of it."""
    while _returns_its_argument(node):
        node = node.args[0]  # type: ignore[assignment]
        if numbers[node] < first:
            return True
    return False


def _returns_its_argument(node: fx.Node) -> bool:
    """Whether an op returns the tensor that it was given: in place, or because there was nothing to convert."""
    if not isinstance(node.target, OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    alias = node.target._schema.returns[0].alias_info if node.target._schema.returns else None
    if alias is not None and alias.is_write:
        return True
    given, value = node.args[0].meta.get("val"), node.meta.get("val")
    if node.target._schema.name not in ("aten::to", "aten::contiguous") or not isinstance(given, Tensor):
        return False
    return isinstance(value, Tensor) and _layout(given) == _layout(value)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tuple(map(str, tensor.shape)), tuple(map(str, tensor.stride()))


def _is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, as far as is known."""
    return "val" not in node.meta or isinstance(node.meta["val"], Tensor)


def _is_value(node: fx.Node) -> bool:
    return node.op != "get_attr" and _is_tensor(node)


def _hidden(graph: fx.GraphModule, around: frozenset[Chain], at: str) -> Iterator[tuple[str, str]]:
    """Modules of which a call is in a graph inside this one, called as a function: their path, and of that graph."""
    for node in graph.graph.nodes:
        for given in node.all_input_nodes:
            inner = graph._modules.get(str(given.target)) if given.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                path = f"{at}.{given.target}" if at else str(given.target)
                inside = around | (_chain(graph, node) or {}).keys()
                for one in inner.graph.nodes:
                    chain = _chain(graph, one) or {}
                    yield from ((place.path, path) for keys, place in chain.items() if keys not in inside)
                yield from _hidden(inner, inside, path)


def _nest(region: Region, inner: list[Region]) -> None:
    """Put what a call runs in order: the calls directly inside it, and the nodes between them."""
    place, number = region.first, 0
    while place <= region.last:
        if number < len(inner) and inner[number].first == place:
            child = inner[number]
            after = next((at for at in range(number + 1, len(inner)) if inner[at].first > child.last), len(inner))
            _nest(child, inner[number + 1 : after])
            region.steps.append(child)
            place, number = child.last + 1, after
        else:
            region.steps.append(place)
            place += 1


def _frees(nodes: list[fx.Node]) -> list[list[int]]:
    """For each node the positions of those whose value nobody needs after it."""
    places = {node: number for number, node in enumerate(nodes)}
    frees: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        frees[max((places[user] for user in node.users), default=number)].append(number)
    return frees


def _plant(tree: GraphTree, graph: fx.GraphModule, kinds: dict[str, str], called: set[str]) -> None:
    """Make the modules of a tree: those of the graph, and those that its nodes name."""
    paths = dict.fromkeys(path for path, _ in graph.named_modules(remove_duplicate=False) if path)
    for path in kinds:
        names = path.split(".")
        paths.update(dict.fromkeys(".".join(names[:depth]) for depth in range(1, len(names) + 1)))
    for path in paths:
        above, _, name = path.rpartition(".")
        parent, own = tree.get_submodule(above), _get(graph, path)
        if not isinstance(parent, GraphPart):
            continue  # it is inside a module that the graph still has
        if own is not None and type(own) is not nn.Module:
            parent._modules[name] = own
            continue
        part = _class(kinds.get(path, "Module"), GraphCall if path in called else GraphPart)()
        part.why_untold = tree.untold.get(path, "")
        part.__dict__["tree"] = tree
        if own is not None:
            part.hold(own)
        parent._modules[name] = part


@lru_cache(maxsize=1024)
def _class(name: str, base: type[GraphPart]) -> Any:
    """A class with the name of the original, by which patterns find it."""
    return type(name, (base,), {})
