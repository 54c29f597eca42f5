"""Where gradient hooks are set: at outputs and inputs of modules. Module backward hooks are never used.

torch's module backward hooks put nodes of their own around a module, which changes the autograd graph, and refuse
in-place writes. Here forward hooks find the tensor that an address means and set a plain tensor hook on it.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from torch import Tensor

from gaff.address.grammar import Key, Site, print_key
from gaff.address.nested import Arguments, dig, first_tensor, iter_tensors, opaque_in
from gaff.compat import autograd, checkpoints
from gaff.engine.clock import Run
from gaff.engine.crossing import Crossing
from gaff.engine.gradients.armed import Armed, ArmedView
from gaff.engine.gradients.later import NO_GRAD_MODE
from gaff.engine.gradients.pending import Gradients
from gaff.engine.gradients.tensor_hooks import passed_in, place_of
from gaff.engine.modules import is_untouched_linear
from gaff.engine.node import Node
from gaff.engine.streams import Act, Stream
from gaff.errors import SiteError

RETURNED_INPUT = "the module returned its input itself"


class GradientArm(Act):
    """Sets the gradient hooks of one site, at the entry or the exit of a module, of whoever looks or edits.

    ``is_exact``: the user named this very site, so a miss is an error; else the stream is told of a skipped event.
    """

    needs_graph = True

    def __init__(self, gradients: Gradients, node: Node, stream: Stream, site: Site, is_exact: bool) -> None:
        self._gradients = gradients
        self._node = node
        self._stream = stream
        self._site = site
        self._is_exact = is_exact
        self._is_plain = site.call is None and not site.key

    def give_up(self, run: Run, call: int) -> None:
        """Tell the stream that this call had no autograd graph, if the site is about this call."""
        if self._wants(call):
            self._stream.absent(run, call, NO_GRAD_MODE)

    def without_graph(self, value: Any, given: Arguments, crossing: Crossing) -> None:
        """Wait, as for every tensor that does not require grad: somebody may still make it.

        Not in compiled code, which shows no tensor that it makes no graph of.
        """
        if first_tensor(value) is None:
            self.give_up(crossing.run, crossing.call)
        else:
            self(value, given, crossing)

    def _wants(self, call: int) -> bool:
        return self._site.call is None or self._site.call == call

    def _found_in(self, output: Any, crossing: Crossing) -> list[tuple[Key, Tensor]]:
        """The tensors that the address means in an output, by key; none, and the stream is told why, if there is none.

        Raises SiteError for an exact address that leads nowhere, or to several tensors.
        """
        try:
            value = dig(output, self._site.key)
        except KeyError as error:
            report_missing(self._site, self._stream, self._is_exact, error)
            return []
        found = list(iter_tensors(value))
        if not found:
            tell_none(self._stream, crossing.run, crossing.call, value, is_exact=self._is_exact)
        if len(found) > 1 and self._is_exact:
            found = _the_one(found)
            if len(found) > 1:
                raise ambiguous(self._site, self._site.key, found)
        return found

    def _arm_late(self, tensor: Tensor, stream: Stream, crossing: Crossing) -> None:
        """Hook a tensor that does not require grad at the end of the run, should it by then.

        One in a call that waits to be run again is left to that; ``give_up`` is called where it never is.
        """
        if crossing.waits and crossing.memo is not None:
            crossing.memo[self] = None
        else:
            self._gradients.later.add(tensor, stream, crossing.run, crossing.call)


class OutputGradient(GradientArm):
    """The gradient at a module's output: at the tensor that its caller gets, all its uses together.

    An address may mean several tensors of the output where a pattern found it; each then has a stream of its own.
    """

    def __call__(self, output: Any, given: Arguments, crossing: Crossing) -> None:
        run, call = crossing.run, crossing.call
        if type(output) is Tensor and self._is_plain:
            if output._is_view() or run.began_after(output) or self._gradients.has_edits:
                self._arm_output(output, self._stream, given, crossing)
            else:  # the common case, without further questions
                self._gradients.arm_plain(output, self._stream, run, call)
                if given.args and output is given.args[0]:
                    self._remark_on_identity(output, self._stream)
            return
        if not self._wants(call):
            return
        found = self._found_in(output, crossing)
        twins = [tensor for _, tensor in iter_tensors(output)] if self._site.key and found else []
        if sum(tensor is found[0][1] for tensor in twins) > 1:
            self._stream.remark("the output holds this tensor several times: this is the gradient of all of them")
        for key, tensor in found:
            self._arm_output(tensor, self._stream.at(key) if key else self._stream, given, crossing)

    def _arm_output(self, tensor: Tensor, stream: Stream, given: Arguments, crossing: Crossing) -> None:
        """Hook one tensor of the output, and remark on what makes its gradient another one than expected.

        A linear layer over more than two dimensions returns a view of a matrix product; writing into that in place
        would hide the gradient, so the product, which nobody else can see, is followed, too.
        """
        if not autograd.takes_gradient(tensor):
            self._arm_late(tensor, stream, crossing)
        else:
            armed = self._gradients.arm(tensor, stream, crossing.run, crossing.call)
            if any(tensor is other for other in given.args):
                self._remark_on_identity(tensor, stream)
            base = tensor._base
            if isinstance(armed, ArmedView) and is_untouched_linear(self._node.module) and _is_flattened(tensor, base):
                armed.is_whole = True  # nobody else can see the base

    def _remark_on_identity(self, tensor: Tensor, stream: Stream) -> None:
        """Remark that the module returned what it was given, unless somebody wrote to it."""
        if tensor._version == 0:
            stream.remark(f"{RETURNED_INPUT}: input and output are one tensor, this is its total gradient")


def _is_flattened(tensor: Tensor, base: Tensor | None) -> bool:
    """Whether ``base`` is all of ``tensor``, as the product of a linear layer in more than two dimensions is."""
    return (
        base is not None
        and base.shape == (tensor.shape[:-1].numel(), tensor.shape[-1])
        and base.is_contiguous()
        and tensor.is_contiguous()
    )


class InputGradient(GradientArm):
    """The total gradient of a tensor that came in: all its uses together, in this module and elsewhere.

    In a reentrant checkpoint the tensor is hooked in the first pass, since the recomputation works on another tensor
    and sees only the uses inside the checkpoint. That decides for as long as the autograd graph lives, however often
    backward runs. A leaf, or what was made before, serves many runs: what the module returned tells whose backward pass
    comes by (``leave``).
    """

    def __init__(self, gradients: Gradients, node: Node, stream: Stream, site: Site, is_exact: bool) -> None:
        super().__init__(gradients, node, stream, site, is_exact)
        # hooked in a pass whose graph does not last, of a checkpoint or (True) of one inside a recomputation
        self._armed_before: dict[tuple[Run, int], tuple[Armed, bool]] = {}

    def __call__(self, value: Arguments, given: Arguments, crossing: Crossing) -> None:
        run, call = crossing.run, crossing.call
        if self._wants(call):
            tensor = self._passed_in(value, call)
            if tensor is None or (run, call) in self._armed_before:
                return
            if not autograd.takes_gradient(tensor):
                self._arm_late(tensor, self._stream, crossing)
            elif autograd.is_grad_enabled() or run.functions is None:  # the run began with grad mode
                armed = self._gradients.arm(tensor, self._stream, run, call)
                if armed.met is not None:
                    self._node.note(self, armed)
            else:  # unless the call turns grad mode on, there is nothing in the run to bring a gradient
                self._node.note(self, (tensor, call))

    def _passed_in(self, value: Arguments, call: int) -> Tensor | None:
        """The tensor that the module's caller passed, also where another session's edit has put one in its place."""
        tensor = find_input(value, self._site, self._stream, self._is_exact)
        return None if tensor is None else passed_in(tensor, place_of(self._site, self._node.module, call))

    def before_graph(self, value: Arguments, crossing: Crossing) -> None:
        """Hook, in a reentrant checkpoint's first pass, what comes in from outside of it.

        What comes into such a checkpoint is the whole tensor now; the recomputation sees a part of its uses. What is
        made inside has no autograd graph yet and is left to the recomputation, which may be the first pass of a
        checkpoint inside. There what has been hooked before stays as it is.
        """
        run, call = crossing.run, crossing.call
        before = self._armed_before.get((run, call))
        if self._wants(call) and (before is None or before[1]):
            tensor = self._passed_in(value, call)
            if tensor is not None and autograd.takes_gradient(tensor) and not _is_made_inside(tensor):
                known = self._armed_before
                if len(known) > 256:
                    known = self._armed_before = {at: row for at, row in known.items() if not row[0].is_over()}
                armed = self._gradients.arm(tensor, self._stream, run, call)
                known[run, call] = armed, crossing.is_again
                if armed.met is not None and (functions := checkpoints.enclosing_functions()):
                    armed.life = weakref.ref(functions[-1])  # the graph of what the checkpoint makes of the leaf

    def give_up(self, run: Run, call: int) -> None:
        """Tell the stream that there was no autograd graph, unless the tensor was hooked in the first pass."""
        if (run, call) not in self._armed_before:
            super().give_up(run, call)

    def leave(self, armed: Any, output: Any, given: Arguments, crossing: Crossing) -> None:
        """Let what the module made of an older tensor tell whose backward pass will bring that its gradient."""
        run = crossing.run
        roots = [tensor for _, tensor in iter_tensors(output) if autograd.takes_gradient(tensor)]
        made = [tensor for tensor in roots if not (tensor.is_leaf or self._gradients.met.knows(tensor))]
        if isinstance(armed, tuple):
            given_one, call = armed
            if not made or all(tensor is given_one for tensor in made):
                self._stream.absent(run, call, NO_GRAD_MODE)
                return
            armed = self._gradients.arm(given_one, self._stream, run, call)
        if armed.met is not None:
            armed.life = autograd.graph_life(made) if made else _gone
            for tensor in made:
                self._gradients.mark(tensor, run)


def _gone() -> None:
    """The life of a graph that there never was."""


def _is_made_inside(tensor: Tensor) -> bool:
    """Whether the custom Function around this call made ``tensor``, with grad mode on; then its graph is not the one
    that backward will meet, unless the Function runs backward through it by itself."""
    if not autograd.is_grad_enabled() or tensor.grad_fn is None:
        return False
    functions = checkpoints.enclosing_functions()
    return bool(functions) and autograd.sequence_of(tensor.grad_fn) > autograd.sequence_of(functions[-1])


def find_input(given: Arguments, site: Site, stream: Stream, is_exact: bool) -> Tensor | None:
    """The tensor that an input address means; None, and the stream is told why, where there is none.

    Without a key it is the first tensor, positional arguments before keywords. Raises SiteError for an exact address
    that leads nowhere or to several tensors.
    """
    if not site.key:
        first = first_tensor(given)
        if first is None:
            report_missing(site, stream, is_exact, KeyError("the call was given no tensor"))
            return None
        return first[1]
    try:
        value = dig(given, site.key)
    except KeyError as error:
        report_missing(site, stream, is_exact, error)
        return None
    found = _the_one(list(iter_tensors(value)))
    if len(found) != 1:
        if is_exact and found:
            raise ambiguous(site, site.key, found)
        stream.skip(f"{len(found)} tensors at {print_key(site.key)}, expected one")
        return None
    return found[0][1]


def report_missing(site: Site, stream: Stream, is_exact: bool, error: KeyError) -> None:
    """Report a key that was not there: raises SiteError for an exact address, and is a skipped event of a pattern."""
    if is_exact:
        raise SiteError(f"{site}: {error.args[0]}") from None
    stream.skip(str(error.args[0]))


def tell_none(stream: Stream, run: Run, call: int, value: Any, *, is_exact: bool) -> None:
    """Tell ``stream`` that there is no tensor in a value; refuse it where an object may hold some that nobody sees."""
    hidden = opaque_in(value)
    why = (
        f"the output holds a {hidden}, into which gaff does not look" if hidden else "there is no tensor in this output"
    )
    (stream.refuse if hidden and is_exact else stream.absent)(run, call, why)


def ambiguous(site: Site, key: Key, found: list[tuple[Key, Tensor]]) -> SiteError:
    """The error of an address that means one tensor and names several, for the caller to raise.

    Lists up to eight of those that can have a gradient, and of others only where there are no such.
    """
    able = [one for one in found if _is_able(one[1])] or found
    names = ", ".join(f"{replace(site, call=None, key=(*key, *inner))}" for inner, _ in able[:8])
    some = f", {len(able)} of which can have a gradient; it" if len(able) < len(found) else ", a gradient"
    return SiteError(f"{site}: its value holds {len(found)} tensors{some} belongs to one; say which: {names}")


def _is_able(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _the_one(found: list[tuple[Key, Tensor]]) -> list[tuple[Key, Tensor]]:
    """The only one that can have a gradient, as the values beside the indices of a sort; all where it is not one."""
    able = [one for one in found if _is_able(one[1])]
    return able if len(able) == 1 else found
