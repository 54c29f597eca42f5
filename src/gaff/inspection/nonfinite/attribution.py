"""What runs now, to tell whose a tensor is that no op of a module has made: hooks, other processes, the past.

The examination sees the ops of modules. A tensor that is not finite and came from none of them is met sooner or later,
as an input of an op or of a module, and has to be blamed on something.
"""

from __future__ import annotations

from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.resolve import join
from gaff.compat import distributed
from gaff.engine.gradients.nodes import NodeWatch
from gaff.inspection.nonfinite.provenance import Made, has_nan, has_positive, is_mask
from gaff.inspection.nonfinite.ranges import range_of


class Now:
    """What runs at this moment. The fields are kept by the examination, which watches the ops.

    ``inside`` is a stack: its last path is the module in whose forward the next op will be.
    """

    def __init__(self) -> None:
        self.inside = [""]  # paths of the modules that run now
        self.modules: dict[str, nn.Module] = {}  # by path
        self.ops = 0  # that have run
        self.latest: Made | None = None  # of the last op
        self.is_spread = False  # whether other processes have parts of the model

    def made_of(self, tensor: Tensor, nodes: NodeWatch, site: Site) -> Made:
        """Whose a tensor is that is not finite. ``site``: what it is where it was met.

        Asked are, in this order: parameters that are gathered from other processes, the autograd node that made it,
        whether it came up while the step ran. What nobody has made was there before the step. Waits for the device.
        """
        made = self._held(tensor) or self._handed_on(tensor, nodes)
        if made is None and (tensor.grad_fn is not None or (self.ops and (self.is_spread or self.inside[-1]))):
            made = self._made_here(tensor, site)
        return made or before(tensor, site, is_meant=is_mask(tensor))

    def _held(self, tensor: Tensor) -> Made | None:
        """The origin of a parameter of the module that runs, gathered from several processes for as long as it does.

        Such a parameter is another tensor than the one that was looked at before the step.
        """
        path = self.inside[-1]
        for name, parameter in self.modules[path]._parameters.items() if self.is_spread else ():
            if parameter is tensor:
                return before(tensor, Site(join(path, name), port="param"))
        return None

    def _handed_on(self, tensor: Tensor, nodes: NodeWatch) -> Made | None:
        """The origin of what something was given that is no op of a module, and hands on what was bad already.

        Nodes of conversions between processes are looked past. Values that were meant (a mask's -inf) account for what
        is handed on only as far as it is of their kind: a NaN, or a +inf that was not there, is a new one, and None is
        returned. With other processes, and without an autograd node, the last op is taken: what came between is moving
        between processes.
        """
        found = (ran.bad.get(which) for ran, which in nodes.owners_behind(tensor, distributed.CONVERSIONS))
        made = next((one for one in found if one is not None), None)
        if made is None and self.is_spread and tensor.grad_fn is None:
            made = self.latest  # what came between is moving between processes
        if made is None or not made.is_meant:
            return made
        is_new = has_nan(tensor) or (has_positive(tensor) and not made.output.positive_inf)
        return None if is_new else made

    def _made_here(self, tensor: Tensor, site: Site) -> Made:
        """The origin of what this step made in no op of a module: in a custom Function, a hook, or another process.

        The name of the autograd node tells which Function; without one, and with other processes in the model, it is
        theirs.
        """
        name = tensor.grad_fn.name().rpartition("::")[2] if tensor.grad_fn is not None else ""
        name = name.rstrip("0123456789").removesuffix("Backward")
        cause = f"it came from {name}, a custom autograd Function, or an op in somebody's hook"
        if self.is_spread and (not name or name in distributed.CONVERSIONS):
            name, cause = "", "another process made it: what this one had here was finite"
        elif not name:
            cause = "no op of a module made it: it was there before, or came from NumPy, a custom Function or a hook"
        where = Site(site.path or self.inside[-1], name or None)
        where = site if site.path and site.port == "input" and not name else where
        is_meant = not name and is_mask(tensor)
        return Made(where, "forward", None, cause, range_of(tensor, "output"), position=self.ops, is_meant=is_meant)


def before(tensor: Tensor, site: Site, *, is_meant: bool = False) -> Made:
    """The origin of what was there before the step: a parameter, a buffer, a gradient, an input.

    Waits for the device.
    """
    output = range_of(tensor, "value")
    kind = {"param": "the parameter", "buffer": "the buffer", "grad": "the gradient"}.get(site.port, "the input")
    cause = f"{kind} held {output.kinds} before the step; what made it lies before this"
    return Made(site, "before", None, cause, output, is_meant=is_meant)
