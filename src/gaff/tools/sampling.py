"""``gaff.sample_norms``: the gradient norm of every example of a batch, from one ordinary backward pass.

What a layer did to an example is told by its input and by the gradient at its output; the norm of the example's part
of a weight's gradient follows from inner products of these, without that part ever being made ("ghost norms":
Goodfellow, "Efficient per-example gradient computations", 2015; Li et al., "Large language models can be strong
differentially private learners", 2022, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.address import Site
from gaff.engine.session import Session, Tap
from gaff.engine.stream import Stream
from gaff.errors import ExactnessError, NeverFiredError, PlanError, SiteError
from gaff.select import Found, find_site, iter_modules, join, need_module, resolve
from gaff.tools.terms import Terms, find_rule, product


class _Use(NamedTuple):
    """One call of a layer: its input, and the gradient at its output once it has come."""

    given: Tensor
    gradient: Tensor | None


class SampleNorms:
    """Collects while open; read by parameter, inside the block after ``backward()`` or after it.

    ``norms["fc.weight"]`` and ``norms.total``: ``[batch]``, of the only run; ``norms.run(2)`` the same of one of
    several. On the device of the gradients, in float32 or wider.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[Any], reduction: str) -> None:
        need_module(model)
        if reduction not in ("mean", "sum"):
            raise PlanError(f"reduction={reduction!r} is not known: expected 'mean' or 'sum', as the loss reduces")
        self._layers = _find_layers(model, patterns)
        self._is_mean = reduction == "mean"
        self._uses: dict[int, dict[tuple[str, int], _Use]] = {}  # by run: (layer, call) -> what is known
        self._sizes: dict[int, int] = {}  # by run: examples in the batch
        self._refused: dict[int, str] = {}
        self._names = _group_parameters(self._layers)
        taps = [Tap(find_site(model, Site(port="input"))[0], _Part(self._see_batch), False)]
        for path in self._layers:
            for port, see in (("input", self._see_input), ("grad_output", self._see_gradient)):
                taps.append(Tap(find_site(model, Site(path, port=port))[0], _Part(see, path), False))
        self._session = Session(model, taps)

    def __enter__(self) -> SampleNorms:
        self._session.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()
        has_any = any(use.gradient is not None for uses in self._uses.values() for use in uses.values())
        if kind is None and not has_any:
            raise NeverFiredError("sample_norms saw no gradient: expected model(...) and backward() inside the session")

    def __getitem__(self, name: str) -> Tensor:
        """Norms of the examples' gradients of one parameter."""
        return self.run(None)[name]

    @property
    def total(self) -> Tensor:
        """Norms of the examples' whole gradients: of all parameters that are followed."""
        return _total(self.run(None))

    @property
    def runs(self) -> list[int]:
        """Numbers of the runs that had a backward pass."""
        return [run for run, uses in self._uses.items() if any(use.gradient is not None for use in uses.values())]

    def run(self, index: int | None) -> dict[str, Tensor]:
        """Norms by parameter, ``[batch]`` each, of one run (None: of the only one)."""
        if index is None:
            if len(self.runs) != 1:
                raise SiteError(f"{len(self.runs)} runs had a backward pass: expected one, or say norms.run(number)")
            [index] = self.runs
        if index in self._refused:
            raise ExactnessError(self._refused[index])
        size = self._sizes[index]
        found = {}
        for names, holders in self._names:
            terms = [
                find_rule(self._layers[path])(self._layers[path], name, use.given, use.gradient)
                for (path, _), use in self._uses[index].items()
                if use.gradient is not None
                for holder, name in holders
                if holder == path
            ]
            square = _square(terms, size, self._layers[holders[0][0]])
            found[names] = square.clamp(min=0).sqrt() * (size if self._is_mean else 1)
        return found

    def _see_batch(self, value: Any, run: Any, call: int, path: str) -> None:
        if isinstance(value, Tensor) and value.dim() and run.index not in self._sizes:
            self._sizes[run.index] = len(value)

    def _see_input(self, value: Any, run: Any, call: int, path: str) -> None:
        layer = self._layers[path]
        if not isinstance(value, Tensor):
            self._refuse(run, f"{path}: its input is no tensor")
            return
        size = self._sizes.get(run.index)
        if size is None or not value.dim() or len(value) != size:
            self._refuse(
                run,
                f"{path}: {type(layer).__name__} was given {tuple(value.shape)} in a batch of {size}: its first "
                "dimension is not the examples, whose parts cannot be told apart; leave it out: sample_norms(model, "
                "pattern of others)",
            )
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            self._refuse(run, f"{path}: {type(layer).__name__} mixes the examples of a batch: expected model.eval()")
        self._uses.setdefault(run.index, {})[path, call] = _Use(value.detach(), None)

    def _see_gradient(self, value: Any, run: Any, call: int, path: str) -> None:
        if isinstance(value, Tensor):
            uses = self._uses[run.index]
            use = uses.get((path, call))
            if use is None or use.gradient is not None:
                self._refuse(run, f"{path}: several backward passes, or a call that was not seen: expected one of each")
            else:
                uses[path, call] = _Use(use.given, value.detach())
        elif value is not None:
            self._refuse(run, f"{path}: {value}")

    def _refuse(self, run: Any, reason: str) -> None:
        self._refused.setdefault(run.index, reason)


