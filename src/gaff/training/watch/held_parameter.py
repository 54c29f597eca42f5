"""A parameter that somebody else may write to: whether it has changed since it was found."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gaff.compat import elements
from gaff.compat.memory import version_of

_ELEMENTS = 1024  # that are compared with what they were


class HeldParameter(NamedTuple):
    """A parameter, by the module that has it and its name there: torch swaps no tensor that is referred to weakly.

    ``before``: its version and its first elements when it was found; None where that is not compared.
    """

    module: weakref.ref[nn.Module]
    name: str
    before: tuple[int, Tensor] | None

    @classmethod
    def of(cls, module: weakref.ref[nn.Module], name: str, parameter: Tensor | None) -> HeldParameter:
        """``parameter``: as it is now, to be compared with later; None where that is not asked for."""
        before = None if parameter is None else (version_of(parameter), _beginning(parameter))
        return cls(module, name, before)

    def now(self) -> Tensor | None:
        """The parameter, None where it is gone."""
        module = self.module()
        return None if module is None else module._parameters.get(self.name, vars(module).get(self.name))

    def has_changed(self) -> bool:
        """Whether something has written to it since it was found; False where that cannot be told.

        The first elements are compared, too, of a parameter on the CPU: writes through ``.data`` count no version.
        """
        now = self.now()
        return now is not None and self.before is not None and (version_of(now) != self.before[0] or self.is_other())

    def is_other(self) -> bool:
        """Whether its first elements are others than they were; of one on a device, whether it was written to."""
        now = self.now()
        if self.before is None or now is None:
            return False
        version, some = self.before
        return not torch.equal(_beginning(now), some) if now.is_cpu and some.numel() else version_of(now) != version


def _beginning(parameter: Tensor) -> Tensor:
    """The first elements of a parameter, in memory of their own; none where they cannot be read."""
    plain = parameter.detach()
    is_readable = elements.is_plain(plain) and elements.is_readable(plain)
    return plain.flatten()[:_ELEMENTS].clone() if is_readable else torch.empty(0, device="cpu")
