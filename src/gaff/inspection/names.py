"""Whether standard names tell the truth in a model: identities between what passes at them, in one run.

``gaff.address.names`` finds addresses by the structure of a model. Here the model runs once, and sums, norms and matrix
products that must hold between the values are computed: the residual stream is the sum of what is added to it,
attention weights sum to one and mix the values, logits are the unembedding of the final norm. A name that fails its
identity is refused for this model from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gaff.address.grammar import Site, parse_site
from gaff.address.names import Block, Stack, is_made_elsewhere, looked_at, stacks_of
from gaff.address.nested import iter_tensors
from gaff.address.resolve import by_path, need_module, resolve, unwrap
from gaff.compat import elements
from gaff.engine.session import Session
from gaff.engine.streams import Stream
from gaff.engine.taps import Tap
from gaff.errors import GaffError, PlanError
from gaff.harvesting.mode import in_mode
from gaff.inspection.op_log import OpLog
from gaff.inspection.untouched import untouched
from gaff.sessions.capture import Capture
from gaff.sessions.plan import Plan
from gaff.sessions.request import maybe
from gaff.views.notebook import Shown, cell, table_html
from gaff.views.text import counted, table

_CLOSE = 2e-4  # of the largest number: what rounding in another order explains, in float32 (chosen)


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
        refused = looked_at(unwrap(model)).refused
        rows = [NameRow(name, str(site)) for name, site in known.items() if name not in refused]
        return Names(kind, rows, dict(refused), was_run=False)
    inputs = [tensor for _, tensor in iter_tensors((args, kwargs))]
    if any(not elements.is_readable(tensor) for tensor in (*model.parameters(), *inputs)):
        raise PlanError(f"{kind} has no values (it is on the meta device, or fake): expected a model that can run")
    with untouched(model, inputs), in_mode(model, training=False), torch.no_grad():
        makers = _Makers(model, {name: site for name, site in known.items() if is_made_elsewhere(name, site)})
        with makers.session:
            values, outputs = _values(model, known, *_copies(args, kwargs))
        held, failed = _judge(model, stacks, values, outputs)
    looked = looked_at(unwrap(model))
    looked.makers |= makers.found()
    looked.was_run = True
    looked.failed |= failed
    looked.missing = {
        name: "it did not pass in the latest run that gaff.sites looked at" for name in known if name not in values
    }
    refused = looked.refused
    rows = [NameRow(name, str(site), held.get(name, "")) for name, site in known.items() if name not in refused]
    return Names(kind, rows, dict(refused), was_run=True)


def _values(
    model: nn.Module, known: Mapping[str, Site], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The first tensor that passes at each name, in one run, at the first call; and what the model returned."""
    plan = Plan.of(*(maybe(str(site)) for site in dict.fromkeys(known.values())))
    with Capture(model, plan, {}) as got:
        output = model(*args, **kwargs)
    found: dict[str, Tensor] = {}
    for name, site in known.items():
        events = got.all(str(site)) if str(site) in got else []
        tensors = [tensor for _, tensor in iter_tensors(events[:1])]
        if tensors and tensors[0].is_floating_point():
            found[name] = tensors[0]
    return found, [tensor for _, tensor in iter_tensors(output)]


