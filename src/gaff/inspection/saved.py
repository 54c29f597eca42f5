"""``gaff.load``: what gaff has saved, read back; anything else is told for what it is. Only captures need torch."""

from __future__ import annotations

import json
import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from gaff.errors import RecordError
from gaff.inspection.anatomy import Anatomy
from gaff.inspection.saved_run import SavedRun
from gaff.inspection.trace import Trace
from gaff.record.flight import ENDING as RING
from gaff.record.run import ENDING
from gaff.views.text import counted

if TYPE_CHECKING:
    from gaff.harvesting.store import Store
    from gaff.sessions.saved_capture import SavedCapture

_MOST_BYTES = 500 * 2**20
_KINDS = ("run", "trace", "anatomy", "capture", "harvest")
_EXPECTED = "expected a run, a trace, an anatomy, a capture or a harvest"
_TENSORS = ".safetensors"
_HARVEST = "harvest.json"
# What else there is: by the ending of a file, what it is and what reads it.
_OTHERS = {
    ".html": ("a page", "open it in a browser"),
    ".svg": ("a picture", "open it in a browser"),
    ENDING: ("the log of one process of a run", "give its folder"),
    RING: ("the flight recorder of one process of a run", "give its folder"),
    _TENSORS: ("a file of tensors", "read it with safetensors; a plan's tensors lie beside its JSON"),
    ".npy": ("an array of NumPy", "read it with numpy.load"),
    ".pt": ("a file of torch", "read it with torch.load"),
    ".pth": ("a file of torch", "read it with torch.load"),
    ".pt2": ("an exported program", "read it with torch.export.load"),
    ".csv": ("a table", "gaff export has written it; give the run's folder"),
    ".parquet": ("a table", "gaff export has written it; give the run's folder"),
}


@overload
def load(path: str | PathLike[str], kind: Literal["run"]) -> SavedRun: ...
@overload
def load(path: str | PathLike[str], kind: Literal["trace"]) -> Trace: ...
@overload
def load(path: str | PathLike[str], kind: Literal["anatomy"]) -> Anatomy: ...
@overload
def load(path: str | PathLike[str], kind: Literal["capture"]) -> SavedCapture: ...
@overload
def load(path: str | PathLike[str], kind: Literal["harvest"]) -> Store: ...
@overload
def load(path: str | PathLike[str], kind: None = None) -> Any: ...
def load(path: str | PathLike[str], kind: str | None = None) -> Any:
    """Read back what was saved: a run or a harvest (folders), a trace, an anatomy or a capture (files).

    Args:
        path: the folder that ``gaff watch --out`` or ``gaff.watch(out=)`` has written, as a ``SavedRun``; that of
            ``gaff.harvest``, its URL, such as ``s3://bucket/acts``, or a store of ``obstore``, as a ``Store``; or a
            file of ``Trace.save``, ``Anatomy.save`` or ``Capture.save``, or of ``--out`` of their commands.
        kind: "run", "trace", "anatomy", "capture" or "harvest", where only that will do; editors then know what comes
            back.

    Unpickles nothing, and needs torch for captures and harvests only, whose tensors come on the CPU. A run that is
    still going on can be opened; its ``refresh()`` reads on.

    Raises:
        RecordError: where there is nothing, where it is damaged or of a later version; for anything else it says what
            it is, and what reads it.
    """
    if kind is not None and kind not in _KINDS:
        raise RecordError(f"kind={kind!r} is not known: expected one of {', '.join(map(repr, _KINDS))}")
    there, found = _read(Path(path)) if isinstance(path, (str, PathLike)) and "://" not in str(path) else _remote(path)
    if kind is not None and there != kind:
        raise RecordError(f"{str(path)!r} is of kind {there!r}: expected one of kind {kind!r}")
    return found


def _read(path: Path) -> tuple[str, SavedRun | Trace | Anatomy | SavedCapture | Store]:
    """What is at ``path``, with its kind."""
    if not os.path.exists(path):  # also where the name is too long for one
        raise RecordError(f"{str(path)!r} is not there: expected the folder of a run, or a file that gaff has saved")
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() == _TENSORS and _is_capture(path):
        from gaff.sessions.saved_capture import read

        return "capture", read(path)
    what, remedy = _OTHERS.get(path.suffix.lower(), ("", ""))
    if what:
        raise RecordError(f"{str(path)!r} is {what}: {_EXPECTED}; {remedy}")
    if path.stat().st_size > _MOST_BYTES:
        raise RecordError(f"{str(path)!r} is larger than {_MOST_BYTES} bytes: not read")
    text = _text_of(path)
    told = _parsed(text)
    if "gaff_trace" in told:
        return "trace", Trace.from_json(text)
    if "gaff_anatomy" in told:
        return "anatomy", Anatomy.from_json(text)
    if "gaff_plan" in told:
        raise RecordError(f"{str(path)!r} is a plan: {_EXPECTED}; gaff.Plan.load reads it")
    is_other = "other JSON" if told else "a text that is no JSON" if text.strip() else "empty"
    raise RecordError(f"{str(path)!r} is {is_other}: {_EXPECTED}")


def _remote(place: Any) -> tuple[str, Store]:
    """What is at a URL, or in a store of ``obstore``: only a harvest can be there."""
    from gaff.harvesting.store import Store

    return "harvest", Store(place)


def _folder(path: Path) -> tuple[str, SavedRun | Store]:
    """The run or the harvest in a folder, with its kind."""
    if (path / _HARVEST).is_file():
        from gaff.harvesting.store import Store

        return "harvest", Store(path)
    inside = [one for one in sorted(path.iterdir()) if one.is_dir() and any(one.glob(f"*{ENDING}"))]
    if inside and not any(path.glob(f"*{ENDING}")):
        names = ", ".join(str(one) for one in inside[:4]) + (" ..." if len(inside) > 4 else "")
        raise RecordError(
            f"{str(path)!r} is a folder of {counted(len(inside), 'run')}: expected one of them, such as {names}"
        )
    return "run", SavedRun(path)


def _is_capture(path: Path) -> bool:
    """Whether a file of tensors says that it is a capture; its header is read without safetensors."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _MOST_BYTES)))
        return "gaff_capture" in header["__metadata__"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _text_of(path: Path) -> str:
    """The text of a file. Raises RecordError where it is no text, or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecordError(f"{str(path)!r} is no text: {_EXPECTED}") from None
    except OSError as error:
        raise RecordError(f"{str(path)!r} cannot be read: {error}") from None


def _parsed(text: str) -> dict[str, Any]:
    """The object that a text holds as JSON; empty where it holds none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found else {"": found}
