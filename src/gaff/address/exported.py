"""Exported graphs (``torch.export``, fx) as the trees of modules that they were made from.

Such a graph calls no modules any more, but each of its nodes knows the calls in which it was made
(``node.meta["nn_module_stack"]``). A tree with the original paths and class names stands for it: its root runs the
graph node by node, the same operations in the same order, and each module in it is called for the nodes of its own.
Nothing is put on the graph here: whoever uses the tree lets its root run in place of the graph's ``forward``.

In order: ``tree_of`` asks ``exported_calls`` for the calls and makes a tree, once for each state of a graph; a session
hooks modules of the tree as it would any others; the graph is called, the engine lets ``GraphTree.forward`` run, a
``_GraphRun`` goes through the nodes, and at each call that was found the module of the tree is called, with its hooks.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from functools import lru_cache
from typing import Any

from torch import fx, nn
from torch.fx import _pytree as fx_pytree
from torch.fx.graph import _PyTreeCodeGen

from gaff.address.exported_calls import Calls, Place, Region, module_at
from gaff.errors import PlanError


class GraphPart(nn.Module):
    """A module of a tree that is never called: it holds parameters, other modules, or a name.

    ``why_untold`` says why the calls that the original had cannot be told, ``why_fixed`` why what it returns can be
    told but not edited; both are empty where that is not so. The engine passes these reasons on.
    """

    why_untold = ""
    why_fixed = ""

    def hold(self, own: nn.Module) -> None:
        """Have the parameters and buffers of a module of the graph: not copies, but the same dictionaries.

        So a parameter that is replaced in the graph is replaced here, and an edit that stands in for one here acts
        there.
        """
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = own.__dict__[name]


class GraphCall(GraphPart):
    """A module of a tree that is called. Hooks see which tensors it uses, not the arguments of the original.

    What it is called with are the values from outside that its nodes use, in the order of the nodes that made them. Its
    ``forward`` finds the run through the root of the tree, on the thread that it runs on.
    """

    tree: GraphTree
    edits = 0  # open sessions that edit what it returns

    def forward(self, *entering: Any) -> Any:
        """Run the nodes of the call that is due, and return what leaves it.

        Raises PlanError where its output is edited, others use that value, too, and it turns out to be the very tensor
        that came in: the edit would reach some of those who use it and not others.
        """
        run: _GraphRun = self.__dict__["tree"].now.run
        region = run.due
        run.go(region)
        value = run.values[run.nodes[region.leaving]]
        if self.edits and region.uses > 1 and any(value is one for one in entering):
            raise PlanError(f"{region.path} cannot be edited in an exported graph: {GIVEN_AGAIN}")
        return value


class GraphTree(GraphCall):
    """The root of the tree that stands for an exported graph, which it does not keep alive.

    Made by ``tree_of``, and kept as long as the graph is and does not change. It may run on several threads at once:
    the run in progress lies in ``now``, which is local to a thread. ``untold`` says by path why a module's calls cannot
    be told. It shares the hook dictionaries of the graph, so that a hook on the root of the tree fires in the graph's
    own call.
    """

    def __init__(self, graph: fx.GraphModule, calls: Calls) -> None:
        super().__init__()
        self.__dict__["tree"] = self
        self.hold(graph)
        for name in _HOOKS:  # those of the root are the graph's own: between the user's, in their order
            self.__dict__[name] = graph.__dict__[name]
        self.untold = calls.untold
        self.now = threading.local()
        self._graph = weakref.ref(graph)
        self._signature = _signature(graph)
        self._whole = Region(Place("", ""), 0, (0, len(calls.nodes) - 1))
        _nest(self._whole, calls.regions)
        self._frees = _frees(calls.nodes)

    def graph(self) -> fx.GraphModule:
        """The exported graph that it stands for. Raises PlanError where that has been freed."""
        graph = self._graph()
        if graph is None:
            raise PlanError("the exported graph that this session is about is gone")
        return graph

    def is_current(self) -> bool:
        """Whether the graph is there, with the code and the modules from which the tree was made."""
        graph = self._graph()
        return graph is not None and self._signature == _signature(graph)

    def check(self) -> None:
        """Raises PlanError when the graph's code does not say what its nodes do.

        fx runs the code and the tree runs the nodes: after a change of nodes without ``recompile()`` the two differ.
        """
        graph = self.graph()
        if graph.graph.python_code("self").src != graph.code:
            raise PlanError("the graph was changed after its code was made: call .recompile() on it first")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph node by node, and return what its own ``forward`` returns, bit for bit.

        Takes what the graph takes. Runs may nest on one thread, where a hook calls the graph again: the outer one is
        put back at the end.
        """
        graph = self.graph()
        before = getattr(self.now, "run", None)
        self.now.run = run = _GraphRun(graph, self._frees, _flat(graph, args, kwargs))
        try:
            run.go(self._whole)
        finally:
            self.now.run = before
        return graph.graph.process_outputs(run.output)


class _GraphRun:
    """One run of an exported graph: which node is next, and the values of those that are still needed.

    ``values``: by node; each is dropped behind the last node that uses it (``frees``), as the graph's own code does, or
    a run would hold all activations. ``due``: the call that is about to be made, which its module picks up. ``given``:
    one value for each placeholder.
    """

    def __init__(self, graph: fx.GraphModule, frees: list[list[int]], given: list[Any]) -> None:
        self._each = fx.Interpreter(graph, garbage_collect_values=False)
        self._frees = frees
        self._given = iter(given)
        self.nodes = list(graph.graph.nodes)
        self.values = self._each.env
        self.due: Region
        self.output: Any = None

    def go(self, region: Region) -> None:
        """Run the nodes of a call, and the calls inside it, in the order in which the graph has them."""
        for step in region.steps:
            if isinstance(step, int):
                self._node(step)
            else:
                self.due = step
                entering = [self.values[self.nodes[place]] for place in step.entering]
                self.values[self.nodes[step.leaving]] = step.module(*entering)

    def _node(self, place: int) -> None:
        """Run one node: a placeholder takes the next value that was given, the output node ends the run."""
        node = self.nodes[place]
        if node.op == "output":
            self.output = self._each.run_node(node)
            return
        self.values[node] = next(self._given) if node.op == "placeholder" else self._each.run_node(node)
        for done in self._frees[place]:
            del self.values[self.nodes[done]]


