"""Calls of some of torch's functions, while one looks: losses with what they are given, attention with its module.

Functions that a program has imported by name before are not told of, since only the name in ``torch.nn.functional`` is
replaced; modules such as ``nn.CrossEntropyLoss`` and ``nn.MultiheadAttention`` look them up there. Not to be on where
code is compiled: it would be compiled with what stands there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from threading import get_ident
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gaff.compat.modes import nearest_call
from gaff.engine.process.stack_room import passed_over

LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
          "binary_cross_entropy", "binary_cross_entropy_with_logits", "multi_margin_loss", "soft_margin_loss",
          "multilabel_margin_loss", "multilabel_soft_margin_loss", "poisson_nll_loss")  # fmt: skip
# of two inputs and 1 or -1; hinge_embedding_loss and soft_margin_loss have one input
PAIRS = ("cosine_embedding_loss", "margin_ranking_loss")
SIGNED = (*PAIRS, "hinge_embedding_loss", "soft_margin_loss")
ATTENTION = "scaled_dot_product_attention"
_ON_BY_DEFAULT = ("dropout", "dropout1d", "dropout2d", "dropout3d", ATTENTION)  # where nothing says otherwise
_ARGUMENTS = {ATTENTION: ("query", "key", "value", "attn_mask", "dropout_p")}
_OF_PAIRS = ("input1", "input2", "target")
_OF_LOSSES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
DROPOUTS = (*_ON_BY_DEFAULT, "alpha_dropout", "feature_alpha_dropout")


class FunctionCalls:
    """Tells of the calls of functions of ``torch.nn.functional``, while it is on: ``told(name, args, kwargs)``.

    Before a call, which is made with the arguments that ``told`` returns, if any; with ``is_after`` once it is over,
    with its result as a fourth argument.
    """

    def __init__(self, names: tuple[str, ...], told: Callable[..., Any], *, is_after: bool = False) -> None:
        self._names = names
        self.told = told
        self.is_after = is_after
        self._is_on = False

    def switch(self, *, is_on: bool) -> None:
        """Listen, or listen no more: the last of several that listen to a function puts it back, in whatever order."""
        for name in self._names if is_on != self._is_on else ():
            if is_on:
                _placed(name)[2].append(self)
                continue
            original, ours, listeners = _PLACED.get(name, (None, None, []))
            listeners[:] = [one for one in listeners if one is not self]
            if not listeners and ours is not None and getattr(F, name) is ours:  # else somebody has replaced it since
                setattr(F, name, original)
                del _PLACED[name]
        self._is_on = is_on


_PLACED: dict[str, tuple[Any, Any, list[FunctionCalls]]] = {}  # what was there, what stands there now, who listens
_IN_PROGRESS: set[tuple[int, str]] = set()  # threads, and the function that each is in


def _placed(name: str) -> tuple[Any, Any, list[FunctionCalls]]:
    """What stands in the place of a function, put there if it does not yet: one for all who listen."""
    known = _PLACED.get(name)
    if known is not None and getattr(F, name) is not known[0]:
        return known
    original, listeners = getattr(F, name), list[FunctionCalls]()

    @wraps(original)
    @passed_over
    def around(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident(), name
        if thread in _IN_PROGRESS:  # a function mode, as that of a default device, makes the call once more
            return original(*args, **kwargs)
        there = list(listeners)
        for one in there:
            if not one.is_after:
                args, kwargs = one.told(name, args, kwargs) or (args, kwargs)
        _IN_PROGRESS.add(thread)
        try:
            output = original(*args, **kwargs)
        finally:
            _IN_PROGRESS.discard(thread)
        for one in there:
            if one.is_after:
                one.told(name, args, kwargs, output)
        return output

    vars(around).update(__script_if_tracing_wrapper=True, __original_fn=original)  # torch.jit.script takes that one
    setattr(F, name, around)
    _PLACED[name] = original, around, listeners
    return _PLACED[name]


def loss_calls(
    told: Callable[[str, Any, Tensor, dict[str, Any]], Tensor], names: Iterable[str] = LOSSES
) -> FunctionCalls:
    """Calls of torch's loss functions: ``told(name, input, target, known)`` returns what is to be given as the target.

    ``known``: the arguments of the call by name, as far as the names are those of a loss over classes.
    """

    def given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        expected = _OF_PAIRS if name in PAIRS else _OF_LOSSES
        at = expected.index("target")
        known = {**dict(zip(expected, args, strict=False)), **kwargs}
        if not isinstance(known.get("target"), Tensor):
            return None
        target = told(name, known.get("input", known.get("input1")), known["target"], known)
        is_by_place = len(args) > at
        return ((*args[:at], target, *args[at + 1 :]), kwargs) if is_by_place else (args, {**kwargs, "target": target})

    return FunctionCalls(tuple(names), given)


def drops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Which share of what it is given a call of one of ``DROPOUTS`` sets to zero: 0 where it is not active."""
    known = {**dict(zip(_ARGUMENTS.get(name, ("input", "p", "training")), args, strict=False)), **kwargs}
    is_on = known.get("training", name in _ON_BY_DEFAULT)
    share = known.get("dropout_p", 0.0) if name == ATTENTION else known.get("p", 0.5)
    return float(share) if is_on and isinstance(share, (int, float)) else 0.0


def calling_module() -> nn.Module | None:
    """The innermost module whose call is in progress on this thread, by torch's own function that calls modules."""
    frame = nearest_call(sys._getframe(1))
    found = frame.f_locals.get("self") if frame is not None else None
    return found if isinstance(found, nn.Module) else None
