"""baukit's ``Trace`` and ``TraceDict``, by the same names.

    from gaff.integrations.baukit import Trace, TraceDict

Values are exact also where the model overwrites them later, layers may be addresses (``"layer4/add#1"``), and a layer
that never runs raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import Parameter, signature
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site, parse_site
from gaff.address.nested import map_tensors
from gaff.compat import autograd
from gaff.errors import PlanError, need_truth
from gaff.sessions.capture import Capture
from gaff.sessions.edit import edit
from gaff.sessions.plan import Plan

_ROOT = ":output"  # the model itself, which has no path


class LastLayer(Exception):
    """Ends a forward pass at the last layer that is wanted (``stop=True``); caught where the block ends."""


class LayerValues:
    """What passed at one layer: ``output``, and ``input`` where it was asked for. None before the layer has run."""

    def __init__(self, layer: str, is_cloned: bool, is_detached: bool) -> None:
        self.layer = layer
        self.kept: dict[str, str] = {}  # the addresses of its output and its input, where they are kept
        self.got: Capture | None = None
        self.last: Tensor | None = None  # where the forward was ended, or the gradient is retained
        self.is_handed_out = False  # the output is that
        self._is_cloned, self._is_detached = is_cloned, is_detached

    @property
    def output(self) -> Any:
        """What the layer has returned, changed by ``edit_output`` where there is one; of several calls the last."""
        return self.last if self.last is not None or self.is_handed_out else self._read("output")

    @property
    def input(self) -> Any:
        """The first tensor that the layer was given. Raises PlanError where it was not kept."""
        return self._read("input")

    def end(self, output: Tensor) -> None:
        """Note what the layer returned, at which the forward is ended."""
        output = output.detach() if self._is_detached else output
        self.last = output.clone() if self._is_cloned else output

    def retain(self, output: Tensor) -> Tensor:
        """Have autograd fill the ``grad`` of what is handed out; a copy for the model to go on with."""
        kept = output if output.requires_grad else output.detach().requires_grad_()
        if autograd.backward_task() == -1:  # the call itself, not a checkpoint that runs it again
            self.last = kept
            kept.retain_grad()
        return kept.clone()

    def _read(self, what: str) -> Any:
        if what not in self.kept:
            raise PlanError(f"{self.layer}: its {what} was not kept: expected retain_{what}=True")
        address = self.kept[what]
        if self.got is None:
            raise PlanError(
                f"{self.layer}: nothing is kept outside of the block: expected with Trace(...) as ret: model(x)"
            )
        if address not in self.got:
            return None
        value = self.got.all(address)[-1]
        if self._is_cloned and not self._is_detached:
            return map_tensors(value, torch.clone)
        return value


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is done at the layers, with the names and in the order of baukit; ``TraceDict`` tells what each means."""

    retain_output: bool = True
    retain_input: bool = False
    clone: bool = False
    detach: bool = False
    retain_grad: bool = False
    edit_output: Callable[..., Any] | None = None
    stop: bool = False

    def __post_init__(self) -> None:
        """Raises PlanError for an option that is no truth value, such as one for each layer."""
        for name in ("retain_output", "retain_input", "clone", "detach", "retain_grad", "stop"):
            need_truth(getattr(self, name), name)
        if self.edit_output is not None and not callable(self.edit_output):
            raise PlanError(f"edit_output={self.edit_output!r:.60} is no function: expected one, for all layers")