GIVEN_AGAIN = "it returns the tensor that it was given, which others use too"
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_trees: weakref.WeakKeyDictionary[nn.Module, GraphTree] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def tree_of(module: nn.Module) -> nn.Module:
    """The tree that stands for an exported graph; any other module, and a graph that knows of no calls, as it is.

    Made once and again when the graph has changed; kept by a weak reference to the graph. Safe to call on any thread.
    """
    if not isinstance(module, fx.GraphModule) or _has_forward_of_its_own(module):
        return module
    with _lock:
        known = _trees.get(module)
        if known is None or not known.is_current():
            found = _build(module)
            if found is None:
                return module
            known = _trees[module] = found
    return known


def _has_forward_of_its_own(graph: fx.GraphModule) -> bool:
    """Whether somebody, such as accelerate, has put another forward on it, which knows nothing of nodes.

    The forward that a session of gaff puts there, marked by ``is_gaffs``, does not count.
    """
    own = graph.__dict__.get("forward")
    return own is not None and not getattr(own, "is_gaffs", False)


def _signature(graph: fx.GraphModule) -> tuple[object, ...]:
    """What a tree is made from: equal as long as the graph has the same code, modules and hook dictionaries."""
    return (graph.code, *map(id, graph.modules()), *(id(graph.__dict__[name]) for name in _HOOKS))


def class_of(module: nn.Module) -> type:
    """A module's class; of one in a tree the class of ``torch.nn`` that has its name, if there is one.

    Whoever asks for what a layer is (a ``Linear``, say) gets an answer for trees, too, whose classes are made up.
    """
    cls = type(module)
    known = getattr(nn, cls.__name__, cls) if isinstance(module, GraphPart) else cls
    return known if isinstance(known, type) else cls


def _build(graph: fx.GraphModule) -> GraphTree | None:
    """A tree for a graph, or None where it cannot be run node by node or no node knows of a call.

    A graph with a body transformer has code that its nodes do not tell. The root's class name is taken from the nodes.
    """
    if not _takes_plain_arguments(graph) or graph.graph._codegen._body_transformer is not None:
        return None
    calls = Calls(graph)
    if not calls.regions and not calls.untold:
        return None
    stacks = (node.meta.get("nn_module_stack") or {} for node in calls.nodes)
    root = next((kind for stack in stacks for path, kind in stack.values() if not path), "GraphModule")
    name = root.__name__ if isinstance(root, type) else root.rpartition(".")[2]
    tree: GraphTree = _class(name, GraphTree)(graph, calls)
    _plant(tree, graph, calls)
    for region in calls.regions:
        region.module = tree.get_submodule(region.path)
        if region.is_given_again and region.uses > 1:
            region.module.why_fixed = GIVEN_AGAIN
    return tree


def _takes_plain_arguments(graph: fx.GraphModule) -> bool:
    """Whether what the graph is called with can be handed to its nodes: by name, or as torch.export flattens it."""
    if any(node.op == "placeholder" and str(node.target).startswith("*") for node in graph.graph.nodes):
        return False
    spec = graph.__dict__.get("_in_spec")
    has_both = spec is not None and spec.type is tuple and spec.num_children == 2 and spec.child(1).type is dict
    return has_both or not isinstance(graph.graph._codegen, _PyTreeCodeGen)


def _flat(graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """One value for each placeholder, from what the graph was called with, defaults filled in.

    Graphs of ``torch.export`` flatten their arguments by ``_in_spec``; others have one placeholder for each argument.
    """
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


def _nest(region: Region, inner: list[Region]) -> None:
    """Put what a call runs in order: the calls directly inside it, and the nodes between them.

    ``inner``: all calls inside, at any depth, outer ones first. Fills ``steps`` of the call and of each of these.
    """
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
    """For each node the positions of those whose value nobody needs after it; what nobody uses goes at once."""
    places = {node: number for number, node in enumerate(nodes)}
    frees: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        frees[max((places[user] for user in node.users), default=number)].append(number)
    return frees


def _plant(tree: GraphTree, graph: fx.GraphModule, calls: Calls) -> None:
    """Make the modules of a tree: those of the graph, and those that its nodes name.

    A module that the graph still calls as a module is put in as it is. A plain ``nn.Module`` is what ``torch.export``
    leaves of one that it took apart: it only holds parameters, and a part of the tree takes these over.
    """
    kinds, called = calls.kinds, {region.path for region in calls.regions}
    paths = dict.fromkeys(path for path, _ in graph.named_modules(remove_duplicate=False) if path)
    for path in kinds:
        names = path.split(".")
        paths.update(dict.fromkeys(".".join(names[:depth]) for depth in range(1, len(names) + 1)))
    for path in paths:
        above, _, name = path.rpartition(".")
        parent, own = tree.get_submodule(above), module_at(graph, path)
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
    """A class with the name of the original, by which patterns such as ``**<Conv2d>`` find it. One for each name."""
    return type(name, (base,), {})
