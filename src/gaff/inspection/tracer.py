"""``gaff.trace``: one run told as a table in execution order, with gradients when a backward function is given.

What cannot be traced is refused first (``_check_backward``). Then taps on every module (``_taps``) write into one
``CallLog`` while the model runs once, and at last the notes become rows (``_build``). Tensors are measured while they
pass; no row holds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gaff.address.grammar import ATTENTIONS, Site, parse_site
from gaff.address.nested import Arguments, iter_tensors, shape_text
from gaff.address.resolve import Found, called_modules, is_container, iter_modules, join, need_module, unwrap
from gaff.compat import elements, libraries
from gaff.compat.leaves import kept_gradients, need_no_updates, others
from gaff.engine.flops import FlopCount
from gaff.engine.gradients.reach import used_leaves
from gaff.engine.ops.calls import OpCall
from gaff.engine.session import Session
from gaff.engine.taps import CallTap, OpTap, Tap
from gaff.errors import PlanError
from gaff.inspection.call_log import (
    NOT_YET,
    CallLog,
    CallNotes,
    GradientLog,
    ParameterLog,
    fingerprint_of,
    statistics_of,
)
from gaff.inspection.keywords import in_order
from gaff.inspection.op_log import place_of, place_text
from gaff.inspection.pictures import Album, are_probabilities, attention_of
from gaff.inspection.sketches import digests_of_some
from gaff.inspection.trace import Trace
from gaff.inspection.untouched import untouched
from gaff.record.picture import Picture
from gaff.record.trace_rows import CallRow, ModuleSetting, ParameterRow

Backward = Callable[[Any], Any]


def trace_run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backward: Backward | None,
    *,
    has_flops: bool,
    has_ops: bool = False,
    has_pictures: bool = False,
) -> Trace:
    """Run ``model`` once and tell every call of it as a ``Trace``; the work behind ``gaff.trace``.

    The options are those of ``gaff.trace``. The model is left as it was, but for parameters that its own forward
    changes, which a note tells. On a GPU every call is waited for. Raises PlanError, before the model runs, for what
    cannot be traced, and after it for a ``backward`` that returned no scalar loss or ran no backward pass; errors of
    the model pass through, and hooks are removed in any case.
    """
    need_module(model)
    if backward is not None:
        _check_backward(model, backward)
    device = libraries.device_of(model)
    counter = FlopCount.warm() if has_flops else None
    modules = [(path, module, chain) for path, module, chain in iter_modules(model)]
    album = Album(len(modules) * (2 if backward is not None else 1)) if has_pictures else None
    log = CallLog(counter, device, album)
    log.class_name = partial(libraries.class_name, model)
    log.own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    parameters = {path: ParameterLog() for path, _ in _iter_parameters(model)}
    taps = _taps(model, modules, log, parameters if backward is not None else None, has_ops=has_ops)
    session = Session(model, taps)
    last = Session(model, [CallTap(found, _go_on(log), _go_on(log)) for found in called_modules(model)])
    inputs = [tensor for _, tensor in iter_tensors((args, kwargs))]
    tokens = _tokens_of(args, kwargs)
    written: list[str] = []
    used: set[int] | None = None
    with ExitStack() as stack:
        stack.callback(log.let_go)
        stack.enter_context(untouched(model, inputs, written))
        if backward is not None:
            stack.enter_context(torch.enable_grad())
        stack.enter_context(session)
        stack.enter_context(last)  # its hooks come after those of the other
        with counter or nullcontext():
            output = model(*args, **kwargs)
        used = used_leaves([tensor for _, tensor in iter_tensors(output)])
        written += _unfinished(output)
        of_forward = len(log.calls)
        if backward is not None:
            _run_backward(backward, output, log, [*model.parameters(), *inputs])
        if has_flops and len(log.calls) > of_forward:
            written.append("flops are those of the model's own run: calls that backward= makes are told without")
    if backward is not None:
        _check_gradients(log, parameters)
    facts = {
        "has_backward": backward is not None,
        "has_flops": has_flops,
        "device": str(device),
        "notes": (
            *session.notes,
            *_notes(counter),
            *_tied(model),
            *written,
            *_elsewhere(session),
            *_added(model, modules),
        ),
        "given": fingerprint_of(log.given),
        "tokens": tokens,
    }
    return _build(model, modules, log, parameters, used, facts)


def _tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The tokens of the first text, as numbers: of ``input_ids``, else of the first argument if it looks like them.

    Tokens are whole numbers of shape [texts, tokens]. Copies them to the CPU.
    """
    value = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64) or value.dim() != 2:
        return ()
    if not value.shape[0] or not elements.is_readable(value):
        return ()
    return tuple(map(str, value[0].tolist()))


