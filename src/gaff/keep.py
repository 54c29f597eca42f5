"""What of a tensor a capture keeps: slices and reductions taken at the source, before anything is stored.

Each is a frozen value that is called with the tensor and returns a smaller one, so that a plan which holds it
can be saved. Any other function ``tensor -> tensor`` serves as well, but a plan with one cannot be saved.
Slices with ``slice`` or an integer are views of a copy-on-write copy; index lists copy the chosen elements.

The values are called inside hooks, on the device of the tensor, and write into nothing. An index list has to be copied
to a GPU, which waits for it; slices and reductions do not. ``Part`` and ``Heads`` also say at which place an edit acts
(``gaff.edits.at``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.compat.modes import beside, outside_modes, without_autocast
from gaff.errors import PlanError, whole_number

Index = int | slice | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """``index`` along dimension ``dim``; an integer keeps the dimension, with size 1.

    Negative numbers count from the end. Raises PlanError, when called, for a dimension or an index that the tensor does
    not have; a slice that reaches beyond the end is shorter, as in Python.
    """

    index: Index
    dim: int

    def __call__(self, tensor: Tensor) -> Tensor:
        _need_dim(tensor, self.dim)
        size = tensor.shape[self.dim]
        if isinstance(self.index, slice):
            at = [slice(None)] * tensor.dim()
            at[self.dim] = self.index
            return tensor[tuple(at)]
        chosen = [self.index] if isinstance(self.index, int) else list(self.index)
        if any(not -size <= number < size for number in chosen):
            hint = "; dim= says another dimension, such as dim=-1" if self.dim == 1 and tensor.dim() > 2 else ""
            if hint and size == 1:
                hint = (
                    "; a step of generate with a cache passes one position: gaff.edits.when(edit, runs=0) limits an "
                    "edit to the prompt"
                )
            raise PlanError(
                f"index {self.index!r} is outside dimension {self.dim} of shape {tuple(tensor.shape)}{hint}"
            )
        if isinstance(self.index, int):
            return tensor.narrow(self.dim, self.index % size, 1)
        # of no numbers torch would make a tensor of floats
        places = torch.tensor([number % size for number in chosen], dtype=torch.int64, device=tensor.device)
        return tensor.index_select(self.dim, beside(tensor, places))


def _need_dim(tensor: Tensor, dim: int) -> None:
    """Raises PlanError for a dimension that the tensor does not have."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise PlanError(f"dimension {dim} asked of a tensor of shape {tuple(tensor.shape)}: it has {tensor.dim()}")


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a ``[..., heads * width]`` tensor: the last dimension is cut into ``count`` equal parts.

    Called, it returns ``[..., len(index), width]``. Raises PlanError where the dimension cannot be cut so.
    """

    index: tuple[int, ...]
    count: int

    def __call__(self, tensor: Tensor) -> Tensor:
        width = tensor.shape[-1] if tensor.dim() else 0
        if not width or width % self.count:
            raise PlanError(
                f"{self.count} heads asked of a tensor of shape {tuple(tensor.shape)}: {width} cannot be cut so"
            )
        return Part(self.index, -2)(tensor.unflatten(-1, (self.count, width // self.count)))


@dataclass(frozen=True, slots=True)
class Reduce:
    """One of torch's reductions over ``dim`` (None: all): mean, sum, amax, amin, or norm (L2).

    A quantised subclass (torchao, quanto) is reduced as the numbers that it stands for, and float8 in float32, as are
    norms and sums of half precision, which may lie beyond its range; every other dtype as torch does it.
    """

    name: str
    dim: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.name not in _REDUCTIONS:
            raise PlanError(f"reduction {self.name!r} is not known: expected one of {', '.join(_REDUCTIONS)}")

    def __call__(self, tensor: Tensor) -> Tensor:
        dim: Any = tuple(range(tensor.dim())) if self.dim is None else self.dim
        if any(not -tensor.dim() <= one < tensor.dim() for one in dim):
            raise PlanError(f"{self.name} over {dim} asked of a tensor of shape {tuple(tensor.shape)}")
        tensor = elements.dequantized(tensor)
        if elements.is_small_float(tensor) or (self.name in ("norm", "sum") and tensor.dtype in _HALF):
            tensor = tensor.float()
        result: Tensor = _REDUCTIONS[self.name](tensor, dim=dim)
        return result


_HALF = torch.float16, torch.bfloat16
_REDUCTIONS: dict[str, Any] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "amax": torch.amax,
    "amin": torch.amin,
    "norm": torch.linalg.vector_norm,
}


@dataclass(frozen=True, slots=True)
class Projection:
    """A random projection of dimension ``dim`` onto ``size`` numbers, the same for the same seed on every machine.

    The matrix has independent entries of a normal distribution of variance 1 / ``size``, so that lengths and dot
    products are kept on average (Johnson and Lindenstrauss, 1984). Computed in float32, or in float64 where the tensor
    is; the result has that dtype, or the complex one of that precision. The matrix of a width is made once, and kept.
    """

    size: int
    seed: int = 0
    dim: int = -1

    def __post_init__(self) -> None:
        if (size := whole_number(self.size, 1)) is None:
            raise PlanError(f"a projection onto {self.size!r} numbers: expected 1 or more")
        object.__setattr__(self, "size", size)

    def __call__(self, tensor: Tensor) -> Tensor:
        _need_dim(tensor, self.dim)
        tensor = elements.dequantized(tensor)
        is_right = tensor.dtype in (torch.float64, torch.complex64, torch.complex128)
        tensor = (tensor if is_right else tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)).movedim(
            self.dim, -1
        )
        matrix = _matrix(tensor.shape[-1], self.size, self.seed, tensor.device, tensor.dtype)
        with without_autocast(tensor.device):
            return (tensor @ beside(tensor, matrix)).movedim(-1, self.dim)


@lru_cache(maxsize=64)
def _matrix(width: int, size: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The matrix of a projection, drawn on the CPU in float32."""
    with outside_modes(), torch.inference_mode(False), torch.no_grad():
        drawn = torch.randn(width, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32,
                            device="cpu")  # fmt: skip
        return (drawn / math.sqrt(size)).to(device, dtype)


