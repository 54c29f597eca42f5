"""Where edits of a module's own share of a gradient take hold: something is put into the autograd graph for them.

All other edits of gradients are armed as captures are (``ports``): the stream behind the tensor hook returns the
gradient that backward goes on with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import Arguments, iter_tensors, put
from gaff.compat import autograd, memory
from gaff.compat.compiler import uncompiled
from gaff.engine.crossing import Crossing
from gaff.engine.gradients.armed import ArmedShare
from gaff.engine.gradients.later import ShareOfLate
from gaff.engine.gradients.ports import GradientArm
from gaff.engine.gradients.reach import find_feeding
from gaff.engine.gradients.share import PAST_THE_SHARE, WRITTEN, mark, roots_of, shows_elsewhere, watch_unseen
from gaff.engine.gradients.tensor_hooks import INNER, place_of, view_for
from gaff.engine.value_edits import find


class ShareChange(GradientArm):
    """Edits a module's own share of the gradient at its input.

    The module is given a view of its input, at which its own uses of it meet, while other uses of the same tensor stay
    outside: what arrives at the view is the share. A module that writes into its input cuts that view out of the
    autograd graph; the one node that then stands before the input is hooked instead.

    Begins at the entry of the module and is ended by ``leave``; between them the frame of the call keeps what
    is noted, so that one object serves all calls.
    """

    def __call__(self, value: Arguments, given: Arguments, crossing: Crossing) -> Arguments | None:
        if not self._wants(crossing.call) or torch.is_inference_mode_enabled():  # no view there has a graph
            return None
        _, tensor = find(value, self._site)
        if tensor is None or not autograd.takes_gradient(tensor):
            if tensor is not None:
                self._arm_late(tensor, ShareOfLate(self._stream), crossing)
            return None
        places = [key for key, other in iter_tensors(value) if other is tensor]
        if self._site.key and len(places) > 1:
            told = f"the same tensor came in {len(places)} times: their shares cannot be told apart"
            whole = replace(self._site, key=())
            self._stream.refuse(crossing.run, crossing.call, f"{told}; {whole} edits what comes by all of them")
        alias = view_for(INNER, tensor, (*place_of(self._site, self._node.module, crossing.call), places), self)
        tensor = INNER[alias].tensor
        edge, since = autograd.grad_edge_node(tensor), autograd.sequence_of(autograd.grad_edge_node(alias)[0])
        share = ArmedShare(self._stream, crossing.run, crossing.call, alias)
        noted = tensor, alias, edge, since, memory.version_of(tensor), share
        self._node.note(self, noted).at_leave.append(share.left)
        self._gradients.arm_share(alias, share)
        for key in places:  # one view for all of them: a module may ask whether they are one tensor
            value = put(value, key, alias)
        return value

    def leave(self, noted: Any, output: Any, given: Arguments, crossing: Crossing) -> None:
        """See, when the module returned, whether it wrote into its input, and hook the node before the input if so.

        Raises ExactnessError, by its stream, where several nodes hand gradients to the input or the input is a view
        itself: the share then passes no one place.
        """
        tensor, alias, edge, since, version, share = noted
        if memory.version_of(tensor) != version:
            if shows_elsewhere(tensor, given, alias):
                share.refuse(WRITTEN)
            roots = [tensor, *roots_of(output, given, self._node.module)]
            feeding, _, unseen = find_feeding(roots, edge, since)
            if len(feeding) != 1 or tensor._is_view():
                share.refuse(
                    "the module writes into its input and uses it in other ways, too: edit :input_grad instead"
                )
            node, position = feeding[0]
            share.follow(node.register_hook(uncompiled(partial(self._gradients.share_arrived, share, position))))
            if unseen is not None:
                graph, told = self._gradients.pass_graph, partial(self._unseen, share)
                share.more += (watch_unseen(graph, tensor, edge, unseen, mark(feeding), told),)

    def _unseen(self, share: ArmedShare, total: Tensor, is_fed_unseen: Callable[[], bool]) -> None:
        """In a pass: raises ExactnessError, by its stream, where a part of the share does not pass the hooked node."""
        if self._gradients.is_open and is_fed_unseen():
            share.refuse(PAST_THE_SHARE)