def _unfinished(output: Any) -> list[str]:
    """A note about a generator that the model has returned: its code runs when somebody goes through it."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else [output]
    if not any(isinstance(one, Generator) for one in values):
        return []
    return ["the model returned a generator: what it calls when somebody goes through it is not of this run"]


def _added(model: nn.Module, modules: list[tuple[str, nn.Module, Any]]) -> list[str]:
    """A note about modules that the model has got while it ran, of which no trace tells."""
    known = {id(module) for _, module, _ in modules}
    names = [path for path, module, _ in iter_modules(model) if id(module) not in known]
    told = f"this run itself added modules, whose calls are not here: {', '.join(names[:5])}"
    return [f"{told}; traced once more, they are"] if names else []


def _elsewhere(session: Session) -> list[str]:
    """A note about calls on other threads, which no trace sees."""
    told = "the forward called modules on another thread: those calls, what they cost and their gradients are not here"
    return [f"{told}, and they may stand among those that were never called"] if session.clock.has_others else []


def _notes(counter: FlopCount | None) -> list[str]:
    """What the numbers of this run do not tell: operations without a formula."""
    if counter is None or not counter.uncounted:
        return []
    return [f"flops are lower bounds: torch has no formula for {', '.join(sorted(counter.uncounted))}"]


def _taps(
    model: nn.Module, modules: list[Any], log: CallLog, parameters: dict[str, ParameterLog] | None, *, has_ops: bool
) -> list[Tap | CallTap | OpTap]:
    """What the session is opened with: every module once, with its gradients and its ops where they are asked for.

    A shared module is listened to once, under the first of its names; containers are never called. ``parameters``:
    None where no backward pass will run; then no gradients are asked for. A gradient of a module or an op that cannot
    be told is no error (``is_exact=False``): its row says why.
    """
    taps: list[Tap | CallTap | OpTap] = []
    for found in called_modules(model):
        path, module, chain = found.site.path, found.module, found.chain
        taps.append(CallTap(found, _enter(log, found.site, module), _leave(log)))
        for port in ("grad_output", "grad_input") if parameters is not None else ():
            log_gradient = GradientLog(log, found.site, port)
            taps.append(Tap(Found(Site(path, port=port), module, chain), log_gradient, is_exact=False))
            if has_ops:
                taps.append(Tap(Found(Site(path, "*", port=port), module, chain), log_gradient, is_exact=False))
        if has_ops:
            taps.append(OpTap(found, partial(_enter_op, log), partial(_leave_op, log)))
        if log.album is not None:
            taps.append(OpTap(found, lambda call: None, partial(_picture_op, log)))
    for path, _ in _iter_parameters(model):
        if parameters is not None and path in parameters:
            owner, chain, name = _owner(modules, path)
            taps.append(Tap(Found(Site(path, port="grad"), owner, chain, name), parameters[path]))
    return taps


def _enter(log: CallLog, site: Site, module: nn.Module) -> Callable[[Any, Any, int], None]:
    """The tap for when the module at ``site`` is called: its notes go along with the call in progress."""

    def enter(given: Arguments, run: Any, call: int) -> None:
        given = given if log.calls else in_order(module, given)
        run.frames[-1].notes[log] = log.enter(site, type(module).__name__, given, run, call)

    return enter


def _leave(log: CallLog) -> Callable[[Any, Any, int], None]:
    """The tap for when a module returns: of calls inside that raised nothing is in progress any more."""
    return lambda output, run, call: log.leave(run.frames[-1].notes.pop(log), output, call)


def _go_on(log: CallLog) -> Callable[[Any, Any, int], None]:
    """The tap for when all that looks at the entry or the exit of a module is done."""
    return lambda value, run, call: log.go_on()


def _enter_op(log: CallLog, call: OpCall) -> None:
    """Note that an op begins, with its place in the code where a module has its class."""
    site = replace(call.site, call=None)
    given = Arguments(call.args, call.kwargs)
    log.enter(site, place_text(place_of(call.place)), given, call.run, call.site.call or 0)


def _leave_op(log: CallLog, call: OpCall, output: Any) -> None:
    """Note what an op returned. Its site is told without the call, as ``CallNotes`` have it."""
    number = call.site.call or 0
    log.leave(log.notes_of(replace(call.site, call=None), call.run, number), output, number)


def _named(picture: Picture, counts: dict[Site, int]) -> Picture:
    """The picture with its site as rows have it: without the call where its module was called once.

    ``counts``: calls of each site. While the run goes on nobody knows whether a second call will come, so pictures are
    taken with the call and named at the end.
    """
    site = parse_site(picture.site)
    is_single = counts.get(Site(site.path), 0) <= 1
    return replace(picture, site=str(replace(site, call=None))) if is_single else picture


def _picture_op(log: CallLog, call: OpCall, output: Any) -> None:
    """Draw attention: what a softmax has returned, or what is inside a fused call."""
    album, name = log.album, str(call.site)
    assert album is not None
    with log.aside():
        op = call.site.op or ""
        found = attention_of(op, call.func, call.args, call.kwargs) if op in ATTENTIONS else None
        if found is not None:
            album.add(name, found, is_attention=True)
        elif call.site.op == "softmax" and are_probabilities(output):
            album.add(name, output, is_attention=True)


def _owner(modules: list[Any], path: str) -> tuple[nn.Module, tuple[nn.Module, ...], str]:
    """The module that a parameter belongs to, the modules that lead to it, and the parameter's name within it."""
    for found, module, chain in modules:
        name = path.removeprefix(f"{found}." if found else "")
        if join(found, name) == path and module._parameters.get(name) is not None:  # a name may hold dots
            return module, chain, name
    raise AssertionError(f"no module owns {path}")