_KINDS: dict[str, Any] = {"part": Part, "heads": Heads, "reduce": Reduce, "projection": Projection}


def __dir__() -> list[str]:
    return ["channels", "heads", "mean", "norm", "positions", "project", "rows"]


def rows(index: int | slice | Sequence[int], dim: int = 0) -> Part:
    """Keep some examples of a batch: ``rows(0)``, ``rows(slice(0, 4))``, ``rows([1, 5])``. One keeps its dimension."""
    return Part(_index(index), _one(dim, "dim"))


def positions(index: int | slice | Sequence[int], dim: int = 1) -> Part:
    """Keep some positions of ``[batch, position, feature]``; other layouts say ``dim``."""
    return Part(_index(index), _one(dim, "dim"))


def channels(index: int | slice | Sequence[int], dim: int = 1) -> Part:
    """Keep some channels of ``[batch, channel, ...]``; features of a transformer are ``dim=-1``."""
    return Part(_index(index), _one(dim, "dim"))


def heads(index: int | Sequence[int], count: int) -> Heads:
    """Keep some heads of ``[..., count * width]``, as ``[..., len(index), width]``; ``count``: how many there are."""
    count = _one(count, "count")
    if count < 1:
        raise PlanError(f"count={count!r} given: expected how many heads there are, 1 or more")
    numbers = whole_numbers(index, "index")
    for one in numbers:
        if not -count <= one < count:
            raise PlanError(f"head {one} of {count} was asked for: expected {-count} to {count - 1}")
    return Heads(numbers, count)


def mean(*dim: int) -> Reduce:
    """Keep the mean over ``dim``; over everything when none is given. Integers have no mean: they are refused."""
    return Reduce("mean", _dimensions(dim))


def norm(*dim: int) -> Reduce:
    """Keep the L2 norm over ``dim``; over everything when none is given. Of half precision it is of float32."""
    return Reduce("norm", _dimensions(dim))


def project(size: int, seed: int = 0, dim: int = -1) -> Projection:
    """Keep a random projection of dimension ``dim`` onto ``size`` numbers; lengths stay what they were on average."""
    return Projection(size, _one(seed, "seed"), _one(dim, "dim"))


def in_graph(reduce: Any) -> Any:
    """``reduce`` itself where compiled code may do it: one number of the whole, which an empty tensor has, too.

    None for every other. A compiled graph tells that number in the place of the tensor, which need not leave the graph.
    """
    return reduce if type(reduce) is Reduce and reduce.dim is None and reduce.name in ("norm", "mean", "sum") else None


