"""The part of the gradient at an output that comes from outside of the module: ``grad_output`` of torch's full hook."""

from __future__ import annotations

from typing import Any

from gaff.address.nested import Arguments, dig, iter_tensors, put
from gaff.compat import autograd
from gaff.engine.crossing import Crossing
from gaff.engine.gradients import tensor_hooks
from gaff.engine.gradients.ports import GradientArm, ambiguous, report_missing

ASIDE = (
    "the caller of the module was given a view of what it returned, at which the uses outside meet; where the module "
    "uses it, too, sums of gradients may be in another order"
)


class OuterGradient(GradientArm):
    """The gradient that the code outside of a module hands back for a tensor that it returned.

    The module itself may go on using that tensor (``return y, y * 2``), or may not have made it, and nothing tells who
    else holds it. So the caller is given a view, as torch's full backward hook gives one: what arrives there comes from
    outside. Nothing is added up in another order unless the module uses the tensor, too. Who asks for a total further
    on is told that of the tensor itself (``tensor_hooks.ORIGINALS``).
    """

    def __call__(self, output: Any, given: Arguments, crossing: Crossing) -> Any:
        site, run, call = self._site, crossing.run, crossing.call
        if not self._wants(call):
            return None
        try:
            found = list(iter_tensors(dig(output, site.key)))
        except KeyError as error:
            report_missing(site, self._stream, self._is_exact, error)
            return None
        if not found:
            self._stream.absent(run, call, "there is no tensor in this output")
        if len(found) > 1 and self._is_exact:
            raise ambiguous(site, site.key, found)
        for key, tensor in found:
            stream = self._stream.at(key) if key else self._stream
            if not autograd.takes_gradient(tensor):
                self._arm_late(tensor, stream, crossing)
                continue
            alias = tensor_hooks.alias_of(tensor)
            stream.remark(ASIDE)
            self._gradients.arm(alias, stream, run, call)
            tensor_hooks.ORIGINALS[alias] = tensor
            for place, other in list(iter_tensors(output)):
                if other is tensor:
                    output = put(output, place, alias, [])
        return output
