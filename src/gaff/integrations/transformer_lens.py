"""TransformerLens' ``run_with_cache`` and ``run_with_hooks`` by its hook names, for models as they are.

    from gaff.integrations.transformer_lens import run_with_cache, run_with_hooks

    logits, cache = run_with_cache(model, input_ids)
    cache["pattern", 3]; cache["blocks.3.hook_resid_post"]

Hook names are translated to standard names (``gaff.sites(model, names=True)``), and these to addresses. Values are
those of the model: weights are not folded or centred, and what stands in one matrix for several of TransformerLens'
(queries, keys and values of GPT-2) has no hook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from gaff.address.grammar import nearest
from gaff.address.names import looked_at, standard_names
from gaff.address.nested import iter_tensors
from gaff.address.resolve import by_path, unwrap
from gaff.errors import PlanError, SiteError
from gaff.inspection.names import list_names
from gaff.sessions.capture import Capture
from gaff.sessions.edit import edit
from gaff.sessions.plan import Plan

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_INSIDE = {
    "hook_resid_pre": "resid_pre", "hook_resid_mid": "resid_mid", "hook_resid_post": "resid_post",
    "hook_attn_out": "attn.out", "hook_mlp_out": "mlp.out", "ln1.hook_normalized": "ln1", "ln2.hook_normalized": "ln2",
    "attn.hook_q": "attn.q", "attn.hook_k": "attn.k", "attn.hook_v": "attn.v", "attn.hook_z": "attn.z",
    "attn.hook_pattern": "attn.pattern", "mlp.hook_pre": "mlp.pre", "mlp.hook_pre_linear": "mlp.pre_linear",
    "mlp.hook_post": "mlp.post",
}  # fmt: skip
_AROUND = {"hook_embed": "embed", "hook_pos_embed": "pos_embed", "ln_final.hook_normalized": "ln_final"}
_SHORT = {"resid_pre": "hook_resid_pre", "resid_mid": "hook_resid_mid", "resid_post": "hook_resid_post",
          "attn_out": "hook_attn_out", "mlp_out": "hook_mlp_out", "pre": "mlp.hook_pre", "post": "mlp.hook_post",
          **{one: f"attn.hook_{one}" for one in ("q", "k", "v", "z", "pattern")}}  # fmt: skip
_OWN = ("names_filter", "remove_batch_dim", "fwd_hooks")
# Options of TransformerLens' functions and of its models' forward that mean something which is not done here.
_NOT_HERE = {
    "bwd_hooks": "gaff.edit of a name's gradient, such as 'names:resid_post.3:grad_output'",
    "incl_bwd": "gaff.capture of a name's gradient, such as 'names:resid_post.3:grad_output'",
    "pos_slice": "a slice of what is kept", "stop_at_layer": "gaff.take, which stops by itself", "start_at_layer": "",
    "return_type": "what the model itself returns", "return_cache_object": "dict(cache)", "device": "tensor.to(device)",
    "reset_hooks": "", "reset_hooks_end": "", "clear_contexts": "", "loss_per_token": "", "prepend_bos": "",
    "padding_side": "", "tokens": "", "shortformer_pos_embed": "", "past_kv_cache": "",
}  # fmt: skip
_KINDS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}  # short names of parts
_BY_HEAD = ("attn.q", "attn.k", "attn.v", "attn.z")
_HEAD_WIDTHS = {"attn.q": ("qk_head_dim",), "attn.k": ("qk_head_dim",), "attn.v": ("v_head_dim",),
                "attn.z": ("v_head_dim",)}  # fmt: skip
_HEAD_WIDTH = ("head_dim", "attention_head_size", "attn_head_size", "head_size", "key_value_proj_dim", "d_kv")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "n_query_groups")
_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")


@dataclass(frozen=True, slots=True)
class HookPoint:
    """What a hook is given beside the activation: its ``name``, and ``layer()``, the number of its block."""

    name: str

    def layer(self) -> int:
        """The number of the block. Raises PlanError outside of blocks."""
        found = _BLOCK.fullmatch(self.name)
        if found is None:
            raise PlanError(f"{self.name} is in no block: it has no layer")
        return int(found[1])


_LOOKED: dict[int, Any] = {}  # models whose names were held to identities, by identity


def hook_names(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, str]:
    """By hook name of TransformerLens the standard name of this model, in the order in which they pass.

    With arguments for the model, names are held to identities first, by one more run on copies of them, once for each
    model; not while a hook is on one of its modules, as while it is edited or captured, but for those that transformers
    leaves there once it was asked for hidden states. Raises PlanError for a model without such names.
    """
    hooks = [
        hook for one in model.modules() for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values())
    ]
    is_hooked = any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
    if (args or kwargs) and not is_hooked and id(model) not in _LOOKED:
        list_names(model, args, dict(kwargs or {}))
        _LOOKED[id(model)] = finalize(model, _LOOKED.pop, id(model), None)
    refused = looked_at(unwrap(model)).refused
    known = [name for name in standard_names(by_path(model)) if name not in refused]
    inside = {one: hook for hook, one in _INSIDE.items()}
    around = {one: hook for hook, one in _AROUND.items()}
    found = {}
    for name in known:
        base, _, number = name.rpartition(".")
        if name in around:
            found[around[name]] = name
        elif base in inside and number.isdigit():
            found[f"blocks.{number}.{inside[base]}"] = name
    if not found:
        why = "no blocks with attention and an MLP were recognised"
        if known:
            why = "they begin with a part of the model, see gaff.sites(model, names=True)"
        raise PlanError(f"{type(model).__name__} has no hook names: {why}")
    return found


class ActivationCache(Mapping[str, Tensor]):
    """What ``run_with_cache`` has kept, by hook name, or short: ``cache["pattern", 3]``, ``cache["resid_post", -1]``.

    Queries, keys, values and z are ``[batch, position, head, width]``; patterns ``[batch, head, query, key]``.
    """

    def __init__(self, values: dict[str, Tensor], layers: int) -> None:
        self._values = values
        self.layers = layers  # how many blocks the model has, kept or not

    def __getitem__(self, name: str | tuple[Any, ...]) -> Tensor:
        full = self._full(name)
        if full not in self._values:
            short = ", ".join(nearest(full, list(self._values)))
            near = (
                f"; nearest: {short}" if short else f": it has {len(self._values)} hooks, such as {[*self._values][:3]}"
            )
            raise SiteError(f"{full!r} is not in the cache{near if self._values else ', which is empty'}")
        return self._values[full]

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, (str, tuple)) and self._full(name) in self._values
        except SiteError:
            return False

    def get(self, name: Any, default: Any = None, /) -> Any:
        """What was kept at a hook, ``default`` where nothing was."""
        try:
            return self[name]
        except SiteError:
            return default

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def stack_activation(self, name: str, layer: int = -1) -> Tensor:
        """One activation of all blocks before ``layer`` (-1: of all), as ``[layer, ...]``."""
        end = self._end(layer)
        if not end:
            raise SiteError(f"{name}: there is no block before layer {layer}: expected 1 to {self.layers}, or -1")
        return torch.stack([self[name, at] for at in range(end)])

    def accumulated_resid(self, layer: int | None = None, *, incl_mid: bool = False) -> Tensor:
        """The residual stream at the entry of each block up to ``layer`` (None: to the end, with what comes out)."""
        end = self.layers if layer is None else self._end(layer)
        parts = []
        for at in range(end):
            parts += [self["resid_pre", at], *([self["resid_mid", at]] if incl_mid else [])]
        last = [self["resid_post", -1]] if end == self.layers else [self["resid_pre", end]]
        return torch.stack([*parts, *last])

    def _end(self, layer: int) -> int:
        """The number of a block, or of all where it is -1. Raises SiteError for a block that there is not."""
        if not -1 <= layer <= self.layers:
            raise SiteError(
                f"layer {layer}: there are {self.layers} blocks: expected 0 to {self.layers}, or -1 for all"
            )
        return self.layers if layer == -1 else layer

    def _full(self, name: str | tuple[Any, ...]) -> str:
        if isinstance(name, str):
            return f"hook_{name}" if name not in self._values and f"hook_{name}" in self._values else name
        if not isinstance(name, tuple) or not 2 <= len(name) <= 3 or not isinstance(name[1], int):
            raise SiteError(f"{name!r} names no activation: expected a hook's name, or such as ('resid_post', 3)")
        what, number = str(name[0]), name[1]
        if not -self.layers <= number < self.layers:
            raise SiteError(f"layer {number}: there are {self.layers} blocks")
        block = f"blocks.{number % self.layers}."
        if len(name) == 2:
            return block + _SHORT.get(what, what)
        kind = _KINDS.get(str(name[2]), str(name[2]))
        return block + (f"{kind}.hook_{what}" if kind else f"hook_{what}")


def run_with_cache(
    model: nn.Module,
    *args: Any,
    names_filter: str | Sequence[str] | Callable[[str], bool] | None = None,
    remove_batch_dim: bool = False,
    **kwargs: Any,
) -> tuple[Any, ActivationCache]:
    """Run the model, and keep what passes at the hooks of TransformerLens: what it returns, and the cache.

    Args:
        args, kwargs: what the model is called with.
        names_filter: which hooks: a name, several, or a function of the name; None: all that the model has.
        remove_batch_dim: of a batch of one, values without that dimension.

    Raises SiteError for a hook that the model has not, PlanError for a model without any.
    """
    _need_known(model, args, kwargs)
    known = hook_names(model, args, kwargs)
    chosen = _chosen(known, names_filter)
    plan = Plan.of(*(f"names:{known[hook]}" for hook in chosen), graph=torch.is_grad_enabled())
    with Capture(model, plan, {}) as got:
        output = model(*args, **kwargs)
    values = {hook: got[f"names:{known[hook]}"] for hook in chosen}
    shapes = [tuple(value.shape[:2]) for value in values.values() if value.dim() == 3]
    if (batch := _batch_of(args, kwargs)) is not None:
        shapes.insert(0, batch)
    for hook, value in values.items():  # some modules are given all positions as rows
        full = next((one for one in shapes if value.dim() == 2 and len(value) == one[0] * one[1]), None)
        if full is not None:
            values[hook] = value.unflatten(0, full)
    values = {hook: _by_head(model, known[hook], value) for hook, value in values.items()}
    if remove_batch_dim:
        if any(len(value) != 1 for value in values.values()):
            raise PlanError("remove_batch_dim=True is for a batch of one: expected one, or False")
        values = {hook: value[0] for hook, value in values.items()}
    layers = 1 + max((int(found[1]) for one in known if (found := _BLOCK.fullmatch(one))), default=-1)
    return output, ActivationCache(values, layers)


def run_with_hooks(
    model: nn.Module,
    *args: Any,
    fwd_hooks: Sequence[tuple[str | Callable[[str], bool], Callable[[Tensor, HookPoint], Tensor | None]]] = (),
    **kwargs: Any,
) -> Any:
    """Run the model with functions at hooks of TransformerLens: what it returns.

    ``fwd_hooks``: pairs of a hook's name (or a function of names) and a function ``(activation, hook)`` that returns
    another activation, or None for the same. It is given a copy, and may write into that. Raises as ``run_with_cache``.
    """
    _need_known(model, args, kwargs)
    pairs = fwd_hooks if isinstance(fwd_hooks, Sequence) and not isinstance(fwd_hooks, str) else None
    if pairs is None or not all(isinstance(one, (tuple, list)) and len(one) == 2 and callable(one[1]) for one in pairs):
        raise PlanError(f"fwd_hooks={fwd_hooks!r:.60}: expected pairs of a hook's name and a function")
    known = hook_names(model, args, kwargs)
    batch = _batch_of(args, kwargs)
    chosen = [(hook, function) for which, function in fwd_hooks for hook in _chosen(known, which)]
    places = list(known)
    changes: dict[str, list[Any]] = {}
    for hook, function in sorted(chosen, key=lambda one: places.index(one[0])):  # in the order in which they pass
        changes.setdefault(f"names:{known[hook]}", []).append(_changed(model, known[hook], hook, function, batch))
    if not changes:
        return model(*args, **kwargs)
    with edit(model, changes, {}):
        return model(*args, **kwargs)


def _batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Batch and positions, as the first tensor has them that a model is given."""
    first = next((one for _, one in iter_tensors((args, kwargs)) if one.dim() > 1), None)
    return None if first is None else (first.shape[0], first.shape[1])