def is_pure(reduce: Any) -> bool:
    """Whether ``reduce`` is one of the values of this module, which never write into what they are given."""
    return isinstance(reduce, tuple(_KINDS.values()))


def to_dict(keep: Any) -> dict[str, Any]:
    """JSON-ready form of one of the values of this module. Raises PlanError for a function, which has none."""
    for kind, cls in _KINDS.items():
        if isinstance(keep, cls):
            return {"kind": kind, **{name: _plain(value) for name, value in asdict(keep).items()}}
    raise PlanError(f"reduce={keep!r} is a function: a plan that holds one cannot be saved; use gaff.keep")


def from_dict(data: dict[str, Any]) -> Any:
    """Make the value of which ``to_dict`` wrote ``data``. Raises PlanError when ``data`` is none of its results."""
    cls = _KINDS.get(str(data.get("kind")))
    try:
        if cls is None:
            raise TypeError("unknown kind")
        return cls(**{name: _from_plain(value) for name, value in data.items() if name != "kind"})
    except TypeError as error:
        raise PlanError(f"reduce {data!r} cannot be read: {error}; expected what a plan wrote") from None


def _index(index: Any) -> Index:
    """What a place was named by, as a value that can be compared and saved: a number, a slice, a tuple of numbers.

    Raises PlanError for a slice that runs backwards, and for what ``whole_numbers`` refuses.
    """
    if not isinstance(index, slice):
        numbers = whole_numbers(index, "index")
        return numbers[0] if _is_one(index) else numbers
    ends = [None if one is None else _one(one, "index") for one in (index.start, index.stop, index.step)]
    if ends[2] == 0:
        raise PlanError(f"{index} given: expected a step of 1 or more")
    if (1 if ends[2] is None else ends[2]) < 1:
        raise PlanError(f"{index} given: torch takes no slice that runs backwards; expected the places, as [2, 1, 0]")
    return slice(*ends)


def whole_numbers(given: Any, what: str) -> tuple[int, ...]:
    """A whole number of Python, NumPy or torch, or several in an order, as Python's.

    Raises PlanError, which calls it ``what``, for everything else. Truth values are refused: as numbers they are 1 and
    0, while whoever gives a mask means the places that are true.
    """
    plain = given.tolist() if hasattr(given, "tolist") else given
    several = plain if isinstance(plain, Sequence) else (plain,)
    numbers = [one.tolist() if hasattr(one, "tolist") else one for one in several]
    if any(isinstance(one, bool) for one in numbers):
        raise PlanError(
            f"{what} {given!r} given: expected numbers of places, as [1, 5]; of a mask, mask.nonzero().flatten()"
        )
    try:
        return tuple(operator.index(one) for one in numbers)
    except TypeError:
        raise PlanError(f"{what} {given!r} given: expected a whole number, or several, as [1, 5]") from None


def _dimensions(given: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Dimensions as whole numbers, given one by one or in one list; None for all of them.

    Raises PlanError for anything else, such as a tensor: the value, where the function was not called.
    """
    if len(given) == 1 and isinstance(given[0], torch.Tensor):
        raise PlanError(
            "dim is a tensor: expected whole numbers; or this was not called: expected (), as in keep.norm()"
        )
    one_list = len(given) == 1 and isinstance(given[0], (list, tuple))
    return whole_numbers(given[0] if one_list else given, "dim") or None


def _is_one(given: Any) -> bool:
    """Whether one number is given, and not several."""
    plain = given.tolist() if hasattr(given, "tolist") else given
    return not isinstance(plain, Sequence) and hasattr(plain, "__index__")


def _one(given: Any, what: str) -> int:
    """One whole number. Raises PlanError for everything else."""
    if not _is_one(given):
        raise PlanError(f"{what}={given!r} given: expected a whole number")
    return whole_numbers(given, what)[0]


def _plain(value: Any) -> Any:
    """A slice as a dict, which JSON can hold; every other field as it is."""
    return {"slice": [value.start, value.stop, value.step]} if isinstance(value, slice) else value


def _from_plain(value: Any) -> Any:
    """Inverse of ``_plain``; lists, which JSON makes of tuples, are made tuples again."""
    if isinstance(value, dict):
        return slice(*value["slice"])
    return tuple(value) if isinstance(value, list) else value
