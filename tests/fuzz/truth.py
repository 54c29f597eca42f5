"""The truth about a program, told by running it a second time in another way: without a hook, and without writing.

The source of the program is executed unchanged, but its tensors are ``Ref`` objects that a function mode looks after
(``World``). Each knows its value twice. The *memory* is a plain tensor that aliases what it would alias in the bare
program, so that every write is seen by whoever sees it there. The *graph value* is a pure function of other graph
values: what the program writes in place is computed anew, a view is computed from its base again whenever the base
has changed, a checkpoint is an ordinary call, a thread runs at once. So every tensor at every version is one node, a
``Spot``, through which all of its gradient passes: there is nothing that could be missed or counted twice.

What an address means is written here a second time, from docs/addresses.md: the calls of modules are followed by
replacing ``nn.Module.__call__`` and the ``forward`` of each module of this copy of the model, and an edit is its
formula, applied by hand at that place.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CALL = nn.Module.__call__
Key = tuple[Any, ...]
RETURNED = {
    False: "the module returned its input",
    True: "the module wrote into its input without grad, and returned it",
}


def acted(actions: list[Callable[[Tensor], Tensor | None]], gradient: Tensor | None) -> Tensor | None:
    """A gradient after all actions on it."""
    for action in actions if gradient is not None else ():
        changed = action(gradient)
        gradient = gradient if changed is None else changed
    return gradient


class Tap(torch.autograd.Function):
    """Hands a value on; its gradient passes through the actions of a spot."""

    @staticmethod
    def forward(ctx, value, actions):
        ctx.actions = actions
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx, gradient):
        return acted(ctx.actions, gradient), None


class Overwritten(torch.autograd.Function):
    """Other numbers in the place of a value, put there without autograd's knowledge: the gradient passes as it is."""

    @staticmethod
    def forward(ctx, value, numbers):
        return numbers

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Spot:
    """One tensor at one version: where all of its gradient comes by.

    ``origin`` is the graph value, at which the ``actions`` are called with the gradient: nothing is written to in
    place here, so that a tensor hook sees all of it. ``value`` is what its users get: the same, or behind the tap of
    a module that it is an input of. ``seen`` is the version of the memory that ``value`` is of.
    """

    def __init__(self, value: Tensor, seen: int) -> None:
        self.seen = seen
        self.actions: list[Callable[[Tensor], Tensor | None]] = []
        self.contributors: dict[int, set[int]] = {}  # of a leaf: by backward pass, the runs that used it
        self.met: set[int] = set()  # of a leaf: the runs that it went into
        self.is_handed_out = False  # of a leaf: a run returned it, and a loss may be on the leaf itself
        self.start(value)

    def start(self, value: Tensor) -> None:
        self.origin = self.value = value
        if value.requires_grad:
            value.register_hook(lambda gradient: acted(self.actions, gradient))

    def runs_of(self, number: int) -> set[int]:
        """The runs that are told the gradient which backward pass ``number`` brings to this leaf.

        Those that contribute to it; where none does (a loss of the leaf itself), the runs that it went into.
        """
        return self.contributors.get(number, self.met)

    def restored(self) -> Callable[[], None]:
        """To be called when its users are to get again what they get now."""
        value, seen = self.value, self.seen

        def restore() -> None:
            self.value, self.seen = value, seen

        return restore

    def shown(self, memory: Tensor) -> Tensor:
        """The value as it is now: with what was written into the memory behind autograd's back."""
        if memory._version != self.seen:
            self.seen = memory._version
            with torch.enable_grad(), torch._C.DisableTorchFunction():  # also where the program's mode is on
                if not torch.equal(memory, self.value):
                    numbers = memory.clone()
                    self.value = Overwritten.apply(self.value, numbers) if self.value.requires_grad else numbers
        return self.value


class Cell:
    """A tensor that is no view for autograd, and what its views have in common: the present spot, and the memory."""

    def __init__(self, memory: Tensor, value: Tensor, is_real: bool = False) -> None:
        self.memory = memory
        self.is_real = is_real  # a tensor that was there before the program ran: a parameter, a buffer
        self.spot = Spot(value, memory._version)


