"""Running a batch once more with every op looked at, and leaving the model as it was.

A guard or a watch notes a ``Batch`` at the beginning of a run, and asks ``run_again`` only where something went wrong.
That finds the same numbers only if the model depends on nothing but its arguments, its weights, random numbers and
autocast.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gaff.address.nested import flat_tensors, iter_tensors, map_tensors
from gaff.compat import distributed, memory, replicas
from gaff.compat.autograd import transform_level
from gaff.compat.modes import autocasts
from gaff.engine.process.alone import alone
from gaff.errors import GaffError
from gaff.inspection.nonfinite.examination import Examination
from gaff.inspection.nonfinite.report import Report
from gaff.inspection.untouched import untouched

# What a model may raise when it is given a batch for the second time: used-up iterators, files, its own checks.
_FAILURES = (ArithmeticError, AssertionError, AttributeError, GaffError, LookupError, OSError, RuntimeError,
             StopIteration, TypeError, ValueError)  # fmt: skip


@dataclass(slots=True)
class Batch:
    """What one run was given, to run it again. Holds the inputs by reference, and what autograd brought back.

    ``random``: states of torch's generators, on the CPU first, then on each GPU where CUDA is initialised.
    ``autocast``: device and type where it was on. ``versions``: each input with its version counter at the time, to
    see whether somebody has written to it. ``part``: path of the part of the model that was called by itself, and a
    weak reference to it; None where the model was. ``sums``, ``gradients`` and ``handles`` are filled in by a guard.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: list[Tensor]
    autocast: list[tuple[str, torch.dtype]]
    has_grad: bool
    versions: list[tuple[Tensor, int]]
    sums: list[tuple[Any, Tensor]] = field(default_factory=list)  # one number a module output, with who asked
    gradients: list[tuple[int, Tensor]] = field(default_factory=list)  # of the outputs, by position
    handles: list[Any] = field(default_factory=list)  # of the hooks that bring them
    part: tuple[str, Any] | None = None
    is_unseen: bool = False  # of what the run was given nothing is known

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], *, holds_graphs: bool = True) -> Batch:
        """What a run is given, with the random state and modes it meets; to be called when the model is about to be.

        Containers are made anew, since the model may take things out of a dict; tensors are not copied. Without
        ``holds_graphs`` the autograd graphs behind inputs are not held, and with them no parameters: those are the
        program's to let go of, or to swap. What a run inside a transform of ``torch.func`` is given ends with that, so
        nothing is held of it.
        """
        if transform_level() is not None:
            return cls((), {}, _random_states(), autocasts(), torch.is_grad_enabled(), [], is_unseen=True)
        tensors = flat_tensors(args, kwargs)
        if tensors is None or not (holds_graphs or all(tensor.grad_fn is None for tensor in tensors)):
            held = _itself if holds_graphs else _without_graph
            args, kwargs = map_tensors((args, kwargs), held, _itself)  # the model may take things out of a dict
            tensors = [tensor for _, tensor in iter_tensors((args, kwargs))]
        else:
            kwargs = dict(kwargs)
        versions = [(tensor, memory.version_of(tensor)) for tensor in tensors]
        return cls(args, kwargs, _random_states(), autocasts(), torch.is_grad_enabled(), versions)


def run_again(
    model: nn.Module, batch: Batch, allow: Iterable[str] = (), *, assume_ones: bool = False
) -> tuple[Report, str]:
    """Run a batch again: the origin of what is not finite in it, and why it could not be run, if it could not.

    Backward runs from the gradients that the batch holds, or with ``assume_ones`` from ones, which the report tells.
    The model is given copies, and buffers, gradients and random numbers are put back; its modules may count it as one
    more call. Where other processes do not run it as well, it fails at what would ask them for something. What the
    model raises (``_FAILURES``) is told in the second part: it must not take the place of the alarm.
    """
    if batch.is_unseen:
        return Report(False), "the batch could not be run again: what this run was given is not known"
    changed = any(memory.version_of(tensor) != version for tensor, version in batch.versions)
    examination = Examination(model, allow, is_again=True)
    if changed:
        examination.notes.append("the batch was written to after the run: this is of what it is now")
    if assume_ones:
        examination.notes.append("backward was run from ones, for what the loss sent back is not known any more")
    try:
        args, kwargs = map_tensors((batch.args, batch.kwargs), _Own(), _itself)
        inputs = [tensor for _, tensor in iter_tensors((args, kwargs))]
        with ExitStack() as stack:
            stack.enter_context(untouched(model, inputs, examination.notes))
            stack.enter_context(replicas.unreplicated_calls(model))
            if not distributed.meshes_of(model):  # of which all processes run it again together
                stack.enter_context(alone())
            replayed(stack, batch)
            examination.meet(args, kwargs)
            return examination.run(lambda: _again(model, args, kwargs, batch.gradients, assume_ones)), ""
    except _FAILURES as error:  # what fails when it is run again must not take the place of the alarm
        return Report(False), f"the batch could not be run again: {type(error).__name__}: {error}".partition("\n")[0]


