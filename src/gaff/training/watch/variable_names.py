"""What the user calls a model or a loss: read from the variables of the code that uses it.

The Python stack at a call of a model, or of ``backward``, leads through the functions that hold it. Reading their
variables takes long, so names are asked for once for each model, and once for each place in the code at which a loss
comes by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from gaff.address.resolve import unwrap
from gaff.compat.modes import frames_from, variables_of

_PASSED_ON = ("self", "cls", "args", "kwargs", "_")
_LIBRARIES = ("torch", "gaff", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "ignite", "fastai")
_HANDLERS = frozenset(("__torch_function__", "__torch_dispatch__"))
_MOST = 200  # entries of a list, dict or object that are looked at


def holder_of(module: nn.Module) -> tuple[str, nn.Module]:
    """The outermost module around ``module`` that a variable of a running function holds, and that variable's name.

    Variables of outer functions come first: a helper's parameter says less than the name in the script. A model that
    only an object holds is called ``self.model``; where nothing holds it, after its class.
    """
    found = _outermost(lambda holder: any(one is module for one in holder.modules()))
    return found or (type(unwrap(module)).__name__, module)


def holder_of_parameter(parameter: Tensor) -> tuple[str, nn.Module] | None:
    """As ``holder_of``, of a module that has this parameter; None where no variable holds one."""
    return _outermost(lambda holder: any(one is parameter for one in holder.parameters()))


def _outermost(is_wanted: Callable[[nn.Module], bool]) -> tuple[str, nn.Module] | None:
    """The largest of the modules that are wanted and that a variable of a running function holds, with its name."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for frame in reversed(list(_frames())):
        if frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
            continue  # what a module's own call names it: self
        for name, holder in _modules_in(variables_of(frame)):
            if is_wanted(holder):
                found.setdefault(id(holder), (holder, []))[1].append(name)
    if not found:
        return None
    holder, names = max(found.values(), key=lambda one: sum(1 for _ in one[0].modules()))
    return min(names, key=_rank), holder


def name_of_variable(value: Any) -> str:
    """The plain variable of the nearest function outside gaff that holds ``value``; empty where there is none."""
    frame = next(_frames(), None)
    names = [] if frame is None else [name for name, held in variables_of(frame).items() if held is value]
    return next((name for name in names if name not in _PASSED_ON), "")


def name_of_loss(loss: Tensor) -> str:
    """The variable that holds ``loss`` in the nearest function that is no library's; ``loss`` where there is none."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            for name, value in variables_of(frame).items():
                if value is loss and name not in _PASSED_ON:
                    return name
            break
    return "loss"


def caller() -> tuple[Any, int]:
    """The place in the user's code that leads here, its code object and instruction: equal for each pass through it.

    Frames of torch, gaff and training frameworks are passed over; (None, 0) where there are no others.
    """
    found, frame = None, sys._getframe(1).f_back
    while frame is not None:  # no generator: asked at each backward pass
        if frame.f_code.co_name in _HANDLERS:
            found = None  # as in ``_outside_modes``
        elif found is None and not _is_of_library(frame.f_globals.get("__name__", "")):
            found = frame
        frame = frame.f_back
    return (None, 0) if found is None else (found.f_code, found.f_lasti)


@lru_cache(maxsize=1024)
def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _outside_modes(frame: FrameType) -> list[FrameType]:
    """The frames of the Python stack from the innermost outwards that no function mode or tensor subclass has called.

    Such a one is handed each call of torch's, and makes it once more, from a frame that is no place in the script.
    """
    frames = list(frames_from(frame))
    inner = [at for at, one in enumerate(frames) if one.f_code.co_name in _HANDLERS]
    return frames[inner[-1] + 1 :] if inner else frames


def _frames() -> Iterator[FrameType]:
    """The frames of the Python stack of this thread from the innermost outwards, without gaff's and Python's own.

    What runs a script (``runpy``, a debugger, a thread) holds its variables, too, under names that are not the user's.
    """
    for frame in _outside_modes(sys._getframe(1)):
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        if library != "gaff" and library not in sys.stdlib_module_names:
            yield frame


def _modules_in(variables: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that variables hold: themselves, in lists and dicts, in attributes of objects.

    Objects are asked by what their types are: what they say of themselves may run code of the program's.
    """
    for name, value in list(variables.items()):
        if name.startswith("__"):
            continue
        yield from _modules_at(name, value)
        if not issubclass(type(value), (nn.Module, type, ModuleType, Tensor)):
            for key, inner in islice(_attributes(value).items(), _MOST):
                yield from _modules_at(f"{name}.{key}", inner)


def _modules_at(name: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    """The value if it is a module; those that are directly in a list, tuple or dict, as ``name[key]``."""
    kind = type(value)
    if issubclass(kind, nn.Module):
        yield name, value
        return
    base = next((one for one in (list, tuple, dict) if issubclass(kind, one)), None)
    if base is not None:
        items = dict.items(value) if base is dict else enumerate(base.__iter__(value))
        for key, inner in islice(items, _MOST):
            if issubclass(type(inner), nn.Module):
                yield f"{name}[{key!r}]", inner


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds as attributes, without asking the object itself."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(found) if type(found) is dict else {}


def _rank(name: str) -> int:
    """How little a name says: plain variables first (0), then what ``self`` holds, then what other objects hold.

    Arguments that are merely passed on, such as ``args``, come last.
    """
    if "." not in name.partition("[")[0]:
        return 3 if name in _PASSED_ON else 0
    return 1 if name.startswith("self.") else 2
