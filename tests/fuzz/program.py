"""What is generated: a program as a small tree of statements, and its text.

Variables ``h0``, ``h1`` ... of a forward, and ``x0``, ``y0`` ... of the driver are 2x4 tensors, one like another: so a
statement can be dropped by letting one of the variables that it used stand in for the one that it made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

PRELUDES = {
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "deepcopy": "from copy import deepcopy",
    "pickled": "import pickle\ndef pickled(model): return pickle.loads(pickle.dumps(model))",
    "dataclass": "from dataclasses import dataclass",
    "in_thread": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(8)
def in_thread(function, *args): return pool.submit(function, *args).result()""",
    "new_weight": "def new_weight(like): return nn.Parameter(like.detach() * 1.25)",
    "cast": "def cast(model): return model.float()",
    "new_linear": "def new_linear(like): return nn.Linear(4, 4).to(like.weight.dtype)",
    "Pair": """
@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor""",
    "Cube": """
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): ctx.save_for_backward(x); return x.pow(3)
    @staticmethod
    def backward(ctx, g): return g * 3 * ctx.saved_tensors[0] ** 2""",
    "Alias": """
class Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.expand_as(x)
    @staticmethod
    def backward(ctx, g): return g * 0.5""",
}
NEEDS = {"Pair": ["dataclass"]}
NAME = re.compile(r"\b[hxyvoglp]\d+\b")


@dataclass(frozen=True)
class Stmt:
    """A line, or a head (``with ...:``, ``if ...:``) with a body. ``kind``: the production that made it."""

    text: str
    body: tuple[Stmt, ...] = ()
    kind: str = ""

    @property
    def made(self) -> str | None:
        """The variable that the line assigns, if it assigns one."""
        found = re.match(r"([a-z]\d+) = ", self.text)
        return found[1] if found else None

    @property
    def used(self) -> list[str]:
        """The variables that it reads, in order."""
        text = self.text.split(" = ", 1)[-1] if self.made else self.text
        return list(dict.fromkeys(NAME.findall(text)))

    def renamed(self, old: str, new: str) -> Stmt:
        return replace(
            self, text=re.sub(rf"\b{old}\b", new, self.text), body=tuple(one.renamed(old, new) for one in self.body)
        )

    def lines(self, indent: str) -> Iterator[str]:
        yield indent + self.text
        for one in self.body:
            yield from one.lines(indent + "    ")


@dataclass(frozen=True)
class Part:
    """A module class: ``init`` lines for its children and parameters, and its forward."""

    name: str
    args: str
    init: tuple[str, ...]
    body: tuple[Stmt, ...]

    def lines(self) -> Iterator[str]:
        yield f"class {self.name}(nn.Module):"
        if self.init:
            yield "    def __init__(self):"
            yield "        super().__init__()"
            yield from (f"        {line}" for line in self.init)
        yield f"    def forward(self, {self.args}):"
        for one in self.body:
            yield from one.lines("        ")


@dataclass(frozen=True)
class Program:
    """A model, ``parts`` from the innermost class to the root, and the ``driver`` that uses it."""

    seed: int
    parts: tuple[Part, ...]
    driver: tuple[Stmt, ...]
    is_double: bool = True
    kinds: tuple[str, ...] = field(default=(), compare=False)

    @property
    def source(self) -> str:
        """The program as a script that defines ``build()`` and ``drive(model)``."""
        body = "\n".join(line for part in self.parts for line in part.lines())
        driver = "\n".join(line for one in self.driver for line in one.lines("    "))
        text = f"{body}\n{driver}"
        wanted = [name for name in PRELUDES if re.search(rf"\b{name}\b", text)]
        wanted = [name for name in PRELUDES if name in wanted or any(name in NEEDS.get(one, ()) for one in wanted)]
        heads = ["import torch", "import torch.nn.functional as F", "from torch import nn"]
        heads += [PRELUDES[name].strip() for name in wanted]
        double = ".double()" if self.is_double else ""
        make = [f"torch.manual_seed({self.seed})", f"return {self.parts[-1].name}(){double}"]
        return "\n".join(
            [
                *heads,
                body,
                "def build():",
                *(f"    {line}" for line in make),
                "def drive(model):",
                "    seen = []",
                driver,
                "    return seen",
                "",
            ]
        )

    @property
    def has(self) -> set[str]:
        """The productions that are (still) in it."""

        def kinds(statements):
            for one in statements:
                yield one.kind
                yield from kinds(one.body)

        return set(kinds([*(one for part in self.parts for one in part.body), *self.driver]))


@dataclass(frozen=True)
class Script(Program):
    """A program that is there as text: a file of the corpus."""

    text: str = ""

    @classmethod
    def of(cls, text: str) -> Script:
        """The program of a script: what stands before gaff comes in."""
        seed = re.search(r"torch\.manual_seed\((\d+)\)\n    return", text)
        assert seed is not None, "a script sets the seed of its model"
        return cls(int(seed[1]), (), (), text=text.partition("\nimport gaff\n")[0] + "\n")

    @property
    def source(self) -> str:
        return self.text
