"""baukit's ``Trace`` and ``TraceDict``, by the same names.

    from gaff.integrations.baukit import Trace, TraceDict

Values are exact also where the model overwrites them later, layers may be any addresses (``"layer4/add#1"``), and a
layer that never runs raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from inspect import signature
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import Site, parse_site
from gaff.errors import PlanError
from gaff.sessions.capture import Capture
from gaff.sessions.edit import edit
from gaff.sessions.plan import Plan


class LastLayer(Exception):
    """Ends a forward pass at the last layer that is wanted (``stop=True``); caught where the block ends."""


class LayerValues:
    """What passed at one layer: ``output``, and ``input`` where it was asked for. None before the layer has run."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.output: Any = None
        self._got: Capture | None = None
        self._input = ""

    @property
    def input(self) -> Any:
        """The first tensor that the layer was given."""
        if not self._input:
            raise PlanError(f"{self.layer}: its input was not kept: expected retain_input=True")
        return self._got.all(self._input)[-1] if self._got is not None and self._input in self._got else None


class TraceDict(Mapping[str, LayerValues]):
    """Keeps, and may change, what passes at several layers: ``with TraceDict(model, ["layer1", "layer2"]) as ret``.

    Args:
        module: the model.
        layers: paths of modules, or addresses.
        retain_output, retain_input: what is kept; of a layer that runs several times the last.
        clone, detach: values without their autograd graph, which the reader may write into. Without both they keep it.
        edit_output: a function ``output -> output``, or ``(output, layer) -> output``, that makes what the model goes
            on with; where a layer returns a tuple it is given its first tensor.
        stop: end the forward at the last of the layers; the block is left there.

    Raises SiteError for a layer that there is not, PlanError for ``retain_grad``, whose address is
    ``"layer:grad_output"``.
    """

    def __init__(  # noqa: PLR0913  # the arguments of the class that it stands for
        self,
        module: nn.Module,
        layers: Iterable[str],
        *,
        retain_output: bool = True,
        retain_input: bool = False,
        clone: bool = False,
        detach: bool = False,
        retain_grad: bool = False,
        edit_output: Callable[..., Any] | None = None,
        stop: bool = False,
    ) -> None:
        if retain_grad:
            raise PlanError(
                "retain_grad is not kept: expected an address of the gradient, gaff.capture(model, 'layer:grad_output')"
            )
        self._module, self._stop, self._edit = module, stop, edit_output
        self._layers = {layer: LayerValues(layer) for layer in layers}
        inputs = {layer: _input_of(layer) for layer in self._layers} if retain_input else {}
        self._capture = Capture(module, Plan.of(*inputs.values(), graph=not (clone or detach)), {}) if inputs else None
        self._keeps, self._loose = retain_output, not (clone or detach)
        for layer, address in inputs.items():
            self._layers[layer]._input = address
        self._stack = ExitStack()

    def __getitem__(self, layer: str) -> LayerValues:
        return self._layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __enter__(self) -> TraceDict:
        with ExitStack() as opening:
            if self._capture is not None:
                got = opening.enter_context(self._capture)
                for one in self._layers.values():
                    one._got = got
            changes = {layer: self._look(one) for layer, one in self._layers.items()}
            opening.enter_context(edit(self._module, changes, {}))
            self._stack = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._stack.__exit__(kind, error, trace)
        return self._stop and isinstance(error, LastLayer)

    def _look(self, one: LayerValues) -> Callable[[Tensor], Tensor]:
        """What happens at a layer: its output is changed, kept, and may be the last that is wanted."""
        last = list(self._layers)[-1]
        has_layer = self._edit is not None and len(signature(self._edit).parameters) > 1

        def look(output: Tensor) -> Tensor:
            if self._edit is not None:
                output = self._edit(output, one.layer) if has_layer else self._edit(output)
            if self._keeps:
                one.output = output if self._loose else output.detach().clone()
            if self._stop and one.layer == last:
                raise LastLayer("the last layer that was wanted")
            return output

        return look


class LayerTrace(TraceDict):
    """Keeps, and may change, what passes at one layer: ``with Trace(model, "layer4") as ret: model(x); ret.output``."""

    def __init__(self, module: nn.Module, layer: str, **options: Any) -> None:
        super().__init__(module, [layer], **options)
        self.layer = layer

    @property
    def output(self) -> Any:
        """What the layer has returned, changed by ``edit_output`` where there is one."""
        return self[self.layer].output

    @property
    def input(self) -> Any:
        """The first tensor that the layer was given (``retain_input=True``)."""
        return self[self.layer].input


Trace = LayerTrace  # its name there


def _input_of(layer: str) -> str:
    site = parse_site(layer)
    return str(Site(site.path, site.op, site.op_index, site.call, "input"))
