"""Plans as files: JSON, and tensors beside it as safetensors. Nothing is unpickled; what is read may be hostile.

So everything that is read goes through the checks that what a user writes goes through, and each failure becomes a
RecordError. Two files belong together by a digest in the first, which covers the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaff import keep as keep_part
from gaff.address.grammar import Pattern, Site, parse
from gaff.compat import elements, extras
from gaff.compat.files import replacing, write_text
from gaff.edits import files as edit_part
from gaff.errors import GaffError, PlanError, RecordError
from gaff.sessions.request import Options, Reducer, Request, read_options

_FORMAT = 1
_TENSORS = ".safetensors"
Asked = tuple[tuple[Request, ...], Options]  # what a plan is made of


def digest_of(requests: Sequence[Request], options: Options) -> str:
    """SHA-256 of what the plan says, tensors included; equal for equal plans.

    Of each tensor its name, dtype, shape and bytes count, and not its device or strides.
    """
    tensors: dict[str, Tensor] = {}
    digest = hashlib.sha256(to_json(requests, options, tensors).encode())
    for name, tensor in tensors.items():
        whole = _whole(name, tensor)
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(elements.words(whole).numpy().tobytes())
    return digest.hexdigest()


def to_json(requests: Sequence[Request], options: Options, tensors: dict[str, Tensor] | None = None) -> str:
    """The plan as text; tensors that edits hold are put into ``tensors``, and named in the text.

    Raises PlanError, naming the request, when the plan holds a function, a capture or a module object, or tensors
    and no place for them.
    """
    held: dict[str, Tensor] = {}
    rows = []
    for request in requests:
        if not isinstance(request.target, (Site, Pattern)):
            raise PlanError(f"plan cannot be saved: {request} is no address; name its sites by text")
        row: dict[str, Any] = {"pattern": str(request.target)}
        if request.optional:
            row["optional"] = True
        try:
            if request.reduce is not None:
                row["reduce"] = keep_part.to_dict(request.reduce)
            if request.edit is not None:
                row["edit"] = edit_part.to_dict(request.edit, held)
        except PlanError as error:
            raise PlanError(f"{request.target}: {error}") from None
        rows.append(row)
    if held and tensors is None:
        raise PlanError(f"plan holds {len(held)} tensors, which are no text: save it with plan.save(path)")
    if tensors is not None:
        tensors.update(held)
    return json.dumps({"gaff_plan": _FORMAT, "requests": rows, "options": _options_dict(options)}, indent=1)


def from_json(text: str, tensors: dict[str, Tensor], named: str = "plan") -> Asked:
    """The requests and options of which ``to_json`` wrote ``text``. Raises RecordError when ``text`` is no plan.

    ``tensors`` holds those that the text names; they are taken over, not copied. ``named``: the plan, in the message.
    """
    try:
        return _read(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, GaffError) as error:
        what = str(error) if isinstance(error, GaffError) else f"{error!r:.200}"
        raise RecordError(f"{named} cannot be read: {what}; expected what Plan.to_json wrote") from None


def save(requests: Sequence[Request], options: Options, path: str | PathLike[str]) -> None:
    """Write JSON to ``path``, and tensors that edits hold to ``path`` + ``.safetensors``.

    The tensors come first, so that a new text never stands without the tensors that it names; those of an earlier plan
    that a new one has none of are removed after it. Raises PlanError for
    a ``path`` that is itself a name for tensors, RecordError where the files cannot be written.
    """
    if str(path).endswith(_TENSORS):
        raise PlanError(f"{str(path)!r} is a name for the tensors of a plan: expected another ending, such as .json")
    tensors: dict[str, Tensor] = {}
    text = to_json(requests, options, tensors)
    if tensors:
        text = json.dumps({**json.loads(text), "digest": digest_of(requests, options)}, indent=1)
        whole = {name: _whole(name, tensor) for name, tensor in tensors.items()}
        library = extras.need("safetensors.torch", "files", for_="a plan with tensors")
        failure = extras.need("safetensors").SafetensorError
        with replacing(f"{path}{_TENSORS}", failure) as made:
            library.save_file(whole, str(made))
    had_tensors = not tensors and Path(path).is_file() and _has_tensors(Path(path).read_text(errors="replace"))
    write_text(path, text + "\n")
    if had_tensors:
        Path(f"{path}{_TENSORS}").unlink(missing_ok=True)


def load(path: str | PathLike[str]) -> Asked:
    """The requests and options of a saved plan; tensors come on the CPU.

    Raises RecordError when a file is missing, is no plan, or the tensors are those of another plan.
    """
    beside = Path(f"{path}{_TENSORS}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecordError(f"plan {str(path)!r} cannot be read: {error}") from None
    if not _has_tensors(text) or not beside.exists():
        return from_json(text, {}, f"plan {str(path)!r}")
    library = extras.need("safetensors.torch", "files", for_="a plan with tensors")
    failure: Any = extras.need("safetensors").SafetensorError
    try:
        tensors = library.load_file(beside)
    except (OSError, ValueError, failure) as error:
        raise RecordError(f"tensors {str(beside)!r} of the plan cannot be read: {error}") from None
    asked = from_json(text, tensors, f"plan {str(path)!r}")
    if json.loads(text).get("digest") != digest_of(*asked):
        raise RecordError(f"{str(beside)!r} holds the tensors of another plan: expected both files of one plan.save")
    return asked


def _has_tensors(text: str) -> bool:
    """Whether a saved plan has tensors, whose digest it holds; False also of what is no plan."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # ``from_json`` tells what is wrong with it
        return False
    return isinstance(data, dict) and "digest" in data