def _iter_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter once, under the first of its names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module, _ in iter_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (join(path, name), parameter))
    return list(found.values())


def _tied(model: nn.Module) -> Iterator[str]:
    """A note on parameters of several names: in the column they stand at each module, in the total once."""
    names: dict[int, list[str]] = {}
    for path, module, _ in iter_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(join(path, name))
    tied = [" = ".join(known) for known in names.values() if len(known) > 1]
    if tied:
        more = f" and {len(tied) - 3} more" if len(tied) > 3 else ""
        yield f"one parameter of several names counts once in the total of parameters: {', '.join(tied[:3])}{more}"


def _run_backward(backward: Backward, output: Any, log: CallLog, known: list[Tensor]) -> None:
    """Call the user's function on the output, and run backward from the loss that it returns.

    Leaves that are not ``known``, of which the trace tells nothing, have the gradients afterwards that they had; where
    the function runs backward itself, those behind the model's output alone.

    A function that returns None has run backward itself. Passes that the model ran in its forward (forces, as the
    gradient of an energy) or the function before it returned the loss (a penalty) are not told. Raises PlanError for
    anything but a scalar that requires grad.
    """
    log.forget_gradients()
    with kept_gradients(others([tensor for _, tensor in iter_tensors(output)], known)):
        loss = backward(output)
    if loss is None:
        return  # it ran backward itself
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise PlanError(f"backward returned {what}: expected a scalar tensor, such as lambda y: y.mean()")
    if not loss.requires_grad:
        raise PlanError("backward returned a loss that does not depend on any parameter that requires grad")
    log.forget_gradients()
    with kept_gradients(others([loss], known)):
        loss.backward(retain_graph=True)  # a part of the graph may be the caller's, behind an input


def _check_gradients(log: CallLog, parameters: dict[str, ParameterLog]) -> None:
    """Raise PlanError where no gradient came at all, so that the trace would be one of Nones.

    A backward function that returned None may have run backward itself, or have forgotten to return the loss.
    """
    gradients = [row.grad for row in parameters.values() if row.grad is not None]
    gradients += [gradient for call in log.calls for gradient in call.gradients.values()]
    if not any(gradient.norm is not None or gradient.shape for gradient in gradients):  # on meta there are shapes alone
        raise PlanError("backward ran nothing: no gradient came; return the loss, such as lambda y: y.mean()")


