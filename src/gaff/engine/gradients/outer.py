"""The part of the gradient at an output that comes from outside of the module: ``grad_output`` of torch's full hook."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gaff.address.nested import Arguments, dig, iter_tensors, put
from gaff.compat import autograd
from gaff.engine.clock import Run
from gaff.engine.crossing import Crossing
from gaff.engine.gradients.ports import OutputGradient, ambiguous, report_missing
from gaff.engine.gradients.share import find_feeding, lead_to, roots_of
from gaff.engine.streams import Stream

ASIDE = (
    "the module uses what it returns, too, or did not make it: its caller was given a view of it, at which the uses "
    "outside meet; where there are several, sums of gradients may be in another order"
)
SECOND = (
    "a differentiable backward pass (create_graph) came by before: from then on the module's own second derivatives "
    "reach its output, too, and are not told apart; ask for :grad_output, the total"
)


class OuterGradient(OutputGradient):
    """The gradient that the code outside of a module hands back for a tensor that it returned.

    It is the total, of ``OutputGradient``, unless the module uses that tensor itself (``return y, y * 2``) or did not
    make it. Only then the caller is given a view of the tensor, as torch's full backward hook gives one always, and the
    receipt says so.

    Begins at the entry, where the number of the next autograd node is noted, and ends at the exit, by ``leave``.
    """

    def __call__(self, value: Any, given: Arguments, crossing: Crossing) -> None:
        if self._wants(crossing.call):
            self._frame(crossing.run).notes[self] = autograd.next_sequence()

    def leave(self, output: Any, given: Arguments, crossing: Crossing) -> Any:
        """Hook the tensors that are meant; what the caller gets, with a view in the place of each that needs one."""
        since = self._frame(crossing.run).notes.pop(self, None)
        if since is None:
            return None
        site, run, call = self._site, crossing.run, crossing.call
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
            if not autograd.takes_gradient(tensor) or self._is_alone(tensor, output, given, since):
                self._arm_output(tensor, _UntilSecond(stream), given, run, call)
                continue
            alias = tensor.view_as(tensor)
            stream.remark(ASIDE)
            self._gradients.arm(alias, stream, run, call)
            for place, other in list(iter_tensors(output)):
                if other is tensor:
                    output = put(output, place, alias)
        return output

    def _is_alone(self, tensor: Tensor, output: Any, given: Arguments, since: int) -> bool:
        """Whether the call made ``tensor``, and nothing that it made besides goes on from there."""
        node = tensor.grad_fn
        if node is None or autograd.sequence_of(node) < since or any(tensor is one for _, one in iter_tensors(given)):
            return False
        edge = autograd.grad_edge_node(tensor)
        roots = roots_of(output, given, self._node.module)
        feeding, older = find_feeding(roots, edge, since, {node})
        return not feeding and not (older and lead_to(older, edge, {node}))


class _UntilSecond(Stream):
    """Stands for the stream of one call where the total is told: true until a pass has made second derivatives."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.place = getattr(stream, "place", None)
        self._is_over = False

    def add(self, value: Any, run: Run, call: int) -> Any:
        if self._is_over:
            self._stream.refuse(run, call, SECOND)
            return None
        self._is_over = autograd.is_grad_enabled()
        return self._stream.add(value, run, call)

    def absent(self, run: Run, call: int, reason: str) -> None:
        self._stream.absent(run, call, reason)

    def refuse(self, run: Run, call: int, reason: str) -> None:
        self._stream.refuse(run, call, reason)

    def remark(self, text: str) -> None:
        self._stream.remark(text)