def _copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a run that must leave nothing in them: a cache would be longer afterwards.

    Tensors are copied without their autograd graphs, also those that objects hold. Raises PlanError for what cannot be
    copied, such as a generator or a file: the run would use it up.
    """
    copies: dict[int, Any] = {}
    found: list[Any] = [args, kwargs]
    seen: set[int] = set()
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (type, nn.Module)):
            copies[id(one)] = one
        elif isinstance(one, Tensor):
            copies[id(one)] = one.detach().clone()
        elif isinstance(one, Mapping):
            found.extend(one.values())
        elif isinstance(one, (list, tuple, set)):
            found.extend(one)
        else:
            found.extend(getattr(one, "__dict__", {}).values())
    try:
        return deepcopy((args, kwargs), copies)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"names are held to identities in a run on a copy of the input, which cannot be copied ({error}): "
            "expected an input without locks, files and generators"
        ) from error


_SUMS = ("add", "add_", "iadd", "sub", "sub_")  # ops that make a stream


class _Maker(Stream):
    """Notes who has made what comes in at one site, at its first call."""

    def __init__(self, log: OpLog) -> None:
        self.log = log
        self.made = ""

    def add(self, value: Any, run: Any, call: int) -> None:
        """A module is given this value."""
        if not call:
            self.made = next((self.log.producers.of(tensor) for _, tensor in iter_tensors(value)), "")


class _Makers:
    """Notes by name, while ``session`` is open, which op or module makes what comes in at a site."""

    def __init__(self, model: nn.Module, aside: Mapping[str, Site]) -> None:
        log = OpLog(model)
        self._model = model
        self._streams = {name: _Maker(log) for name in aside}
        taps = [Tap(one, self._streams[name]) for name, site in aside.items() for one in resolve(model, site)]
        self.session = Session(model, [*log.taps(), *taps] if taps else [])

    def found(self) -> dict[str, Site]:
        """Who has made the value: an addition, or a module with others inside. What another op makes of the stream,
        such as a copy, is not what goes on around the module; such names are left out."""
        sites = {name: parse_site(stream.made) for name, stream in self._streams.items() if stream.made}
        return {name: site for name, site in sites.items() if site.port == "output" and self._is_sum(site)}

    def _is_sum(self, site: Site) -> bool:
        if site.op is not None:
            return site.op in _SUMS
        return any(True for one in resolve(self._model, Site(site.path)) for _ in one.module.children())


class Identity(NamedTuple):
    """Something that must hold between values: which names it speaks for, in words, and both sides.

    ``more``: names that it confirms where it holds, and that are not to blame where it does not. ``weaker``: the right
    side with half of what is added. Where that is as near as the right side itself, what is added is too small to tell,
    and the identity says nothing. ``is_one``: both sides are one value, of which nothing is computed, and at most its
    type is another.
    """

    names: tuple[str, ...]
    text: str
    left: Callable[[], Tensor]
    right: Callable[[], Tensor]
    more: tuple[str, ...] = ()
    weaker: Callable[[], Tensor] | None = None
    is_one: bool = False


def _judge(
    model: nn.Module, stacks: list[Stack], values: Mapping[str, Tensor], outputs: list[Tensor]
) -> tuple[dict[str, str], dict[str, str]]:
    """By name the identity that holds, and by name why it is refused."""
    held: dict[str, str] = {}
    failed: dict[str, str] = {}
    for stack in stacks:
        prefix = stack.prefix
        own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        silent: set[str] = set()
        for identity in _identities(model, stack, own, outputs):
            why = _difference(identity)
            if why is None:
                silent |= {f"{prefix}{name}" for name in identity.names}
                continue
            for name in identity.names if why else (*identity.names, *identity.more):
                if why:
                    failed[f"{prefix}{name}"] = f"{identity.text} does not hold: {why}"
                else:
                    held.setdefault(f"{prefix}{name}", identity.text)
        for name in own:
            full, (base, _, number) = f"{prefix}{name}", name.rpartition(".")
            mid = f"{prefix}resid_mid.{number}"
            if base == "ln2" and mid in failed:
                failed.setdefault(full, f"it is a norm of {mid}, and {failed[mid]}")
            elif base in _ASKED and full not in held and full not in silent:
                failed.setdefault(
                    full, "no identity of it could be asked: another value that belongs to it was not found"
                )
    return {name: text for name, text in held.items() if name not in failed}, failed


_ASKED = ("resid_mid", "resid_post", "resid_cross", "attn.out", "mlp.out", "cross.out", "main", "shortcut")


# What a layer may raise that is called by itself, without what its model does around it.
_OF_A_LAYER = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, GaffError)


def _difference(identity: Identity) -> str | None:
    """What keeps an identity from holding; empty where it does, None where it cannot tell.

    Each number may differ by what rounding explains: a part of the largest number of what is compared, and some units
    in the last place of the number itself, which may be far larger than what is added to it. Rounding has no direction,
    so that over all numbers the difference must have none either along what is compared: a factor shows there that no
    single number of half precision could show.
    """
    try:
        left, right = identity.left(), identity.right()
        eps = max(torch.finfo(one.dtype).eps for one in (left, right))
        exact = 0.0 if left.dtype == right.dtype else eps
        left, right = left.double(), right.double()
        if left.shape != right.shape and left.shape[-1:] == right.shape[-1:] and left.numel() == right.numel():
            right = right.reshape(left.shape)  # some modules are given all positions as rows
        if left.shape != right.shape:
            return f"shapes {list(left.shape)} and {list(right.shape)}"
        weaker = identity.weaker().double().reshape(left.shape) if identity.weaker is not None else None
    except _OF_A_LAYER as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    added = 2 * (right - weaker).abs() if weaker is not None else right.abs()
    if weaker is not None and not bool((added > 64 * eps * right.abs()).any()):
        return None
    allowed = max(_CLOSE, 4 * eps) * added.max() + 16 * eps * right.abs()
    beyond = (left - right).abs() - (exact * right.abs() if identity.is_one else allowed)
    if bool((beyond <= 0).all()):
        part = right if weaker is None else 2 * (right - weaker)
        factor, noise = _along(left - right, part, right, eps)
        return "" if abs(factor) <= noise else f"what is compared is off by a factor of {1 + factor:.3g}"
    at = int(beyond.argmax())
    far, size = (left - right).abs().flatten()[at].item(), added.max().item()
    return f"they differ by {far:.3g}, where the largest number of what is compared is {size:.3g}"


def _along(difference: Tensor, part: Tensor, whole: Tensor, eps: float) -> tuple[float, float]:
    """Which share of ``part`` a difference holds, by least squares, and how much of it rounding may make.

    Rounding moves each number of ``whole`` by some units in its last place, up or down: their sum along ``part`` is
    that of a random walk, of which four deviations are chosen, and never less than two units.
    """
    square = part.square().sum()
    if not bool(square > 0):
        return 0.0, 0.0
    noise = 4 * eps * (whole * part).square().sum().sqrt() / square + max(_CLOSE, 2 * eps)
    return ((difference * part).sum() / square).item(), noise.item()


@dataclass(frozen=True, slots=True)
class NamedValues:
    """What has passed in the run, by name, and the model's layers, to be asked for what they make of it."""

    model: nn.Module
    values: Mapping[str, Tensor]

    def have(self, *names: str) -> bool:
        """Whether there is a value at each of the names."""
        return all(name in self.values for name in names)

    def call(self, site: Site, given: Tensor) -> Tensor:
        """What the module at ``site`` makes of a tensor, without hooks of others, which have seen this run already."""
        [found] = resolve(self.model, Site(site.path))
        return next(tensor for _, tensor in iter_tensors(found.module.forward(given)))