def _read(data: Any, tensors: dict[str, Tensor]) -> Asked:
    """The plan in parsed JSON. Raises ValueError, KeyError, TypeError and others where it is none."""
    if not isinstance(data, dict) or "gaff_plan" not in data:
        raise ValueError("it is none that gaff has written")
    if type(data["gaff_plan"]) is not int or data["gaff_plan"] != _FORMAT:
        raise ValueError(f"format {data['gaff_plan']!r}, expected {_FORMAT}")
    requests = []
    for row in data["requests"]:
        optional = row.get("optional", False)
        if not isinstance(optional, bool):
            raise ValueError(f"optional {optional!r}, expected true or false")
        edit = edit_part.from_dict(row["edit"], tensors) if "edit" in row else None
        requests.append(Request(parse(row["pattern"]), optional, _maybe_keep(row.get("reduce")), edit))
    if not requests or not isinstance(data["options"], dict):
        raise ValueError("nothing is asked for, or the options are no table")
    options = dict(data["options"])
    options["reduce"] = _maybe_keep(options.get("reduce"))
    return tuple(requests), Options(**read_options(options))


def _whole(name: str, tensor: Tensor) -> Tensor:
    """A contiguous copy of a plan's tensor on the CPU. Raises PlanError for one without plain memory."""
    if not elements.is_plain(tensor):
        raise PlanError(
            f"tensor {name!r} of the plan is {tensor.layout} on {tensor.device}: expected a plain one to save"
        )
    if tensor.is_complex() and tensor.dtype != torch.complex64:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise PlanError(f"tensor {name!r} of the plan is {kind}, which safetensors does not hold: make it complex64")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()


def _options_dict(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults, as JSON can hold them."""
    row = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    row["dtype"] = str(options.dtype).removeprefix("torch.") if options.dtype is not None else None
    row["reduce"] = keep_part.to_dict(options.reduce) if options.reduce is not None else None
    return {name: value for name, value in row.items() if value != getattr(Options(), name)}


def _maybe_keep(data: dict[str, Any] | None) -> Reducer | None:
    """A reduction from its saved form; None where none was saved."""
    return None if data is None else keep_part.from_dict(data)
