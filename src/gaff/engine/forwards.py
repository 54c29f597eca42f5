"""A forward that stands on one module instead of its own, until it is removed.

An instance attribute ``forward`` goes before the class's method, and torch calls it with all hooks around it. Used for
what hooks cannot do: not to run a module at all, to see an exception that no hook hears of, to run a graph as its
tree.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, MutableMapping
from types import MethodType
from typing import Any, cast
from weakref import ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from gaff.compat.modes import call_frames

Around = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# By module, of which some have an == of their own: what of gaff's stands on it, the last on top.
_LEVELS: MutableMapping[nn.Module, list[ref[Level]]] = WeakIdKeyDictionary()


def users_forward(found: Any) -> Any:
    """Of what stands as ``forward`` on an instance what its user has put there, below all stand-ins, or None."""
    while isinstance(found, StandIn):
        found = found.before
    return found


class Level:
    """That ``stands``, or else this itself, is the ``forward`` of a module, over what was ``before``, until taken away.

    Levels of several sessions go in any order: what is taken away from between two others is not put back later. The
    module holds what stands on it, and is held weakly.
    """

    def __init__(self, module: nn.Module, stands: Any = None) -> None:
        self._module = ref(module)
        self._other = None if stands is None else ref(stands)
        self.before = module.__dict__.get("forward")
        module.__dict__["forward"] = self._stands
        _LEVELS.setdefault(module, []).append(ref(self))

    @property
    def _stands(self) -> Any:
        return self if self._other is None else self._other()

    def take_away(self) -> None:
        """What was there before comes back, unless somebody stands before this or has replaced it."""
        module, stands = self._module(), self._stands
        if module is None:
            return
        levels = [level for one in _LEVELS.pop(module, ()) if (level := one()) is not None]
        above = next((one for one in levels if one.before is stands), None)
        inside = module.__dict__
        if above is not None:
            above.before = self.before
        elif inside.get("forward") is stands:
            del inside["forward"]
            if self.before is not None:
                inside["forward"] = self.before
        if rest := [ref(one) for one in levels if one is not self]:
            _LEVELS[module] = rest


class StandIn(Level):
    """Stands as ``forward`` on one module from its making until ``remove``.

    ``around(original, args, kwargs)`` is called in its place and returns the output; ``original`` is what was
    ``forward`` before, which may be another stand-in. Copies and pickles of the module get its own forward back, and a
    shallow copy, which shares the module's attributes, runs that of its class.
    """

    is_gaffs = True

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._around = around
        self._is_removed = False
        self._found = self.__wrapped__ = module.forward  # whose signature others ask for
        self._of_class = getattr(type(module), "forward", None)
        super().__init__(module)

    @property
    def _original(self) -> Any:
        """What is called without this: what was on the instance, or the class's method as it is by now.

        The module may be of another class since, and its class may have another method (a graph that was recompiled).
        """
        module = self._module()
        kind = type(module)
        if self.before is not None or getattr(kind, "forward", None) is self._of_class:
            return self._found if self.before is None else self.before
        return next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)).__get__(module, kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``around``, or what was there before, where this is removed but others still stand before it."""
        frame = sys._getframe(1)
        caller = frame.f_locals.get("self") if frame.f_code in call_frames().codes else None  # torch's own call
        if isinstance(caller, nn.Module) and caller is not self._module() and caller.__dict__.get("forward") is self:
            return type(caller).forward(caller, *args, **kwargs)  # a shallow copy, which shares its attributes
        if self._is_removed:
            return self._original(*args, **kwargs)
        return self._around(self._original, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the original has (``__code__``, ``__name__``), for whoever inspects a forward as a function."""
        if name in ("_original", "_module"):  # of a copy that was not made by ``__init__``
            raise AttributeError(name)
        return getattr(self._original, name)

    def remove(self) -> None:
        """Take it away, in any order with others; one that others stand before stays and passes every call on.

        What was on the instance before comes back, but nothing that has been removed meanwhile.
        """
        self._is_removed = True
        self.take_away()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module gets a copy of what its user had put there, or its own class's method."""
        users = users_forward(self)
        if users is not None:
            return copy.deepcopy(users, memo)
        module: Any = self._module()  # which is being copied
        copied = memo.get(id(module), module)
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        """A pickle holds what the user had put there, or the module's own method: never anything of gaff's."""
        users = users_forward(self)
        if users is not None:
            return cast, (None, users)  # which is its second argument, and of the standard library
        return getattr, (self._module(), "forward")  # whose class answers, since it is read before its attributes