def _identities(
    model: nn.Module, stack: Stack, values: Mapping[str, Tensor], outputs: list[Tensor]
) -> Iterator[Identity]:
    """Everything that must hold between the values that there are."""

    passed = NamedValues(model, values)
    call, have = passed.call, passed.have
    for number, block in enumerate(stack.blocks):
        yield from _of_block(block, number, passed)
        yield from _of_parts(block, number, passed)
        post, following = f"resid_post.{number}", f"resid_pre.{number + 1}"
        if have(post, following):
            yield _same(values, (post,), f"{post} = {following}", post, following)
    last = f"resid_post.{len(stack.blocks) - 1}"
    if have("ln_final", last):
        norm = stack.around["ln_final"]
        yield Identity(("ln_final",), f"ln_final = norm({last})", lambda: values["ln_final"],
                       lambda: call(norm, values[last]))  # fmt: skip
    if have("unembed"):
        logits = next((one for one in outputs if one.shape == values["unembed"].shape), None)
        yield Identity(("unembed",), "unembed = what the model returns", lambda: values["unembed"],
                       lambda: logits if logits is not None else outputs[0], is_one=True)  # fmt: skip


class Sum(NamedTuple):
    """What is added up in a block: ``left`` is the sum of ``parts``, the last of which is what a layer adds.

    ``how``: nothing, ``norm`` (of the sum, by the module at ``left``), or ``relu``.
    """

    names: tuple[str, ...]
    left: str
    parts: tuple[str, ...]
    how: str = ""


def _sums(block: Block, number: int, have: Callable[..., bool]) -> Iterator[Sum]:
    """The sums of one block, by its order, of which all values are there."""
    pre, mid, post, attn, mlp = (
        f"{one}.{number}" for one in ("resid_pre", "resid_mid", "resid_post", "attn.out", "mlp.out")
    )
    crossed, cross = f"resid_cross.{number}", f"cross.out.{number}"
    if block.order == "sum":
        main, short = f"main.{number}", f"shortcut.{number}"
        found = [Sum((main, short, post), post, (short, main), "relu")]
    elif block.order == "parallel":
        found = [Sum((attn, post), post, (pre, mlp, attn)), Sum((mlp, post), post, (pre, attn, mlp))]
    elif block.order == "after" and have(crossed, cross):
        found = [Sum((attn, crossed), crossed, (pre, attn), "norm"), Sum((cross, mid), mid, (crossed, cross), "norm")]
        found.append(Sum((mlp, post), post, (mid, mlp), "norm"))
    elif block.order == "after":
        found = [Sum((attn, mid), mid, (pre, attn), "norm"), Sum((mlp, post), post, (mid, mlp), "norm")]
    elif have(crossed, cross):
        found = [Sum((attn, crossed), crossed, (pre, attn)), Sum((cross, mid), mid, (crossed, cross))]
        found.append(Sum((mlp, post), post, (mid, mlp)))
    else:
        found = [Sum((attn, mid), mid, (pre, attn)), Sum((mlp, post), post, (mid, mlp))]
    yield from (one for one in found if have(one.left, *one.parts))


