"""Marks on tensors that are not finite: what made them, and where that is.

``Made`` is an origin, ``Marks`` holds the origin of each tensor that was looked at, ``Ran`` carries it to the nodes of
the backward pass. The functions name places as the user knows them.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gaff.address.grammar import STATE_PORTS, Site
from gaff.compat.memory import address_of, storage_life, version_of
from gaff.compat.modes import frames_from
from gaff.inspection.nonfinite.report import Range, Report
from gaff.inspection.op_log import code_at, place_of, place_text
from gaff.version import FOLDER

RETURNED = Site("returned")  # by the step, of a tensor that nothing seen has made, such as a gradient
NOWHERE = Site(port="input")  # a tensor that nothing seen has made
ARRIVED = (
    "it was not finite when the step used it, and nothing that this process's backward pass ran made it: another "
    "process did, whose gradients are averaged with this one's, or code that wrote to it"
)
ADDED = (
    "what backward passes handed to it was finite, and overflows as it is added up: clear gradients between steps "
    "(optimizer.zero_grad()), or divide the loss by the number of passes; unless code that is not seen wrote to it"
)
UPDATED = (
    "the optimizer's step made it of a finite value and a finite gradient: look at the learning rate, at eps, and at "
    "what the optimizer keeps"
)
KEPT = (
    "what the optimizer keeps of this parameter, {}, overflowed in its step, of a finite gradient{}: its updates are 0 "
    "or NaN from now on. Clip the gradient, or scale the loss down"
)
KEPT_BEFORE = (
    "what the optimizer keeps of this parameter, {}, was not finite before this step: its updates are 0 or NaN"
)
RUNNING = (
    "its running statistics overflowed, though what it returned did not: the variance of this batch is more than their "
    "type holds, and evaluation will divide by it"
)
WRITTEN = "no op that was seen and no optimizer made it: it was written to past torch, by .data or NumPy"
SINCE = (
    "it was finite in the run before: the optimizer's step made it so (look at the learning rate, at eps, at its "
    "gradient and at what the optimizer keeps), or code that wrote to it"
)
FOLLOWED = (
    "it was finite before what was told first: a guard that only warns lets the optimizer take the step all the same, "
    "with gradients that may not have been finite"
)
STEP = "(step)"  # stands for the path of code outside the model
_WRAPPING = ("accelerate/hooks.py", "accelerate\\hooks.py", "diffusers/hooks/hooks.py")
_TORCH = torch.__file__.rpartition("__init__")[0]


@dataclass(slots=True)
class Made:
    """An op, or something that was there before, with a non-finite value that nothing before it accounts for.

    ``direction`` and ``place`` are those of a ``Report``. Holds ranges, and no tensor. One origin stands for all
    tensors that it has spoiled; ``passed`` grows as modules hand them on.
    """

    site: Site
    direction: str
    place: tuple[str, int] | None
    cause: str
    output: Range
    inputs: tuple[Range, ...] = ()
    position: int = -1  # how many ops ran before
    is_meant: bool = False  # put in by a constant, such as a mask's -inf
    is_scaling: bool = False  # by a GradScaler, which skips what overflows
    number: int = field(default_factory=itertools.count().__next__)  # in the order in which they were made
    passed: dict[str, None] = field(default_factory=dict)  # modules that passed it on, in order
    before: tuple[str, ...] | None = None  # ops that ran before the first that returned it
    told: Callable[[Iterable[str], int], Report] | None = None  # of a backward pass: what tells it

    def tell(self, notes: Iterable[str], ops: int) -> Report:
        """The report of what this began, with addresses as they are in the model; ``ops``: those looked at by now."""
        if self.told is not None:
            return self.told(notes, ops)
        path = self.site.path.rpartition(".")[0] if self.site.port in STATE_PORTS else self.site.path
        names = ("the model" if one == "model" else shown(one) for one in self.passed if one != self.site.path)
        return Report(
            found=True,
            site=shown(str(replace(self.site, call=None))),
            module=own_path(path),
            direction=self.direction,
            line=place_text(self.place) if self.place else "",
            code=code_at(self.place) if self.place else "",
            cause=self.cause,
            output=self.output,
            inputs=self.inputs,
            passed=tuple(dict.fromkeys(names)),
            notes=tuple(notes),
            ops=ops,
            before=self.before or (),
            position=ops if self.direction == "update" else self.position,
        )


class Marks:
    """What is known of tensors by now: what made them bad, or None. Holds none of them.

    By identity, with a weak reference and the version counter beside it: a tensor that was written to since, or whose
    identity another one has, is not known. Iterating gives the origin of every bad one, as often as it was put.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Made | None]] = {}
        self._memory: dict[int, tuple[Callable[[], object], Made]] = {}  # by address

    def __iter__(self) -> Iterator[Made]:
        return (made for _, _, made in self._known.values() if made is not None)

    def put(self, tensor: Tensor, made: Made | None) -> None:
        """Note what made ``tensor`` bad, or with None that it is finite, as it is at this moment."""
        self._known[id(tensor)] = weakref.ref(tensor), version_of(tensor), made
        if made is not None and (address := address_of(tensor)):
            self._memory[address] = storage_life(tensor), made

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor was looked at, and nobody has written to it since."""
        known = self._known.get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] == version_of(tensor)

    def of(self, tensor: Tensor) -> Made | None:
        """What made ``tensor`` bad; None where it is finite, or not known."""
        return self._known[id(tensor)][2] if self.knows(tensor) else None

    def of_memory(self, tensor: Tensor) -> Made | None:
        """The origin of the last bad tensor in the memory of this one: of what was written through a view or an alias.

        Later writes do not count here: who asks has seen that the tensor itself is bad.
        """
        life, made = self._memory.get(address_of(tensor), (None, None))
        return made if life is not None and life() is not None else None


@dataclass(slots=True)
class Ran:
    """An op that ran, as owner of the autograd nodes that it made: for what backward makes of it.

    ``made``: the origin of what is bad in its outputs, if something is; ``came``: in what it was given.
    """

    site: Site
    place: tuple[str, int] | None
    given: tuple[Range, ...]  # of ops with steep derivatives
    made: Made | None = None
    came: Made | None = None
    bad: dict[tuple[Any, int], Made] = field(default_factory=dict)  # by autograd node and number of an output


def shown(name: str) -> str:
    """An address within the step as one within the model; what is outside the model is in parentheses."""
    if name.startswith("model."):
        return name[6:]
    if name.startswith("model") and (len(name) == 5 or not (name[5].isalnum() or name[5] == "_")):
        return name[5:] or ":output"
    return f"{STEP}{name}" if name else name


def own_path(path: str) -> str:
    """The path of a module within the model: empty for the model itself, ``(step)`` for code outside it."""
    return "" if path == "model" else shown(path) if path else STEP


def users_place(frame: FrameType) -> tuple[str, int]:
    """The line of the user's code: where a layer of torch runs the op, the line that calls the layer.

    Frames of torch, of gaff, of contextlib and of the hooks of accelerate and diffusers are passed over; where there
    are no others it is the line of the op itself.
    """
    first = place_of(frame)
    for here in frames_from(frame):
        name = here.f_code.co_filename.removeprefix("<")  # of gaff's own that warnings pass over
        if not name.startswith((_TORCH, FOLDER, contextlib.__file__)) and not name.endswith(_WRAPPING):
            return place_of(here)
    return first