class Ref(Tensor):
    """What the program holds in the place of a tensor."""

    cell: Cell
    chain: tuple[Callable[[Tensor], Tensor], ...]
    memory: Tensor

    @staticmethod
    def made(cell: Cell, memory: Tensor, chain: tuple[Any, ...] = ()) -> Ref:
        with torch._C.DisableTorchFunctionSubclass(), torch._C.DisableTorchFunction():
            ref = Tensor._make_subclass(Ref, memory)
        ref.cell, ref.memory, ref.chain, ref._own, ref._of = cell, memory, chain, None, None
        return ref

    @property
    def spot(self) -> Spot:
        if not self.chain:
            return self.cell.spot
        if self._of is not self.cell.spot:  # the base was changed: torch makes the view anew, too
            value = self.cell.spot.shown(self.cell.memory)
            with torch.enable_grad(), torch._C.DisableTorchFunction():  # also where the program's mode is on
                for step in self.chain:
                    value = step(value)
            self._of, self._own = self.cell.spot, Spot(value, self.memory._version)
        return self._own

    def read(self) -> Tensor:
        return self.spot.shown(self.memory)

    def write(self, value: Tensor) -> None:
        """Put a new value in its place: in its memory and, where there is a graph, in that of its base."""
        before = self.cell.spot.shown(self.cell.memory)
        with torch.no_grad():
            self.memory.copy_(value)
        if not torch.is_grad_enabled():
            return
        if self.chain:
            place = torch.empty_strided(self.cell.memory.shape, self.cell.memory.stride(), dtype=torch.long)
            place.copy_(torch.arange(place.numel()).view(place.shape))
            for step in self.chain:
                place = step(place)
            flat = before.reshape(-1).index_put((place.reshape(-1),), value.reshape(-1).to(before.dtype))
            value = flat.view(before.shape)
        if self.cell.is_real and not value.requires_grad:
            value = self.cell.memory
        self.cell.spot = Spot(value, self.cell.memory._version)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return World.current.dispatch(func, args, kwargs or {})


def plain(function: Any) -> Any:
    """A method that computes with plain tensors: no function of torch in it is one of the program's."""

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return computed


def walk(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with each tensor inside it replaced, at any depth."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(walk(one, change) for one in value)
    if isinstance(value, dict):
        return {name: walk(one, change) for name, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{one.name: walk(getattr(value, one.name), change) for one in fields(value)})
    return value


def leaves(value: Any, key: Key = ()) -> Iterator[tuple[Key, Tensor]]:
    """Each tensor inside ``value``, with the key that leads to it."""
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, (list, tuple)):
        for at, one in enumerate(value):
            yield from leaves(one, (*key, at))
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from leaves(one, (*key, name))
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from leaves(getattr(value, one.name), (*key, one.name))


def put(value: Any, key: Key, tensor: Tensor) -> Any:
    """``value`` with another tensor at that key; what holds it is made anew."""
    if not key:
        return tensor
    if isinstance(value, (list, tuple)):
        return type(value)(put(one, key[1:], tensor) if at == key[0] else one for at, one in enumerate(value))
    if isinstance(value, dict):
        return {name: put(one, key[1:], tensor) if name == key[0] else one for name, one in value.items()}
    held = {one.name: getattr(value, one.name) for one in fields(value)}
    return type(value)(**put(held, key, tensor))


def places(value: Any, tensor: Tensor) -> list[Key]:
    return [key for key, one in leaves(value) if one is tensor]


@dataclass
class Event:
    """What is true of one port in one call: a ``value``, or the gradients by backward pass.

    ``unclear``: why a refusal is right; then ``also`` are other numbers that are as true (by pass), or, where it
    ``is_open``, any.
    """

    run: int
    call: int
    value: Tensor | None = None
    passes: dict[int, Tensor] = field(default_factory=dict)
    also: list[dict[int, Tensor]] = field(default_factory=list)
    unclear: str = ""
    is_open: bool = False
    spot: Spot | None = None
    is_leaf: bool = False
    in_thread: bool = False
    without_grad: bool = False  # grad mode was off


@dataclass
class Change:
    """An edit at one place, as its formula for values and its formula for gradients."""

    path: str
    port: str
    key: Key
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]
    is_skip: bool = False  # the formula makes a module's output of its first input, and the module is not run
    hits: int = 0

    def act(self, gradient: Tensor) -> Tensor:
        self.hits += 1
        return self.gradient(gradient)


@dataclass
class Frame:
    """A forward that is being run."""

    path: str
    entry: int
    ops: Counter[str] = field(default_factory=Counter)


