"""Compiled code that runs eagerly while a session is open: ``torch.compiler.set_stance("force_eager")``.

Compiled code calls no hooks that came after it was compiled. Where a session cannot put hooks into the code itself
(see ``compiled``), it lets the modules run eagerly, and says so in its receipt.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch

from gaff.address.nested import iter_tensors
from gaff.compat import checkpoints
from gaff.compat.compiler import as_before, compiled_calls, has_asked_to_compile, is_loaded, stance
from gaff.compat.modes import dispatch_modes, plainly
from gaff.compat.replacements import Held, Replacements
from gaff.engine.flops import FlopCount
from gaff.engine.process.alone import Unanswered
from gaff.errors import PlanError

EAGER = "compiled code ran eagerly while the session was open (torch.compiler.set_stance('force_eager'))"
EAGER_IF_ANY = f"of a model that is not compiled itself, in a process that has compiled: if any called it, {EAGER}"


def _force() -> ExitStack:
    """Compiled code runs eagerly, and control flow with it, as long as what this returns is open.

    In that stance torch brings no gradient to what the functions of its operators close over, such as parameters of
    modules.
    """
    with ExitStack() as forced:
        before = stance()
        forced.enter_context(_CONTROL_FLOW)
        forced.enter_context(compiled_calls)
        forced.enter_context(checkpoints.recomputations.at_each(functools.partial(_as_before, before)))
        forced.callback(checkpoints.follow_regions(_eagerly, _BEGUN))
        try:
            forced.enter_context(_eager_stance())
        except RuntimeError as error:
            raise PlanError(
                "a session cannot be opened inside compiled code: expected it around the call of what is compiled"
            ) from error
        return forced.pop_all()


@contextmanager
def _eager_stance() -> Iterator[None]:
    """Compiled code runs eagerly inside; a stance that the program sets meanwhile, for good, is left to it."""
    with torch.compiler.set_stance("force_eager"):
        yield
        now = stance()
    if now != "force_eager":
        torch.compiler.set_stance(now)


def _eagerly(recompute: Callable[..., Any]) -> Callable[..., Any]:
    """What a checkpoint recomputes that began while code was kept eager: eagerly, too, whoever still keeps it so.

    What compiled code saves is matched by its place with what eager code has saved, and would be taken for it. One that
    begins in the recomputation of an older one runs as that does.
    """
    if as_before.stance is not None:
        return _in_stance(as_before.stance, recompute)

    @functools.wraps(recompute)
    def run(*args: Any, **kwargs: Any) -> Any:
        with forced_eager:
            return recompute(*args, **kwargs)

    return run


def _as_before(before: str, region: Any) -> None:
    """A checkpoint recomputes; one that began while nobody kept code eager does it in the stance from before that."""
    if region not in _BEGUN and region not in _OLDER:
        _OLDER.add(region)
        checkpoints.wrap_recomputation(region, functools.partial(_in_stance, before))


def _in_stance(name: str, recompute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(recompute)
    def run(*args: Any, **kwargs: Any) -> Any:
        around, as_before.stance = as_before.stance, name
        try:
            return recompute(*args, **kwargs)
        finally:
            as_before.stance = around

    return run


def _is_traced() -> bool:
    """Whether somebody's dispatch mode stands around what runs; gaff's own only count, or watch for collectives."""
    return any(not isinstance(mode, (FlopCount, Unanswered)) for mode in dispatch_modes())


_BRANCH = (
    "gaff: not bitwise: a session keeps code eager, where torch.cond is a branch of Python: parameters of the branch "
    "that is not taken get no gradient (None), where torch gives zeros, on which momentum and weight decay act"
)


def _as_python(dispatch: Any) -> Any:
    """An operator of torch's for control flow as the branch or the loop of Python that it stands for."""
    operator = dispatch.__self__

    def run(key: Any, *args: Any, **kwargs: Any) -> Any:
        is_older = as_before.stance is not None
        result = NotImplemented if is_older or _is_traced() else plainly(operator, args, kwargs)
        if result is NotImplemented:
            return dispatch(key, *args, **kwargs)
        if operator is _OPS.cond and any(tensor.requires_grad for _, tensor in iter_tensors(result)):
            warnings.warn(_BRANCH, stacklevel=2)
        return result

    return run


_OPERATORS = ("cond", "while_loop", "map_impl", "scan", "associative_scan")
_OPS = torch.ops.higher_order
_CONTROL_FLOW = Replacements(
    *((getattr(_OPS, name), "dispatch", _as_python) for name in _OPERATORS if hasattr(_OPS, name)),
)
_BEGUN: WeakSet[Any] = WeakSet()  # checkpoints that began while code was kept eager
_OLDER: WeakSet[Any] = WeakSet()  # those that did not, and have recomputed while it was
forced_eager = Held(_force)


def keep_eager(opening: ExitStack, at_end: list[Callable[[Any, Any], None]], notes: list[str]) -> None:
    """Let code that is first compiled while the session is open run eagerly until ``opening`` closes.

    ``generate`` of transformers may compile a model by itself, in the middle of a session, and ``torch.cond`` compiles
    its branches. In a process that has not loaded the compiler, which takes a second, the first call of
    ``torch.compile`` is waited for. ``at_end`` is the list of what a clock calls at the end of a run; there ``notes``
    is told, once somebody has asked for a compilation.
    """
    opening.enter_context(forced_eager if is_loaded() else _forced_later)

    def tell(run: Any, output: Any) -> None:
        if has_asked_to_compile() and EAGER not in notes:
            notes.append(EAGER)

    at_end.append(tell)


def _force_later() -> ExitStack:
    """Compiled code runs eagerly from the first call of ``torch.compile`` on, as long as what this returns is open.

    Somebody may keep what stands there meanwhile (``from torch import compile``), and call it later.
    """
    forced, live = ExitStack(), [True]
    forced.callback(live.clear)

    def stand_in(compile: Any) -> Any:
        @functools.wraps(compile)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _first:
                if live:
                    forced.enter_context(forced_eager)  # also where another session holds it, which may close before
                    live.clear()
                    for one in checkpoints.enclosing():  # in which nothing compiled has run
                        if not one.is_again and one.frame not in _BEGUN:
                            _BEGUN.add(one.frame)
                            checkpoints.wrap_recomputation(one.frame, _eagerly)
            return compile(*args, **kwargs)

        return run

    forced.enter_context(Replacements((torch, "compile", stand_in)))
    return forced


_first = threading.Lock()
_forced_later = Held(_force_later)
