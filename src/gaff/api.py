"""The public verbs, each a few lines over a plan and the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from gaff.errors import PlanError, need_truth
from gaff.sessions.capture import Capture
from gaff.sessions.edit import Editing
from gaff.sessions.edit import edit as make_edit
from gaff.sessions.plan import Plan
from gaff.sessions.request import given

if TYPE_CHECKING:  # tools are loaded when they are called
    from typing_extensions import Unpack

    from gaff.edits.places import EditLike
    from gaff.harvesting.engines import Engine
    from gaff.harvesting.rows import Rows
    from gaff.harvesting.store import Store
    from gaff.inspection.anatomy import Anatomy
    from gaff.inspection.names import Names
    from gaff.inspection.nonfinite.report import Report
    from gaff.inspection.sites import Sites
    from gaff.inspection.trace import Trace
    from gaff.inspection.tracer import Backward
    from gaff.sessions.request import Evict, PatternLike, Reducer, Threads
    from gaff.sessions.take import Take
    from gaff.training.clipping import Clipping
    from gaff.training.clipping_limits import ClippingLimits
    from gaff.training.guard import Guard
    from gaff.training.sample_norms import SampleNorms
    from gaff.training.watch.handle import Watch
    from gaff.training.watch.settings import WatchOptions


def capture(  # noqa: PLR0913  # what to keep, and how
    model: nn.Module | None = None,
    /,
    *patterns: PatternLike | Plan,
    to: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    reduce: Reducer | None = None,
    last: int | None = None,
    budget: int | str | None = None,
    evict: Evict = "raise",
    clone: bool = False,
    reference: bool = False,
    graph: bool = False,
    threads: Threads = "own",
    **tensors: Tensor,
) -> Capture:
    """Keep values of ``model`` while the session is open: ``with gaff.capture(model, "fc", "fc:grad_input") as got``.

    Args:
        model: any module; None (or left out) when only plain tensors are captured.
        patterns: addresses (see docs/addresses), modules of the model, predicates on a ``Site``, lists of these,
            ``gaff.maybe(...)``, a dict from pattern to what of it is kept (``{"h.*.attn": gaff.keep.rows(0)}``), or
            one ``Plan``.
        to: a device for the kept copies ("cpu" from a GPU goes through pinned memory, without waiting).
        dtype: of kept floating tensors; None: as they are.
        reduce: a value of ``gaff.keep`` or any function tensor -> tensor, applied at the source.
        last: keep only this many events a site; None: all.
        budget: bytes, or text such as "4GB"; None: half of the memory that is free.
        evict: when the budget is exceeded "raise" PlanError, or let the "oldest" go.
        clone: copy at once instead of copy-on-write. reference: do not clone parameters.
        graph: keep the autograd graph of the values, for a loss on them. What the model goes on with is another tensor:
            the gradient that comes to a site is asked for as ``fc:grad_output``, not by ``autograd.grad`` of the value.
        threads: "own", runs that this thread starts, or "all".
        tensors: every other keyword captures the gradient of the tensor that it is given, under this name.

    Kept values are detached, on the device and in the dtype of the original, and are what the tensor was when it
    passed, even if the model overwrites it later; nothing waits for a device, unless ``reduce`` does. Gradients arrive
    when ``backward()`` runs inside the session.

    Raises:
        SiteError: an address that cannot be read or names nothing. PlanError: what cannot be done. Both before
            anything is installed. NeverFiredError: at closing, for a pattern that stayed silent.
    """
    if isinstance(model, str):
        raise PlanError(f"capture was given {model!r} first: expected a model, then patterns")
    options: dict[str, Any] = {"to": to, "dtype": dtype, "reduce": reduce, "last": last, "budget": budget,
                               "evict": evict, "clone": clone, "reference": reference, "graph": graph,
                               "threads": threads}  # fmt: skip
    odd = {name: value for name, value in tensors.items() if not isinstance(value, Tensor)}
    plan = Plan.of(*patterns, **given(options), **odd)  # type: ignore[arg-type]  # which refuses what is odd
    if not plan.requests and not tensors:
        raise PlanError("capture was given nothing to capture: expected patterns such as 'fc1', or tensors as b=b")
    if model is None and plan.requests:
        raise PlanError(f"pattern {str(plan.requests[0])!r} needs a model: expected gaff.capture(model, pattern)")
    return Capture(model, plan, tensors)


def clip_gradients(
    optimizer: Any,
    *,
    model: nn.Module | None = None,
    views: Sequence[str] = (),
    **limits: Unpack[ClippingLimits],
) -> Clipping:
    """Limit gradients when ``optimizer`` is about to use them: ``handle = gaff.clip_gradients(optimizer, norm=1.0)``.

    Acts in the optimizer's step, whatever the loop looks like: on unscaled (GradScaler), accumulated, reduced (DDP)
    gradients, in place, after each evaluation of a closure. A handle with ``audit`` and ``remove()``, or a context.

    Args:
        optimizer: a torch optimizer, or a wrapper such as accelerate's.
        norm: largest norm (``norm_type``, default 2) of all gradients together, or of those of each ``per`` "group" of
            the optimizer, "layer" (what one module of ``model`` holds itself), "tensor": bit by bit what
            ``torch.nn.utils.clip_grad_norm_`` does on finite gradients.
        value: largest magnitude of an element, as ``clip_grad_value_``.
        adaptive: largest ratio of a unit's gradient norm to its weight norm (AGC: Brock et al. 2021, equation 3, with
            their floor of 1e-3 for the latter); needs ``model``, whose modules tell what a unit is.
        deviations: limit the global norm to mean + this many standard deviations of the last ``window`` (128) norms,
            as clipped; none before ``warmup`` (25) of them. ``spike`` "clip", or "skip" the step.
        nonfinite: a NaN or inf: "raise" NonFiniteError, which names the parameters, before anything is stepped;
            "skip" the step, parameters and optimizer state untouched; "zero" such elements. A norm that overflows is
            computed again in float64.
        when: "step", or "backward": each tensor as its gradient comes, still scaled and not yet accumulated.
        model: for names in the audit. views: parameters whose gradients are kept at the stations of a step.

    Waits for the device once a step to see whether the norm is finite; not with ``nonfinite="skip"`` and an optimizer
    that reads ``found_inf`` (``fused=True``).

    Raises PlanError for limits that do not go together, before anything is installed.
    """
    from gaff.training.clipping import Clipping
    from gaff.training.clipping_limits import Limits

    unknown = [name for name in limits if name not in Limits.__dataclass_fields__]
    if unknown:
        known = ", ".join(Limits.__dataclass_fields__)
        raise PlanError(f"option {unknown[0]!r} is not known to clip_gradients: expected {known}")
    return Clipping(optimizer, Limits(**limits), model, views)


def edit(
    model: nn.Module | Mapping[Tensor, EditLike] | None,
    changes: Mapping[Any, EditLike] | Plan | None = None,
    /,
    *,
    check_finite: bool = False,
    threads: Threads = "own",
) -> Editing:
    """Change what passes while the session is open: ``with gaff.edit(model, {"layer3": gaff.edits.scale(0.5)}) as e``.

    Args:
        model: any module; left out when only plain tensors are edited.
        changes: a dict from pattern (as ``capture`` takes them, or a plain tensor, whose gradient is meant) to an
            edit: one of ``gaff.edits``, a function ``tensor -> tensor``, a module, or a list of these; or a ``Plan``.
            At one site edits act in the order of the dict; sessions act in the order in which they were opened.
            Gradient edits at one tensor act as backward meets the calls, the last one first.
        check_finite: raise where an edit makes a NaN or inf (waits for the device at every event).
        threads: "own" or "all", as in ``capture``.

    Values and inputs stay edited in a recomputation by ``torch.utils.checkpoint``, also when ``backward()`` comes
    after the session: such modules keep a hook until the graph is freed (``receipt.armed``, ``release()``). Gradient
    edits act while the session is open. ``path:param`` stands in for the parameter during a run; it is not written to.

    Raises:
        SiteError, PlanError: before anything is installed, or where an edit returned another shape, dtype or device.
        NeverFiredError: at closing, for a pattern that never acted. ExactnessError: where an edit cannot be true.
    """
    return make_edit(model, changes, given({"check_finite": check_finite, "threads": threads}))


def anatomy(module: nn.Module, /, *inputs: Any, **keywords: Any) -> Anatomy:
    """Run ``module`` once, forward and backward, and explain its backward pass: the autograd nodes behind it.

    Each node with the op and line that made it, whose gradient comes and whose it hands on, shapes and norms; and what
    the legacy ``register_backward_hook`` would have shown beside the truth. ``print`` it for tables and words;
    ``tree()``, ``to_svg()``, ``to_dict()``.

    Args:
        module: any module; left as it was: weights, buffers, ``.grad``, random state. Weights to which its own code
            writes in its forward are not put back, which a warning tells.
        inputs, keywords: of the call. Floating inputs are treated as if they required grad.

    Backward starts from the sum of the outputs' floating elements. Raises PlanError where there is no graph.
    """
    from gaff.inspection.explanation import explain

    return explain(module, inputs, keywords)


def find_nonfinite(step: Callable[[], Any], *, model: nn.Module | None = None, allow: Sequence[str] = ()) -> Report:
    """Run ``step`` once and tell where the first NaN or inf of it began: op, line, ranges, likely cause.

    ``gaff.find_nonfinite(lambda: criterion(model(x), y).backward(), model=model)``. Every op and every autograd node
    is looked at, which takes several times as long as the step; the step itself computes the bits of a bare one, and
    does to weights and optimizers what it does.

    Args:
        step: forward, loss, backward, an optimizer's step: any part of it.
        model: its modules give the addresses; without it every op is outside the model, and only lines tell.
        allow: patterns of ops or modules whose infinite values are meant, such as ``"**.attn/masked_fill"``; a NaN is
            told wherever it is made.

    Returns a ``Report``, which is False where nothing is wrong: an infinite value that is put in by a constant and
    masked again, or overflow under a GradScaler that skips the step, is no finding. Waits for the device at every op.
    """
    from gaff.inspection.nonfinite.examination import find_nonfinite as find

    return find(step, model, allow)


def guard(model: nn.Module, *, action: Literal["raise", "warn"] = "raise", allow: Sequence[str] = ()) -> Guard:
    """Stop at the first NaN or inf, with its origin: ``with gaff.guard(model): train()``.

    Adds up one number a module output, and reads one flag a step: when the optimizer is about to use the gradients
    (which are looked at, too), or at the end of a run without grad. On a hit the same batch is run again with every op
    looked at, with the random state, autocast and parameters that it had.

    Args:
        model: whose forward and gradients are guarded.
        action: "raise" NonFiniteError, with ``report``, before the optimizer changes anything; or "warn" once.
        allow: as in ``find_nonfinite``.

    A step that a GradScaler skips is no alarm. ``reports`` holds what was found.
    """
    from gaff.training.guard import Guard as MakeGuard

    return MakeGuard(model, action, allow)


def sample_norms(
    model: nn.Module, /, *patterns: PatternLike, reduction: Literal["mean", "sum"] = "mean"
) -> SampleNorms:
    """Gradient norms of every example: ``with gaff.sample_norms(model) as norms: loss.backward()``, ``norms.total``.

    Args:
        model: its first input tensor, and the inputs of the layers, have the examples in dimension 0.
        patterns: layers to follow, as ``capture`` takes them; all with trainable parameters when none is given.
        reduction: how the loss sums up the examples; after "mean" norms are multiplied by the batch size, so that
            they are those of each example's own loss. After a mean over tokens, of which examples have different
            numbers, they are those of each example's share in it, times the batch size.

    Exact for Linear, Conv (also transposed), Embedding and norm layers, also where a layer is called several times or
    two share a weight, at the price of some matrix products a layer. Keeps the layers' inputs until it is freed.

    Where examples meet in a function of the forward or in the loss (``F.batch_norm`` in training, ``h - h.mean(0)``, a
    contrastive loss), which nothing tells, the gradients are those of the whole loss by way of each example's rows, and
    no example has a loss of its own.

    Raises:
        PlanError: before anything runs, for layers without a rule. ExactnessError: on reading, where examples cannot
            be told apart (batch norm in training, flattened batches, position embeddings that are shared).
    """
    from gaff.training.sample_norms import sample_norms as make_sample_norms

    return make_sample_norms(model, patterns, reduction)


def take(
    model: nn.Module,
    /,
    *patterns: PatternLike | Plan,
    to: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    reduce: Reducer | None = None,
    clone: bool = False,
) -> Take:
    """A feature extractor: ``gaff.take(model, "layer4", "avgpool")(x)["avgpool"]``; see ``Take`` for what it promises.

    Args:
        model: any module; it becomes a submodule of the extractor, and runs only as far as the last wanted site.
        patterns: as ``capture`` takes them, forward values only.
        to, dtype, reduce, clone: as ``capture`` knows them.

    Raises:
        SiteError, PlanError: before anything runs. NeverFiredError: from a call in which a pattern stayed silent.
    """
    from gaff.sessions.take import take as make_take

    return make_take(model, patterns, given({"to": to, "dtype": dtype, "reduce": reduce, "clone": clone}))


def harvest(  # noqa: PLR0913  # what to keep, and how
    model: nn.Module,
    data: Any,
    /,
    *patterns: PatternLike | Plan,
    out: str | PathLike[str] | Any,
    rows: Rows | Callable[[Any], Tensor] = "sample",
    loss: Callable[[Any, Any], Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    mask: str | None = None,
    labels: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None,
    reduce: Reducer | None = None,
    top: int | None = None,
    sample_norms: str | Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    nonfinite: Literal["count", "mark", "refuse"] = "count",
    batch: int = 32,
    shard: int = 64,
    training: bool = False,
    accept_changes: bool = False,
    engine: Literal["ranks", "ray"] | Engine = "ranks",
    progress: bool = True,
) -> Store:
    """Run ``model`` over ``data`` and keep what passes at some sites on disk; begun again, it goes on where it was.

    ``gaff.harvest(model, loader, "h.*.mlp", out="acts")["h.3.mlp"][:8]``. The folder holds ordinary safetensors files,
    a checksum (CRC32C) of every block of rows, and labels of each row. Rows are written batch after batch, so memory
    holds one batch. Needs the extra ``harvest``.

    Args:
        model: any module. It is in evaluation mode meanwhile, unless ``training``. Of one whose weights lie on several
            processes (FSDP2, tensor parallelism) values are written as one process would have them, once.
        data: a DataLoader, any iterable of batches, or one batch, a dict or a tensor (of a tuple each is a batch). A
            dict is passed as keywords, of a batch that is a tuple or list the first element; batches are moved to the
            model's device. Or a Hugging Face data set with the column ``input_ids``, whose sequences are put together
            by length, so that little is padded.
        patterns: as ``capture`` takes them. Forward values only: the model stops at the last one, without gradients.
        out: a new folder, or that of the same harvest, which is completed; or a place in an object store: a URL such
            as ``s3://bucket/acts``, or a store of ``obstore`` (extra ``objects``).
        rows: what one row is. "sample": the first dimension; "token": the first two, where the mask is true (that of
            ``attention_mask``, or all of a batch without a mask); "position": the first two; or a function from a
            batch to a mask over them.
        loss: of gradients, a function (output, batch) -> scalar; ``.grad`` of parameters is as before afterwards.
        inputs: a function from a batch to what the model takes.
        mask: the key of another mask in the batch, for "token".
        labels: columns beside sample, position and token: a dict from name to key (or place) in the batch, or a
            function from a batch to a dict; numbers of shape ``[samples]`` or ``[samples, positions]``.
        reduce, dtype: as ``capture`` knows them; the first dimensions must stay. "int8" writes whole numbers with a
            scale for each row (0.4 % of its largest number, where that is above 2.3e-41), read back as float32.
        top: of each row keep only so many numbers of its last dimension, those of largest size, largest first; the
            label ``place of SITE`` (int32) says which they are.
        sample_norms: layers whose parameters' gradients are measured for each sample, as ``gaff.sample_norms`` does
            with reduction "sum" (an empty list: all with trainable parameters): labels ``gradient norm of PARAMETER``.
        nonfinite: rows with a NaN or an infinity are told by a warning ("count"), also by a label ``finite``
            ("mark"), or end the harvest ("refuse").
        batch: samples in a batch of a Hugging Face data set, whose batches are made here.
        shard: batches in each shard: what is done anew after a kill.
        training: leave the modes of the modules as they are.
        accept_changes: go on although model, functions, data or versions are others than at the beginning, which
            ``store.changes`` tells; other sites or options are refused all the same.
        engine: "ranks": this process makes the shards, or each rank of a ``torchrun`` its own, for which ``data`` must
            give every rank the same batches. "ray": workers of a Ray cluster, or of one that is started here;
            ``gaff.integrations.ray.OnRay(workers=4)`` says how many (extra ``ray``).
        progress: draw a bar on a terminal, where the package ``rich`` is there.

    Raises:
        SiteError, PlanError: before anything runs, and for what cannot be told apart by rows. RecordError: where what
            is there is damaged, or the data gives something else than the first time.
    """
    from gaff.address.resolve import need_module
    from gaff.harvesting.engines import engine_of
    from gaff.harvesting.options import HarvestOptions
    from gaff.harvesting.progress import on_terminal, silent
    from gaff.harvesting.run import harvest as run_harvest
    from gaff.harvesting.sequences import is_table, known_inputs, table_loader

    if is_table(data):
        need_module(model)
        data = table_loader(data, batch, model)
        inputs = inputs or known_inputs(model, data)
    options = HarvestOptions(
        rows, loss, inputs, mask, labels or {}, reduce, top,
        (sample_norms,) if isinstance(sample_norms, str) else sample_norms, dtype, nonfinite, shard, training,
        accept_changes,
    )  # fmt: skip
    norms = None if options.sample_norms is None else partial(_sample_norms, options.sample_norms)
    with on_terminal() if progress else nullcontext(silent) as tell:
        return run_harvest(model, data, patterns, out, options, progress=tell, engine=engine_of(engine), norms=norms)


def _sample_norms(patterns: Sequence[str], model: nn.Module) -> SampleNorms:
    """A measurement of one batch, for a harvest."""
    return sample_norms(model, *patterns, reduction="sum")


def trace(
    model: nn.Module,
    /,
    *args: Any,
    backward: Backward | None = None,
    flops: bool = True,
    ops: bool = False,
    pictures: bool = False,
    **kwargs: Any,
) -> Trace:
    """Run ``model(*args, **kwargs)`` once and tell every call: shapes, parameters, time, FLOPs, statistics.

    Args:
        model: any module. It is left as it was: weights, buffers, ``.grad``, training flags, random state. Weights to
            which its own code writes in its forward are not put back, which a note tells.
        backward: gets the output and returns a scalar loss; then gradients are told as well, None ones with the reason.
        flops: count operations by torch's formulas; without it no operation passes through a counter, some 10 us each.
        ops: also every op in the modules' own forwards, with its place in the code in the column of the class.
        pictures: also draw what passes, of the first example: images, feature maps, attention (also inside
            ``scaled_dot_product_attention``, computed from its inputs), tokens by channels; with ``backward`` also
            gradients, and class activation maps (Grad-CAM) of outputs of the model's own children. For
            ``trace.save("x.html")`` and notebooks.

    The number of parameters of a call is of those that its module holds itself, without those of its children. Times
    are of this watched run, in seconds, without what measuring tensors took; on a GPU every call is waited for. FLOPs
    count a multiplication and an addition as two, as ``torch.utils.flop_counter`` does, and are of the forward; a
    call has those inside it. Its memory is that of the tensors that it returns, in bytes. Statistics are of the first
    output tensor. Raises PlanError for what cannot be traced; errors of the model pass through.
    """
    from gaff.inspection.keywords import need_models_own
    from gaff.inspection.tracer import trace_run

    need_models_own(model, kwargs, ("backward", "flops", "ops", "pictures"))
    for name, value in (("flops", flops), ("ops", ops), ("pictures", pictures)):
        need_truth(value, name)
    return trace_run(model, args, kwargs, backward, has_flops=flops, has_ops=ops, has_pictures=pictures)


@overload
def sites(
    model: nn.Module, /, *what: Any, ops: bool = False, names: Literal[False] = False, **inputs: Any
) -> Sites: ...
@overload
def sites(model: nn.Module, /, *what: Any, names: Literal[True], **inputs: Any) -> Names: ...
def sites(model: nn.Module, /, *what: Any, ops: bool = False, names: bool = False, **inputs: Any) -> Sites | Names:
    """What can be addressed in ``model``: a tree to print, rows to use.

    Args:
        model: any module.
        what: patterns (texts, predicates, modules) limit the list; every other value is an example input, with
            which the model is run once, and left as it was, to tell shapes, types and calls.
        ops: also the ops in every module's own forward, with line, shapes, and what made each input; needs an input.
        names: instead of all that, the standard names of a transformer or ResNet (``resid_pre.3``, ``attn.pattern.0``)
            with their addresses; any of them is an address itself, ``names:resid_pre.3``. With an example input the
            model runs once in eval mode and names are held to identities (``resid_mid = resid_pre + attn.out``); one
            that fails is refused for this model from then on.
        inputs: keyword inputs of that run.

    Raises SiteError for a pattern that matches nothing, PlanError for ``ops`` without an input, and for ``names`` of a
    model in which no stack of blocks is recognised.
    """
    from gaff.inspection.keywords import need_models_own

    need_models_own(model, inputs, ("ops", "names"))
    need_truth(ops, "ops")
    if need_truth(names, "names"):
        from gaff.inspection.names import list_names

        if ops or any(isinstance(one, str) for one in what):
            raise PlanError("names=True lists standard names alone: expected no patterns and no ops beside it")
        return list_names(model, what, inputs)
    from gaff.inspection.sites import list_sites

    return list_sites(model, what, inputs, ops=ops)


def watch(
    model: nn.Module | Mapping[str, nn.Module] | None = None, optimizer: Any = None, **options: Unpack[WatchOptions]
) -> Watch:
    """Watch a training run: statistics of activations, gradients, weights and updates, judged by health rules.

    Watches from the call on; ``remove()`` or the end of a ``with`` block ends it. Computes nothing else than a bare
    run, bit for bit; a failure of its own ends the watching, never the training.

    Args:
        model: one, or several by name; None: whatever is trained in this process, found by itself.
        optimizer: one or a list: only their steps count. None: all that own parameters of the models.
        out: a new folder for the record, see ``gaff.load``; None keeps no record, only findings.
        only, skip: patterns of modules, such as ``["layer4.*"]``: which are looked at.
        every: look at each nth step. None: as often as ``budget`` allows, and more often in the first steps.
        budget: the share of the time that looking may take.
        rules_off: names of health rules that are not asked (docs/rules).
        keep_batch: write the batch of a step in which a NaN, a spike of the loss or an exception came, with weights and
            random state, into ``out``: for ``gaff replay``. Needs safetensors.
        tell: called with lines for a terminal, from another thread: alarms at once, progress every ten seconds.

    Statistics are computed where the tensors are; values on a GPU are read by another thread. One thread trains: runs
    of others are not seen. Raises SiteError for a filter that names nothing, PlanError for what cannot be done,
    RecordError where ``out`` holds a run already.
    """
    from gaff.training.watch.handle import make_watch

    return make_watch(model, optimizer, options)
