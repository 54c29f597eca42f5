"""From addresses to what they name in one model: modules, parameters, buffers; near misses named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from gaff.address.grammar import ANY_DEPTH, OP_PORTS, STATE_PORTS, Address, Name, Pattern, Site, nearest, parse
from gaff.errors import PlanError, SiteError

if TYPE_CHECKING:
    from torch import Tensor, nn

Wanted = "str | Address | nn.Module | Callable[[Site], bool]"

# A wrapper's own class name -> the name under which it holds the module that it wraps. Paths skip the wrapper.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


class Found(NamedTuple):
    """One exact site in one model; the name of an op may be a glob.

    ``chain``: the modules that lead to ``module``, root first, without itself.
    """

    site: Site
    module: nn.Module  # for a parameter or buffer: the module that owns it
    chain: tuple[nn.Module, ...] = ()
    name: str = ""  # of the parameter or buffer within its owner

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer itself, as it is now."""
        owned = self.module._buffers if self.site.port == "buffer" else self.module._parameters
        found = owned.get(self.name)
        if found is None:
            raise PlanError(f"{self.site}: {type(self.module).__name__} no longer has a tensor {self.name!r}")
        return found


def need_module(model: object) -> None:
    """Raises PlanError when ``model`` is no module: the commonest slip is to give the class, or the output."""
    from torch import nn

    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}: make one first" if isinstance(model, type) else f"a {type(model).__name__}"
        raise PlanError(f"expected a model (torch.nn.Module), got {what}")


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any number of known wrappers (DDP, torch.compile, checkpoint); of a graph its tree."""
    while (name := _wrapped_name(type(module))) and (inner := module._modules.get(name)) is not None:
        module = inner
    if "_graph" in module.__dict__:  # of torch.fx
        from gaff.address import exported

        return exported.tree_of(module)
    return module


def _wrapped_name(kind: type) -> str | None:
    """The name under which a wrapper holds what it wraps; ``fully_shard`` makes a class of its own below each."""
    name = _WRAPPERS.get(kind.__name__)
    if name is None and kind.__name__.startswith("FSDP"):
        name = next((known for base in kind.__mro__ if (known := _WRAPPERS.get(base.__name__))), None)
    return name


def resolve(model: nn.Module, wanted: str | Address | nn.Module | Callable[[Site], bool]) -> list[Found]:
    """Every exact site that ``wanted`` names. Raises SiteError with near names when there is none."""
    from torch import nn

    if isinstance(wanted, nn.Module):
        return [_find_object(model, wanted)]
    if isinstance(wanted, str):
        wanted = parse(wanted)
    if isinstance(wanted, (Site, Pattern)):
        return find_site(model, wanted) if isinstance(wanted, Site) else _find_pattern(model, wanted)
    found = [item for item in _iter_outputs(model) if wanted(item.site)]
    if not found:
        raise SiteError(f"predicate {wanted!r} accepted none of the sites of {type(model).__name__}")
    return _without_aliases(found)


def find_site(model: nn.Module, site: Site) -> list[Found]:
    """The one place that an exact address names, as a list of one."""
    if site.port in STATE_PORTS:
        _refuse_op_state(site)
        return [_find_state(model, site)]
    found = _descend(model, site.path)
    if found is None:
        raise SiteError(_no_module(model, site))
    module, chain = found
    if is_container(module):
        if reason := getattr(module, "why_untold", ""):
            raise SiteError(f"{site}: this exported graph cannot tell it: {reason}; torch.export.unflatten(ep) can")
        inside = ", ".join(f"{site.path}.{name}" for name in list(module._modules)[:3]) or "nothing"
        raise SiteError(
            f"{site}: {site.path!r} is a {type(module).__name__}, a container that is never called itself; "
            f"address what is inside: {inside} ..., or {site.path}.*"
        )
    return [Found(site, module, chain)]


def identity(module: nn.Module, name: str, site: Site) -> tuple[object, ...]:
    """Equal for two addresses of the same stream: a shared module or tied parameter has several names."""
    owned = module._buffers if site.port == "buffer" else module._parameters
    return id(owned.get(name) if name else module), site.port, site.key, site.call, site.op, site.op_index


def first_name(model: nn.Module, path: str) -> str:
    """The first of the names of the module at ``path``; itself where there is none."""
    found = _descend(model, path)
    if found is None:
        return path
    return next(name for name, module, _ in iter_modules(model) if module is found[0])


def is_there(found: Found) -> bool:
    """Whether the module that was found is still the one at its place."""
    if not found.chain:
        return True
    path = found.site.path.rpartition(".")[0] if found.name else found.site.path
    child = found.chain[-1]._modules.get(path.rpartition(".")[2])
    if child is None or unwrap(child) is not found.module:
        return False
    return all(
        any(inner is not None and unwrap(inner) is expected for inner in parent._modules.values())
        for parent, expected in zip(found.chain, found.chain[1:], strict=False)
    )


def place_of(found: Found) -> tuple[dict[str, nn.Module | None], str, nn.Module | None]:
    """Where the module that was found hangs: the children of its parent, its name there, and what hangs there now."""
    path = found.site.path.rpartition(".")[0] if found.name else found.site.path
    inside, name = found.chain[-1]._modules, path.rpartition(".")[2]
    return inside, name, inside.get(name)


def _refuse_op_state(address: Address) -> None:
    if address.op is not None:
        raise PlanError(f"{address}: an op has no :{address.port}: expected {', '.join(OP_PORTS)}")


def is_container(module: nn.Module) -> bool:
    """Whether a module has no forward of its own (ModuleList, ModuleDict, ParameterList ...)."""
    from torch import nn

    return getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in module.__dict__


def _has_values(module: nn.Module) -> bool:
    """Whether a module is called; also one that an exported graph cannot tell, which the receipt then says."""
    return not is_container(module) or bool(getattr(module, "why_untold", ""))


def iter_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Path, module and chain of every module, root first, every name of a shared module; wrappers skipped."""
    yield from _walk(unwrap(model), "", ())


