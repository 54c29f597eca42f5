"""Where in a model an exception was raised: a note on the exception, read from its traceback when a session is left.

No hook is needed, and nothing is kept: neither a frame nor a tensor. Type, arguments and traceback of the exception
stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.resolve import iter_modules
from gaff.compat.modes import call_frames
from gaff.errors import GaffError, note

_RAISED = "gaff: raised in "
_KNOWN = (_RAISED, "gaff: in the edit at ", "gaff: while keeping ")  # notes that tell the place
_MOST = 8  # arguments that are told
_TOLD = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def tell_where(error: BaseException | None, model: nn.Module | None) -> None:
    """Add to an exception that came through ``model`` the address of the innermost module, and what that was given.

    Nothing is added to what gaff itself raised, to what is no error (Ctrl-C), to an exception that came from elsewhere
    (the loss, the data), to one whose notes tell the place already, and to a RecursionError: no stack is left to look.
    """
    if model is None or not isinstance(error, Exception) or isinstance(error, (GaffError, RecursionError)):
        return
    if any(str(one).startswith(_KNOWN) for one in getattr(error, "__notes__", ())):
        return
    codes, trace, calls = call_frames().codes, error.__traceback__, []
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            calls.append(trace.tb_frame)
        trace = trace.tb_next
    if not calls:
        return
    names = {id(model): ""}
    for path, module, _ in iter_modules(model):
        names.setdefault(id(module), path)
    for frame in reversed(calls):
        told = _told(frame.f_locals, names)
        if told:
            note(error, told)
            return


def _told(found: Any, names: dict[int, str]) -> str:
    """The note for one call of a module, by the variables of torch's own function; empty for a module of others.

    Before Python 3.13 the variables are a copy that stays with the frame: it is emptied, so that what whoever clears
    the frame wants to free is freed.
    """
    module = found.get("self")
    args, kwargs = found.get("args", ()), found.get("kwargs", {})
    if type(found) is dict:
        found.clear()
    if not isinstance(module, nn.Module) or id(module) not in names:
        return ""
    given = [_text(value) for value in args] + [f"{name}={_text(value)}" for name, value in kwargs.items()]
    more = f" and {len(given) - _MOST} more" if len(given) > _MOST else ""
    path = names[id(module)]
    where = str(Site(path)) if path else "the model itself"
    return f"{_RAISED}{where} ({type(module).__name__}), which was given {', '.join(given[:_MOST]) or 'nothing'}{more}"


def _text(value: Any) -> str:
    """A value in a few words: ``Tensor float32 [4, 7]``, ``tuple of 2``, ``3``; no code of other classes is called."""
    if isinstance(value, Tensor):
        size = "nested" if value.is_nested else str(list(value.shape))
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {size}{where}"
    if type(value) in (tuple, list, dict):
        return f"{type(value).__name__} of {len(value)}"
    return f"{value!r:.40}" if type(value) in _TOLD else type(value).__name__