class TraceDict(Mapping[str, LayerValues]):
    """Keeps, and may change, what passes at several layers: ``with TraceDict(model, ["layer1", "layer2"]) as ret``.

    Args:
        module: the model.
        layers: paths of modules, or addresses; an empty path is the model itself.
        retain_output, retain_input: what is kept; of a layer that runs several times the last is read.
        clone, detach: copies; values without their autograd graph. Without ``detach`` they keep it.
        retain_grad: the output's ``grad`` is filled by backward passes, also after the block, and adds up as torch's
            does; the model goes on with a copy of the output. It goes before ``clone`` and ``detach``.
        edit_output: a function of a copy of the output, and of the layer's name where it has a second parameter or one
            that is called ``layer``, that returns what the model goes on with. Of a layer that returns several tensors
            say which: ``"layer:output[0]"``.
        stop: end the forward at the last of the layers; the block is left there.

    Raises SiteError for a layer that there is not, and NeverFiredError for one that was not called.
    """

    def __init__(self, module: nn.Module, layers: Iterable[str], *options: Any, **named: Any) -> None:
        """``options``, ``named``: those of ``TraceOptions``, by place or by name. Raises TypeError for another one."""
        self._module, self._asked = module, TraceOptions(*options, **named)
        asked = self._asked
        self._layers = {layer: LayerValues(layer, asked.clone, asked.detach) for layer in layers}
        self._last = list(self._layers)[-1] if self._layers else ""
        for layer, one in self._layers.items():
            one.is_handed_out = asked.retain_grad or (asked.retain_output and asked.stop and layer == self._last)
            if asked.retain_output and not one.is_handed_out:
                one.kept["output"] = layer or _ROOT
            if asked.retain_input:
                one.kept["input"] = _input_of(layer)
        Plan.of(*(layer or _ROOT for layer in self._layers)).check(module)
        wanted = [address for one in self._layers.values() for address in one.kept.values()]
        self._capture = Capture(module, Plan.of(*wanted, graph=not asked.detach), {}) if wanted else None
        self._stack = ExitStack()

    def __getitem__(self, layer: str) -> LayerValues:
        return self._layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __enter__(self) -> TraceDict:
        for one in self._layers.values():
            one.last = None  # of a run before
        with ExitStack() as opening:
            is_any = self._asked.edit_output is not None or self._asked.retain_grad
            changed = self._layers if is_any else [self._last] if self._asked.stop else []
            if changed:
                opening.enter_context(
                    edit(self._module, {layer or _ROOT: self._change(layer) for layer in changed}, {})
                )
            if self._capture is not None:
                got = opening.enter_context(self._capture)
                for one in self._layers.values():
                    one.got = got
            self._stack = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._asked.stop and isinstance(error, LastLayer):
            self._stack.__exit__(None, None, None)  # where the run was to end: all layers must have been called
            return True
        self._stack.__exit__(kind, error, trace)
        return False

    def _change(self, layer: str) -> Callable[[Tensor], Tensor]:
        """What happens at a layer: its output is changed, and may be the last that is wanted."""
        asked = self._asked.edit_output
        editing = _editing(asked, layer) if asked is not None else None

        def change(output: Tensor) -> Tensor:
            if editing is not None:
                output = editing(output)
            if self._asked.retain_grad:
                output = self._layers[layer].retain(output)
            if self._asked.stop and layer == self._last:
                if not self._asked.retain_grad and self._asked.retain_output:
                    self._layers[layer].end(output)
                raise LastLayer("the last layer that was wanted")
            return output

        return change


def _editing(function: Callable[..., Any], layer: str) -> Callable[[Tensor], Any]:
    """The function of a user as one of the output alone, a copy, into which it may write.

    It is also given the name of the layer, where it has a parameter ``layer``, or a second place without a default.
    Raises PlanError where it asks for what is not told here.
    """
    try:
        parameters = signature(function).parameters
    except ValueError:  # a builtin of torch's has no signature to be read
        return lambda output: function(output.clone())
    if "inputs" in parameters:
        raise PlanError("edit_output asks for inputs=, which is not told here: expected a function of output, or of "
                        "output and layer; gaff.capture(model, 'layer:input') beside it keeps them")  # fmt: skip
    places = [one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    given = {"layer": layer} if "layer" in parameters else {}
    if "output" in parameters and parameters["output"].kind is not Parameter.POSITIONAL_ONLY:
        return lambda output: function(output=output.clone(), **given)
    more = (layer,) if not given and len(places) > 1 and places[1].default is Parameter.empty else ()
    return lambda output: function(output.clone(), *more, **given)


class LayerTrace(TraceDict):
    """Keeps, and may change, what passes at one layer: ``with Trace(model, "layer4") as ret: model(x); ret.output``."""

    def __init__(self, module: nn.Module, layer: str | None = None, *options: Any, **named: Any) -> None:
        """As ``TraceDict`` of one layer; without one it is the model itself."""
        super().__init__(module, [layer or ""], *options, **named)
        self.layer = layer or ""

    @property
    def output(self) -> Any:
        """What the layer has returned, changed by ``edit_output`` where there is one; of several calls the last."""
        return self[self.layer].output

    @property
    def input(self) -> Any:
        """The first tensor that the layer was given (``retain_input=True``)."""
        return self[self.layer].input


Trace = LayerTrace  # its name there


def _input_of(layer: str) -> str:
    site = parse_site(layer or _ROOT)
    return str(Site(site.path, site.op, site.op_index, site.call, "input"))