def has_class(module: nn.Module, name: str | None) -> bool:
    return name is None or any(base.__name__ == name for base in type(module).__mro__)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _walk(
    module: nn.Module, path: str, chain: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    yield path, module, chain
    inner = (*chain, module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(unwrap(child), join(path, name), inner)


def _descend(model: nn.Module, path: str) -> tuple[nn.Module, tuple[nn.Module, ...]] | None:
    module = unwrap(model)
    chain: tuple[nn.Module, ...] = ()
    outer: nn.Module = model
    for name in path.split(".") if path else ():
        child = module._modules.get(name)
        if child is None and outer._modules.get(name) is not None and outer is not module:
            outer = outer._modules[name]  # type: ignore[assignment]  # the wrapper's own name for it: step through
            continue
        if child is None:
            return None
        chain = (*chain, module)
        outer, module = child, unwrap(child)
    return module, chain


def _find_state(model: nn.Module, site: Site) -> Found:
    owner_path, _, name = site.path.rpartition(".")
    found = _descend(model, owner_path)
    kind = "buffer" if site.port == "buffer" else "parameter"
    if found is not None:
        owned = found[0]._buffers if kind == "buffer" else found[0]._parameters
        if owned.get(name) is not None:
            return Found(site, found[0], found[1], name)
    raise SiteError(_no_state(model, site, kind))


def _find_pattern(model: nn.Module, pattern: Pattern) -> list[Found]:
    if pattern.port in STATE_PORTS:
        _refuse_op_state(pattern)
        found = _match_states(model, pattern)
    elif pattern.op is not None and not pattern.names and pattern.cls is None:
        found = [Found(_site(pattern, ""), unwrap(model))]  # the ops of the root itself
    else:
        found = [
            Found(_site(pattern, path), module, chain)
            for path, module, chain in _match(unwrap(model), pattern.names, "", ())
            if path and has_class(module, pattern.cls) and _has_values(module)
        ]
    if not found:
        raise SiteError(_no_match(model, pattern))
    return _without_aliases(found)


def _match(
    module: nn.Module, names: Sequence[Name], path: str, chain: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    if not names:
        yield path, module, chain
        return
    first, rest = names[0], names[1:]
    if first == ANY_DEPTH:
        yield from _match(module, rest, path, chain)
    elif not first.is_glob:
        child = module._modules.get(first.text)
        if child is not None:
            yield from _match(unwrap(child), rest, join(path, first.text), (*chain, module))
        return
    inner = (*chain, module)
    prefix = f"{path}." if path else ""
    onward = names if first == ANY_DEPTH else rest
    for name, child in module._modules.items():
        if child is not None and (first == ANY_DEPTH or first.text == "*" or first.matches(name)):
            if onward:
                yield from _match(unwrap(child), onward, prefix + name, inner)
            else:
                yield prefix + name, unwrap(child), inner


def _match_states(model: nn.Module, pattern: Pattern) -> list[Found]:
    found = []
    for path, module, chain in iter_modules(model):
        owned = module._buffers if pattern.port == "buffer" else module._parameters
        for name, tensor in owned.items():
            if tensor is not None and has_class(module, pattern.cls) and pattern.matches(join(path, name)):
                found.append(Found(_site(pattern, join(path, name)), module, chain, name))
    return found


@lru_cache(maxsize=16384)
def _site(pattern: Pattern, path: str) -> Site:
    return Site(path, pattern.op, pattern.op_index, pattern.call, pattern.port, pattern.key)


def _without_aliases(found: Sequence[Found]) -> list[Found]:
    """A shared module or tied parameter once, under the first of its names."""
    kept: dict[object, Found] = {}
    for item in found:
        kept.setdefault((id(item.tensor) if item.name else id(item.module), item.site.port), item)
    return list(kept.values())


def _find_object(model: nn.Module, wanted: nn.Module) -> Found:
    wanted = unwrap(wanted)
    for path, module, chain in iter_modules(model):
        if module is wanted:
            return Found(Site(path), module, chain)
    for path, module in model.named_modules(remove_duplicate=False):
        if module is wanted and path:  # of an exported graph, for which a tree stands
            return find_site(model, Site(path))[0]
    raise SiteError(f"module {type(wanted).__name__} given as a pattern is not part of {type(model).__name__}")


def _iter_outputs(model: nn.Module) -> Iterator[Found]:
    for path, module, chain in iter_modules(model):
        if not is_container(module):
            yield Found(Site(path), module, chain)


def _no_module(model: nn.Module, site: Site) -> str:
    paths = [path for path, _, _ in iter_modules(model) if path]
    states = [join(path, name) for path, module, _ in iter_modules(model) for name in module._parameters]
    what = f"no module {site.path!r} in {type(model).__name__} of {len(paths)} modules"
    if site.path in states:
        return f"{what}: it is a parameter; address it as {site.path}:param or {site.path}:grad"
    graph = "; an exported graph knows only modules that ran operations" if hasattr(unwrap(model), "untold") else ""
    return f"{what}{graph}; nearest: {', '.join(nearest(site.path, paths)) or 'none, see gaff.sites(model)'}"


def _no_state(model: nn.Module, site: Site, kind: str) -> str:
    found = _descend(model, site.path)
    if found is not None:
        owned = found[0]._buffers if kind == "buffer" else found[0]._parameters
        have = ", ".join(f"{join(site.path, name)}:{site.port}" for name in owned) or f"no {kind} of its own"
        return (
            f"{site}: {site.path!r} is a module, not a {kind}: it has {have}; its gradient is {site.path}:grad_output"
        )
    states = [
        join(path, name)
        for path, module, _ in iter_modules(model)
        for name in (module._buffers if kind == "buffer" else module._parameters)
    ]
    near = ", ".join(nearest(site.path, states)) or "none, see gaff.sites(model)"
    return f"no {kind} {site.path!r} in {type(model).__name__} of {len(states)} {kind}s; nearest: {near}"


def _no_match(model: nn.Module, pattern: Pattern) -> str:
    if not pattern.names:
        return f"pattern {str(pattern)!r} names no path: expected names before <{pattern.cls}>; say '**<{pattern.cls}>'"
    classes = sorted({type(module).__name__ for _, module, _ in iter_modules(model)})
    paths = [path for path, _, _ in iter_modules(model) if path]
    literal = ".".join(name.text for name in pattern.names)
    hint = f"classes here: {', '.join(nearest(pattern.cls, classes) or classes[:8])}" if pattern.cls else ""
    hint = hint or f"nearest: {', '.join(nearest(literal, paths)) or 'none, see gaff.sites(model)'}"
    return f"pattern {str(pattern)!r} matches nothing in {type(model).__name__} of {len(paths)} modules; {hint}"
