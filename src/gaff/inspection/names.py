"""Whether standard names tell the truth in a model: identities between what passes at them, in one run.

``gaff.address.names`` finds addresses by the structure of a model. Here the model runs once, and sums, norms and matrix
products that must hold between the values are computed: the residual stream is the sum of what is added to it,
attention weights sum to one and mix the values, logits are the unembedding of the final norm. A name that fails its
identity is refused for this model from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site
from gaff.address.names import Block, Stack, refused_names, stacks_of
from gaff.address.nested import iter_tensors
from gaff.address.resolve import by_path, need_module, resolve, unwrap
from gaff.errors import GaffError, PlanError
from gaff.inspection.untouched import untouched
from gaff.sessions.capture import Capture
from gaff.sessions.plan import Plan
from gaff.sessions.request import maybe
from gaff.views.notebook import Shown, cell, table_html
from gaff.views.text import counted, table

_CLOSE = 2e-4  # of the largest number: what rounding in another order explains, in float32


@dataclass(frozen=True, slots=True)
class NameRow:
    """One standard name: its address, and the identity that it was found to hold; empty where none was asked."""

    name: str
    address: str
    identity: str = ""


class Names(Mapping[str, str]):
    """The standard names of a model: a mapping from name to address, in the order in which they pass.

    ``rows`` are data; ``refused`` holds names whose identity does not hold in this model, with the reason.
    """

    def __init__(self, model: str, rows: list[NameRow], refused: dict[str, str], *, was_run: bool) -> None:
        self.model = model
        self.rows = tuple(rows)
        self.refused = refused
        self._was_run = was_run
        self._by_name = {row.name: row.address for row in rows}

    def __getitem__(self, name: str) -> str:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def to_dict(self) -> dict[str, Any]:
        """Rows and refused names as plain values that JSON takes."""
        return {"model": self.model, "names": [asdict(row) for row in self.rows], "refused": self.refused}

    def __str__(self) -> str:
        told = table(("name", "address", "identity"), [(row.name, row.address, row.identity) for row in self.rows])
        return "\n".join([told, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(row.name, row.address, row.identity) for row in self.rows]
        title = f"{self.model}: {counted(len(self.rows), 'name')}"
        return cell(title, Shown(table_html(("name", "address", "identity"), rows)), *self._notes())

    def _notes(self) -> list[str]:
        told = [f"note: {name} is refused: {why}" for name, why in self.refused.items()]
        if not self._was_run:
            told.append("note: found by structure alone; with an example input identities are asked as well")
        return told


def list_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Names:
    """The standard names of ``model``; with an example input it runs once in eval mode, and identities are asked.

    The model is left as it was. Raises PlanError where no stack of blocks is recognised.
    """
    need_module(model)
    stacks = stacks_of(by_path(model))
    kind = type(unwrap(model)).__name__
    if not stacks:
        raise PlanError(f"{kind} has no standard names: no list of blocks with attention and an MLP was recognised")
    known = {name: site for stack in stacks for name, site in stack.names().items()}
    if not args and not kwargs:
        refused = refused_names(unwrap(model))
        rows = [NameRow(name, str(site)) for name, site in known.items() if name not in refused]
        return Names(kind, rows, dict(refused), was_run=False)
    values = _values(model, known, args, kwargs)
    held, failed = _judge(model, stacks, values)
    missing = {name: "it did not pass in this run" for name in known if name not in values}
    refused = refused_names(unwrap(model))
    refused.clear()
    refused |= missing | failed
    rows = [NameRow(name, str(site), held.get(name, "")) for name, site in known.items() if name not in refused]
    return Names(kind, rows, dict(refused), was_run=True)


def _values(
    model: nn.Module, known: Mapping[str, Site], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """The first tensor that passes at each name, in one run in eval mode without gradients, at the first call."""
    plan = Plan.of(*(maybe(str(site)) for site in dict.fromkeys(known.values())))
    inputs = [tensor for _, tensor in iter_tensors((args, kwargs))]
    was_training = {module: module.training for module in model.modules()}
    with untouched(model, inputs), Capture(model, plan, {}) as got:
        model.eval()
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        finally:
            for module, mode in was_training.items():
                module.training = mode
    found: dict[str, Tensor] = {}
    for name, site in known.items():
        events = got.all(str(site)) if str(site) in got else []
        tensors = [tensor for _, tensor in iter_tensors(events[:1])]
        if tensors and tensors[0].is_floating_point():
            found[name] = tensors[0]
    return found


class Identity(NamedTuple):
    """Something that must hold between values: which names it speaks for, in words, and both sides.

    ``more``: names that it confirms where it holds, and that are not to blame where it does not.
    """

    names: tuple[str, ...]
    text: str
    left: Callable[[], Tensor]
    right: Callable[[], Tensor]
    more: tuple[str, ...] = ()


def _judge(
    model: nn.Module, stacks: list[Stack], values: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, str]]:
    """By name the identity that holds, and by name why one does not."""
    held: dict[str, str] = {}
    failed: dict[str, str] = {}
    for stack in stacks:
        prefix = stack.prefix
        own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        for identity in _identities(model, stack, own):
            why = _difference(identity)
            for name in identity.names if why else (*identity.names, *identity.more):
                if why:
                    failed[f"{prefix}{name}"] = f"{identity.text} does not hold: {why}"
                else:
                    held.setdefault(f"{prefix}{name}", identity.text)
    return {name: text for name, text in held.items() if name not in failed}, failed


def _difference(identity: Identity) -> str:
    """What keeps an identity from holding; empty where it does."""
    try:
        left, right = identity.left().double(), identity.right().double()
        if left.shape != right.shape and left.shape[-1:] == right.shape[-1:] and left.numel() == right.numel():
            right = right.reshape(left.shape)  # some modules are given all positions as rows
        if left.shape != right.shape:
            return f"shapes {list(left.shape)} and {list(right.shape)}"
        far = (left - right).abs().max().item()
        size = max(left.abs().max().item(), right.abs().max().item(), 1e-6)
    except (RuntimeError, TypeError, ValueError, AttributeError, GaffError) as error:  # of a module called by itself
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "" if far <= _CLOSE * size else f"they differ by {far:.3g}, where the largest number is {size:.3g}"


def _identities(model: nn.Module, stack: Stack, values: Mapping[str, Tensor]) -> Iterator[Identity]:
    """Everything that must hold between the values that there are."""

    def call(site: Site, given: Tensor) -> Tensor:
        [found] = resolve(model, Site(site.path))
        with torch.no_grad():
            output = found.module(given)
        return next(tensor for _, tensor in iter_tensors(output))

    def have(*names: str) -> bool:
        return all(name in values for name in names)

    for number, block in enumerate(stack.blocks):
        yield from _of_block(block, number, values, call, have)
        post, following = f"resid_post.{number}", f"resid_pre.{number + 1}"
        if have(post, following):
            yield _same(values, (post,), f"{post} = {following}", post, following)
    last = f"resid_post.{len(stack.blocks) - 1}"
    if have("ln_final", last):
        norm = stack.around["ln_final"]
        yield Identity(("ln_final",), f"ln_final = norm({last})", lambda: values["ln_final"],
                       lambda: call(norm, values[last]))  # fmt: skip
    if have("unembed", "ln_final"):
        head = stack.around["unembed"]
        yield Identity(("unembed",), "unembed = W(ln_final)", lambda: values["unembed"],
                       lambda: _as_wanted(call(head, values["ln_final"]), values["unembed"]))  # fmt: skip


def _of_block(
    block: Block,
    number: int,
    values: Mapping[str, Tensor],
    call: Callable[[Site, Tensor], Tensor],
    have: Callable[..., bool],
) -> Iterator[Identity]:
    """What must hold inside one block."""
    pre, mid, post, attn, mlp = (
        f"{one}.{number}" for one in ("resid_pre", "resid_mid", "resid_post", "attn.out", "mlp.out")
    )

    def norm_of(name: str, *parts: str) -> Tensor:
        return call(block.sites[name], _sum(values, *parts))

    crossed, cross = f"resid_cross.{number}", f"cross.out.{number}"
    if block.order == "sum":
        main, short = f"main.{number}", f"shortcut.{number}"
        yield Identity((main, short, post), f"{post} = relu({main} + {short})", lambda: values[post],
                       lambda: _sum(values, main, short).relu())  # fmt: skip
        return
    if block.order == "parallel" and have(pre, attn, mlp, post):
        yield Identity((attn, mlp, post), f"{post} = {pre} + {attn} + {mlp}", lambda: values[post],
                       lambda: _sum(values, pre, attn, mlp), (pre,))  # fmt: skip
    elif block.order == "after":
        if have(pre, attn, mid):
            yield Identity((attn, mid), f"{mid} = norm({pre} + {attn})", lambda: values[mid],
                           lambda: norm_of("resid_mid", pre, attn), (pre,))  # fmt: skip
        if have(mid, mlp, post):
            yield Identity((mlp, post), f"{post} = norm({mid} + {mlp})", lambda: values[post],
                           lambda: norm_of("resid_post", mid, mlp))  # fmt: skip
    else:
        after = crossed if have(crossed, cross) else mid
        if have(pre, attn, after):
            yield Identity((attn, after), f"{after} = {pre} + {attn}", lambda: values[after],
                           lambda: _sum(values, pre, attn), (pre,))  # fmt: skip
        if have(crossed, cross, mid):
            yield Identity((cross, mid), f"{mid} = {crossed} + {cross}", lambda: values[mid],
                           lambda: _sum(values, crossed, cross))  # fmt: skip
        if have(mid, mlp, post):
            yield Identity((mlp, post), f"{post} = {mid} + {mlp}", lambda: values[post], lambda: _sum(values, mid, mlp))
    yield from _of_parts(block, number, values, call, have)


def _of_parts(
    block: Block,
    number: int,
    values: Mapping[str, Tensor],
    call: Callable[[Site, Tensor], Tensor],
    have: Callable[..., bool],
) -> Iterator[Identity]:
    """What must hold inside attention and MLP: each layer's output is that layer of what stands before it."""
    at = {name: f"{name}.{number}" for name in (*block.sites, "resid_mid", "resid_pre")}
    pattern, value, mixed = at.get("attn.pattern", ""), at.get("attn.v", ""), at.get("attn.z", "")
    if have(pattern):
        yield Identity((pattern,), f"rows of {pattern} sum to 1", lambda: values[pattern].sum(-1),
                       lambda: torch.ones_like(values[pattern][..., 0]))  # fmt: skip
    if have(pattern, value, mixed):
        yield Identity((pattern, mixed), f"{mixed} = {pattern} @ {value}", lambda: _flat(values[mixed]),
                       lambda: _mixed(values[pattern], values[value], _flat(values[mixed]).shape[-1]))  # fmt: skip
    before_mlp = "ln1" if block.order == "parallel" else "resid_mid"
    for name, wanted in _LAYERS:
        given = {"ln1": "resid_pre", "ln2": before_mlp}.get(wanted, wanted) if wanted not in block.sites else wanted
        one, other = at.get(name, ""), at.get(given, "")
        if not have(one, other) or (name in ("attn.out", "mlp.out") and block.sites[name].path.endswith(_BEHIND)):
            continue
        names = (one, other) if wanted in ("attn.z", "mlp.post") else (one,)
        yield Identity(names, f"{one} = f({other})", partial(values.__getitem__, one),
                       partial(_called, call, block.sites[name], values, other))  # fmt: skip