class World(TorchFunctionMode):
    """One run of a program under observation; ``events`` by path, port and key when it is over.

    ``is_functional``: with refs, for gradients and edits. Without, tensors are the program's own, and only values are
    told: those have the very bits that the bare program computes.
    """

    current: World

    def __init__(self, model: nn.Module, is_functional: bool, change: Change | None = None) -> None:
        super().__init__()
        World.current = self
        self.model, self.is_functional, self.change = model, is_functional, change
        self.events: dict[tuple[str, str, Key], list[Event]] = {}
        self.frames: list[Frame | None] = []
        self.run, self.depth, self.passes, self.threads_deep = -1, 0, -1, 0
        self.thread = threading.get_ident()
        self.reentrant = 0  # checkpoints around what is run
        self.calls: Counter[tuple[str, str]] = Counter()
        self.refs: dict[int, tuple[Tensor, Ref]] = {}
        self.first_call: Any = None
        self.paths: dict[int, str] = {}
        self.parameters = {}
        self.seen_parameters: set[tuple[str, int]] = set()
        self.handed_back: list[Ref] = []  # what a module returned that it was given
        for path, module in model.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(module), path)
        for module in model.modules():
            module.__dict__["forward"] = self._forward(module, type(module).forward)
        firsts = {id(parameter): path for path, parameter in model.named_parameters()}
        if is_functional:
            for path, parameter in model.named_parameters():
                self._follow_parameter(path, parameter)
        if change is not None and change.port in ("param", "grad"):  # under its first name
            named = dict(model.named_parameters(remove_duplicate=False))
            self.change = replace(change, path=firsts[id(named[change.path])])

    # -- modules

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            nn.Module.__call__ = lambda module, *args, **kwargs: self._call(module, args, kwargs)
            stack.callback(setattr, nn.Module, "__call__", CALL)
            if self.is_functional:
                stack.enter_context(self)
            yield

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(id(module))
        is_again = torch._C._current_graph_task_id() != -1  # a recomputation, where values are recorded
        if path is None or is_again or (self.depth == 0 and self.in_thread):  # or a thread of a recomputation
            return CALL(module, *args, **kwargs)
        ends = self._begin_run() if self.depth == 0 else []
        self.depth += 1
        self.frames.append(None)  # what hooks compute is nobody's
        try:
            output = CALL(module, *args, **kwargs)
            if self.depth == 1:  # a leaf that is handed out: what is made of it later is of this run, too
                handed = [one.spot for _, one in leaves(output) if isinstance(one, Ref)]
                ends = [(spot, end) for spot, end in ends if not any(spot is one for one in handed)]
                for one in handed:
                    one.is_handed_out = True
            call = self._count(path, "out")
            given = [one for _, one in leaves((args, kwargs))]
            for key, tensor in leaves(output):
                self.tell_value(path, "output", key, tensor, call)
                event = self.tell_gradient(path, "grad_output", key, tensor, call, output)
                is_given = any(tensor is one for one in given)
                if self.reentrant and event is not None and is_given:
                    event.unclear, event.is_open = "its input, returned inside of a reentrant checkpoint", True
                self._begin_outside(path, key, tensor, call, output, is_given=is_given)
            return output
        finally:
            self.frames.pop()
            self.depth -= 1
            for _, end in reversed(ends):
                end()

    @plain
    def _begin_run(self) -> list[tuple[Spot, Callable[[], None]]]:
        self.run += 1
        self.calls.clear()
        ends = self.ends = []
        self.leaves: list[Spot] = []
        for path, ref in self.parameters.items() if self.is_functional else ():
            spot, before = ref.spot, ref.read()
            if not before.requires_grad:
                continue
            ends.append((spot, spot.restored()))
            with torch.enable_grad():
                spot.value = Tap.apply(before, [self._contributes(spot)])
                if self.change is not None and (self.change.path, self.change.port) == (path, "param"):
                    spot.value = self.change.value(spot.value)
                    self.change.hits += 1
        return ends

    def _contributes(self, spot: Spot) -> Callable[[Tensor], None]:
        run = self.run
        return lambda gradient: spot.contributors.setdefault(self.passes, set()).add(run) and None

    @plain
    def _follow_parameter(self, path: str, parameter: Tensor) -> None:
        ref = self.parameters[path] = self.ref_of(parameter)
        event = Event(-1, 0, spot=ref.spot, is_leaf=True)
        self.events[path, "grad", ()] = [event]
        if parameter.requires_grad:
            ref.spot.actions.append(self._arrives(event))
            self._edit_gradient(path, "grad", (), ref.spot)

    def _forward(self, module: nn.Module, forward: Any) -> Any:
        path = self.paths[id(module)]

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:
                return forward(module, *args, **kwargs)
            call = self._count(path, "in")
            if not path and self.first_call is None:
                self.first_call = args, kwargs
            first = True
            given = (*args, kwargs)
            ends = []
            if not self.is_functional:
                self._tell_parameters(path, module)
            for key, tensor in list(leaves(given)):
                name = () if first else key if key[0] != len(args) else key[1:]
                first = False
                changed = self.edit_value(path, "input", name, tensor)
                if changed is not tensor:
                    given, tensor = put(given, key, changed), changed
                self.tell_value(path, "input", name, tensor, call)
                self.tell_gradient(path, "input_grad", name, tensor, call)
                ends.append(self._begin_share(path, name, tensor, call, given))
            args, kwargs = given[:-1], given[-1]
            self.frames.append(None if type(module) is nn.MultiheadAttention else Frame(path, call))  # opened by gaff
            output = None
            try:
                is_skipped = self.change is not None and self.change.is_skip and self.change.path == path
                output = self.skipped(given) if is_skipped else self.edited(path, forward(module, *args, **kwargs))
                return output
            finally:
                self.frames.pop()
                for end in reversed(ends):
                    end(output)

        return run

    def edited(self, path: str, output: Any) -> Any:
        """What a module returns, after the edit of it."""
        for key, tensor in list(leaves(output)):
            changed = self.edit_value(path, "output", key, tensor)
            if changed is not tensor:
                output = put(output, key, changed)
        return output

    @plain
    def skipped(self, given: Any) -> Any:
        """What a module that is not run returns: made of its first input, which may be that input itself."""
        first = next(one for _, one in leaves(given))
        assert self.change is not None
        self.change.hits += 1
        old = self.ref_of(first).read()
        new = self.change.value(old)
        return first if new is old else self.fresh(new)

    def _count(self, path: str, side: str) -> int:
        self.calls[path, side] += 1
        return self.calls[path, side] - 1

    @plain
    def _tell_parameters(self, path: str, module: nn.Module) -> None:
        if (path, self.run) not in self.seen_parameters:
            self.seen_parameters.add((path, self.run))
            for port, named in (("param", module.named_parameters), ("buffer", module.named_buffers)):
                for name, tensor in named(recurse=False):
                    where = (f"{path}.{name}" if path else name, port, ())
                    self.events.setdefault(where, []).append(
                        Event(self.run, 0, tensor.detach().clone(), in_thread=self.in_thread)
                    )

    # -- ports

    @property
    def in_thread(self) -> bool:
        return self.threads_deep > 0 or threading.get_ident() != self.thread

    @plain
    def tell_value(self, path: str, port: str, key: Key, tensor: Tensor, call: int) -> None:
        if self.change is None:
            value = (tensor.read() if isinstance(tensor, Ref) else tensor).detach().clone()
            event = Event(self.run, call, value, in_thread=self.in_thread)
            self.events.setdefault((path, port, key), []).append(event)

    @plain
    def tell_gradient(
        self, path: str, port: str, key: Key, tensor: Tensor, call: int, whole: Any = None
    ) -> Event | None:
        if not self.is_functional or not tensor.dtype.is_floating_point:
            return None
        ref = self.ref_of(tensor)
        spot = ref.spot
        event = Event(self.run, call, spot=spot, in_thread=self.in_thread, without_grad=not torch.is_grad_enabled())
        event.is_leaf = spot.origin.is_leaf and spot.origin.requires_grad
        if whole is not None and len(places(whole, tensor)) > 1:
            event.unclear = "twice in the output"
        if event.is_leaf:
            spot.met.add(self.run)
        if event.is_leaf and not any(one is spot for one in self.leaves):
            self.leaves.append(spot)
            ref.read()
            end = spot.restored()
            with torch.enable_grad():
                spot.value = Tap.apply(spot.value, [self._contributes(spot)])
            self.ends.append((spot, end))
        self.events.setdefault((path, port, key), []).append(event)
        spot.actions.append(self._arrives(event))
        self._edit_gradient(path, port, key, spot)
        return event

    def _arrives(self, event: Event) -> Callable[[Tensor], None]:
        def arrives(gradient: Tensor) -> None:
            passes, spot = event.passes, event.spot
            if event.is_leaf and event.run >= 0:
                if (self.passes not in spot.contributors or spot.is_handed_out) and len(spot.met) > 1:
                    event.unclear, event.is_open = "a loss of a leaf that several runs met", True
                elif event.run not in spot.runs_of(self.passes):
                    return
            old = passes.get(self.passes)
            passes[self.passes] = gradient.detach().clone() if old is None else old + gradient.detach()

        return arrives

    def _edit_gradient(self, path: str, port: str, key: Key, spot: Spot) -> None:
        change = self.change
        if change is not None and (change.path, change.port, change.key) == (path, port, key):
            run = self.run

            def act(gradient: Tensor) -> Tensor:
                if port != "grad" and spot.met and run not in spot.runs_of(self.passes):
                    return gradient  # a backward pass of another run
                return change.act(gradient)

            spot.actions.append(act)

    @plain
    def _begin_outside(self, path: str, key: Key, tensor: Tensor, call: int, output: Any, *, is_given: bool) -> None:
        """From here on, outside of the module, the uses of what it returned meet at a tap."""
        if not self.is_functional or not tensor.dtype.is_floating_point:
            return
        ref = self.ref_of(tensor)
        spot = ref.spot
        event = Event(self.run, call, spot=spot, in_thread=self.in_thread, without_grad=not torch.is_grad_enabled())
        if is_given:
            self.handed_back.append(ref)
            for (_, port, _), told in self.events.items():
                for one in told if port == "outer_grad" else ():
                    if one.spot is spot:
                        one.unclear, one.is_open = "a module that it was given to returned it", True
        if any(ref is one for one in self.handed_back):  # of which others were given a view
            event.unclear, event.is_open = "the module returned its input", True
        elif len(places(output, tensor)) > 1:  # each place has uses of its own, which one tap cannot tell apart
            event.unclear, event.is_open = "twice in the output", True
        self.events.setdefault((path, "outer_grad", key), []).append(event)
        value, actions, change = ref.read(), [self._arrives(event)], self.change
        if change is not None and (change.path, change.port, change.key) == (path, "outer_grad", key):
            actions.append(change.act)
        if value.requires_grad:
            with torch.enable_grad():
                spot.value = Tap.apply(value, actions)

    @plain
    def _begin_share(self, path: str, key: Key, tensor: Tensor, call: int, given: Any) -> Callable[[Any], None]:
        """From here on the module's own uses of its input meet at a tap; what is returned ends that."""
        if not self.is_functional or not tensor.dtype.is_floating_point:
            return lambda output: None
        ref = self.ref_of(tensor)
        spot = ref.spot
        event = Event(self.run, call, spot=spot, in_thread=self.in_thread, without_grad=not torch.is_grad_enabled())
        if len(places(given, tensor)) > 1:
            event.unclear = "the same tensor given twice"
        self.events.setdefault((path, "grad_input", key), []).append(event)
        total = Event(0, 0)
        event.also.append(total.passes)
        spot.actions.append(self._arrives(total))
        before, version, actions = ref.read(), ref.memory._version, [self._arrives(event)]
        restore = spot.restored()
        change = self.change
        if change is not None and (change.path, change.port, change.key) == (path, "grad_input", key):
            actions.append(change.act)
        if before.requires_grad:
            with torch.enable_grad():
                spot.value = Tap.apply(before, actions)

        @plain
        def end(output: Any) -> None:
            is_returned = ref.spot is spot and any(one is ref for _, one in leaves(output))
            if is_returned:
                is_written = ref.memory._version != version
                event.unclear = event.unclear or RETURNED[is_written]
            elif not before.requires_grad and spot.value.requires_grad:
                event.unclear = "came to require grad inside"
            else:
                event.also.clear()
            if before.requires_grad:
                restore()

        return end

    @plain
    def edit_value(self, path: str, port: str, key: Key, tensor: Tensor) -> Tensor:
        change = self.change
        if change is None or (change.path, change.port, change.key) != (path, port, key):
            return tensor
        change.hits += 1
        return self.fresh(change.value(self.ref_of(tensor).read()))

    # -- tensors

    def ref_of(self, tensor: Tensor) -> Ref:
        if isinstance(tensor, Ref):
            return tensor
        known = self.refs.get(id(tensor))
        if known is None:
            cell = Cell(tensor.detach(), tensor, is_real=True)
            known = self.refs[id(tensor)] = tensor, Ref.made(cell, cell.memory)
        return known[1]

    def fresh(self, value: Tensor) -> Ref:
        memory = value.detach().clone()
        return Ref.made(Cell(memory, value), memory)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.dispatch(func, args, kwargs or {})

    @plain
    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the program gets when it calls a function of torch with refs."""
        name = func.__name__
        if name in ("__get__", "__set__"):
            return self._attribute(func, name, args)
        if getattr(func, "__module__", "") == "torch.nn.init":  # of a module that the driver makes
            return func(*args, **kwargs)
        special = getattr(self, f"on_{name}", None)
        if special is not None:
            return special(func, *args, **kwargs)
        refs: list[tuple[Ref, Tensor]] = []

        def read(tensor):
            ref = self.ref_of(tensor)
            refs.append((ref, ref.read()))
            return refs[-1][1]

        plain_args, plain_kwargs = walk((args, kwargs), read)
        is_writing = kwargs.get("inplace") or re.fullmatch(r"__i(?!nv)\w+__|__setitem__|[a-z]\w*[a-z\d]_", name)
        if is_writing and refs:
            return self._write(func, name, refs[0], plain_args, plain_kwargs)
        result = func(*plain_args, **plain_kwargs)
        found = self._wrap(func, result, refs, plain_args, plain_kwargs)
        return self._op(name, found)

    def _attribute(self, func: Any, name: str, args: Any) -> Any:
        attribute = func.__self__.__name__
        ref = self.ref_of(args[0])
        if name == "__get__" and attribute == "grad":
            gradient = func(ref.spot.origin)
            return None if gradient is None else self.ref_of(gradient)
        if name == "__set__":
            return func(ref.spot.origin, *(walk(one, lambda tensor: self.ref_of(tensor).read()) for one in args[1:]))
        result = func(ref.memory if attribute == "_version" else ref.read(), *args[1:])
        if isinstance(result, Tensor):
            return self._op(attribute, self._wrap(func, result, [(ref, ref.read())], (ref.read(), *args[1:]), {}))
        return result

    def _write(self, func: Any, name: str, target: tuple[Ref, Tensor], args: Any, kwargs: Any) -> Any:
        """An op that writes into its first argument: the same op on a copy, and the copy in the place of the tensor."""
        ref, value = target
        if kwargs.get("inplace"):
            copy = func(value, *args[1:], **{**kwargs, "inplace": False})
        else:
            copy = value.clone()
            func(copy, *args[1:], **kwargs)
        ref.write(copy)
        return None if name == "__setitem__" else self._op(name, ref, is_written=True)

    def _wrap(self, func: Any, result: Any, refs: list[tuple[Ref, Tensor]], args: Any, kwargs: Any) -> Any:
        if not any(True for _ in leaves(result)):
            return result

        def wrap(tensor: Tensor, at: Any) -> Any:
            for ref, value in refs:
                if tensor is value:
                    return ref
            for ref, value in refs:
                if tensor.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() and tensor.numel():
                    return self._view(func, tensor, at, ref, value, args, kwargs)
            return self.fresh(tensor)

        if isinstance(result, Tensor):
            return wrap(result, None)
        if not isinstance(result, (tuple, list)):
            return walk(result, lambda tensor: wrap(tensor, None))
        found = [wrap(one, at) if isinstance(one, Tensor) else one for at, one in enumerate(result)]
        return type(result)(found) if type(result) in (tuple, list) else tuple(found)

    def _view(self, func: Any, tensor: Tensor, at: Any, ref: Ref, value: Tensor, args: Any, kwargs: Any) -> Ref:
        def step(base: Tensor) -> Tensor:
            given = walk((args, kwargs), lambda one: base if one is value else one)
            result = func(*given[0], **given[1])
            return result if at is None else result[at]

        with torch.no_grad():
            memory = step(ref.memory)
        is_cut = not torch.is_grad_enabled() or (value.requires_grad and not tensor.requires_grad)
        if is_cut or func.__name__ == "detach":
            return Ref.made(Cell(memory, tensor.detach()), memory)
        made = Ref.made(ref.cell, memory, (*ref.chain, step))
        made._of, made._own = ref.cell.spot, Spot(tensor, memory._version)  # of its parent, as long as that stays
        return made

    def _op(self, name: str, result: Any, is_written: bool = False) -> Any:
        """Tell what an op has given, if it is one of a module's own forward."""
        frame = self.frames[-1] if self.frames else None
        found = list(leaves(result))
        if frame is None or not found or re.match("_[a-z]|apply$", name):
            return result
        name = op_name(name)
        number = frame.ops[name]
        frame.ops[name] += 1
        path = f"{frame.path}/{name}#{number}"
        for key, ref in found:
            changed = self.edit_value(path, "output", key, ref)
            if changed is not ref:
                if is_written:
                    ref.write(changed.read())
                else:
                    result = put(result, key, changed)
        for key, ref in leaves(result):
            self.tell_value(path, "output", key, ref, frame.entry)
            self.tell_gradient(path, "grad_output", key, ref, frame.entry, result)
        return result

    # -- functions that are no ops

    def on_requires_grad_(self, func, tensor, requires_grad=True):
        ref = self.ref_of(tensor)
        spot, old = ref.spot, ref.read()
        if old.requires_grad != requires_grad:
            spot.start(old.detach().clone().requires_grad_(requires_grad))
        return tensor

    def on_register_hook(self, func, tensor, hook):
        spot = self.ref_of(tensor).spot
        spot.actions.append(hook)

    def on_backward(self, func, tensor, gradient=None, **kwargs):
        self.passes += 1
        if gradient is not None:
            kwargs["gradient"] = self.ref_of(gradient).read()
        self.ref_of(tensor).read().backward(**kwargs)

    def on_grad(self, func, outputs, inputs, grad_outputs=None, **kwargs):
        self.passes += 1
        outputs = walk(outputs, lambda one: self.ref_of(one).read())
        inputs = walk(
            list(inputs) if not isinstance(inputs, Tensor) else inputs, lambda one: self.ref_of(one).spot.origin
        )
        found = func(outputs, inputs, walk(grad_outputs, lambda one: self.ref_of(one).read()), **kwargs)
        return tuple(None if one is None else self.fresh(one) for one in found)

    def on___hash__(self, func, tensor):
        return id(tensor)

    # -- what the program calls in the place of torch's own

    def checkpoint(self, function: Any, *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
        """An ordinary call; a reentrant one makes a graph only where an argument asks for it, and hands on what is made.

        What the program gets from a reentrant one are other tensors for autograd than those made inside: a hook that
        is set on them comes before the gradient goes in.
        """
        wants = any(self.ref_of(one).read().requires_grad for one in args if isinstance(one, Tensor))
        self.reentrant += use_reentrant
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and (wants or not use_reentrant)):
                output = function(*args, **kwargs)
                return walk(output, self._handed_on) if use_reentrant else output
        finally:
            self.reentrant -= use_reentrant

    @plain
    def _handed_on(self, tensor: Tensor) -> Tensor:
        """A tensor in the same memory, with an autograd node of its own."""
        ref = self.ref_of(tensor)
        value = ref.read()
        if not (value.requires_grad and torch.is_grad_enabled()):
            return tensor
        return Ref.made(Cell(ref.memory, Tap.apply(value, [])), ref.memory)

    @plain
    def copied(self, model: nn.Module) -> nn.Module:
        """A copy of the model, which is not looked at."""
        twin = deepcopy(model)
        for module in twin.modules():
            module.__dict__.pop("forward", None)
        return twin

    @plain
    def cast(self, model: nn.Module) -> None:
        """Let the model compute in float32; what its parameters were before is nobody's any more."""
        for parameter in model.float().parameters():
            self.refs.pop(id(parameter), None)

    def at_once(self, function: Any, *args: Any) -> Any:
        """What the program gives to a worker thread, which has a grad mode of its own."""
        self.threads_deep += 1
        try:
            with torch.enable_grad():
                return function(*args)
        finally:
            self.threads_deep -= 1


def op_name(name: str) -> str:
    """The name that the documentation gives to an op: ``+`` is add, ``+=`` is add_, ``1 - x`` is sub."""
    name = name.strip("_") + ("_" if name.endswith("_") and not name.endswith("__") else "")
    operators = {"truediv": "div", "radd": "add", "rsub": "sub", "rmul": "mul", "rtruediv": "div", "iadd": "add_",
                 "imul": "mul_", "isub": "sub_", "itruediv": "div_"}  # fmt: skip
    return operators.get(name, name)