def _of_block(block: Block, number: int, passed: NamedValues) -> Iterator[Identity]:
    """The sums of one block, as identities."""
    values = passed.values

    def made(one: Sum, share: float) -> Tensor:
        """The sum, with this share of the last part."""
        total = values[one.parts[0]]
        for part in one.parts[1:]:
            total = total + (share if part == one.parts[-1] else 1.0) * values[part].reshape(total.shape)
        if one.how == "norm":
            return passed.call(block.sites[one.left.rpartition(".")[0]], total)
        return total.relu() if one.how == "relu" else total

    for one in _sums(block, number, passed.have):
        text = " + ".join(one.parts)
        text = f"{one.left} = {one.how}({text})" if one.how else f"{one.left} = {text}"
        more = tuple(part for part in one.parts if part.startswith("resid_pre"))
        yield Identity(one.names, text, partial(values.__getitem__, one.left), partial(made, one, 1.0), more,
                       partial(made, one, 0.5))  # fmt: skip


def _of_parts(block: Block, number: int, passed: NamedValues) -> Iterator[Identity]:
    """What must hold inside attention and MLP: each layer's output is that layer of what stands before it."""
    values, have = passed.values, passed.have
    at = {name: f"{name}.{number}" for name in (*block.sites, "resid_mid", "resid_pre")}
    pattern, value, mixed = at.get("attn.pattern", ""), at.get("attn.v", ""), at.get("attn.z", "")
    if have(pattern) and values[pattern].dim() != 4:
        yield Identity((pattern,), f"{pattern} is [batch, heads, queries, keys]", lambda: values[pattern],
                       lambda: values[pattern].flatten(0, 1)[:0])  # fmt: skip
    elif have(pattern):
        yield Identity((pattern,), f"rows of {pattern} sum to 1", lambda: values[pattern].sum(-1),
                       lambda: _sums_of_rows(values[pattern]))  # fmt: skip
        if have(mixed) and (counts := _positions(values[pattern], _flat(values[mixed])))[0] != counts[1]:
            yield Identity((pattern,), f"{pattern} has a row for each position of {mixed}", counts.select(0, 0).clone,
                           counts.select(0, 1).clone)  # fmt: skip
    keys = values[pattern].shape[-1] if have(pattern) else 0
    known = _flat(values[value]).shape[1] if have(value) else 0
    if have(pattern, value) and keys < known:
        yield Identity((pattern,), f"{pattern} has a column for each position of {value}", lambda: values[pattern],
                       lambda: values[pattern].repeat(1, 1, 1, known))  # fmt: skip
    if have(pattern, mixed, value) and keys == known:  # there are more keys than values where a cache holds some
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
                       partial(_called, passed, block.sites[name], other))  # fmt: skip


# What each layer is given, by its name; and how the paths end of what scales or normalises a layer's output.
_LAYERS = (("ln1", "resid_pre"), ("ln2", "resid_mid"), ("attn.q", "ln1"), ("attn.k", "ln1"), ("attn.v", "ln1"),
           ("attn.out", "attn.z"), ("mlp.pre", "ln2"), ("mlp.pre_linear", "ln2"), ("mlp.out", "mlp.post"))  # fmt: skip
_BEHIND = ("norm", "scale1", "scale2", "ls1", "ls2")


def _sums_of_rows(pattern: Tensor) -> Tensor:
    """What rows of attention weights sum to: 1, and 0 where a query sees nothing, as padding does."""
    sees = (pattern != 0).any(-1)
    return (sees if bool(sees.any()) else ~sees).to(pattern.dtype)


def _positions(pattern: Tensor, mixed: Tensor) -> Tensor:
    """How many queries attention weights ``[batch, heads, queries, keys]`` have, and positions what was mixed has."""
    counts = [pattern.shape[0] * pattern.shape[2], mixed.numel() // max(1, mixed.shape[-1])]
    return torch.tensor(counts, dtype=torch.float64, device="cpu")


def _called(passed: NamedValues, site: Site, name: str) -> Tensor:
    return passed.call(site, passed.values[name])


def _mixed(pattern: Tensor, value: Tensor, width: int) -> Tensor:
    """Values mixed by attention weights ``[batch, heads, queries, keys]``, as ``[batch, queries, width]``.

    ``width`` is that of all heads together; several heads may share the values of one. In float64: some models compute
    their weights in another type than their values.
    """
    batch, heads = pattern.shape[:2]
    flat = _flat(value)
    groups = max(1, flat.shape[-1] * heads // width)
    split = flat.view(batch, -1, groups, width // heads).transpose(1, 2).repeat_interleave(heads // groups, 1)
    return (pattern.double() @ split.double()).transpose(1, 2).reshape(batch, pattern.shape[2], -1)


def _flat(value: Tensor) -> Tensor:
    """``[batch, positions, heads, width]`` as ``[batch, positions, heads * width]``."""
    return value.flatten(2) if value.dim() == 4 else value


def _same(values: Mapping[str, Tensor], names: tuple[str, ...], text: str, one: str, other: str) -> Identity:
    return Identity(names, text, lambda: values[one], lambda: values[other], is_one=True)
