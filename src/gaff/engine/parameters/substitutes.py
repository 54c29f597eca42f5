"""Which tensors stand in for which parameters now, over all sessions.

Several sessions may edit one parameter, and leave in any order; a recomputation may need another value than the run in
progress. So what stands in is kept as a stack for each parameter, known by the parameter and by all that stands in.

It stands in the tables of the modules that own the parameter, where nearly all code finds it. Code that holds the
parameter itself (a list, a closure, a module that the model does not know) is met at its uses: as long as something
stands in, the parameter's class is one whose ``__torch_function__`` puts the substitute in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch._functorch.utils as functorch_utils
from torch import Tensor, nn

from gaff.address.nested import map_tensors
from gaff.compat import memory
from gaff.compat.replacements import Replacements

_BY_TENSOR: dict[int, Standing] = {}  # by identity of a parameter, or of what stands in for it; only while it does


class _Row(NamedTuple):
    """One tensor on the stack of a parameter. ``task``: the backward pass whose recomputation it is for, else -1."""

    key: object  # who put it there
    tensor: Tensor
    version: int  # of the tensor, then
    task: int
    snapshot: Tensor | None  # of what it held, where it has memory of its own

    @property
    def is_written(self) -> bool:
        """Whether somebody wrote into the tensor since it was put there: also by ``.data``, as far as can be told."""
        is_counted = memory.version_of(self.tensor) != self.version
        return is_counted or not memory.is_as_in(self.tensor, self.snapshot)


class _Wait(NamedTuple):
    """What would stand in for a parameter once it is used: made by ``make``, for the recomputation ``task``.

    ``number``: which of those for this task are made first; each is made of what the ones before have.
    """

    key: object
    make: Callable[[], Tensor]
    task: int
    number: int


class Standing:
    """One parameter and all that stands in for it; the one that came last is in its place.

    ``owners`` are the modules that hold the parameter; each of its names there gets the new tensor, and so do lists in
    their attributes. Found by ``of`` as long as something stands in, then it is gone.
    """

    def __init__(self, original: Tensor, owners: Sequence[nn.Module]) -> None:
        self.original = original
        held = [owner for owner in owners if any(value is original for value in owner._parameters.values())]
        self._owners = held or list(owners)  # one that shared it may have been given another since
        self._rows: list[_Row] = []
        self._waiting: list[_Wait] = []
        # what has the parameter's attributes while it stands in, the names of those that it had, and what it was lent
        self._lent: list[tuple[Tensor, set[str], dict[str, Any]]] = []

    @classmethod
    def of(cls, tensor: Tensor, owners: Sequence[nn.Module]) -> Standing:
        """That of the parameter which ``tensor`` is, or stands in for; a new one if nothing stands in."""
        return _BY_TENSOR.get(id(tensor)) or cls(tensor, owners)

    def add(self, key: object, new: Tensor, task: int = -1) -> None:
        """Put ``new`` in the parameter's place; ``task``: for the recomputation in this backward pass.

        It is noted before anything is exchanged: what breaks off in the middle, as by Ctrl-C, is undone by ``remove``.
        """
        before = self.now
        if new is not self.original and not any(one is new for one, _, _ in self._lent):
            self._lend(new)
        with torch._C.DisableTorchFunctionSubclass():  # no use of the parameter
            snapshot = None if memory.shares(new, self.original) else memory.snapshot(new)
            row = _Row(key, new, memory.version_of(new), task, snapshot)
        _BY_TENSOR[id(self.original)] = _BY_TENSOR[id(new)] = self
        self._rows.append(row)
        if len(self._rows) == 1:
            _step_aside(self.original)
        self._put(before, new)

    def is_of(self, task: int) -> bool:
        """Whether what stands there now, or waits to, if anything, was put there for the recomputation ``task``."""
        return self._rows[-1].task == task if self._rows else not self._waiting

    def wait(self, key: object, make: Callable[[], Tensor], task: int, number: int) -> None:
        """Let what ``make`` returns stand in from the first use of the parameter on, until ``leave(key)``.

        For the recomputation ``task``, and there only where nothing stands in for the same one already. In its place
        while ``make`` runs is the parameter itself, or what those of lower ``number`` have made of it. Of classes that
        cannot step aside it is made at once.
        """
        self._waiting.append(_Wait(key, make, task, number))
        _BY_TENSOR[id(self.original)] = self
        if not _step_aside(self.original):
            self.used()

    def used(self) -> Tensor:
        """What a use of the parameter means: what stands in, which is made now if it waits for that."""
        waiting = self._waiting
        if not waiting or (self._rows and self._rows[-1].task == waiting[-1].task):
            return self.now
        self._waiting, task, below = [], waiting[-1].task, object()  # what is used meanwhile is what stands there
        try:
            self.add(below, self.original, task)
            try:
                for one in sorted(waiting, key=attrgetter("number")):
                    if one.task == task:
                        self.add(one.key, one.make(), task)
            finally:
                self.remove(below)
        finally:
            self._waiting = waiting
        return self.now

    def leave(self, key: object) -> None:
        """Take away what waited or stands in by ``key``."""
        self._waiting = [one for one in self._waiting if one.key is not key]
        if any(row.key is key for row in self._rows):
            self.remove(key)
        elif not self._rows:
            self._end()

    def _end(self) -> None:
        """Nothing stands in any more, and nothing may: the parameter is what it was."""
        if not self._waiting:
            _BY_TENSOR.pop(id(self.original), None)
            _step_back(self.original)

    def remove(self, key: object) -> bool:
        """Take away what ``key`` put there; False if it was written to, or is no longer where it was put.

        What lies below comes back if this was on top; else the one on top stays in place. May be called again where an
        exception came in between.
        """
        row = next((row for row in self._rows if row.key is key), None)
        if row is None:  # somebody broke off as it was put there, or taken away
            if not self._rows:
                self._end()
            return True
        was_there = all(any(value is self.now for value in owner._parameters.values()) for owner in self._owners)
        rows = [other for other in self._rows if other is not row]
        before, after = self.now, rows[-1].tensor if rows else self.original
        if after is not before:
            self._put(before, after)
        self._rows = rows
        if row.tensor is not self.original and not any(other.tensor is row.tensor for other in rows):
            _BY_TENSOR.pop(id(row.tensor), None)
            self._take_back(row.tensor)
        if not rows:
            self._end()
        return was_there and not row.is_written

    def _lend(self, new: Tensor) -> None:
        """Let what stands in go for the parameter: it has the attributes that the program has given that one."""
        own = vars(new)
        lent = {name: value for name, value in vars(self.original).items() if name not in own}
        if isinstance(self.original, nn.Parameter) and not isinstance(new, nn.Parameter):
            lent["_is_param"] = True  # what torch asks for where code asks for the class
            # a copy of a module is one of its parameter: copy and pickle ask the object first
            lent |= {name: partial(_by_itself, self.original, name) for name in ("__deepcopy__", "__reduce_ex__")}
        self._lent.append((new, set(own), lent))
        own.update(lent)

    def _take_back(self, new: Tensor) -> None:
        """Take the attributes of the parameter from what has stood in; what the program has made of them is its own."""
        for tensor, before, lent in self._lent:
            if tensor is new:
                own, theirs = vars(new), vars(self.original)
                found = {name: own.pop(name) for name in set(own) - before}
                theirs.update({name: value for name, value in found.items() if lent.get(name, self) is not value})
                for name in set(lent) - set(found):
                    theirs.pop(name, None)
        self._lent = [row for row in self._lent if row[0] is not new]

    @property
    def now(self) -> Tensor:
        """What is in the parameter's place now; the parameter itself where nothing stands in."""
        return self._rows[-1].tensor if self._rows else self.original

    def _put(self, old: Tensor, new: Tensor) -> None:
        """Put ``new`` wherever the owners hold ``old``, past the checks of ``nn.Module``: it may be no Parameter.

        RNNs hold weights in a list, and in one of weak references by which they notice others. On a GPU these are left
        to torch: it then lays the weights out anew for cuDNN, at the next call.
        """
        for owner in self._owners:
            for name in [name for name, value in owner._parameters.items() if value is old]:
                owner._parameters[name] = new  # type: ignore[assignment]
            for held in (value for value in vars(owner).values() if isinstance(value, list)):
                for at, value in enumerate(held):
                    if value is old:
                        held[at] = new
                    elif isinstance(value, weakref.ref) and value() is old and not new.is_cuda:
                        held[at] = weakref.ref(new)


