"""Compiled code that runs eagerly while a session is open: ``torch.compiler.set_stance("force_eager")``.

Compiled code calls no hooks that came after it was compiled. Where a session cannot put hooks into the code itself
(see ``compiled``), it lets the modules run eagerly, and says so in its receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from gaff.compat.compiler import has_asked_to_compile, is_loaded
from gaff.compat.modes import dispatch_depth
from gaff.engine.replacements import Held, Replacements
from gaff.errors import PlanError

EAGER = "compiled code ran eagerly while the session was open (torch.compiler.set_stance('force_eager'))"


def _force() -> ExitStack:
    """Compiled code runs eagerly, and control flow with it, as long as what this returns is open.

    In that stance ``torch.cond`` brings no gradient to what its branches close over, such as parameters of modules.
    """
    forced = ExitStack()
    forced.enter_context(_CONTROL_FLOW)
    forced.enter_context(torch.compiler.set_stance("force_eager"))
    return forced


def _plain_branch(dispatch: Any) -> Any:
    """``torch.cond`` as the branch of Python that it stands for."""

    def run(key: Any, condition: Any, if_true: Any, if_false: Any, operands: Any) -> Any:
        if dispatch_depth():  # something is traced, and needs both branches
            return dispatch(key, condition, if_true, if_false, operands)
        return (if_true if condition else if_false)(*operands)

    return run


def _without_gradients(dispatch: Any) -> Any:
    """A loop of torch's in code that needs no gradient; with grad mode it is refused."""

    def run(key: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not dispatch_depth():
            raise PlanError(
                "map, scan or while_loop of torch runs eagerly while the session is open, and would bring no gradient "
                "to parameters that its function uses: open the session under torch.no_grad(), or on another model"
            )
        return dispatch(key, *args, **kwargs)

    return run


_LOOPS = ("while_loop", "map_impl", "scan", "associative_scan")
_OPS = torch.ops.higher_order
_CONTROL_FLOW = Replacements(
    (_OPS.cond, "dispatch", _plain_branch),
    *((getattr(_OPS, name), "dispatch", _without_gradients) for name in _LOOPS if hasattr(_OPS, name)),
)
forced_eager = Held(_force)


def keep_eager(opening: ExitStack, at_end: list[Callable[[Any, Any], None]], notes: list[str]) -> None:
    """Let code that is first compiled while the session is open run eagerly until ``opening`` closes.

    ``generate`` of transformers may compile a model by itself, in the middle of a session. ``at_end`` is the list of
    what a clock calls at the end of a run; there ``notes`` is told, once somebody has asked for a compilation. Does
    nothing in a process that has not loaded the compiler.
    """
    if not is_loaded():
        return
    opening.enter_context(forced_eager)

    def tell(run: Any, output: Any) -> None:
        if has_asked_to_compile() and EAGER not in notes:
            notes.append(EAGER)

    at_end.append(tell)
