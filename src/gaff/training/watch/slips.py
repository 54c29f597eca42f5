"""What was set on optimizers, modules and parameters for nothing, or loaded onto itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from gaff.address.resolve import iter_modules
from gaff.compat import memory
from gaff.compat.elements import is_plain
from gaff.training.watch.models import Model

_OF_GROUPS = ("lr", "learning_rate", "weight_decay", "momentum")
_NEARLY = ("require_grad", "requires_gradient", "require_gradient", "required_grad", "requiresgrad")
_OTHERS = ("torch.nn.", "torchvision.", "timm.", "transformers.")  # of which no module has such an attribute


def set_for_nothing(models: Iterable[Model], optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    """Attributes that nobody reads, as the rule of this name explains them; reads no tensor."""
    found = [told for optimizer in optimizers for told in _on_optimizer(optimizer)]
    for model in models:
        found += _on_parameters(model)
        root = model.root()
        found += _on_modules(model, root) if root is not None else ()
    return found


def _on_optimizer(optimizer: Any) -> Iterator[dict[str, Any]]:
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    own = vars(optimizer)
    for name in _OF_GROUPS:
        value, key = own.get(name), "lr" if name == "learning_rate" else name
        used = [group.get(key) for group in optimizer.param_groups]
        is_driven = key == "lr" and any(one != optimizer.defaults.get(key) for one in used)  # by whoever reads it
        if isinstance(value, (int, float)) and value not in used and not is_driven:
            yield _told("", "", f"{type(optimizer).__name__}.{name}", value, f"the {key} of its groups is {used[0]}")


def _on_parameters(model: Model) -> list[dict[str, Any]]:
    found: list[tuple[str, str, Tensor]] = []
    for called, name, path in model.parameters.values():
        module = called()
        one = module._parameters.get(name) if module is not None else None
        known = vars(one).keys() & set(_NEARLY) if one is not None else ()
        found += [(path, wrong, one) for wrong in known if one is not None and vars(one)[wrong] != one.requires_grad]
    if not found:
        return []
    path, wrong, first = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    meant = f"requires_grad is {first.requires_grad}"
    return [_told(model.name, f"{path}:param", f"{path}.{wrong}{more}", vars(first)[wrong], meant)]


def _on_modules(model: Model, root: nn.Module) -> list[dict[str, Any]]:
    for path, module, _ in iter_modules(root):
        value = vars(module).get("requires_grad")
        if isinstance(value, bool) and type(module).__module__.startswith(_OTHERS):
            parameters = list(module.parameters())
            if parameters and all(one.requires_grad is not value for one in parameters):
                meant = f"requires_grad of its {len(parameters)} parameters is {not value}"
                return [_told(model.name, path, f"{path or model.name}.requires_grad", value, meant)]
    return []


def _told(model: str, site: str, name: str, value: Any, meant: str) -> dict[str, Any]:
    return {"model": model, "site": site, "name": name, "value": value, "meant": meant}


class SelfLoads:
    """Loads of a model with its own tensors, which bring nothing back; where the program has written into these since
    the last step, as to limit the weights, it loads what it means, in whatever a roundabout way."""

    def __init__(self) -> None:
        self.first: int | None = None  # the step of the first one, if any
        self._weight: Callable[[], Tensor | None] = lambda: None
        self._version = 0  # of that, one of the weights, at the end of the last step
        self._is_meant = False

    def loaded(self, module: nn.Module, state: Any, step: int) -> None:
        """``load_state_dict`` has run after so many steps. What was written before it is known from the second on."""
        if self._is_meant or not is_loaded_with_itself(module, state):
            return
        weight = self._weight()
        if weight is None:
            self.first = step
            self._weight = weakref.ref(next(module.parameters()))
        else:
            self._is_meant = memory.version_of(weight) > self._version + 1  # one write is that of the load
        self.step_ended()

    def step_ended(self) -> None:
        """A step has ended, or nothing was written since it has."""
        weight = self._weight()
        if weight is not None:
            self._version = memory.version_of(weight)

    def told(self) -> int | None:
        """The step of the first load that has brought nothing back; None where there was none."""
        return None if self._is_meant else self.first


def is_loaded_with_itself(module: nn.Module, state: Any) -> bool:
    """Whether a state dict holds the very memory of all parameters of a module, of which it has some; never of such as
    lie in no memory of their own, as those of which each process has a part."""
    known = [(one, state.get(name)) for name, one in module.named_parameters()] if hasattr(state, "get") else []
    return bool(known) and all(_is_same(one, other) for one, other in known)


def _is_same(one: Tensor, other: Any) -> bool:
    """Whether two plain tensors of one shape lie in the same memory."""
    if not isinstance(other, Tensor) or not is_plain(one) or not is_plain(other):
        return False
    return other.shape == one.shape and other.data_ptr() == one.data_ptr() != 0