def _by_itself(parameter: Tensor, method: str, given: Any) -> Any:
    """What a method of a parameter returns that stands aside, as if it did not."""
    is_aside = type(parameter) in _ASIDE.values()
    _step_back(parameter)
    try:
        return getattr(parameter, method)(given)
    finally:
        if is_aside:
            _step_aside(parameter)


def original_of(tensor: Tensor) -> Tensor:
    """The parameter for which ``tensor`` stands in, or itself."""
    standing = _BY_TENSOR.get(id(tensor))
    return tensor if standing is None else standing.original


def _registered(register: Callable[..., None]) -> Callable[..., None]:
    """torch's own way of making a tensor a parameter of a module, given the parameter for what stands in for it."""

    @wraps(register)
    def register_parameter(self: nn.Module, name: str, param: Any) -> None:
        return register(self, name, original_of(param))

    return register_parameter


def _applied(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    """What torch makes of the arguments of every custom Function, which asks no class of theirs: substitutes, here."""

    @wraps(unwrap)
    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> Any:
        return unwrap(tuple(_substitute(arg) for arg in args) if _BY_TENSOR else args)

    return unwrap_dead_wrappers


# While open: a module that is given what stands in, as one that ties its weights in its forward, has the parameter; a
# custom Function that is given the parameter has what stands in.
parameters_given = Replacements(
    (nn.Module, "register_parameter", _registered), (functorch_utils, "unwrap_dead_wrappers", _applied)
)


_TENSORS = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag, Tensor.data)  # attributes with values
_OF_THE_LEAF = frozenset(
    ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward", "__hash__")
)


