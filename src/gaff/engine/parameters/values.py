"""Parameters and buffers as sites: their values at the entry of their owner.

Their gradients are in ``gradients.leaves``, their edits in ``edits``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from gaff.address.resolve import Found, is_container, iter_modules, join
from gaff.compat import elements, libraries, memory
from gaff.engine.clock import Run
from gaff.engine.node import Node
from gaff.engine.parameters.substitutes import original_of
from gaff.engine.streams import Stream
from gaff.errors import PlanError

OFFLOADED = "it lies on the meta device between calls (offloaded), and nothing tells its value"
READ_AROUND = "its module was not called itself; read when the one around it was"


class StateValue:
    """Tells the value of a parameter or buffer once a run: when its first owner is entered, else at the end.

    Hung as a tap on every owner. ``around``: the hooked module around the owner; it tells whether the run came near an
    owner that is not called. ``is_lent``: FSDP2 gathers the parameter for the call, and frees its memory afterwards: a
    copy is told. Of a parameter that accelerate keeps elsewhere the value there is told, or it is refused.
    """

    def __init__(self, found: Found, stream: Stream, around: Node | None, *, is_lent: bool = False) -> None:
        self._found = found
        self._stream = stream
        self._index = -1 if around is None else around.index  # the node itself holds this: a circle would stay
        self._is_lent = is_lent
        self._near: dict[Run, Tensor] = {}  # what stood there when the module around was called
        if around is not None:
            around.entry.taps += (self.near,)

    def __call__(self, given: Any, run: Run, call: int) -> None:
        self._tell(run, self._found.tensor)

    def _tell(self, run: Run, tensor: Tensor | None) -> None:
        if self not in run.once:
            run.once.add(self)
            if tensor is not None and tensor.is_meta:  # offloaded: it comes when the forward begins, and goes again
                tensor = libraries.offloaded(self._found.module, self._found.name)
            if tensor is None:
                self._stream.refuse(run, 0, OFFLOADED)
            else:
                self._stream.add(tensor.clone() if self._is_lent else tensor, run, 0)

    def is_of(self, tensor: Tensor | None) -> bool:
        """Whether it tells the value of ``tensor``."""
        return tensor is not None and tensor is self._found.tensor

    def refuse(self, run: Run, reason: str) -> None:
        """Refuse to tell the value in this run, if it has not been told."""
        if self not in run.once:
            run.once.add(self)
            self._stream.refuse(run, 0, reason)

    def near(self, given: Any, run: Run, call: int) -> None:
        """The module around the owner is called: remember what stands there, perhaps edited, should it be asked for.

        Of what is lent, and is gone then, only a copy of what was edited: the parameter itself is asked for later.
        """
        if self not in run.once:
            tensor = self._found.tensor
            if not self._is_lent:
                self._near[run] = tensor
            elif original_of(tensor) is not tensor:
                self._near[run] = tensor.clone()

    def finish(self, run: Run, output: Any) -> None:
        """Tell the value at the end of a run in which no owner was entered, though the module around one was.

        The stream is told that, too.
        """
        if self not in run.once and self._index >= 0 and run.entered[self._index]:
            self._stream.skip(READ_AROUND)
            self._tell(run, self._near.get(run, self._found.tensor))
        self._near.pop(run, None)


class Owners:
    """Which modules of a model hold which parameters and buffers: the model is looked through once, for the first."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._known: dict[int, list[nn.Module]] | None = None

    def of(self, found: Found) -> list[nn.Module]:
        """Every module that holds the parameter or buffer of ``found``, the found one first; tied ones have several."""
        if self._known is None:
            self._known = {}
            for module in self._model.modules() if self._model is not None else ():
                held = (*module._parameters.values(), *module._buffers.values())
                for one in {id(tensor) for tensor in held if tensor is not None}:
                    self._known.setdefault(one, []).append(module)
        others = self._known.get(id(found.tensor), ())
        return [found.module, *(module for module in others if module is not found.module)]


def called_above(found: Found) -> nn.Module | None:
    """The nearest module around the owner that is called: containers such as ModuleList are not."""
    return next((module for module in reversed(found.chain) if not is_container(module)), None)


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the attributes of modules, by their paths, but for parameters and buffers.

    Left out is what is made of a parameter in each call, as ``weight`` of ``weight_orig`` by spectral_norm and pruning.
    """
    for path, module, _ in iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and f"{name}_orig" not in module._parameters:
                yield join(path, name), value


def need_no_view(kept: Iterable[tuple[str, Tensor]], found: Found) -> None:
    """Raises PlanError where a module keeps a view of a parameter, made before: nothing can stand in for that."""
    parameter = found.tensor
    if not elements.is_plain(parameter) or parameter.untyped_storage().nbytes() != parameter.nbytes:
        return  # its memory is not its own
    for place, value in kept:
        if value is not parameter and memory.shares(value, parameter):
            raise PlanError(
                f"{found.site}: {place} is a view of it that is kept, which an edit would not reach: "
                "expected a model that makes the view when it is called"
            )