def _check_backward(model: nn.Module, backward: Backward) -> None:
    """Raise PlanError where a backward pass could not run, or would change the model, before anything is installed.

    Gradients of parameters are put back, but what a post-accumulate hook does with one (a step of an optimizer inside
    backward) cannot be undone.
    """
    if not callable(backward):
        raise PlanError(f"backward={backward!r} cannot be called: expected a function such as lambda y: y.mean()")
    if torch.is_inference_mode_enabled():
        raise PlanError("backward= cannot run in torch.inference_mode: leave it, or trace without backward=")
    need_no_updates(_iter_parameters(model), "trace without backward=")


def _build(
    model: nn.Module,
    modules: list[Any],
    log: CallLog,
    parameters: dict[str, ParameterLog],
    used: set[int] | None,
    facts: dict[str, Any],
) -> Trace:
    """The trace, from what was noted: rows, edges between them, what was not used.

    Ops that did not return are left out, and the row of such a module says ``did not return``; edges count rows, not
    calls. ``used``: identities of the leaves that the output depends on, None where that cannot be told: then no
    parameter is called unused without a backward pass. ``facts``: fields of the trace that are known already.
    """
    classes = {path: module for path, module, _ in modules}
    counts = Counter(call.site for call in log.calls)
    shown = [call for call in log.calls if call.returned is not NOT_YET or call.site.op is None]
    rows = tuple(_row(call, classes[call.site.path], counts[call.site]) for call in shown)
    place = {id(call): at for at, call in enumerate(shown)}
    edges = tuple(
        (place[id(maker)], at, is_known)
        for at, call in enumerate(shown)
        for maker, is_known in call.makers
        if id(maker) in place
    )
    pictures = tuple(_named(one, counts) for one in log.album.pictures) if log.album is not None else ()
    called = {id(classes[site.path]) for site in counts}
    settings = tuple(_setting_of(path, module) for path, module, _ in modules if id(module) in called)
    unused = [path for path, module, _ in modules if path and not is_container(module) and id(module) not in called]
    states = []
    without: list[str] = []
    named = list(_iter_parameters(model))
    digests = digests_of_some([parameter for _, parameter in named])
    for (path, parameter), digest in zip(named, digests, strict=True):
        noted = parameters.get(path)  # None of one that the model has got while it ran
        grad = noted.grad if facts["has_backward"] and noted is not None else None
        shape, dtype = shape_text(parameter), str(parameter.dtype).removeprefix("torch.")
        states.append(
            ParameterRow(str(Site(path, port="param")), shape, dtype, parameter.numel(), parameter.requires_grad, grad,
                         digest)
        )  # fmt: skip
        is_unused = grad.norm is None if grad is not None else used is not None and id(parameter) not in used
        if parameter.requires_grad and is_unused and not parameter.is_meta:  # of which nobody knows
            without.append(path)
    name = type(unwrap(model)).__name__
    return Trace(name, rows, tuple(states), tuple(unused), tuple(without), **facts, edges=edges, pictures=pictures,
                 modules=settings)  # fmt: skip


def _setting_of(path: str, module: nn.Module) -> ModuleSetting:
    """How a module was set; of a class of somebody else nobody knows what its code for ``print`` does."""
    is_own = type(module).__module__.startswith("torch.nn.")
    inside = sum(one.numel() for one in nn.Module.parameters(module) if not is_lazy(one))
    return ModuleSetting(path, module.training, module.extra_repr() if is_own else "", inside)


def _row(call: CallNotes, module: nn.Module, count: int) -> CallRow:
    """One row from the notes of one call. Waits for the device, for statistics and marks are still tensors.

    ``count``: calls of this site in the run; a site that was called once is told without the call.
    """
    owned = [] if call.site.op is not None else list(module._parameters.values())
    own = sum(parameter.numel() for parameter in owned if parameter is not None)
    site, returned = replace(call.site, call=call.call if count > 1 else None), call.returned
    return CallRow(
        site=str(site),
        cls=call.cls,
        call=call.call,
        depth=call.depth,
        input=call.input,
        output=returned.shapes,
        dtype=returned.dtype,
        parameters=own,
        time_s=returned.time_s,
        memory_bytes=returned.memory_bytes,
        flops=returned.flops,
        statistics=statistics_of(returned.statistics),
        grad_output=call.gradients.get("grad_output"),
        grad_input=call.gradients.get("grad_input"),
        fingerprint=fingerprint_of(returned.marks),
    )
