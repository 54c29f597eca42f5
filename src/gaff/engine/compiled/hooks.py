"""Inside compiled code: hooks that Dynamo puts into the graph, and two ops by which the graph tells what passes.

How they come into it is told in ``own_forward``.

A graph holds no number and no name of a session, only tensors: a *ticket*, the number of the receiver that hears of a
call, and a token that keeps the order. What is told runs in ordinary Python while the graph runs.

Each hook here is two things. Its ``__call__`` is what Dynamo compiles: it may only use what fits into a graph. Its
``told`` runs later, each time that the graph has come by, and does what hooks of ``modules`` do outside. See
docs/decisions/0014.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gaff.address.nested import NO_ARGUMENTS, Arguments, iter_tensors
from gaff.compat import autograd, checkpoints, compiler
from gaff.compat.own_variants import OwnVariants
from gaff.engine.clock import Run
from gaff.engine.compiled.own_forward import OwnForward, calls_exits, changes_output
from gaff.engine.compiled.structure import has_grad_mode, has_gradients, rebuild, structure_of
from gaff.engine.compiled.tell import (
    WRITTEN_BEFORE,
    Call,
    Inside,
    Receiver,
    is_view,
    new_place,
    note_stale,
    tell,
    tell_gradients,
)
from gaff.engine.compiled.tracing import is_untold, was_written
from gaff.engine.crossing import Crossing
from gaff.engine.modules import MISSING
from gaff.engine.node import Node
from gaff.engine.parameters.values import StateValue
from gaff.errors import PlanError

GRAPH_WRITES = (
    "compiled code has written to it before, and brings that into the parameter at its end, or lets another tensor "
    "stand in for it (torch.func.functional_call): open the session under torch.compiler.set_stance('force_eager')"
)


class HookInside(Receiver):
    """A hook that does what ``func`` does outside of compiled code, and something else inside of it.

    ``func`` is one of the functions of ``modules``, and ``node`` the module's. ``edits`` are those to be made here, in
    order. ``func``, ``args`` and ``is_gaffs`` are what ``modules`` reads when it puts hooks in order.
    """

    is_gaffs = True

    def __init__(self, inside: Inside, func: Any, node: Node, edits: tuple[Any, ...] = ()) -> None:
        super().__init__(inside)
        self.edits = edits
        self.changes_output = any(edit.site.port == "output" for edit in edits)
        self.edits_gradient = any(edit.site.port == "grad_output" for edit in edits)
        self.node = node
        self.func = func
        self.args = (node,)  # as of the hooks that are partials
        self.outside = torch.compiler.disable(func)


class EntryHook(HookInside):
    """Before a module: its arguments. ``is_bound``: compiled code may begin here, and with it a run.

    It tells the arguments if somebody looks at them; where code may begin it tells at least that the module is
    entered.
    """

    def __init__(self, inside: Inside, func: Any, node: Node, edits: tuple[Any, ...], *, is_bound: bool) -> None:
        super().__init__(inside, func, node, edits)
        self.taps = node.entry.taps
        self.is_bound = is_bound
        self.states = tuple(tap for tap in self.taps if isinstance(tap, StateValue))
        owned = [(name, one) for name, one in node.module._parameters.items() for tap in self.states if tap.is_of(one)]
        self.names = tuple(name for name, _ in owned)  # of the parameters that are told

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            return self.outside(self.node, module, args, kwargs)
        _refuse_export()
        values: list[Tensor] = []
        what = structure_of((args, kwargs), values)
        if is_untold(module):
            return None
        if self.taps or self.is_bound:
            parts = self.parts(values) if self.taps else []
            place = new_place()
            for name in self.names:
                held = getattr(module, name)
                note_stale(place, not isinstance(held, nn.Parameter) or was_written(held))
            tell(parts, self.token, self.ticket, place, what)
        if not self.edits:
            return None
        value = given = Arguments(args, kwargs)
        for edit in self.edits:
            value = edit.change(value, given)
        return value.args, value.kwargs

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """The module has been entered in compiled code: open a run if code begins here, count the call, tell the taps.

        A recomputation and a closed session are ignored. Of values that are no tensors only the type is known.
        """
        clock = self.node.clock
        if clock.closed or autograd.backward_task() != -1:
            return
        if self.is_bound:
            clock.enter_compiled(self.node, call[0])
        run = clock.run_of_compiled(self.node)
        if run is not None:
            number = run.entered[self.node.index]
            run.entered[self.node.index] = number + 1
            if self.taps:
                given = Arguments(*rebuild(what, values.__getitem__))
                if call[1] in WRITTEN_BEFORE:
                    for state in self.states:
                        state.refuse(run, GRAPH_WRITES)
                for tap in self.taps:
                    tap(given, run, number)


class ExitHook(HookInside):
    """After a module: its output, and the gradients of its tensors when they come.

    Inside it has the edits made, then tells what goes on. Gradients are told for tensors that need one and are no
    views; by ``at_forward``, where there is one.
    """

    def __init__(self, inside: Inside, func: Any, node: Node, edits: tuple[Any, ...]) -> None:
        super().__init__(inside, func, node, edits)
        self.at_forward: ForwardHook | None = None
        self.side, self.taps = node.exit, node.exit.taps
        self.acts = () if node.exit.is_edited else node.exit.acts  # edits are part of the graph

    def with_forward(self, inside: Inside) -> None:
        """Let gradients be heard inside the module's forward, where that can be and nobody ``changes_output``."""
        if calls_exits(self.node.module) and (self.acts or self.edits):
            self.at_forward = ForwardHook(inside, self.func, self.node, self.edits)
            self.outside = torch.compiler.disable(self._left)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = MISSING) -> Any:
        if not torch.compiler.is_compiling():
            return self.outside(self.node, module, args, kwargs, output)
        return self.in_graph(module, args, kwargs, output, is_by_forward=self._is_by_forward())

    def in_graph(self, module: nn.Module, args: Any, kwargs: Any, output: Any, *, is_by_forward: bool) -> Any:
        """While Dynamo compiles: make the edits, tell what goes on. None, or what takes the output's place."""
        is_copy = bool((self.acts or self.edits) and shows_a_product(module, output))
        if is_copy:
            output = output.clone()
        values: list[Tensor] = []
        what = structure_of(output, values)
        is_told = is_by_forward and has_gradients(what)
        if is_untold(module, values if self.acts or self.edits_gradient else ()):
            return output if is_copy else None
        edits = () if is_told else self.edits
        for edit in edits:
            output = edit.change(output, Arguments(args, kwargs or {}))
        if self.taps or self.acts:
            values = []
            what = structure_of(output, values)
            ticket = self.ticket.clone() if self.acts else self.ticket  # as it is now: torch may set hooks later
            place = new_place()
            given = self.parts(values) if self.taps else []
            tell(given, self.token, ticket, place, what)
            if self.acts and not is_told:
                tell_gradients(values, ticket, place, self.reduce)
        return output if is_copy or edits else None

    def _is_by_forward(self) -> bool:
        """Whether gradients are told by the module's forward."""
        return self.at_forward is not None and not changes_output(self.node.module)

    def _left(self, node: Node, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Outside of compiled code: what ``func`` does, unless the forward has told of gradients already."""
        inner = self.at_forward
        if inner is not None and output is not MISSING and inner.has_told(output) and self._is_by_forward():
            return inner.left(output)
        return self.func(node, module, args, kwargs, output)

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """The module has returned in compiled code: count the call, tell the taps, set gradient hooks on stand-ins.

        In a recomputation only the gradient hooks are due, as for any other module.
        """
        clock = self.node.clock
        if clock.closed:
            return
        if autograd.backward_task() != -1:
            if not self._is_by_forward() or not has_gradients(what):
                self._told_again(call, what)
            return
        run = clock.run_of_compiled(self.node)
        if run is not None:
            number = run.left[self.node.index]
            run.left[self.node.index] = number + 1
            if self.taps:
                output = rebuild(what, values.__getitem__)
                for tap in self.taps:
                    tap(output, run, number)
            if self.acts and not (self._is_by_forward() and has_gradients(what)):
                self._pass(call, what, run, number)

    def _pass(self, call: Call, what: str, run: Run, number: int) -> None:
        """Let acts set gradient hooks on stand-ins for what passes, or wait for a reentrant checkpoint.

        Whether there is an autograd graph is told by the grad mode that was written down with the value.
        """
        crossing, replay = Crossing(run, number, has_grad_mode(what)), self.side.replay
        if not crossing.has_graph:
            replay.wait(crossing, None)
        elif checkpoints.has_saved_hooks():
            replay.remember(crossing, None)
            if crossing.memo is not None:
                crossing.memo[self] = call
        self._act(call, what, crossing)

    def _told_again(self, call: Call, what: str) -> None:
        """A recomputation has come by: its gradients belong to the call of the first pass.

        Where that had an autograd graph its hooks wait for the call of the first pass, and what arrives by the ticket
        of the recomputation is handed to them.
        """
        crossing = self.side.met_again(has_grad_mode(what), None) if self.acts else None
        if crossing is not None and crossing.has_graph:
            self._act(call, what, crossing)
        elif crossing is not None and crossing.memo is not None and (first := crossing.memo.get(self)) in self.waiting:
            self.waiting[call] = self.waiting[first]

    def _act(self, call: Call, what: str, crossing: Crossing) -> None:
        """Let gradient hooks be set on what stands for the tensors of the call.

        These are small tensors, kept as long as the call's ticket may be needed. When a gradient arrives,
        ``Receiver.arrived`` calls the hooks on the stand-in by hand.
        """
        output = None
        if crossing.has_graph:
            stands = self.wait(call, what)
            output = rebuild(what, stands.__getitem__)
        self.side.act(output, NO_ARGUMENTS, crossing)


class ForwardHook(ExitHook):
    """As part of a module's forward: the gradients of its output; see ``own_forward``.

    The module's hooks may be called outside of the graph, after it. They then ask whether it ``has_told``, which it has
    not where the forward ran eagerly.
    """

    def __init__(self, inside: Inside, func: Any, node: Node, edits: tuple[Any, ...]) -> None:
        super().__init__(inside, func, node, edits)
        self.taps = ()
        self._eager: dict[int, Any] = {}  # by thread: what the forward returned that ran there eagerly, at last
        self.ran_eagerly = torch.compiler.disable(self._ran_eagerly)

    def exit(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The forward returns ``output``: tell its gradients where that is compiled. None, or a copy to go on with."""
        if not torch.compiler.is_compiling():
            self.ran_eagerly(output)
            return None
        if not has_gradients(structure_of(output, [])):
            return None
        return self.in_graph(module, args, kwargs, output, is_by_forward=False)

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """The forward has returned in compiled code: set gradient hooks on stand-ins. The call is counted elsewhere."""
        if self.node.clock.closed:
            return
        if autograd.backward_task() != -1:
            self._told_again(call, what)
            return
        run = self.node.clock.run_of_compiled(self.node)
        if run is not None:
            self._pass(call, what, run, run.left[self.node.index])

    def has_told(self, output: Any) -> bool:
        """Outside of compiled code: whether the gradients of ``output`` are heard inside of it.

        They are not where all code runs eagerly; the module may then not even have come to its forward (``skip``). A
        program may call a forward by itself, which is no call of the module: what it returned is then another tensor.
        """
        eager = self._eager.pop(get_ident(), None)
        tensors = [tensor for _, tensor in iter_tensors(output)]
        if compiler.stance() == "force_eager" or (eager is not None and any(one is eager() for one in tensors)):
            return False
        return any(one.requires_grad for one in tensors)

    def left(self, output: Any) -> None:
        """Outside, after it has told: count the call and tell the taps, which the hooks of ``modules`` would do."""
        node, run = self.node, self.node.open.get(get_ident())
        if run is None or autograd.backward_task() != -1:
            return
        number = run.left[node.index]
        run.left[node.index] = number + 1
        for tap in node.exit.taps:
            tap(output, run, number)
        if node.mark is not None:
            node.mark(run, output)

    def _ran_eagerly(self, output: Any) -> None:
        first = next((tensor for _, tensor in iter_tensors(output)), None)
        if first is not None:
            self._eager[get_ident()] = ref(first)


class LeaveHook(HookInside):
    """Where compiled code ends, and with it a run that began there; after all other hooks of the module.

    With ``Inside.has_marks`` the gradients of what is returned are told, too, by which a backward pass is known as the
    run's.
    """

    def __init__(self, inside: Inside, func: Any, node: Node, *, is_bound: bool) -> None:
        super().__init__(inside, func, node)
        self.is_bound = is_bound
        self.has_marks = inside.has_marks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> None:
        if not torch.compiler.is_compiling():
            self.outside(self.node, module, args, kwargs, output)
        elif self.is_bound and not is_untold(module):
            values: list[Tensor] = []
            what = structure_of(output, values)
            ticket = self.ticket.clone() if self.has_marks else self.ticket
            place = new_place()
            tell([], self.token, ticket, place, what)
            if self.has_marks:
                tell_gradients(values, ticket, place)

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """Compiled code has ended: tell the clock, with stand-ins for what was returned if marks are wanted."""
        if not self.node.clock.closed and autograd.backward_task() == -1:
            output = None
            if self.has_marks:
                stands = self.wait(call, what)
                output = rebuild(what, stands.__getitem__)
            with torch.enable_grad() if has_grad_mode(what) else nullcontext():
                self.node.clock.leave(self.node, output)


class LookHook(Receiver):
    """After a module: tells ``listener(module, args, output, stands)``, inside compiled code and outside of it.

    ``stands``: by the identity of a tensor of the output, what can be hooked to hear of its gradient; in compiled
    code. For the watching of a training run, which belongs to no session. The module is held weakly. ``args`` are told
    from inside only with ``has_args``, since what is told cannot be fused away.
    """

    is_gaffs = False  # they are of no node, and no order is kept among them

    def __init__(self, inside: Inside, module: nn.Module, listener: Any, *, has_args: bool) -> None:
        super().__init__(inside)
        self.module = ref(module)
        self.listener = listener
        self.has_args = has_args
        self.outside = torch.compiler.disable(self._outside)
        self.at_forward: LookHook | None = None  # itself, where the forward calls it; known when it is put there

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        is_told = self.at_forward is not None and not changes_output(module)
        return None if is_told else self.exit(module, args, None, output)

    def exit(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The module returns ``output``: None, or a copy of it that has another memory."""
        if not torch.compiler.is_compiling():
            return self.outside(module, args, output)
        if torch.compiler.is_exporting():
            return None
        before = output
        if shows_a_product(module, output):
            output = output.clone()
        own: list[Tensor] = []
        structure_of(output, own)
        values: list[Tensor] = []
        what = structure_of((output, args if self.has_args else ()), values)
        if is_untold(module, values):
            return None if output is before else output
        ticket, place = self.ticket.clone(), new_place()
        tell(self.parts(values), self.token, ticket, place, what, is_flexible=True)
        if torch.is_grad_enabled():
            tell_gradients(own, ticket, place, is_flexible=True)  # the first of the values
        return None if output is before else output

    def told(self, call: Call, values: list[Tensor], what: str) -> None:
        """The module has returned in compiled code: tell the listener, with stand-ins if there are gradients."""
        module = self.module()
        if module is not None:
            output, args = rebuild(what, values.__getitem__)
            stands = self.wait(call, what) if has_grad_mode(what) else []
            self.listener(module, args, output, {id(one): stand for one, stand in zip(values, stands, strict=False)})

    def _outside(self, module: nn.Module, args: Any, output: Any) -> None:
        self.listener(module, args, output, None)


def shows_a_product(module: nn.Module, output: Any) -> bool:
    """Whether a module returns a view of a product in two dimensions that nobody else sees, so that a copy is the same.

    A forward of somebody's own, or another hook, may keep what it shows; those of torch's parallel styles do not.
    """
    if type(module).forward is not nn.Linear.forward or not is_view(output):
        return False
    for hook in module._forward_hooks.values():  # a generator is a frame, which Dynamo would come upon
        if not hasattr(hook, "is_gaffs") and not str(hook.__module__).startswith("torch.distributed."):
            return False
    return True


class LookHooks:
    """Hooks of ``LookHook`` on many modules, on and off: always the same ones, so that compiled code fits again.

    ``modules`` are pairs of a module and whether its arguments are wanted. Nothing is on a module until ``switch_on``.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, bool]], listener: Any) -> None:
        self._inside = Inside(has_marks=False)
        self._looks = [
            (ref(one), LookHook(self._inside, one, listener, has_args=has_args)) for one, has_args in modules
        ]
        self._handles: list[Any] = []
        self._variants = OwnVariants()

    def switch_on(self) -> None:
        """Put the hooks on all modules that still exist; does nothing if they are on."""
        self._variants.open()
        for reference, look in () if self._handles else self._looks:
            module = reference()
            if module is not None:
                look.at_forward = look if calls_exits(module) else None
                self._handles += [module.register_forward_hook(look), OwnForward(module)]

    def switch_off(self) -> None:
        """Take the hooks away, and stop waiting for gradients; compiled code without them fits again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._variants.close()
        for _, look in self._looks:
            look.waiting.clear()

    def close(self) -> None:
        """Switch off for good: code that is still running with the hooks is not heard any more."""
        self.switch_off()
        self._inside.close()


def _refuse_export() -> None:
    """Raises PlanError while torch exports: the hooks would become part of what is exported."""
    if torch.compiler.is_exporting():
        raise PlanError("torch exports or traces the model while a gaff session is open on it: close it first")
