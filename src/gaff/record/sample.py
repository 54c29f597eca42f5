"""What one look at one step has seen, as plain numbers. Needs no torch.

A ``Sample`` is made on the writer's thread, from what a sampled step has left on its devices. Health rules judge it,
then the recorder writes it as tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gaff.address.grammar import Site, parse_site
from gaff.record.statistics import Numbers

_MOST_ACTING = 16  # examples that an agent meets at a time

Key = tuple[str, str]  # the model's name and the address in it


@dataclass(frozen=True, slots=True)
class Units:
    """What the units of a stream did in one sampled step.

    ``active``: a number whose lowest bit of each byte tells of one unit whether it was ever above 1e-5 in magnitude
    (TheDeepChecker's limit); ``|`` joins two steps. ``is_constant``: no unit differed between inputs by more than
    3e-6 of its magnitude, or of the median unit's. ``outlier``: the mean magnitude of the largest unit, relative to the
    median one.
    """

    count: int
    inputs: int  # values of each that were seen
    active: int
    is_constant: bool
    outlier: float

    @property
    def dead(self) -> int:
        """How many units were never above 1e-5 in magnitude in what was seen of them."""
        return self.count - self.active.bit_count()


@dataclass(frozen=True, slots=True)
class Load:
    """Where the tokens of a mixture of experts went in one sampled step.

    ``counts``: tokens by expert; ``is_exact``: that is where they went, and not only which expert each would choose
    first; ``tokens``: how many there were; ``dropped``: those of them that no expert got.
    """

    counts: tuple[int, ...]
    is_exact: bool
    tokens: int
    dropped: int

    @property
    def heaviest(self) -> float:
        """What the expert with most tokens has, over what each would have in a balanced router; NaN without tokens."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else math.nan

    def number(self, name: str) -> float:
        """One of the statistics of a router by its name in ``statistics``: ``load``, ``idle`` or ``dropped``.

        NaN where it is not known: first choices alone tell neither who is idle nor what was dropped.
        """
        if name == "load":
            return self.heaviest
        if not self.is_exact or not self.tokens:
            return math.nan
        return len(self.idle) / len(self.counts) if name == "idle" else self.dropped / self.tokens

    @property
    def idle(self) -> tuple[int, ...]:
        """The experts that no token went to."""
        return tuple(at for at, count in enumerate(self.counts) if not count)


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is known of a parameter at one optimizer step.

    The parameters of an optimizer that made no step in the sampled step are left out of a ``Sample``, for nothing is
    known of their gradients. ``lr`` is that of the parameter's group, 0 where no optimizer owns it.
    """

    kind: str  # "weight", "bias" (of one dimension), "embedding"
    elements: int
    requires_grad: bool
    has_grad: bool
    optimizer: int | None  # the number of the one that owns it; None: none that has made a step
    lr: float
    step: int = 0  # steps that its optimizer had completed
    dtype: str = "float32"
    was_cleared: bool = True  # its gradient was None or zero at some time since the last step
    was_called: bool = True  # whether its module has been, in this sampled step
    decay: float = 0.0  # weight_decay of its group
    is_decoupled: bool = False  # decay is taken off the weight, not added to the gradient
    adam_rms: float | None = None  # root of the mean of g^2 / v (Wortsman et al., 2023, "RMS_t")
    momentum: float | None = None  # norm of the first moment
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class Sample:
    """One sampled step. ``phase``: ``train`` or ``eval``.

    ``rows`` has the numbers of activations and gradients of modules, and of each parameter's ``param``, ``grad`` and
    ``update``; its order is that in which they were first seen. ``ports`` is an index of ``rows`` that ``port`` makes
    when it is first asked: rows that are added later are not in it. ``age``: how many steps after the first look at the
    same training this one is, as the judge notes it; a run may have several trainings, one after the other.
    """

    step: int
    phase: str
    time: float  # seconds since the run began
    rows: dict[Key, Numbers] = field(default_factory=dict)
    units: dict[Key, Units] = field(default_factory=dict)
    parameters: dict[Key, Parameter] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    shares: dict[tuple[str, Key], float] = field(default_factory=dict)  # "entropy" of attention, ...
    loads: dict[Key, Load] = field(default_factory=dict)  # of mixtures of experts, by what their gate returned
    facts: dict[str, Any] = field(default_factory=dict)  # what holds for the step as a whole
    ports: dict[str, dict[Key, Numbers]] = field(default_factory=dict)  # filled when first asked for
    age: int = -1

    def __post_init__(self) -> None:
        self.age = self.step if self.age < 0 else self.age

    @property
    def is_acting(self) -> bool:
        """Whether the step is that of something that acts: its model ran often with few examples, for one loss.

        Eight times or more for each backward pass, with sixteen examples at most, or before it without gradients for a
        single one, as an agent does that learns from what it remembers: such losses follow what is met. So it is where
        a loss has targets that it teaches itself, as of quantised codes: it follows the model.
        """
        return acts(self.facts)

    def of(self, key: Key, port: str) -> Numbers | None:
        """The row of another port of the parameter that ``key`` is of (``grad``, ``param``, ``update``), or None."""
        return self.rows.get((key[0], f"{key[1].rpartition(':')[0]}:{port}"))

    def port(self, name: str) -> dict[Key, Numbers]:
        """The rows of one port, such as ``output``, by key; in the order in which they were first seen."""
        if not self.ports:
            for key, row in self.rows.items():
                self.ports.setdefault(port_of(key[1]), {})[key] = row
        return self.ports.get(name, {})

    def norms(self, port: str) -> dict[str, float]:
        """The norm over all rows of a port, by model."""
        found: dict[str, list[float]] = {}
        for key, row in self.port(port).items():
            found.setdefault(key[0], []).append(self.norm_of_all(key, row))
        return {model: math.hypot(*norms) for model, norms in found.items()}

    def norm_of_all(self, key: Key, row: Numbers) -> float:
        """The norm of a row of a parameter; of an update that was measured on some elements about that of all."""
        known = self.parameters.get((key[0], f"{path_of(key[1])}:param")) if port_of(key[1]) == "update" else None
        return row.norm * math.sqrt(known.elements / row.count) if known is not None and row.count else row.norm


def acts(facts: Mapping[str, Any]) -> bool:
    """As ``Sample.is_acting``, of the facts of a step as they are, or as a record's event about a look holds them."""
    runs, backwards, batch = facts.get("runs", 0), facts.get("backwards", 0), facts.get("batch", _MOST_ACTING + 1)
    is_met = facts.get("acted") or facts.get("own_targets") or (runs >= 8 * backwards and batch <= _MOST_ACTING)
    return bool(backwards and is_met)


def port_of(address: str) -> str:
    """The port in an address: ``grad_output`` of ``fc1:grad_output``, ``output`` of ``fc1``."""
    return _split(address)[1]


def path_of(address: str) -> str:
    """The path in an address, of a module or of a parameter."""
    return _split(address)[0]


def address_of(path: str, port: str) -> str:
    """The address of a parameter's ``param``, ``grad`` or ``update``; the last is no port that can be asked for."""
    return f"{path}:{port}" if _PLAIN_PATH(path) else _printed(path) + port


@lru_cache(maxsize=16384)
def _split(address: str) -> tuple[str, str]:
    """Path and port of an address; rules ask for those of each row, many times a look."""
    path, colon, port = address.rpartition(":")
    if not colon:
        path, port = address, "output"
    if _PLAIN_PATH(path) and port.isidentifier():  # as most are: nothing to parse
        return path, port
    if port == "update":  # of a parameter; no port that can be asked for
        return parse_site(path).path, port
    site = parse_site(address)
    return site.path, site.port


_PLAIN_PATH = re.compile(r"(?:\w+(?:\.\w+)*)?", re.ASCII).fullmatch


@lru_cache(maxsize=4096)
def _printed(path: str) -> str:
    return str(Site(path, port="param")).removesuffix("param")
