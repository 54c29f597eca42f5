"""Hooks on tensors: how gradients are heard of, but for those of compiled code, of FSDP2's shards and of nodes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gaff.address.grammar import Site
from gaff.compat import autograd, compiler, modes
from gaff.compat.placements import ANY_PARTS, PARTS

EDGE = (
    "it comes out of compiled code that returns other tensors, too, and what its uses inside bring is not heard here: "
    "ask for it at the module that makes it, or open the session under torch.compiler.set_stance('force_eager')"
)


class ShownTensor(NamedTuple):
    """What a view shows that somebody was given in the place of a tensor, so that a part of its gradient is seen.

    ``tensor`` has a total that is that of the view, too; ``place`` says of which call's which
    side; ``users`` are the acts, each of one session, that have a hook on it, held weakly.
    """

    tensor: Tensor
    place: tuple[Any, ...]
    users: list[weakref.ref[Any]]


# By the view: those that a module's caller was given (``outer``), and those that a module was given (``edits``).
OUTER: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
INNER: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# By what an edit has made of an input: whose, and what was passed in, held weakly, which has a gradient of its own.
PASSED_IN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def place_of(site: Site, module: nn.Module, call: int) -> tuple[Any, ...]:
    """What a stand-in is for: a call of a module, or of an op in its forward, the same in every session."""
    return id(module), site.op, site.op_index, call


def note_passed(new: Tensor, tensor: Tensor, place: tuple[Any, ...]) -> None:
    """An edit has made ``new`` of an input: note what was passed in, also where ``tensor`` was made by another edit."""
    PASSED_IN[new] = place, weakref.ref(passed_in(tensor, place))


def passed_in(tensor: Tensor, place: tuple[Any, ...]) -> Tensor:
    """What the caller passed where ``tensor`` comes in, which edits of this call, or views for them, stand in for."""
    while INNER and (shown := INNER.get(tensor)) is not None and shown.place[: len(place)] == place:
        tensor = shown.tensor
    known = PASSED_IN.get(tensor) if PASSED_IN else None
    before = known[1]() if known is not None and known[0] == place else None
    return tensor if before is None else before


def view_for(known: WeakTensorKeyDictionary, tensor: Tensor, place: tuple[Any, ...], user: object) -> Tensor:
    """A view of ``tensor`` for ``user`` to hook, noted in ``known``; the one that another session's user at the same
    place has made is used again, and is ``tensor`` itself then: so that hooks act in the order in which sessions were
    opened, and not, as on views of views, the last first."""
    found = known.get(tensor) if known else None
    if found is not None and found.place == place and all(one() is not user for one in found.users):
        found.users.append(weakref.ref(user))
        return tensor
    view = alias_of(tensor)
    known[view] = ShownTensor(tensor, place, [weakref.ref(user)])
    return view


_TOLD = threading.local()  # ``is_edge``, while a compiled graph tells a gradient: whether it is one at its edge


@contextmanager
def told_by_graph(*, is_edge: bool) -> Iterator[None]:
    """While a compiled graph tells a gradient, to hooks on what stands for the tensor: whether that is at its edge."""
    before = getattr(_TOLD, "is_edge", None)
    _TOLD.is_edge = is_edge
    try:
        yield
    finally:
        _TOLD.is_edge = before


def is_at_edge() -> bool:
    """Whether the gradient that a hook is called with may be a part, as at an output of compiled code."""
    told: bool | None = getattr(_TOLD, "is_edge", None)
    return autograd.is_edge_of_compiled() if told is None else told


def on_gradient(tensor: Tensor, callback: Callable[[Any], Any]) -> Any:
    """Call ``callback`` with every gradient that arrives at ``tensor`` while its graph lives; the handle removes it.

    ``tensor`` must require grad. What the callback returns takes the gradient's place, None leaves it. It may be called
    with None: a custom Function hands that to what it does not need.
    """
    if tensor._is_view():
        _ = tensor.grad_fn  # torch 2.13 can crash when a hook is set on a stale view
    return modes.unseen(tensor.register_hook, compiler.uncompiled(callback))


def on_base(view: Tensor, is_stale: Callable[[], bool], callback: Callable[[Tensor], Any]) -> Any:
    """Call ``callback`` with what comes to the base of ``view`` once that is stale: torch tells a part of it there, or
    nothing. Returns the handle; None where the base is a leaf, or there is none."""
    base = view._base
    if base is None or base.grad_fn is None:
        return None
    return on_gradient(base, lambda total: None if total is None or not is_stale() else callback(total))


def alias_of(tensor: Tensor) -> Tensor:
    """A view of all of ``tensor``, in its autograd graph whatever grad mode says, with its attributes and placement.

    Made by ``tensor[...]``, of which the gradient goes on as it came, also one that is sparse.
    """
    with torch.enable_grad():  # a module without grad mode may return what it was given
        alias = modes.unseen(tensor.__getitem__, ...)
    alias.__dict__.update(tensor.__dict__)
    if ANY_PARTS and tensor in PARTS:
        PARTS[alias] = PARTS[tensor]
    return alias


def original(tensor: Tensor) -> Tensor:
    """The tensor that a stand-in shows, as a module's caller or a module was given one; else ``tensor`` itself."""
    while (known := OUTER.get(tensor) if OUTER else None) or (known := INNER.get(tensor) if INNER else None):
        tensor = known.tensor
    return tensor


def take_turn(handle: Any, session: int) -> None:
    """The hook of an edit has been set, of which ``handle`` is, by the session of this number: let edits of sessions
    that were opened later come after it, and those who only look at the gradient after all others, whoever came first:
    they tell what backward goes on with."""
    hooks = handle.hooks_dict_ref()
    later = [(owner.number, number) for number, hook in hooks.items()
             if not (owner := _owner(hook)).only_looks and owner.number > session]  # fmt: skip
    _put_last(hooks, [number for _, number in sorted(later)])
    _put_last(hooks, [number for number, hook in hooks.items() if _owner(hook).only_looks])


def be_first(handle: Any) -> None:
    """Let one who looks at a part of a gradient come before all others there: it tells what came, before an edit."""
    hooks = handle.hooks_dict_ref()
    _put_last(hooks, [number for number in hooks if number != handle.id])


def _put_last(hooks: Any, numbers: list[int]) -> None:
    """Put some hooks of a tensor behind all others; as new ones, for torch goes by the order in the dict's memory."""
    for number in numbers:
        hooks[number] = hooks.pop(number)


class _Others:
    """The owner of hooks that are not ours, or that change nothing and need no turn."""

    only_looks, number = False, -1


def _owner(hook: Any) -> Any:
    """Who has set a hook: something with ``only_looks`` and the ``number`` of its session."""
    owner = hook.args[0] if isinstance(hook, partial) and hook.args else getattr(hook, "__self__", None)
    return owner if hasattr(owner, "only_looks") and hasattr(owner, "number") else _Others


def keep_gradient(tensor: Tensor, keep: Callable[[Tensor], None]) -> Any:
    """Call ``keep`` with every gradient that arrives at ``tensor`` while its graph lives; returns the handle.

    ``tensor`` must require grad. The gradient itself is handed over, not a copy, and goes on unchanged.
    """

    return on_gradient(tensor, partial(_kept, _Looker, keep))


class _Looker:
    """The owner of hooks that keep gradients."""

    only_looks, number = True, -1


def _kept(_owner: type[_Looker], keep: Callable[[Tensor], None], gradient: Tensor | None) -> None:
    if gradient is not None:  # a custom Function hands None to what it does not need
        keep(gradient)
