"""A backward pass written down: which nodes ran, what they handed on, and where the first bad gradient began.

Backward runs from the loss to the leaves, so the first node that was given finite gradients and handed on others is no
proof: what it made may never reach a leaf. ``Trail.origin`` therefore goes back from what has reached a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gaff.address.grammar import Site
from gaff.address.nested import iter_deep
from gaff.compat import distributed
from gaff.compat.autograd import backward_task
from gaff.compat.memory import address_of, storage_life
from gaff.engine.gradients.nodes import Gradients, NodeWatch, Seen
from gaff.engine.ops.calls import OpCall
from gaff.inspection.nonfinite.backward_causes import backward_cause
from gaff.inspection.nonfinite.provenance import STEP, Made, own_path, shown
from gaff.inspection.nonfinite.ranges import has_nan, has_nonfinite, nonfinite_elements, range_of
from gaff.inspection.nonfinite.report import Range, Report
from gaff.inspection.op_log import Producers, code_at, place_text


@dataclass(slots=True)
class Passed:
    """An autograd node that ran. ``bad``: which of the gradients that it handed on are not finite, by position.

    ``is_bad``: whether one that came was not; ``is_nan``: whether one held a NaN. ``is_overflow_of_scale``: it would
    have handed on finite ones without a GradScaler's factor.
    """

    seen: Seen
    is_bad: bool
    bad: frozenset[int]
    cause: tuple[Range, Range] | None  # the gradient that came, the one handed on
    is_overflow_of_scale: bool = False
    is_nan: bool = False


class Trail:
    """Looks at every node that runs. ``scale``: a GradScaler's factor on the loss, once it is known.

    Owned by an examination, which follows tensors with ``nodes`` and closes it at the end; owners of nodes are
    ``Ran``. Nodes are held until then. ``len`` is how many have run.
    """

    def __init__(self) -> None:
        self.nodes = NodeWatch(self._ran)
        self.scale: float | None = None
        self.lost: list[Made] = []  # what made the losses, not finite, at which backward passes began
        self._passed: list[Passed] = []
        self._by_memory: dict[int, tuple[Callable[[], object], Passed]] = {}  # who handed on a bad gradient, by address
        # the last that did, and where what it handed on is not finite
        self._by_shape: dict[tuple[torch.Size, torch.dtype], tuple[Passed, Tensor]] = {}
        self._task = -1

    def __len__(self) -> int:
        return len(self._passed)

    @property
    def ops(self) -> int:
        """How many nodes ran that are no leaves."""
        return sum(one.seen.variable is None for one in self._passed)

    def _ran(self, seen: Seen, incoming: Gradients, outgoing: Gradients) -> None:
        """Called by the watch as backward has run a node: note whether what came and what it handed on is finite.

        Ranges are taken only at a node that made something bad of what was finite. The first node of a backward pass
        belongs to its loss: where that was not finite, what made it is noted in ``lost``. Waits for the device.
        """
        is_bad = any(one is not None and has_nonfinite(one) for one in incoming)
        bad = frozenset(at for at, one in enumerate(outgoing) if one is not None and has_nonfinite(one))
        ranges = None
        is_scale = False
        if bad and not is_bad:
            came = next((one for one in incoming if one is not None), None)
            handed = outgoing[min(bad)]
            if handed is not None:
                name = "gradient that came"
                before = range_of(came, name) if came is not None else Range(name, "", "", 0, None, None)
                ranges = before, range_of(handed, "gradient handed on")
            is_here = not any(one is not None and distributed.is_spread(one) for one in incoming)
            is_scale = self.scale is not None and is_here and self._fits_unscaled(seen, incoming)
        if backward_task() != self._task:  # a backward pass begins, at a loss
            self._task = backward_task()
            made = seen.owner.made
            is_loss = sum(one.numel() for one in incoming if one is not None) == 1  # else outputs, run again
            if made is not None and not made.is_scaling and (is_loss or not made.is_meant):
                self.lost.append(made)
        is_nan = is_bad and any(one is not None and has_nan(one) for one in incoming)
        passed = Passed(seen, is_bad, bad, ranges, is_scale, is_nan)
        self._passed.append(passed)
        for one in (outgoing[at] for at in bad):
            if one is not None:
                if not one.is_nested:  # has no shape
                    self._by_shape[one.shape, one.dtype] = passed, nonfinite_elements(one)
                if address := address_of(one):
                    self._by_memory[address] = storage_life(one), passed

    def _fits_unscaled(self, seen: Seen, incoming: Gradients) -> bool:
        """Whether the node would hand on finite gradients had the loss not been multiplied by the scaler's factor.

        Derivatives are linear in the gradient that comes, so the node is run again on gradients divided by it. Where
        the node cannot be run again the answer is no.
        """
        scaled = [None if one is None else one / (self.scale or 1.0) for one in incoming]
        try:
            handed = seen.node(*scaled)  # type: ignore[operator]
        except (RuntimeError, TypeError):
            return False
        handed = handed if isinstance(handed, tuple) else (handed,)
        return not any(isinstance(one, Tensor) and has_nonfinite(one) for one in handed)

    def note_scale(self, call: OpCall) -> None:
        """Note the factor by which a GradScaler multiplies the loss: backward asks what it would be without."""
        factors = [one for one in iter_deep(call.args) if one.numel() == 1]
        if call.site.op == "mul" and len(factors) >= 2:
            self.scale = float(factors[1])

    def overflow(self) -> str:
        """What to note of gradients that overflow by the scaler's doing."""
        return f"gradients overflowed under the GradScaler's factor {self.scale:g}: it skips such a step itself"

    def origin(self) -> Passed | None:
        """The node at which gradients that reached a leaf began to be bad; None where no leaf got a bad one."""
        return self._began(
            [one for one in self._passed if (one.seen.variable is not None and one.is_bad) or _reaches_leaf(one)]
        )

    def made_of(self, tensor: Tensor, producers: Producers) -> Made | None:
        """The origin of a bad gradient that the step goes on with, as ``autograd.grad`` hands it out, or ``x.grad``.

        Known by its memory; one that autograd has added up has another, and is known by its shape, and by where it is
        not finite, so that this is to be asked only of what nothing else has made. None where no backward pass handed
        on such a gradient.
        """
        life, passed = self._by_memory.get(address_of(tensor), (None, None))
        if passed is None or life is None or life() is None:
            passed = None if tensor.is_nested else self._like(tensor)
        origin = None if passed is None else self._began([passed])
        if origin is None:
            return None
        ran, scaling = origin.seen.owner, origin.is_overflow_of_scale
        told = partial(self.tell, origin, producers)
        return Made(
            ran.site,
            "backward",
            ran.place,
            "",
            range_of(tensor, "value"),
            is_scaling=scaling,
            is_meant=scaling,
            told=told,
        )

    def _like(self, tensor: Tensor) -> Passed | None:
        """Who handed on the last bad gradient of a tensor's shape, if it is bad wherever that was: sums stay so."""
        known = self._by_shape.get((tensor.shape, tensor.dtype))
        if known is None:
            return None
        (passed, bad), now = known, nonfinite_elements(tensor)
        return passed if now.shape == bad.shape and not bool((bad & ~now).any()) else None

    def _began(self, waiting: list[Passed]) -> Passed | None:
        """Where bad gradients began that came to some nodes, or that these made.

        Goes back from each along what fed it, to nodes that were given finite ones, or whose bad ones nobody handed
        them; of several the one that ran first.
        """
        by_node = {id(one.seen): one for one in self._passed}
        feeding: dict[int, list[Passed]] = {}
        for one in self._passed:
            for at in one.bad:
                onward = one.seen.onward[at] if at < len(one.seen.onward) else None
                if onward is not None:
                    feeding.setdefault(id(onward[0]), []).append(one)
        seen: set[int] = set()
        origins = []
        while waiting:
            one = waiting.pop()
            if id(one.seen) in seen:
                continue
            seen.add(id(one.seen))
            before = feeding.get(id(one.seen), [])
            if not one.is_bad or not before:
                origins.append(by_node[id(one.seen)])
            waiting += before if one.is_bad else []
        return min(origins, key=self._passed.index, default=None)

    def _count_feeding(self, origin: Passed) -> int:
        """How many nodes that ran hand a gradient to this one."""
        onward = [one for passed in self._passed for one in passed.seen.onward]
        return sum(one is not None and one[0] is origin.seen for one in onward)

    def tell(self, origin: Passed, producers: Producers, notes: Iterable[str], ops: int) -> Report:
        """The report of a gradient that began to be bad at ``origin``; ``ops``: of the step, forward and backward."""
        came_in: Made | None = origin.seen.owner.came
        if origin.cause is not None and came_in is not None:  # an infinity that tanh has made 1
            return came_in.tell(notes, ops)
        position = ops - self.ops + self._passed.index(origin)
        ran = origin.seen.owner
        name = origin.seen.name
        feeding = self._count_feeding(origin)
        op = ran.site.op or name.removesuffix("Backward")
        where = shown(str(Site(ran.site.path, op, ran.site.op_index)))
        if origin.cause is None and not feeding:
            cause = f"the gradient that backward began with, at {where}, is not finite: it was made outside the model"
            return Report(True, STEP, STEP, "backward", cause=cause, notes=tuple(notes), ops=ops, position=position)
        if origin.cause is None:  # what was given to it was finite piece by piece
            came = handed = None
            cause = (
                f"the gradients that meet at {name} overflow when they are added up, or a gradient hook there made it"
            )
            if feeding == 1 or origin.is_nan:  # a sum of finite numbers is no NaN
                cause = f"a gradient hook: {name} got something that is not finite, and what was handed to it was"
        else:
            came, handed = origin.cause
            cause = backward_cause(ran.site.op or "", name, ran.given, came, handed)
        leaves = [
            producers.of(one.seen.variable) for one in self._passed if one.is_bad and one.seen.variable is not None
        ]
        return Report(
            found=True,
            site=where,
            module=own_path(ran.site.path),
            direction="backward",
            line=place_text(ran.place) if ran.place else "",
            code=code_at(ran.place) if ran.place else "",
            cause=cause,
            output=handed,
            inputs=((came,) if came is not None else ()) + tuple(ran.given),
            passed=tuple(dict.fromkeys(shown(leaf) for leaf in leaves if leaf)),
            notes=tuple(notes),
            ops=ops,
            position=position,
        )


def _reaches_leaf(passed: Passed) -> bool:
    """Whether a node handed something bad to a leaf, also where ``autograd.grad`` took it and nothing accumulated.

    Then the leaf's own node does not run, and cannot be where the search begins.
    """
    onward = [passed.seen.onward[at] for at in passed.bad if at < len(passed.seen.onward)]
    return any(one is not None and one[0].variable is not None for one in onward)