# What each layer is given, by its name; and how the paths end of what scales or normalises a layer's output.
_LAYERS = (("ln1", "resid_pre"), ("ln2", "resid_mid"), ("attn.q", "ln1"), ("attn.k", "ln1"), ("attn.v", "ln1"),
           ("attn.out", "attn.z"), ("mlp.pre", "ln2"), ("mlp.pre_linear", "ln2"), ("mlp.out", "mlp.post"))  # fmt: skip
_BEHIND = ("norm", "scale1", "scale2", "ls1", "ls2")


def _called(call: Callable[[Site, Tensor], Tensor], site: Site, values: Mapping[str, Tensor], name: str) -> Tensor:
    return call(site, values[name])


def _mixed(pattern: Tensor, value: Tensor, width: int) -> Tensor:
    """Values mixed by attention weights ``[batch, heads, queries, keys]``, as ``[batch, queries, width]``.

    ``width`` is that of all heads together; several heads may share the values of one.
    """
    batch, heads = pattern.shape[:2]
    flat = _flat(value)
    groups = max(1, flat.shape[-1] * heads // width)
    split = flat.view(batch, -1, groups, width // heads).transpose(1, 2).repeat_interleave(heads // groups, 1)
    return (pattern @ split).transpose(1, 2).reshape(batch, pattern.shape[2], -1)


def _flat(value: Tensor) -> Tensor:
    """``[batch, positions, heads, width]`` as ``[batch, positions, heads * width]``."""
    return value.flatten(2) if value.dim() == 4 else value


def _as_wanted(found: Tensor, wanted: Tensor) -> Tensor:
    """As many last positions as are wanted, of a classifier the first one or the mean, whichever is nearer."""
    if found.dim() == wanted.dim() == 3:
        return found[:, -wanted.shape[1] :]
    if found.dim() == 3 and wanted.dim() == 2 and found.shape[::2] == wanted.shape:
        return min((found[:, 0], found.mean(1)), key=lambda one: float((one - wanted).abs().max()))
    return found


def _sum(values: Mapping[str, Tensor], *names: str) -> Tensor:
    found = values[names[0]]
    for name in names[1:]:
        found = found + values[name].reshape(found.shape)
    return found


def _same(values: Mapping[str, Tensor], names: tuple[str, ...], text: str, one: str, other: str) -> Identity:
    return Identity(names, text, lambda: values[one], lambda: values[other])
