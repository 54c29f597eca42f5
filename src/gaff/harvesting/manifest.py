"""What a harvest was begun with: ``harvest.json``, written once, with which every later start is compared."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from gaff.address.resolve import unwrap
from gaff.compat import distributed, libraries
from gaff.errors import PlanError, RecordError
from gaff.harvesting.location import OPEN, Location
from gaff.harvesting.tensor_file import checksum_of
from gaff.version import __version__

NAME, END = "harvest.json", "end.json"
FORMAT = 1
ORDER = "batch, sample"  # what the columns of the file of the order are
_DRAFTS = (OPEN, "order-")  # names of what a start that was killed may have left before it had a manifest


def described(model: nn.Module) -> dict[str, Any]:
    """What tells one model from another: classes by path, and a checksum of all parameters and buffers by name.

    Copies what lies on a device to the CPU, and puts together what lies on several processes, which must all ask, one
    tensor after another. Raises PlanError for a lazy module.
    """
    model = unwrap(model)
    classes = {path: f"{type(one).__module__}.{type(one).__qualname__}" for path, one in model.named_modules()}
    checksum = 0
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = next((name for name, tensor in state.items() if nn.parameter.is_lazy(tensor)), None)
    if lazy is not None:
        raise PlanError(f"{lazy!r} is not made yet (a lazy module): expected a model that was called once")
    for name, tensor in state.items():
        whole = distributed.whole_of(tensor)
        checksum = checksum_of([torch.tensor(list(name.encode()), dtype=torch.uint8, device="cpu"), whole], checksum)
    structure = checksum_of([torch.tensor(list(json.dumps(classes).encode()), dtype=torch.uint8, device="cpu")])
    kinds = ("cpu", libraries.device_of(model).type)
    casts = {
        kind: str(torch.get_autocast_dtype(kind))
        for kind in kinds
        if kind != "meta" and torch.is_autocast_enabled(kind)
    }
    return {
        "class": classes[""], "modules": len(classes), "structure": structure, "weights": checksum,
        "hooks": hooks_of(model), "autocast": casts,
    }  # fmt: skip


def hooks_of(model: nn.Module) -> list[str]:
    """The hooks of forward passes that modules have now, an open session of gaff among them: where, and whose."""
    found = []
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            found.append(f"{path}: {getattr(hook, '__module__', None)}.{name}")
    return found


def is_begun(out: Location) -> bool:
    """Whether a harvest was begun in this place. Raises PlanError where something else is there."""
    if out.holds(NAME):
        return True
    others = any(not name.startswith(_DRAFTS) for name in out.names())
    if out.holds(NAME):  # another process has begun it meanwhile
        return True
    if others:
        raise PlanError(f"{str(out)!r} holds something else: expected a new folder, or that of a harvest")
    return False


def begin(
    out: Location, told: dict[str, Any], order: Any, *, accept_changes: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write the manifest of a new harvest, or compare that of the one that is there.

    ``order``: where the order of the samples lies, which is kept and not compared. Returns the manifest that counts,
    the first one, and how ``told`` differs from it. Raises PlanError where it does and ``accept_changes`` is not given.
    """
    told = {"gaff_harvest": FORMAT, "gaff": __version__, "torch": torch.__version__, **told}
    out.create(NAME, json.dumps({**told, "order": order}, indent=1).encode())
    known = read(out)
    changes = tuple(_differences({name: one for name, one in known.items() if name != "order"}, told))
    plan = [text for text in changes if text.startswith(("sites", "options"))]
    other = "another out=" if out.shards() else "another out= (no row is kept there yet: the folder may be removed)"
    if plan:
        told_apart = [text for text in plan if not text.startswith("options.plan")] or plan  # which follows from others
        raise PlanError(
            f"the harvest in {str(out)!r} keeps something else: {'; '.join(told_apart)}: expected the same again, or "
            f"{other}"
        )
    if changes and not accept_changes:
        raise PlanError(
            f"the harvest in {str(out)!r} was begun otherwise: {'; '.join(changes)}: expected the same again, {other}, "
            "or accept_changes=True, after which its shards come from both"
        )
    return known, changes


def read(out: Location, name: str = NAME) -> dict[str, Any]:
    """The manifest of a harvest, or its end. Raises RecordError where it cannot be read, or is of a later version."""
    path = f"{out}/{name}"
    if name == NAME and not out.holds(name):
        raise RecordError(f"{path} is not there: expected the folder of a harvest, which gaff harvest --out makes")
    content = out.read(name)
    try:
        told = json.loads(content)
        version = told["gaff_harvest"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RecordError(f"{path}: is damaged, or none that gaff has written") from None
    if version != FORMAT:
        raise RecordError(f"{path}: is of version {version!r}: this gaff reads version {FORMAT}")
    return dict(told)


def need(out: Location) -> None:
    """Raise RecordError where the manifest is gone: somebody has deleted the harvest while it was being made."""
    if not out.holds(NAME):
        raise RecordError(f"{out}/{NAME} is gone: the harvest was deleted, or moved, while it was being made")


def identity(out: Location) -> str:
    """What tells a harvest from another: a checksum of its manifest, but for where its order lies.

    Raises RecordError where the manifest is gone.
    """
    need(out)
    told = {name: one for name, one in read(out).items() if name != "order"}
    return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def end_of(out: Location) -> int:
    """After how many batches the data ends, as was noted. Raises RecordError for a note that is damaged."""
    batches = read(out, END).get("batches")
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        raise RecordError(f"{out}/{END}: is damaged: it says that the data had {batches!r} batches")
    return batches


def end(out: Location, batches: int) -> None:
    """Note that the data ends after that many batches.

    Raises RecordError where another process met another end, and where the harvest was deleted meanwhile.
    """
    need(out)
    out.create(END, json.dumps({"gaff_harvest": FORMAT, "batches": batches}).encode())
    known = end_of(out)
    if known != batches:
        raise RecordError(f"{out}/{END}: the data had {known} batches, and has {batches} now: it is another")


def _differences(known: dict[str, Any], told: dict[str, Any], path: str = "") -> list[str]:
    """Each leaf that is another, as ``data.samples: 100, now 200``."""
    found = []
    told = json.loads(json.dumps(told))  # tuples become lists, as in the file
    for name in dict.fromkeys((*known, *told)):
        one, other = known.get(name), told.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found += _differences(one, other, f"{path}{name}.")
        elif one != other:
            is_sum = path == "model." and name == "weights"  # of all of them, which tells nobody anything
            found.append("model.weights: others" if is_sum else f"{path}{name}: {one!r}, now {other!r}")
    return found