def _need_known(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise PlanError for an option that would get lost in the model: one of TransformerLens, or one with a slip in it.

    Models of transformers take any keyword and pass over those that they do not know. A text has no tokens here.
    """
    if any(isinstance(one, str) for one in args):
        raise PlanError("a text was given: expected tokens, such as tokenizer(text, return_tensors='pt').input_ids")
    own = signature(unwrap(model).forward).parameters
    for name in (name for name in kwargs if name not in own):
        if name in _NOT_HERE:
            instead = f": expected {_NOT_HERE[name]}" if _NOT_HERE[name] else ""
            raise PlanError(f"{name}= of TransformerLens is not done here{instead}")
        near = get_close_matches(name, (*_OWN, *_NOT_HERE), 1, 0.8)
        if near:
            raise PlanError(f"{name}= is no option: expected {near[0]}=, or one of the model")


def _chosen(known: Mapping[str, str], which: str | Sequence[str] | Callable[[str], bool] | None) -> list[str]:
    """The hooks that are meant. Raises SiteError for one that there is not."""
    if which is None:
        return list(known)
    if callable(which):
        found = [hook for hook in known if which(hook)]
        if not found:
            raise SiteError(f"{which!r} accepts none of the {len(known)} hooks of this model: {', '.join(known):.200}")
        return found
    wanted = [which] if isinstance(which, str) else list(which)
    missing = next((hook for hook in wanted if hook not in known), None)
    if missing is not None:
        near = ", ".join(nearest(missing, list(known)))
        raise SiteError(f"no hook {missing!r} in this model; nearest: {near}")
    return wanted


def _changed(
    model: nn.Module,
    name: str,
    hook: str,
    function: Callable[[Tensor, HookPoint], Tensor | None],
    batch: tuple[int, ...] | None,
) -> Callable[[Tensor], Tensor]:
    """What calls a function with a value as TransformerLens has it; ``batch``: examples and positions of the input."""

    try:
        is_named = "hook" in signature(function).parameters  # as TransformerLens gives it
    except ValueError:
        raise PlanError(f"{function!r:.60} takes no hook: expected a function of a value and a hook") from None

    def change(value: Tensor) -> Tensor:
        copied = value.clone()
        is_rows = batch is not None and copied.dim() == 2 and len(copied) == batch[0] * batch[1]
        given = copied.unflatten(0, batch) if is_rows else copied  # some modules are given all positions as rows
        given = _by_head(model, name, given)
        point = HookPoint(hook)
        new = function(given, hook=point) if is_named else function(given, point)  # type: ignore[call-arg]
        if new is not None and not isinstance(new, Tensor):
            raise PlanError(f"{hook}: the function returned {new!r:.40}: expected a tensor, or None for the same")
        if new is not None and new.shape != given.shape:
            raise PlanError(f"{hook}: the function returned shape {list(new.shape)}: expected {list(given.shape)}")
        return copied if new is None else new.reshape(value.shape)

    return change


def _by_head(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Heads as a dimension of their own, where a standard name has them side by side.

    Raises PlanError where nothing in the attention tells how many there are: a head would be taken for a feature.
    """
    kind = name.rpartition(".")[0]
    kind = next((one for one in _BY_HEAD if kind == one or kind.endswith(f".{one}")), "")
    if not kind or value.dim() != 3:
        return value
    modules = by_path(model)
    names = standard_names(modules)
    path = names[name].path
    heads = _heads(modules, path, kind, value.shape[-1])
    query = names.get(f"{name.rpartition(kind)[0]}attn.q.{name.rpartition('.')[2]}")
    if heads is not None and kind in ("attn.k", "attn.v") and query is not None:
        heads = _of_keys(modules, query.path, heads, value.shape[-1])
    if heads is None:
        raise PlanError(
            f"{name}: nothing in {path.rpartition('.')[0] or 'the model'} tells how many heads share the "
            f"{value.shape[-1]} features (such as num_heads or head_dim): gaff.edit of names:{name} has them as is"
        )
    split: Tensor = value.unflatten(-1, (heads, -1))
    return split


def _of_keys(modules: Mapping[str, nn.Module], query: str, heads: int, width: int) -> int | None:
    """The number of heads of keys, where all that is known is that of queries: each has the width of one of these.

    ``query``: the path of the layer that makes queries, where there is one; ``width``: the features of all keys.
    """
    weight = getattr(modules.get(query), "weight", None)
    made = len(weight) if isinstance(weight, Tensor) and weight.dim() == 2 else 0
    queries = _heads(modules, query, "attn.q", made) if made else None
    if queries is None or heads != queries or made == width:
        return heads
    size = made // queries
    return width // size if width % size == 0 else None


def _heads(modules: Mapping[str, nn.Module], path: str, kind: str, width: int) -> int | None:
    """How many heads lie side by side in ``width`` features, as the modules around ``path`` in its block tell.

    The nearest counts: layers of one model may have other numbers, and a config tells that of all, or of the encoder.
    """
    while not path.rpartition(".")[2].isdigit() and path:
        path = path.rpartition(".")[0]
        for module in (modules[path], *modules[path].children()):
            for holder in (module, getattr(module, "config", None)):
                if (found := _told_by(holder, kind, width)) is not None:
                    return found
    return None


def _told_by(holder: Any, kind: str, width: int) -> int | None:
    """The number of heads by the width of one, or by their count, as an attention or a config tells it."""
    for name in (*_HEAD_WIDTHS[kind], *_HEAD_WIDTH):
        size = _number(holder, name)
        if size and width % size == 0:
            return width // size
    counts = (*_KEY_COUNTS, *_COUNTS) if kind in ("attn.k", "attn.v") else _COUNTS
    return next((count for name in counts if (count := _number(holder, name)) and width % count == 0), None)


def _number(holder: Any, name: str) -> int:
    """An own attribute that is a whole number, else 0; some configs refuse to tell what layers have their own of."""
    found = getattr(holder, "__dict__", {}).get(name, 0)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0