def _step_aside(parameter: Tensor) -> bool:
    """Let a parameter's uses go to what stands in for it, and tell whether they do.

    Tensors of other classes than torch's own are left as they are.
    """
    kind = _ASIDE.get(type(parameter))
    if kind is not None:
        parameter.__class__ = kind
    return type(parameter) in _ASIDE.values()


def _step_back(parameter: Tensor) -> None:
    """Give a parameter its own class back."""
    for own, kind in _ASIDE.items():
        if type(parameter) is kind:
            parameter.__class__ = own


def _used(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A use of a parameter that stands aside: of its value with the substitute, of the leaf itself (its hooks, its
    ``grad``) with the parameter."""
    kwargs = kwargs or {}
    is_of_leaf = func.__name__ in _OF_THE_LEAF
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        is_of_leaf = getattr(func, "__self__", None) not in _TENSORS
    if not is_of_leaf:
        args, kwargs = map_tensors((args, kwargs), _substitute)
    with torch._C.DisableTorchFunctionSubclass():  # the parameter may stand in for itself, in a recomputation
        return func(*args, **kwargs)


def _substitute(tensor: Tensor) -> Tensor:
    standing = _BY_TENSOR.get(id(tensor))
    return tensor if standing is None or standing.original is not tensor else standing.used()


_OWN: dict[str, Any] = {
    "__torch_function__": classmethod(_used),
    "__deepcopy__": lambda self, memo: _by_itself(self, "__deepcopy__", memo),
    "__reduce_ex__": lambda self, protocol: _by_itself(self, "__reduce_ex__", protocol),
}
_ASIDE: dict[type, type] = {
    kind: type(kind.__name__, (kind,), {**_OWN, "__module__": kind.__module__}) for kind in (nn.Parameter, Tensor)
}
