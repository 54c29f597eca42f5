"""The weights of fused attention, which it does not return: told from its inputs, or edited, by the plain formula.

``attend`` runs an op of attention of which somebody asks for ``:weights``. Who looks gets ``Weights``, of which only
what is kept is ever made. Where an edit acts, the op is not run: the formula stands in for it, with the edited weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gaff.address.grammar import ATTENTIONS, Site
from gaff.compat import attention
from gaff.compat.checkpoints import saved_plainly
from gaff.compat.modes import outside_modes, without_autocast
from gaff.engine.clock import Run
from gaff.engine.crossing import Crossing
from gaff.engine.ops.calls import OpEvent
from gaff.engine.ops.names import is_torchs
from gaff.engine.streams import Act, EditStream, Stream
from gaff.keep import Part

WRITTEN_OUT = "attention whose weights are edited was computed as softmax(query key^T) value, not by torch's fused op"
OF_OTHERS = "an op of a library's of this name is not torch's own, and nothing tells what it computes"

# What each argument is called, in torch's order; of flex_attention those of the op that its Python function calls.
_SHARED = ("query", "key", "value")
_BUFFERS = ("score_mod_other_buffers", "mask_mod_other_buffers")
_NAMES = {
    ATTENTIONS[0]: (*_SHARED, "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ATTENTIONS[1]: (*_SHARED, "score_mod", "block_mask", "scale", "kernel_options", *_BUFFERS),
}


class Weights:
    """The weights of one call of attention, as [..., queries, keys]: what its softmax gives, before dropout.

    ``untold`` says why they cannot be told, and is empty where they can: then ``make`` computes them, as torch's own
    plain path does and in the dtype in which attention gets its query. ``edited`` are what an edit made of them. Heads
    that the caller has laid into the rows of another one (``_packed``: how it was) are heads here.
    """

    def __init__(self, op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_flex = op == ATTENTIONS[1]  # which also returns sums and maxima of its scores
        self._given = {**dict(zip(_NAMES[op], args, strict=False)), **kwargs}
        self.edited: Tensor | None = None
        self.untold = self._why_untold() if is_torchs(func) else OF_OTHERS
        self._packed = self._unpack() if not (self.is_flex or self.untold) else ()
        self._is_grouped = self.is_flex or bool(self._given.get("enable_gqa") or self._packed)
        tensors = {name: value for name, value in self._given.items() if isinstance(value, Tensor)}
        self._dtypes = {name: attention.cast_to(tensor) for name, tensor in tensors.items()}  # as autocast is now

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of all weights. Only of those that can be told, of a call that has not failed."""
        query, key = self._given["query"], self._given["key"]
        heads = query.shape[-3:-2] if self._is_grouped else key.shape[-3:-2]
        batch = torch.broadcast_shapes(query.shape[:-2], (*key.shape[:-3], *heads))
        return torch.Size((*batch, query.shape[-2], key.shape[-2]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which attention gets its query. Only of weights that can be told."""
        return self._dtypes["query"]

    def part_of(self, reduce: Any) -> Part | None:
        """``reduce`` where only that part of the weights would be made: of all dimensions but that of the keys."""
        is_part = isinstance(reduce, Part) and self.edited is None and reduce.dim not in (-1, len(self.shape) - 1)
        return reduce if is_part else None

    def size_bytes(self, part: Part | None) -> int:
        """Bytes of the weights, or of a part of them. Raises PlanError for a part that is not there."""
        whole = torch.empty(self.shape, dtype=self.dtype, device="meta")
        made = whole if part is None else part(whole)
        return made.numel() * made.element_size()

    def make(self, part: Part | None) -> Tensor:
        """The weights, or only ``part`` of them, as ``part_of`` has accepted it; as edited where they were.

        Unseen by whoever counts operations or keeps what autograd saves, such as a checkpoint: the model does not
        compute them. With an autograd graph where grad mode is on.
        """
        if self.edited is not None:
            return self.edited
        with ExitStack() as around:
            around.enter_context(outside_modes())
            if torch.is_grad_enabled():
                around.enter_context(saved_plainly())
            return self.compute(part)

    def compute(self, part: Part | None = None) -> Tensor:
        """As ``make``, in the open: a computation of the model itself."""
        with without_autocast(self._given["query"].device):
            return attention.safe_softmax(self._scores(part), -1).to(self.dtype)

    def scores(self, part: Part | None = None) -> Tensor:
        """What the weights are the softmax of, scaled and masked; only ``part`` of them, as ``part_of`` accepts it."""
        with without_autocast(self._given["query"].device):
            return self._scores(part)

    def output(self, weights: Tensor) -> Tensor:
        """What attention returns with these ``weights``; dropout draws anew from torch's random state, as in the op."""
        with without_autocast(weights.device):
            value = self._grouped(self._cast("value"))
            if self.is_flex:
                return weights @ value.to(self.dtype)
            sums = attention.sums_in(self.dtype)
            dropout = self._given.get("dropout_p") or 0.0
            weights = functional.dropout(weights.to(sums), dropout) if dropout else weights.to(sums)
            output = (weights @ value.to(sums)).to(self.dtype)
            return output.reshape(*self._packed, output.shape[-1]) if self._packed else output

    def put(self, output: Any, new: Tensor) -> Any:
        """What the op returned with ``new`` in the place of its first tensor; the others of ``flex_attention`` stay."""
        return (new, *output[1:]) if isinstance(output, tuple) else new

    def _unpack(self) -> tuple[int, ...]:
        """Give each head rows of its own; how batch, heads and rows were, empty where they were so already."""
        query, mask = self._given["query"], self._given["attn_mask"]
        if attention.heads_in_rows(query) == 1:
            return ()
        if mask is not None and mask.dim() == 4 and mask.shape[-3:-1] == query.shape[-3:-1]:
            self._given["attn_mask"] = mask.flatten(-3, -2).unsqueeze(-2)
        self._given["query"] = query.flatten(-3, -2).unsqueeze(-2)
        return tuple(query.shape[:-1])

    def _why_untold(self) -> str:
        given = self._given
        odd = [name for name in _SHARED if not attention.is_plain(given.get(name))]
        if odd:
            return f"attention over a {_kind(given.get(odd[0]))} ({odd[0]}) is not what the plain formula says"
        device = given["query"].device
        mask = given["attn_mask"] = attention.opened_mask(given.get("attn_mask"), device)
        if mask is not None and not attention.is_plain(mask):
            return f"its attn_mask is a {_kind(mask)}, of which the plain formula knows nothing"
        return ""

    def _cast(self, name: str) -> Tensor:
        """An argument as autocast hands it to attention."""
        tensor: Tensor = self._given[name]
        return tensor.to(self._dtypes[name])

    def _grouped(self, tensor: Tensor) -> Tensor:
        """Keys or values with a head for each of the query's; groups of these share one."""
        heads = self._given["query"].shape[-3] if self._is_grouped else 0
        return tensor.repeat_interleave(heads // tensor.shape[-3], -3) if self._is_grouped else tensor

    def _scores(self, part: Part | None) -> Tensor:
        """Scores as softmax gets them: scaled and masked. With a ``part`` all that is too much is left out first."""
        query, key = self._cast("query"), self._grouped(self._cast("key"))
        at = [torch.arange(size, device=query.device) for size in self.shape]
        if part is not None:
            dim = part.dim % len(self.shape)
            part = replace(part, dim=dim - len(self.shape))
            at[dim] = replace(part, dim=0)(at[dim])
            query = part(query.expand(*self.shape[:-2], *query.shape[-2:]))
            key = key if part.dim == -2 else part(key.expand(*self.shape[:-2], *key.shape[-2:]))
        scale = self._given.get("scale")
        scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale  # of no features all scores are 0
        if self.is_flex:
            return self._flexed(query, key, scale, at)
        root, sums = math.sqrt(abs(scale)), attention.sums_in(self.dtype)  # as torch, which multiplies both by the root
        scores = (query.to(sums) * math.copysign(root, scale)) @ (key.to(sums).transpose(-2, -1) * root)
        if self._given.get("attn_mask") is not None:
            mask = self._cast("attn_mask")
            mask = mask if part is None else part(mask.expand(self.shape))
            scores = scores + (mask if mask.dtype != torch.bool else _bias(mask, sums))
        if self._given.get("is_causal"):
            scores = scores + _bias(at[-1] <= at[-2][:, None], sums)
        return scores

    def _flexed(self, query: Tensor, key: Tensor, scale: float, at: Sequence[Tensor]) -> Tensor:
        given = self._given
        sums = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = (query.to(sums) @ key.to(sums).transpose(-2, -1)) * scale
        score_buffers, mask_buffers = (given.get(name, ()) for name in _BUFFERS)
        mods = given["score_mod"], given["block_mask"][-1]
        return attention.flex_scores(scores, at, mods, (score_buffers, mask_buffers))


class WeightsTap:
    """Tells a stream of the weights of attention, by ``tell``; hung among those who hear of the op's output."""

    def __init__(self, site: Site, stream: Stream) -> None:
        self._site = site
        self._stream = stream

    def __call__(self, output: Any, run: Run, call: int) -> None:
        """The output itself is not asked for."""

    def tell(self, weights: Weights, run: Run, call: int) -> None:
        """Hand the weights to the stream, which makes what it keeps, or say why they cannot be told."""
        if self._site.call not in (None, call):
            return
        if weights.untold:
            self._stream.refuse(run, call, weights.untold)
        else:
            self._stream.add(weights, run, call)


class WeightsChange(Act):
    """An edit of the weights. ``weigh`` makes it, before the op has an output; to that nothing is done any more."""

    def __init__(self, site: Site, stream: EditStream) -> None:
        self._site = site
        self._stream = stream

    def __call__(self, value: Any, given: Any, crossing: Crossing) -> None:
        """The output itself is not edited."""

    def acts(self, crossing: Crossing) -> bool:
        """Whether the site is about this call."""
        return self._site.call in (None, crossing.call)

    def weigh(self, weights: Tensor, crossing: Crossing) -> Tensor:
        """What attention goes on with in the place of ``weights``."""
        try:
            return self._stream.change(weights, crossing)
        except Exception as error:
            crossing.run.fail(error)
            raise

    def refuse(self, crossing: Crossing, reason: str) -> None:
        """Raises ExactnessError while the session is open: the weights cannot be told, and so not be edited."""
        self._stream.refuse(crossing.run, crossing.call, reason)


def attend(name: str, events: list[OpEvent], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op of attention, or the formula with edited weights in its place; tell the weights. What it returns.

    ``events``: one for each session that asks for something of this op, edits first.
    """
    nodes = [event.node for event in events if event.node is not None]
    asked = (one for node in nodes for one in (*node.exit.taps, *node.exit.acts))
    if not any(isinstance(one, (WeightsTap, WeightsChange)) for one in asked):
        return func(*args, **kwargs)
    weights = Weights(name, func, args, kwargs)
    new = _edited(weights, events)
    output = func(*args, **kwargs) if new is None or weights.is_flex else new
    for event in events:
        run, node = event.part.run, event.node
        if run is not None and node is not None:
            for tap in (one for one in node.exit.taps if isinstance(one, WeightsTap)):
                tap.tell(weights, run, event.part.call)
    return output if new is None else weights.put(output, new)


def _edited(weights: Weights, events: list[OpEvent]) -> Tensor | None:
    """The output of attention with its weights edited; None where no edit acts, and the op itself is to be run."""
    acting = []
    for event in events:
        changes = [one for one in event.node.exit.acts if isinstance(one, WeightsChange)] if event.node else []
        crossing = event.crossing() if changes else None
        if crossing is not None:
            acting += [(event, change, crossing) for change in changes if change.acts(crossing)]
    if acting and weights.untold:
        acting[0][1].refuse(acting[0][2], weights.untold)
    if not acting or weights.untold:
        return None
    new = whole = weights.compute()
    for event, change, crossing in acting:
        before, new = new, change.weigh(new, crossing)
        notes = event.part.scope.notes
        if new is not before and WRITTEN_OUT not in notes:
            notes.append(WRITTEN_OUT)
    if new is whole:
        return None
    weights.edited = new
    return weights.output(new)


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that only what is ``seen`` is left: 0 there, -inf elsewhere."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)


def _kind(value: Any) -> str:
    """What a message calls an argument that is no ordinary tensor."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "nested tensor" if value.is_nested else f"tensor of {type(value).__name__}, {value.layout}"
