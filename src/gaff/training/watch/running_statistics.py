"""What BatchNorm normalises by in an evaluation: running statistics, and whether they were ever filled."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gaff.address.resolve import iter_modules
from gaff.compat import distributed, elements, memory
from gaff.training.watch.models import Models

_WRITES = 5  # to a weight, more than making it takes
_NORMS = nn.modules.batchnorm._BatchNorm


def running_statistics(module: nn.Module) -> tuple[tuple[str, float, Tensor, Tensor], ...]:
    """Of what normalises by running statistics inside, in evaluation mode: path, momentum, batches and least variance.

    Those that average over all batches (``momentum=None``), and that are frozen with a momentum of 0, are left out.
    """
    return tuple(
        (path, float(one.momentum), one.num_batches_tracked.clone(), one.running_var.min())
        for path, one in _norms_of(module)
        if one.momentum and not one.training and one.running_var is not None
    )


def _norms_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The paths and modules of what counts the batches by which it will normalise."""
    return [
        (path, one)
        for path, one, _ in iter_modules(module)
        if isinstance(one, _NORMS) and one.num_batches_tracked is not None
    ]


class UnfilledCopies:
    """Finds copies of models that follow the weights of these, but not the running statistics."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._sums: dict[str, float] = {}  # by such a model: of its first weight, when it was last evaluated

    def facts(self, name: str, module: nn.Module) -> dict[str, Any]:
        """What is to be told of ``module``, of the model ``name``, which is about to run in an evaluation.

        By that name: what the model is like that has trained with as many batches as are told, where all running
        statistics of this one are the 0 and 1 that they began with, and its weights have changed. Else empty. Waits for
        the device where there is such another model.
        """
        norms = [one for _, one in _norms_of(module)]
        if not norms or any(one.training for one in norms) or not all(map(_is_unfilled, norms)):
            return {}
        found = (self._filled(other.name, type(module), len(norms)) for other in self._models.all if other.name != name)
        like, batches = max(found, key=lambda one: one[1], default=("", 0))
        if not batches or not self._has_changed(name, module):
            return {}
        return {name: {"like": like, "batches": batches, "norms": len(norms)}}

    def _filled(self, name: str, kind: type[nn.Module], count: int) -> tuple[str, int]:
        """A model's name, and how many batches all of its running statistics have seen; 0 if it is of another make."""
        root = self._models.named(name).root()
        same = next((one for _, one, _ in iter_modules(root) if type(one) is kind), None) if root is not None else None
        norms = _norms_of(same) if same is not None else []
        return name, min(int(one.num_batches_tracked) for _, one in norms) if len(norms) == count else 0

    def _has_changed(self, name: str, module: nn.Module) -> bool:
        """Whether the weights were written to, as an average over steps is; ``.data`` is not counted, and compared."""
        first = next((one for one in module.parameters() if one.is_floating_point()), None)
        if first is None:
            return False
        own = distributed.local_of(first.detach())
        total = float(own.to(elements.wide_type(own)).sum())
        before = self._sums.setdefault(name, total)
        self._sums[name] = total
        return before != total or memory.version_of(first) >= _WRITES


def _is_unfilled(norm: Any) -> bool:
    """Whether a norm has seen no batch, and normalises by a mean of 0 and a variance of 1."""
    is_new = int(norm.num_batches_tracked) == 0 and norm.running_mean is not None
    return is_new and not bool(norm.running_mean.any()) and bool((norm.running_var == 1).all())