def replayed(stack: ExitStack, batch: Batch) -> None:
    """Set autocast, grad mode and random numbers as the batch met them, until ``stack`` is closed.

    The random numbers are not put back by it: that is for who calls.
    """
    for device, dtype in batch.autocast:
        stack.enter_context(torch.autocast(device, dtype))
    stack.enter_context(torch.set_grad_enabled(batch.has_grad))
    _set_random_states(batch.random)


def _again(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: list[tuple[int, Tensor]], ones: bool
) -> Any:
    """Run the model and then backward, from the gradients that came to its outputs; returns what the model returned.

    ``gradients``: by the position of an output, as the guard noted them; ``ones``: begin with ones at every output
    instead.
    """
    output = model(*args, **kwargs)
    tensors = [tensor for _, tensor in iter_tensors(output)]
    pairs = [(tensors[at], gradient) for at, gradient in gradients if at < len(tensors)]
    if ones:
        pairs = [(tensor, torch.ones_like(tensor)) for tensor in tensors if tensor.is_floating_point()]
    pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
    if pairs:
        _backward(model, [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    return output


def _backward(model: nn.Module, roots: list[Tensor], gradients: list[Tensor]) -> None:
    """Run backward as the program does.

    Where its hooks act on gradients that are accumulated (an optimizer that steps in backward, gradients that are added
    up elsewhere) nothing is accumulated: they would act once more.
    """
    leaves = [one for one in model.parameters() if one.requires_grad and one.is_leaf]
    if any(one._post_accumulate_grad_hooks or hasattr(one, "_in_backward_optimizers") for one in leaves):
        torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
    else:
        torch.autograd.backward(roots, gradients)


def _without_graph(tensor: Tensor) -> Tensor:
    """A tensor that is no leaf, as one that is none either and has the same memory, but another's graph behind it."""
    if tensor.grad_fn is None:
        return tensor
    with torch.enable_grad():
        leaf = tensor.detach().requires_grad_()
        return leaf.view_as(leaf)


def _itself(value: Any) -> Any:
    return value


def _copy(tensor: Tensor) -> Tensor:
    """A copy that takes no more memory than the tensor does: what is expanded is copied once and expanded again."""
    if tensor.layout != torch.strided or 0 not in tensor.stride():
        return tensor.clone()
    small = tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            small = small.narrow(dimension, 0, 1)
    return small.clone().expand(tensor.shape)


class _Own:
    """Copies of tensors, for a second run of the model.

    The model may write into its arguments, and backward has used up the autograd graph behind them. A function of a
    tensor, for ``map_tensors``: the same tensor given twice has the same copy, as in the run. A copy requires grad
    where its tensor did, and is a leaf where that was one.
    """

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}  # the same tensor twice stays one

    def __call__(self, tensor: Tensor) -> Tensor:
        known = self._known.get(id(tensor))
        if known is None:
            known = _copy(tensor.detach())
            if tensor.requires_grad and not tensor.is_inference():
                known.requires_grad_()
                if tensor.grad_fn is not None:
                    known = known.clone()  # no leaf: the model may write into it, as it did
            self._known[id(tensor)] = known
        return known


def _random_states() -> list[Tensor]:
    """The states of torch's generators, on the CPU first, then on each GPU where CUDA is initialised."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: list[Tensor]) -> None:
    """Set the states that ``_random_states`` has read; those of GPUs only where there are some."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
