"""Holds ``gaff.sample_norms``: the gradient norm of every example of a batch, from one ordinary backward pass.

What a layer did to an example is told by its input and by the gradient at its output; the norm of the example's part of
a weight's gradient follows from inner products of these, without that part ever being made ("ghost norms": Goodfellow,
"Efficient per-example gradient computations", 2015; Li et al., "Large language models can be strong differentially
private learners", 2022, section 4).

The order of things: a layer's input is kept in forward, the gradient at its output in backward, and when the gradient
of a parameter is complete the norms of it are computed and checked against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gaff.address.grammar import Site, nearest
from gaff.address.resolve import Found, find_site, iter_modules, join, need_module, resolve
from gaff.compat import autograd, distributed, elements, memory, modes
from gaff.engine.session import Session
from gaff.engine.streams import Stream
from gaff.engine.taps import Tap
from gaff.errors import ExactnessError, NeverFiredError, PlanError, SiteError
from gaff.training.layer_gradients import Terms, find_rule, is_batched, measure, question, wide
from gaff.views.text import counted


class _Use:
    """One call of a layer: its input, and the gradient at its output once it has come.

    Made when the layer is called, and kept with the run. The input is held by reference; ``version`` tells whether
    somebody has written into it since, which would make the norms wrong.
    """

    def __init__(self, given: Tensor) -> None:
        self.given = given
        self.version = memory.version_of(given)
        self.gradient: Tensor | None = None
        self.told: set[tuple[str, str]] = set()  # parameters whose gradient has come with it

    def is_narrow(self) -> bool:
        """Whether half precision took part, as it does under autocast."""
        given = self.given.is_floating_point() and self.given.element_size() < 4
        return given or (self.gradient is not None and self.gradient.element_size() < 4)


class SampleNorms:
    """Collects while open; read by parameter, inside the block after ``backward()`` or after it.

    ``norms["fc.weight"]`` and ``norms.total``: ``[batch]``, of the only run; ``norms.run(2)`` the same of one of
    several. On the device of the gradients, in float32 or wider. They are computed when the gradient of the parameter
    arrives, and checked against it: what the followed layers add up to must be all of it. A run of which something is
    not exact is refused as a whole: reading it raises ExactnessError with the first reason.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[Any], reduction: str) -> None:
        need_module(model)
        if reduction not in ("mean", "sum"):
            raise PlanError(f"reduction={reduction!r} is not known: expected 'mean' or 'sum', as the loss reduces")
        self._layers = _find_layers(model, patterns)
        if any(one.is_meta for layer in self._layers.values() for one in layer.parameters()):
            raise PlanError("parameters on the meta device hold no numbers: expected a model whose weights are there")
        if any(distributed.is_spread(one) for layer in self._layers.values() for one in layer.parameters()):
            raise PlanError("sample_norms of parameters that are spread over processes (FSDP2, tensor parallelism) are "
                            "not known here: expected a model that lies whole in each process")  # fmt: skip
        self._is_mean = reduction == "mean"
        self._uses: dict[int, dict[str, dict[int, _Use]]] = {}  # by run, layer and call: what is known
        self._sizes: dict[int, int] = {}  # by run: examples in the batch
        self._refused: dict[int, str] = {}
        self._has_gradient = False
        self._squares: dict[int, dict[str, Tensor]] = {}  # by run, by parameter: squared norms
        self._left_out: dict[int, list[str]] = {}  # by run: parameters that its first pass was not for
        self._names = _group_parameters(self._layers)
        taps = [Tap(find_site(model, Site(port="input"))[0], _Part(self._see_batch), False)]
        for path in self._layers:
            for port, see in (("input", self._see_input), ("grad_output", self._see_gradient)):
                taps.append(Tap(find_site(model, Site(path, port=port))[0], _Part(see, path), False))
        for path, module, _ in iter_modules(model):
            if isinstance(module, _BatchNorm) and path not in self._layers:
                taps.append(Tap(find_site(model, Site(path, port="input"))[0], _Part(self._see_mixing, path), False))
        self._mixing = {path: module for path, module, _ in iter_modules(model) if isinstance(module, _BatchNorm)}
        for name in self._names:
            taps.append(Tap(find_site(model, Site(name, port="grad"))[0], _Part(self._see_total, name), False))
        self._session = Session(model, taps)
        self._closing = ExitStack()

    def __repr__(self) -> str:
        seen = f"{counted(len(self._names), 'parameter')}, {counted(len(self._sizes), 'run')}"
        return f"<gaff sample norms: {seen}, of a loss that is a {'mean' if self._is_mean else 'sum'} over examples>"

    def __enter__(self) -> SampleNorms:
        with ExitStack() as opening:
            opening.push(self._look_last)
            opening.enter_context(self._session)
            self._closing = opening.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._closing.__exit__(*exc)

    def _look_last(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raise NeverFiredError where the block ends well and there was nothing to measure in it."""
        if error is None and not self._has_gradient:
            why = next(iter(self._refused.values()), "expected model(...) and backward() inside the session")
            raise NeverFiredError(f"sample_norms saw no gradient: {why}")

    def __iter__(self) -> Iterator[str]:
        """The names of the parameters that are followed."""
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        """Norms of the examples' gradients of one parameter, or of all parameters that are followed of one layer.

        Raises SiteError for what is not followed.
        """
        return _norms_of(name, self.run(None), self._layers)

    @property
    def total(self) -> Tensor:
        """Norms of the examples' whole gradients, of all parameters that are followed: ``[batch]``.

        Of the only run, and raises as ``run`` does.
        """
        return torch.stack(list(self.run(None).values())).square().sum(0).sqrt()

    @property
    def runs(self) -> list[int]:
        """The numbers of the runs that had a backward pass, refused ones included, in order."""
        return sorted({*self._squares, *self._refused})

    def run(self, index: int | None) -> dict[str, Tensor]:
        """Norms by parameter, ``[batch]`` each, of one run (None: of the only one).

        A parameter that got no gradient has norms of zero. Raises SiteError where there is no such run, ExactnessError
        where it was refused, or a parameter was left out by a backward pass for chosen ``inputs``.
        """
        if index is None and len(self.runs) == 1:
            [index] = self.runs
        if index is None or index not in self.runs:
            told = (
                f"{len(self.runs)} runs had a backward pass, {self.runs}: expected norms.run(number), the dict of one"
            )
            raise SiteError(told if self.runs else "no run had a backward pass while this was open: there are no norms")
        if index in self._refused:
            raise ExactnessError(self._refused[index])
        if lacking := [name for name in self._left_out.get(index, ()) if name not in self._squares[index]]:
            raise ExactnessError(
                f"{lacking[0]}: its gradient was not asked of the backward pass, which was for some inputs; expected "
                "all that is followed, or sample_norms(model, patterns of layers whose parameters are asked for)"
            )
        squares, factor = self._squares[index], self._sizes[index] if self._is_mean else 1
        like = next(iter(squares.values()))
        return {
            name: squares.get(name, torch.zeros_like(like)).clamp(min=0).sqrt().to(like.dtype) * factor
            for name in self._names
        }

    def _see_batch(self, value: Any, run: Any, call: int, path: str) -> None:
        """Note the number of examples of a run: the first dimension of the first tensor that the model is given."""
        if isinstance(value, Tensor) and value.dim() and run.index not in self._sizes:
            self._sizes[run.index] = len(value)

    def _see_input(self, value: Any, run: Any, call: int, path: str) -> None:
        """Keep a layer's input, or refuse the run where examples cannot be told apart in it.

        Its first dimension must be the examples, and batch norm in training mixes them.
        """
        if not isinstance(value, Tensor) or not elements.is_plain(distributed.local_of(value)):
            what = "no tensor" if not isinstance(value, Tensor) else f"a {type(value).__name__} of {value.layout}"
            self._refuse(
                run.index,
                f"{path or 'the model'}: its input is {what}: expected a dense tensor, whose rows are the examples",
            )
            return
        layer, size = self._layers[path], self._sizes.get(run.index)
        if size is None:
            self._refuse(run.index, "the first input of the model is no tensor with a dimension of examples")
        elif not is_batched(layer, value) or len(value) != size:
            self._refuse(
                run.index,
                f"{path}: {type(layer).__name__} was given {tuple(value.shape)} in a batch of {size}: its first "
                "dimension is not the examples, whose parts cannot be told apart; leave it out: sample_norms(model, "
                f"lambda site: site.path != {path!r})",
            )
        elif not value.numel():
            self._refuse(run.index, f"{path}: was given {tuple(value.shape)}, in which there is nothing to measure")
        elif isinstance(layer, _BatchNorm):
            self._need_apart(run.index, path, layer)
        self._uses.setdefault(run.index, {}).setdefault(path, {})[call] = _Use(value.detach())

    def _see_mixing(self, value: Any, run: Any, call: int, path: str) -> None:
        """Refuse a run in which a batch norm that is not followed itself mixes what followed layers have made.

        What it mixes before the first of them is given to them as it is, and does no harm.
        """
        if run.index in self._uses:
            self._need_apart(run.index, path, self._mixing[path])

    def _need_apart(self, index: int, path: str, layer: _BatchNorm) -> None:
        """Refuse a run where batch norm takes its statistics from the batch: the loss of one depends on the others."""
        if layer.training or layer.running_mean is None:
            self._refuse(index, f"{path}: {type(layer).__name__} mixes the examples of a batch: expected model.eval()")

    def _see_gradient(self, value: Any, run: Any, call: int, path: str) -> None:
        """Keep the gradient at a layer's output beside its input; a second one for the same call is refused."""
        if isinstance(value, Tensor):
            self._has_gradient = True
            use = self._uses.get(run.index, {}).get(path, {}).get(call)
            if use is None or use.gradient is not None:
                self._refuse(
                    run.index, f"{Site(path, call=call)}: several backward passes, or a call that was not seen"
                )
            else:
                use.gradient = value.detach()
                if run.index not in self._left_out:
                    self._left_out[run.index] = [*self._find_left_out()]
        elif value is not None:
            self._refuse(run.index, f"{path}: {value}")

    def _find_left_out(self) -> Iterator[str]:
        """The parameters that a backward pass in progress does not compute, since it is for chosen inputs only."""
        chosen = autograd.chosen_inputs()
        for name, uses in self._names.items():
            identities = {id(self._layers[path]._parameters[own]) for path, own in uses}
            if any(not one & identities for one in chosen):
                yield name

    def _see_total(self, value: Any, run: Any, call: int, name: str) -> None:
        """Measure a parameter whose gradient has come, in all runs that contribute to it.

        All contributions have been added up by then (of a reentrant checkpoint: all so far). Waits for the device.
        """
        if not isinstance(value, Tensor):
            return
        self._has_gradient = True
        explained, reach = 0.0, 0.0
        reached = []
        with torch.no_grad(), modes.without_autocast(value.device):
            total = value.to_dense() if value.is_sparse else value
            asked = question(total)
            for index in [index for index in self._uses if index not in self._refused]:
                before, new = self._terms_of(index, name)
                if new:
                    reached.append(index)
                    found = measure(before, new, asked)
                    explained += found.explained
                    reach += found.reach
                    self._squares.setdefault(index, {})[name] = found.squares
            missing = float(torch.dot(total.reshape(-1).to(asked.dtype), asked.reshape(-1))) - explained
            self._check(name, total, missing, reach, reached or [run.index])

    def _terms_of(self, index: int, name: str) -> tuple[list[Terms], list[Terms]]:
        """What the layers add to a parameter in one run: terms that an earlier gradient has told, and new ones."""
        before: list[Terms] = []
        new: list[Terms] = []
        for path, own in self._names[name]:
            layer = self._layers[path]
            for use in self._uses[index].get(path, {}).values():
                if use.gradient is None:
                    continue
                if memory.version_of(use.given) != use.version:
                    self._refuse(index, f"{path}: its input was changed in place after the call")
                terms = find_rule(layer)(layer, own, use.given, wide(use.gradient))
                (before if (path, own) in use.told else new).append(terms)
                use.told.add((path, own))
        return before, new

    def _check(self, name: str, total: Tensor, missing: float, reach: float, runs: Iterable[int]) -> None:
        """Refuse ``runs`` where the layers do not account for the gradient that came.

        If they account for all of it, their sum gives what the gradient gives in the direction that was asked, and
        nothing is ``missing``; else a part of it is of another use of the parameter, or somebody has changed it. The
        tolerance is 1e-3 of the squared norm (5e-2 where half precision took part), and more where large numbers may
        have cancelled. Squares that float32 cannot add up (below 1e-37 an element, above 1e37) are refused, too.
        """
        paths = {path for path, _ in self._names[name]}
        narrow = (use for index in runs for path in paths for use in self._uses.get(index, {}).get(path, {}).values())
        is_wide = total.element_size() >= 4 and not any(use.is_narrow() for use in narrow)
        square = float(torch.linalg.vector_norm(total, dtype=elements.wide_type(total)).square())
        lost = (square**0.5 or 1.0) * reach * (1e-5 if is_wide else 1e-2) + (reach * (1e-6 if is_wide else 1e-3)) ** 2
        is_out = square and total.dtype != torch.float64 and not 1e-37 * total.numel() < square < 1e37
        if is_out or not abs(missing) <= (1e-3 if is_wide else 5e-2) * square + lost:
            for index in runs:
                self._refuse(
                    index,
                    f"{name}: the layers that are followed account for a part of its gradient only: it is also used in "
                    "another way (F.linear, a tied layer that is not followed), an edit of the layer's output or "
                    "weight is open, a hook, penalty or edit set before changed its gradient, or its square is out of "
                    "float32's range"
                    if math.isfinite(square)
                    else f"{name}: its gradient is not finite",
                )

    def _refuse(self, index: int, reason: str) -> None:
        """Remember why the norms of a run are not exact; the first reason stays."""
        self._refused.setdefault(index, reason)


class _Part(Stream):
    """A stream of the engine that hands its events on with the path of its layer, or the name of its parameter.

    The value is None where there was nothing to see, and a text, the reason, where it could not be told.
    """

    def __init__(self, see: Callable[[Any, Any, int, str], None], path: str = "") -> None:
        self._see = see
        self._path = path

    def add(self, value: Any, run: Any, call: int) -> None:
        self._see(value, run, call, self._path)

    def absent(self, run: Any, call: int, reason: str) -> None:
        self._see(None, run, call, self._path)

    def refuse(self, run: Any, call: int, reason: str) -> None:
        self._see(reason, run, call, self._path)


def _norms_of(name: str, found: Mapping[str, Tensor], layers: Mapping[str, nn.Module]) -> Tensor:
    """The norms of a parameter, or of a layer as a whole, [batch], in those of a run by parameter."""
    if name in found:
        return found[name]
    inside = [norms for one, norms in found.items() if one.rpartition(".")[0] == name]
    if name not in layers or not inside:
        known = [*found, *layers]
        raise SiteError(f"{name!r} is not followed: expected one of {', '.join(nearest(name, known) or known)}")
    return torch.stack(inside).square().sum(0).sqrt()


def sample_norms(model: nn.Module, patterns: Sequence[Any], reduction: str) -> SampleNorms:
    """Make the session that ``gaff.sample_norms`` returns; what its arguments mean is told there."""
    return SampleNorms(model, patterns, reduction)


def _find_layers(model: nn.Module, patterns: Sequence[Any]) -> dict[str, nn.Module]:
    """Every layer with trainable parameters that the patterns name, or the model has, by its first path.

    Raises PlanError where one of them has no rule, or there is none.
    """
    if patterns:
        found = [item for pattern in patterns for item in resolve(model, pattern)]
    else:
        found = [Found(Site(path), module) for path, module, _ in iter_modules(model)]
    layers: dict[int, tuple[str, nn.Module]] = {}
    for item in found:
        layers.setdefault(id(item.module), (item.site.path, item.module))
    trained = {path: module for path, module in layers.values() if _trainable(module)}
    if imaginary := [path for path, module in trained.items() if any(one.is_complex() for one in module.parameters())]:
        raise PlanError(f"{imaginary[0] or 'the root'}: its parameters are complex: expected real ones")
    unknown = [
        f"{path or 'the root'} ({type(module).__name__})" for path, module in trained.items() if not _has_rule(module)
    ]
    if unknown:
        raise PlanError(
            f"{', '.join(unknown[:5])}: no rule for its parameters, or for an option of it: expected Linear, Conv, "
            "Embedding and norm layers; limit what is followed, sample_norms(model, '**<Linear>')"
        )
    if not trained:
        inside = next(
            (path for path, module in layers.values() if any(one.requires_grad for one in module.parameters())), None
        )
        hint = "" if inside is None else f"; {inside!r} has some inside: expected '**' for all that is inside"
        raise PlanError(f"sample_norms found no layer with trainable parameters of its own there{hint}")
    return trained


def _trainable(module: nn.Module) -> list[str]:
    """The names of a module's own parameters that require grad."""
    return [name for name, one in module._parameters.items() if one is not None and one.requires_grad]


def _has_rule(module: nn.Module) -> bool:
    """Whether all trainable parameters of a module can be told.

    It must be a layer of a known kind, with a weight and a bias only.
    """
    with suppress(PlanError):
        find_rule(module)
        return set(_trainable(module)) <= {"weight", "bias"}  # others come from weight_norm, pruning and the like
    return False


def _group_parameters(layers: dict[str, nn.Module]) -> dict[str, list[tuple[str, str]]]:
    """Each parameter once, by its first name, with every layer that uses it: (path of the layer, name in it)."""
    groups: dict[int, tuple[str, list[tuple[str, str]]]] = {}
    for path, module in layers.items():
        for name in _trainable(module):
            one = module._parameters[name]
            groups.setdefault(id(one), (join(path, name), []))[1].append((path, name))
    return dict(groups.values())
