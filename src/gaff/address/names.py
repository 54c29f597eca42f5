"""Standard names of what passes in a transformer, and the addresses that they mean in one model.

People who look into language and vision models call the same places by the same names, whatever a library calls its
modules: ``resid_pre.3`` is what block 3 is given, ``attn.pattern.3`` its attention weights. Which address that is in a
given model is found by its structure: a list of blocks that hold attention and an MLP, and in each the modules that
``names.json`` lists for each role, in order. Functions are given the modules of a model by path, wrappers skipped, as
``gaff.address.resolve.by_path`` makes them; the empty path is the model itself. A name whose place is not found is not
there. Nothing runs: whether names tell the truth is asked, by identities, in ``gaff.inspection.names``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import finalize

from gaff.address.grammar import NAMED, OUTPUT, Pattern, Site, nearest
from gaff.errors import PlanError, SiteError

if TYPE_CHECKING:
    from torch import nn

Order = Literal["before", "after", "parallel", "around", "sum"]
_FUSED = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a stack: its place, and how it adds to what passes.

    ``order``: norms stand *before* attention and MLP, *after* the sum (as in BERT), attention and MLP are *parallel*,
    norms are *around* each of both; in a ResNet a block is a *sum*. ``sites`` are the addresses by name, without the
    number of the block.
    """

    path: str
    order: Order
    sites: dict[str, Site]


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of blocks, and what stands around it. ``prefix`` tells several stacks of a model apart (``decoder.``)."""

    prefix: str
    blocks: tuple[Block, ...]
    around: dict[str, Site]

    def names(self) -> dict[str, Site]:
        """Every name with the address that it means, in the order in which they pass."""
        found = {name: site for name, site in self.around.items() if name in ("embed", "pos_embed")}
        for number, block in enumerate(self.blocks):
            found |= {f"{name}.{number}": site for name, site in block.sites.items()}
        found |= {name: site for name, site in self.around.items() if name not in found}
        return {f"{self.prefix}{name}": site for name, site in found.items()}


Modules = Mapping[str, "nn.Module"]


def standard_names(modules: Modules) -> dict[str, Site]:
    """The standard names of a model, each with the exact address that it means; empty where it has no known blocks.

    Of a model with several stacks names begin with that part of their paths which differs: ``decoder.resid_pre.0``.
    """
    return {name: site for stack in stacks_of(modules) for name, site in stack.names().items()}


def named_by(modules: Modules, pattern: Pattern, *, is_edit: bool = False) -> dict[str, Site]:
    """The addresses that a pattern of standard names means in a model, such as ``names:attn.pattern.*``, each by name.

    Names are written as addresses, with the port, call and key that the pattern asks for.

    A port of a gradient means that of the value: at an input the total gradient of what comes in. With ``is_edit`` that
    of a value which goes on around the module that is given it is where it is made. Raises SiteError with near names
    where the model has none that fits, PlanError for a name whose identities do not hold in this model, and where an
    edit would reach a part of those who use the value.
    """
    known, text = standard_names(modules), ".".join(map(str, pattern.names))
    fitting = {name: site for name, site in known.items() if pattern.matches(name)}
    if not fitting:
        near = ", ".join(nearest(text, list(known)) or [*known][:4])
        near = near or "none: no blocks with attention and an MLP were recognised"
        raise SiteError(f"{pattern}: {type(modules['']).__name__} has no such name{_joined(modules, text, known)}; "
                        f"nearest: {near}; gaff.sites(model, names=True) lists them")  # fmt: skip
    refused = looked_at(modules[""]).refused
    wrong = next((name for name in fitting if name in refused), None)
    if wrong is not None:
        raise PlanError(f"{pattern}: {wrong} is refused in this model: {refused[wrong]}; by structure it would "
                        f"be {fitting[wrong]}")  # fmt: skip
    if is_edit and pattern.port == OUTPUT:
        fitting = {name: _made_at(modules[""], name, site) for name, site in fitting.items()}
    tail = str(pattern).removeprefix(f"{NAMED}{text}")
    return {f"{NAMED}{name}{tail}": _asked(pattern, site) for name, site in fitting.items()}


def _joined(modules: Modules, name: str, known: Mapping[str, Site]) -> str:
    """Why a model has no queries, keys or values by themselves, where one matrix makes the three; else empty."""
    kind, _, block = name.rpartition(".")
    site = known.get(f"{kind[:-1]}out.{block}") if kind.endswith(("attn.q", "attn.k", "attn.v")) else None
    if site is None:
        return ""
    for around in (site.path, site.path.rpartition(".")[0]):  # the attention, or its last layer
        for path, module in modules[around].named_children():
            weight = getattr(module, "weight", None)
            sizes = sorted(weight.shape) if weight is not None and weight.dim() == 2 else [1, 1]
            if sizes[1] == 3 * sizes[0]:
                return f": its queries, keys and values are parts of one tensor, what {around}.{path} returns"
    return ""


_ASIDE = ("resid_mid", "resid_cross")  # told at a norm in a branch, while the value goes around the branch, too
_HANDED_ON = ("resid_post",)  # told where the next block is given it, while a model may read it elsewhere, too


def is_made_elsewhere(name: str, site: Site) -> bool:
    """Whether others may use the value of a name than the module at whose input it is told."""
    return site.port == "input" and name.split(".")[-2:-1] in [[one] for one in (*_ASIDE, *_HANDED_ON)]


def _made_at(model: nn.Module, name: str, site: Site) -> Site:
    """Where an edit of a name acts. Raises PlanError where that is not known, or where nothing else is reached."""
    if site.port == "input" and name.split(".")[-2:-1] == ["shortcut"]:
        raise PlanError(
            f"names:{name}: is the very tensor that the main branch is given: expected an edit of resid_pre, or of main"
        )
    if not is_made_elsewhere(name, site):
        return site
    looked = looked_at(model)
    made = looked.makers.get(name)
    if made is None and name.split(".")[-2] in _HANDED_ON:
        return site
    if made is None:
        how = "gaff.sites(model, x, names=True) finds the op that makes it, where edits act from then on"
        if looked.was_run:
            how = "no sum was seen to make it; expected an edit by the op's address, as gaff.sites(model, x) tells it"
        raise PlanError(
            f"names:{name}: is told at {site}, and an edit there would miss what goes around that module: {how}"
        )
    return made


def _asked(pattern: Pattern, site: Site) -> Site:
    """The address of a standard name, at the port, call and key that a pattern asks for."""
    port = site.port
    if pattern.port != OUTPUT:
        told = _GRADIENTS.get(site.port)
        if pattern.port == "grad_output" and told is None:
            raise PlanError(f"{pattern}: {site} is computed beside the model, and has no gradient")
        if told is None or pattern.port != "grad_output":
            raise PlanError(f"{pattern}: a standard name is a value: expected it alone, or with :grad_output")
        port = told
    return replace(site, port=port, key=(*site.key, *pattern.key), call=pattern.call)


_GRADIENTS = {"output": "grad_output", "input": "input_grad"}


@dataclass(slots=True)
class LookedAt:
    """What a run of a model has shown of its names, as ``gaff.sites(model, x, names=True)`` finds it.

    ``failed``: by name why it does not mean in this model what it means elsewhere, found in any run; ``missing``: names
    that did not pass in the latest run that was looked at; ``makers``: by name the op or module that makes the value,
    where others may use it than the module at whose input it is told.
    """

    failed: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    makers: dict[str, Site] = field(default_factory=dict)
    was_run: bool = False

    @property
    def refused(self) -> dict[str, str]:
        """By name why it is refused."""
        return {**self.missing, **self.failed}


_LOOKED_AT: dict[int, LookedAt] = {}  # by identity: models may define what is equal


def looked_at(model: nn.Module) -> LookedAt:
    """What has been found in ``model``, which is without wrappers; kept for as long as it lives."""
    if id(model) not in _LOOKED_AT:
        _LOOKED_AT[id(model)] = LookedAt()
        finalize(model, _LOOKED_AT.pop, id(model), None)
    return _LOOKED_AT[id(model)]


def stacks_of(modules: Modules) -> list[Stack]:
    """The lists of blocks of a model, all of them different modules that hold attention and an MLP.

    Blocks that are one module have one address for all of their calls, and so no names by number.
    """
    lists = [path for path, module in modules.items() if type(module).__name__ in ("ModuleList", "Sequential")]
    inside = {
        path: [_join(path, name) for name, one in modules[path]._modules.items() if one is not None] for path in lists
    }
    found = [path for path in lists if inside[path] and all(_is_block(modules, one) for one in inside[path])]
    found = [path for path in found if len({id(modules[one]) for one in inside[path]}) == len(inside[path])]
    found = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    prefixes = _prefixes(found)
    made = [_stack(modules, path, inside[path], prefixes[path]) for path in found]
    for stack in made[:-1]:
        stack.around.pop("unembed", None)  # what comes last goes into it
    return made or residual_stacks(modules)


def _is_block(modules: Modules, block: str) -> bool:
    return bool(_role(modules, block, "attention") and (_role(modules, block, "down") or _role(modules, block, "mlp")))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")


def _prefixes(paths: list[str]) -> dict[str, str]:
    """By path of a stack what its names begin with: nothing where there is one, else the first part that differs."""
    if len(paths) < 2:
        return dict.fromkeys(paths, "")
    for depth in range(max(len(path.split(".")) for path in paths)):
        parts = {path: (path.split(".") + [""] * 9)[depth] for path in paths}
        if len(set(parts.values())) == len(paths) and all(parts.values()):
            return {path: f"{part}." for path, part in parts.items()}
    return {path: f"stack{at}." for at, path in enumerate(paths)}


@lru_cache
def _data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
    return loaded


def _role(modules: Modules, place: str, role: str, inside: str = "") -> str:
    """The path, from ``place``, of the first module with this role; ``inside``: below that path. Empty without one."""
    own = _data()["families"].get(type(modules[place]).__name__, {})
    for path in own.get(role, _data()[role]):
        full = _join(inside, path)
        found = modules.get(_join(place, full))
        if found is not None and not (role == "up" and found._modules):  # one layer, and not the whole MLP by that name
            return full
    return ""


def _stack(modules: Modules, path: str, blocks: list[str], prefix: str) -> Stack:
    """A stack with the names of its blocks and of what stands around it."""
    around = dict(_around(modules, path))
    made = [_block(modules, block) for block in blocks]
    for at, block in enumerate(made):
        if "resid_post" in block.sites:
            continue  # the norm after it hands it on
        following = Site(made[at + 1].path, port="input") if at + 1 < len(made) else around.get("resid_final")
        if following is not None and following.path.endswith("post_layernorm"):
            following = None  # it is given one position alone
        made[at] = replace(block, sites={**block.sites, "resid_post": following or Site(block.path)})
    around.pop("resid_final", None)
    return Stack(prefix, tuple(made), around)


def _around(modules: Modules, path: str) -> Iterator[tuple[str, Site]]:
    """Embedding, final norm and unembedding: looked for beside the list, and from there outwards to the root."""
    outer = path
    places = []
    while outer:
        outer = outer.rpartition(".")[0]
        places.append(outer)
    for name, role, port in (("embed", "embedding", "output"), ("pos_embed", "position", "output"),
                             ("resid_final", "final norm", "input"), ("ln_final", "final norm", "output"),
                             ("unembed", "unembedding", "output")):  # fmt: skip
        for place in places:
            if name == "unembed" and place and "" in places and place != path.partition(".")[0]:
                continue
            found = _role(modules, place, role)
            if found and (role != "unembedding" or not path.startswith(f"{_join(place, found)}.")):
                yield name, Site(_join(place, found), port=port)
                break


def _block(modules: Modules, path: str) -> Block:
    """The names of one block, without its number, in the order in which they pass."""
    find = partial(_role, modules, path)
    order = _order_of(modules, path)
    attention = find("attention")
    out = _out_of(modules, path, attention) or find("out of the block")
    before, mid = find("norm before attention"), find("norm before mlp")
    up, down = _layers_in_order(modules, path, find("mlp")) or (find("up"), find("down"))
    told: dict[str, tuple[str, str]] = {"resid_pre": ("", "input")}
    if order != "after" and before:
        told["ln1"] = before, "output"
    for name, role in (("attn.q", "query"), ("attn.k", "key"), ("attn.v", "value")):
        told[name] = find(role, attention), "output"
    told["attn.z"] = (out if out != attention else ""), "input"
    scaled = find("scale of attention"), find("scale of mlp")
    told["attn.out"] = (
        (find("norm of what attention adds") if order == "around" else scaled[0] or out),
        "output",
    )
    told |= _crossed(modules, path, order)
    if order == "after":
        told["resid_mid"] = find("norm after cross attention") or find("norm after attention"), "output"
    elif order == "around":
        told["resid_mid"] = (mid if mid.startswith("pre_") else find("mlp")), "input"
        told["ln2"] = (mid if mid.startswith("pre_") else ""), "output"
    elif order == "before":
        told["resid_mid"], told["ln2"] = (mid, "input"), (mid, "output")
    told["mlp.pre"] = up, "output"
    if up.endswith(("gate_proj", "wi_0", "w1")):
        told["mlp.pre_linear"] = find("up beside a gate"), "output"
    told["mlp.post"] = down, "input"
    added = scaled[1] or down or find("mlp")
    told["mlp.out"] = (find("norm of what mlp adds") if order == "around" else added), "output"
    if order == "after":
        told["resid_post"] = find("norm after mlp"), "output"
    sites = {name: Site(_join(path, inner) if inner else path, port=port)
             for name, (inner, port) in told.items() if inner or name == "resid_pre"}  # fmt: skip
    for name in ("attn.out", "cross.out", "mlp.out"):
        if name in sites and type(modules[sites[name].path]).__name__ in _data()["return it first"]:
            sites[name] = replace(sites[name], key=(0,))
    weights = _weights(modules, _join(path, attention))
    return Block(path, order, _after(sites, "attn.v", {"attn.pattern": weights}))


def _layers_in_order(modules: Modules, block: str, mlp: str) -> tuple[str, str] | None:
    """The first and the last linear layer of an MLP that is an ``nn.Sequential``, or holds one alone; else None."""
    inside = modules[_join(block, mlp)]._modules
    if len(inside) == 1:
        mlp = _join(mlp, *inside)
    found = modules[_join(block, mlp)]
    layers = [name for name, one in found._modules.items() if type(one).__name__ == "Linear"]
    if not mlp or len(layers) < 2 or not any(kind.__name__ == "Sequential" for kind in type(found).__mro__):
        return None
    return _join(mlp, layers[0]), _join(mlp, layers[-1])


def _out_of(modules: Modules, block: str, attention: str) -> str:
    """The output projection of an attention; itself, where it multiplies with that layer's weight and never calls it.

    That is torch's ``nn.MultiheadAttention``.
    """
    out = _role(modules, block, "out", attention)
    is_called = not out or type(modules[_join(block, out)]).__name__ != "NonDynamicallyQuantizableLinear"
    return out if is_called else attention


def _crossed(modules: Modules, path: str, order: Order) -> dict[str, tuple[str, str]]:
    """The names around cross-attention, of a block that has it."""
    find = partial(_role, modules, path)
    cross, is_after = find("cross attention"), order == "after" and find("norm after cross attention")
    if not cross or not (is_after or order == "before"):
        return {}
    norm = (
        (find("norm before cross attention"), "input")
        if order == "before"
        else (find("norm after attention"), "output")
    )
    return {
        "resid_cross": norm,
        "cross.out": (_out_of(modules, path, cross) or find("out of cross attention"), "output"),
    }


def _after(sites: dict[str, Site], name: str, more: dict[str, Site]) -> dict[str, Site]:
    """``sites`` with others put in behind one of them."""
    found: dict[str, Site] = {}
    for known, site in sites.items():
        found[known] = site
        if known == name:
            found |= more
    return found if name in sites else {**sites, **more}


def _weights(modules: Modules, path: str) -> Site:
    """Attention weights: of the fused call, or of the softmax where attention is written out."""
    config = getattr(modules[path], "config", None) or getattr(modules[""], "config", None)
    is_written_out = getattr(config, "_attn_implementation", None) == "eager" or (
        config is None and getattr(modules[path], "fused_attn", True) is False
    )
    return Site(path, op="softmax", op_index=0) if is_written_out else Site(path, op=_FUSED, op_index=0, port="weights")


def _order_of(modules: Modules, path: str) -> Order:
    """How a block adds to what passes, by the norms that it has."""
    role, block = partial(_role, modules, path), modules[path]
    told: Order | None = _data()["families"].get(type(block).__name__, {}).get("order")
    if told is not None:
        return told
    if role("norm of what mlp adds"):
        return "around"
    config = getattr(block, "config", None)
    told_by = ((block, "use_parallel_residual"), (config, "parallel_attn"), (block, "parallel_attn"))
    if any(getattr(one, name, None) is True for one, name in told_by):
        return "parallel"
    inside = role("norm after attention")
    if inside and ("." in inside or not role("norm before attention")):
        return "after"
    if getattr(block, "normalize_before", getattr(block, "norm_first", None)) is False:
        return "after"
    return "before" if role("norm before mlp") else "parallel"


def residual_stacks(modules: Modules) -> list[Stack]:
    """The blocks of a ResNet as one stack, in order: what comes in, what is added, by which way, and the sum."""
    blocks = []
    for path, module in modules.items():
        convolutions = [name for name in ("conv1", "conv2", "conv3") if name in module._modules]
        norms = [name for name in ("bn1", "bn2", "bn3") if name in module._modules]
        if len(convolutions) < 2 or len(norms) != len(convolutions) or "downsample" not in dir(module):
            continue
        last = _join(path, norms[-1])
        short = (
            Site(_join(path, "downsample"))
            if module._modules.get("downsample") is not None
            else Site(path, port="input")
        )
        sites = {"resid_pre": Site(path, port="input"), "conv1": Site(_join(path, "conv1")), "main": Site(last),
                 "shortcut": short, "resid_post": Site(path)}  # fmt: skip
        blocks.append(Block(path, "sum", sites))
    around = {"embed": "maxpool", "pool": "avgpool", "unembed": "fc"}
    around = {**around, "pool": "global_pool"} if "global_pool" in modules else around
    known = {name: Site(path) for name, path in around.items() if path in modules}
    return [Stack("", tuple(blocks), known)] if blocks else []