class _Part(Stream):
    """A stream that hands its events on with the path of its layer."""

    def __init__(self, see: Callable[[Any, Any, int, str], None], path: str = "") -> None:
        self._see = see
        self._path = path

    def add(self, value: Any, run: Any, call: int) -> None:
        self._see(value, run, call, self._path)

    def absent(self, run: Any, call: int, reason: str) -> None:
        self._see(None, run, call, self._path)

    def refuse(self, run: Any, call: int, reason: str) -> None:
        self._see(reason, run, call, self._path)


def sample_norms(model: nn.Module, patterns: Sequence[Any], reduction: str) -> SampleNorms:
    """See ``gaff.sample_norms``."""
    return SampleNorms(model, patterns, reduction)


def _square(terms: list[Terms], size: int, layer: nn.Module) -> Tensor:
    """Squared norm of the sum of all terms of each example: every pair of uses meets once."""
    if not terms:
        parameter = next(layer.parameters())
        return torch.zeros(size, device=parameter.device)
    total = torch.zeros((), device=terms[0].inner.device)
    for number, one in enumerate(terms):
        total = total + product(one, one)
        for other in terms[number + 1 :]:
            total = total + 2 * product(one, other)
    return total


def _total(norms: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(norms.values())).square().sum(0).sqrt()


def _find_layers(model: nn.Module, patterns: Sequence[Any]) -> dict[str, nn.Module]:
    """Every layer with trainable parameters, once. Raises PlanError for one without a rule."""
    if patterns:
        found = [item for pattern in patterns for item in resolve(model, pattern)]
    else:
        found = [Found(Site(path), module) for path, module, _ in iter_modules(model)]
    layers: dict[int, tuple[str, nn.Module]] = {}
    for item in found:
        layers.setdefault(id(item.module), (item.site.path, item.module))
    trained = {path: module for path, module in layers.values() if _trainable(module)}
    unknown = [
        f"{path or 'the root'} ({type(module).__name__})" for path, module in trained.items() if not _has_rule(module)
    ]
    if unknown:
        raise PlanError(
            f"{', '.join(unknown[:5])}: no rule for its parameters: expected Linear, Conv, Embedding and norm layers; "
            "limit what is followed, sample_norms(model, '**<Linear>')"
        )
    if not trained:
        raise PlanError("sample_norms found no layer with trainable parameters there")
    return trained


def _trainable(module: nn.Module) -> list[str]:
    return [name for name, one in module._parameters.items() if one is not None and one.requires_grad]


def _has_rule(module: nn.Module) -> bool:
    try:
        find_rule(module)
    except PlanError:
        return False
    return True


def _group_parameters(layers: dict[str, nn.Module]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each parameter once, by its first name, with every layer that uses it."""
    groups: dict[int, tuple[str, list[tuple[str, str]]]] = {}
    for path, module in layers.items():
        for name in _trainable(module):
            one = module._parameters[name]
            groups.setdefault(id(one), (join(path, name), []))[1].append((path, name))
    return list(groups.values())
