"""Several sessions at once on one program: two edits, in their order, and a capture.

What is asked is what no session may change for another one: the capture tells the same, and the program leaves the
same, whichever place among them it was opened in; and in a setting the same as in one process without it. Addresses
are drawn near one another, where several of them mean one tensor.
"""

from __future__ import annotations

import os
import random
import traceback
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

import gaff
from fuzz.formulas import EDITS
from fuzz.running import Outcome, run
from fuzz.settings import whole
from fuzz.tally import Where, address_of, identical
from fuzz.truth import Event

PORTS = ("grad_output", "grad_output", "input_grad", "output", "input", "grad_input", "outer_grad", "grad", "param")
NOT_ALIKE = ("stop", "replace", "ablate", "patch", "quantize")  # leave no gradient, or round what is rounded elsewhere
LAST = 2  # the place of the capture behind both edits
RUNS = 40  # more than any program has


class Asked(NamedTuple):
    """Two edits, as expressions, by address in the order of opening; what is captured; where the capture is opened."""

    edits: tuple[tuple[str, str], ...]
    captured: tuple[str, ...]
    place: int

    def opened(self, model: nn.Module) -> Several:
        space = {"gaff": gaff}
        sessions = [gaff.edit(model, {gaff.maybe(address): eval(text, space)}) for address, text in self.edits]
        capture = gaff.capture(model, gaff.maybe(*self.captured))
        return Several(capture, [*sessions[: self.place], capture, *sessions[self.place :]])


class Several(ExitStack):
    """Sessions that are opened in their order, and closed the last first, also where one of them refuses."""

    def __init__(self, capture: Any, sessions: list[Any]) -> None:
        super().__init__()
        self.capture, self.sessions = capture, sessions

    def __enter__(self) -> Several:
        with ExitStack() as opening:
            for session in self.sessions:
                opening.enter_context(session)
            self.push(opening.pop_all())
        return self

    def told(self, address: str) -> list[Tensor] | gaff.GaffError:
        """All that was told of an address, put together; or the refusal."""
        try:
            found = [one for number in range(-1, RUNS) for one in self.capture.run(number).all(address)]
            return [whole(one) for one in found if one is not None]
        except gaff.GaffError as error:
            return error


def of_one_tensor(values: dict[Where, list[Event]]) -> list[list[str]]:
    """Paths of modules that hand on the same numbers, as a module and the one around it: often the same tensor."""
    groups: list[tuple[Tensor, list[str]]] = []
    for (path, port, key), events in values.items():
        if port == "output" and not key and "/" not in path and events[0].value is not None:
            known = next((paths for value, paths in groups if identical(value, events[0].value)), None)
            if known is None:
                groups.append((events[0].value, [path]))
            else:
                known.append(path)
    return [paths for _, paths in groups if len(paths) > 1]


def drawn(places: list[Where], groups: list[list[str]], seed: int) -> Asked | None:
    """Two edits and what is captured beside them, near one another; None where a program has too few places.

    In half of the programs they are at modules that hand on one tensor, where there are some: one of ``groups``.
    """
    rng = random.Random(seed)
    at_modules = [one for one in places if "/" not in one[0] and one[1] in PORTS]
    if groups and rng.random() < 0.5:
        group = rng.choice(groups)
        at_modules = [one for one in at_modules if one[0] in group and one[1] in ("output", "grad_output")]
    if len(at_modules) < 3:
        return None
    first = rng.choice(at_modules)
    near = [one for one in at_modules if one[0].startswith(first[0]) or first[0].startswith(one[0])]

    def another() -> Where:
        some = near if rng.random() < 0.7 else at_modules
        port = rng.choice(PORTS)
        return rng.choice([one for one in some if one[1] == port] or some)

    texts = [one.text for one in EDITS if one.width is None and not one.is_skip
             and not any(word in one.text for word in NOT_ALIKE)]  # fmt: skip
    edits = tuple((address_of(one), rng.choice(texts)) for one in (first, another()))
    captured = tuple(dict.fromkeys(address_of(another()) for _ in range(4)))
    return Asked(edits, captured, rng.randrange(3))


def is_gaffs(error: Exception) -> bool:
    """Whether it was gaff's own code, or torch for it, that raised this; else the program does not survive the edits."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [one.filename for one in frames if one.name != "run_backward"]  # where gaff lets torch's own be called
    others = [one for one in files if f"{os.sep}torch{os.sep}" not in one]
    return others[-1].startswith(os.path.dirname(gaff.__file__))


class Comparison:
    """The same sessions in each order that must not matter, or in a setting and without it. ``checker``: who asks."""

    def __init__(self, checker: Any, asked: Asked) -> None:
        self.checker, self.asked = checker, asked
        path, _, port = asked.edits[0][0].rpartition(":")
        self.where: Where = (path, port, ())
        self.text = repr(tuple(asked))

    def check(self) -> None:
        plain = self.ran(LAST)
        for other in [self.ran(LAST, self.checker.setting)] if self.checker.setting else [self.ran(0), self.ran(1)]:
            if isinstance(plain, Outcome) and isinstance(other, Outcome):
                self.compare(plain, other)
                continue
            for one in (plain, other):
                if isinstance(one, gaff.GaffError):
                    self.checker.tally.refuse("several", one, self.where)
            crashed = [one for one in (plain, other) if not isinstance(one, (Outcome, gaff.GaffError))]
            if len(crashed) == 1 or any(map(is_gaffs, crashed)):
                told = [f"{type(one).__name__}: {one}"[:200] for one in (plain, other)]
                self.checker.fail("several", self.where, None, *told, self.text)
            elif crashed:
                self.checker.tally.unclear["the program does not survive two edits"] += 1

    def ran(self, place: int, setting: Any = None) -> Outcome | Exception:
        """What the program leaves with the capture opened in this place, or raises."""
        try:
            return run(self.checker.program, self.asked._replace(place=place).opened, setting=setting)
        except Exception as error:
            return error

    def compare(self, plain: Outcome, other: Outcome) -> None:
        checker = self.checker
        plain.surroundings = checker.bare.surroundings
        is_cast = checker.setting is not None and checker.setting.casts
        if reason := "FSDP2 casts what was edited" if is_cast else checker.why_not_averaged(plain):
            checker.tally.unclear[reason] += 1
            return
        if checker.compare(plain, other, "several", False, self.where, self.text):
            return
        for address in self.asked.captured:
            expected, got = plain.session.told(address), other.session.told(address)
            refused = next((one for one in (got, expected) if isinstance(one, gaff.GaffError)), None)
            if refused is not None:
                checker.tally.refuse("several", refused, self.where)
                continue
            checker.tally.several += len(got)
            if checker.setting is not None and not got and self.was_without_grad(address):
                checker.tally.unclear["grad mode was off in this call"] += 1
            elif not checker.alike(expected, got):
                checker.fail("several", self.where, None, expected, got, self.text)
                return

    def was_without_grad(self, address: str) -> bool:
        """Whether the module was called without grad mode: what passes has a gradient where it is somebody else's."""
        events = self.checker.truth.events.items()
        return any(one.without_grad for where, found in events if address_of(where) == address for one in found)
