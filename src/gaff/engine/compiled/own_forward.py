"""The ``forward`` that stands on a module whose hooks are to be in compiled code.

torch guards no table of hooks that was empty when a graph was made, but it does guard a module's own ``forward``. A
session therefore lets each hooked module have one: compiled code without taps no longer fits, code with them is
compiled once, and fits again whenever the same modules are tapped; once the session is closed the old code fits again.

What stands there also calls the hooks at the module's exit, because torch calls hooks of a compiled module outside of
its graph. There the gradient of an output is only what comes to it from outside, without what the module's own uses of
that tensor bring.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, MethodType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules import module as torch_module

from gaff.compat import compiler
from gaff.compat.replacements import Held
from gaff.engine.forwards import Level

kept_buffers = Held(compiler.without_donated_buffers)  # where hooks are compiled, or they could forbid retain_graph


class OwnForward:
    """Lets ``module`` have a ``forward`` as an attribute of its own, which torch guards, until all are removed.

    It runs what was there before: the method of the class, or an attribute of the user's or a ``StandIn``, which is
    wrapped. What is compiled itself stays as it is: torch guards what it calls. Counted over all sessions of the
    process. The module is held weakly. Where the class has a property of this name nothing can stand before it:
    compiled code then knows of no hooks, which never fire.
    """

    _standing: ClassVar[WeakKeyDictionary[nn.Module, list[Any]]] = WeakKeyDictionary()  # how many, and ours

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        kept_buffers.__enter__()
        known = self._standing.get(module)
        if known is not None:
            known[0] += 1
            return
        before = module.__dict__.get("forward")
        own = before
        if before is None:
            plain = is_a_method(_kind(module))
            own = MethodType(_with_exits(_kind(module)), module) if plain else _passing_on(module.forward)
        elif not compiler.is_compiled_function(before):
            own = _passing_on(before)
        is_property = isinstance(inspect.getattr_static(type(module), "forward", None), property)
        self._standing[module] = [1, None if is_property else Level(module, own)]

    def remove(self) -> None:
        """Count one less; with the last one what was there before comes back, unless somebody replaced it."""
        kept_buffers.__exit__()
        module = self._module()
        if module is None:
            return
        known = self._standing[module]
        known[0] -= 1
        if not known[0]:
            del self._standing[module]
            if known[1] is not None:
                known[1].take_away()


def changes_output(module: nn.Module) -> bool:
    """Whether an edit in compiled code changes what ``module`` returns: gradients are then those of the changed tensor.

    Such an edit acts after the forward, where its hook does, so that the forward must leave telling to the hooks. Also
    asked while Dynamo compiles, and of sessions that were opened in whatever order.
    """
    for hook in module._forward_hooks.values():  # noqa: SIM110  # a generator is a frame, which Dynamo would come upon
        if getattr(hook, "changes_output", False):
            return True
    return False


def calls_exits(module: nn.Module) -> bool:
    """Whether the ``forward`` that would stand on ``module`` is to call the hooks at its exit.

    Not where others hook the module: what they make of an output comes after its forward. Nor where the user has put
    another forward on it.
    """
    before = module.__dict__.get("forward")
    if before is None and not is_a_method(_kind(module)):
        return False
    others = [hook for hook in module._forward_hooks.values() if not hasattr(hook, "is_gaffs")]
    is_free = before is None or getattr(before, "__func__", None) is _with_exits(_kind(module))
    return is_free and not others and not torch_module._global_forward_hooks


@functools.lru_cache(maxsize=1024)
def is_a_method(kind: Any) -> bool:
    """Whether the forward of a class is a method, and no static or class method, no property, and no other object."""
    return isinstance(inspect.getattr_static(kind, "forward", None), FunctionType)


@functools.lru_cache(maxsize=1024)
def _with_exits(kind: Any) -> Any:
    """The forward of a class, with the hooks at the module's exit called as part of it.

    Each class has code of its own, since torch keeps a limited number of compiled variants of each code; and it sees
    the globals of the forward that it stands for, by which torch guards what that forward names. What Dynamo would not
    compile by itself (see ``left_alone``) it leaves alone here, too.
    """
    known, alone = kind.forward, compiler.left_alone(kind.forward)
    type_of, read, is_changed = type, getattr, changes_output  # which names of the user's own may hide

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compiled by Dynamo. The hooks are those in torch's own table, which it guards; they leave this to here."""
        whole = type_of(self).forward
        output = (alone if whole is known else whole)(self, *args, **kwargs)
        hook: Any
        if is_changed(self):
            return output
        for hook in self._forward_hooks.values():
            inner = read(hook, "at_forward", None)
            if inner is not None:
                changed = inner.exit(self, args, kwargs, output)
                if changed is not None:
                    output = changed
        return output

    code = forward.__code__.replace(co_name=f"forward of {kind.__qualname__}")
    names = getattr(kind.forward, "__globals__", globals())
    made = FunctionType(code, names, "forward", None, forward.__closure__)  # a pickle finds it by this name
    functools.update_wrapper(made, kind.forward, ("__module__", "__qualname__", "__doc__", "__annotations__"))
    made.__dict__["is_gaffs"] = True
    for mark in [name for name in vars(made) if name.startswith("_torchdynamo")]:
        delattr(made, mark)  # it was compiled by its class, and Dynamo would inline the original instead of this
    compiler.leave_uncompiled(changes_output, *([] if alone is known else [made]))
    return made


def _kind(module: nn.Module) -> Any:
    return type(module)


def _passing_on(forward: Any) -> Any:
    """Another function that does the same, with the signature and the attributes of the one that it stands for."""

    def passing_on(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return functools.update_wrapper(passing_on, forward)
