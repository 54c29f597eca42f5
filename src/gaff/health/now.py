"""What runs now, to tell whose a tensor is that no op of a module has made: hooks, other processes, the past."""

from __future__ import annotations

from torch import Tensor, nn

from gaff import spread
from gaff.address import Site
from gaff.engine.backward_nodes import NodeWatch
from gaff.health.marks import Made, has_nan, is_mask
from gaff.health.ranges import range_of
from gaff.select import join


class Now:
    """The fields are kept by who watches the ops."""

    def __init__(self) -> None:
        self.inside = [""]  # paths of the modules that run now
        self.modules: dict[str, nn.Module] = {}  # by path
        self.ops = 0  # that have run
        self.latest: Made | None = None  # of the last op
        self.is_spread = False  # whether other processes have parts of the model

    def made_of(self, tensor: Tensor, nodes: NodeWatch, site: Site) -> Made:
        """Whose a tensor is that is not finite. ``site``: what it is where it was met."""
        made = self._held(tensor) or self._handed_on(tensor, nodes)
        if made is None and (tensor.grad_fn is not None or (self.is_spread and self.ops)):
            made = self._made_here(tensor, site.path)
        return made or before(tensor, site, is_meant=is_mask(tensor))

    def _held(self, tensor: Tensor) -> Made | None:
        """A parameter of the module that runs, gathered from several processes for as long as it does."""
        path = self.inside[-1]
        for name, parameter in self.modules[path]._parameters.items() if self.is_spread else ():
            if parameter is tensor:
                return before(tensor, Site(join(path, name), port="param"))
        return None

    def _handed_on(self, tensor: Tensor, nodes: NodeWatch) -> Made | None:
        """Something that is no op of a module was given what was bad already."""
        found = (one.made for one in nodes.owners_behind(tensor, lambda ran: ran.site.op) if one.made)
        made = next(found, None)
        if made is None and self.is_spread and tensor.grad_fn is None:
            made = self.latest  # what came between is moving between processes
        return None if made is None or (made.is_meant and has_nan(tensor)) else made

    def _made_here(self, tensor: Tensor, path: str) -> Made:
        """A custom Function, somebody's hook, or another process has made it."""
        name = tensor.grad_fn.name().rpartition("::")[2].removesuffix("Backward") if tensor.grad_fn is not None else ""
        cause = f"it came from {name}, a custom autograd Function, or an op in somebody's hook"
        if self.is_spread and (not name or name in spread.CONVERSIONS):
            name, cause = "", "another process made it: what this one had here was finite"
        site = Site(path or self.inside[-1], name or None)
        return Made(site, "forward", None, cause, range_of(tensor, "output"), position=self.ops)


def before(tensor: Tensor, site: Site, *, is_meant: bool = False) -> Made:
    """What was there before the step."""
    output = range_of(tensor, "value")
    kind = {"param": "the parameter", "buffer": "the buffer", "grad": "the gradient"}.get(site.port, "the input")
    cause = f"{kind} held {output.kinds} before the step; what made it lies before this"
    return Made(site, "before", None, cause, output, is_meant=is_meant)
