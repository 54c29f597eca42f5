"""From addresses to what they name in one model: modules, parameters, buffers; near misses named.

``resolve`` is the way in: it takes whatever a user may give as a pattern and returns exact sites with the objects
behind them (``Found``). It reads the model's ``_modules`` itself instead of ``named_modules``: a shared module must be
found under each of its names, wrappers (DDP, ``torch.compile``, checkpoint wrappers) must not show in paths, and an
exported graph must be seen as its tree. Nothing here changes the model; torch is imported by functions only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gaff.address.grammar import (
    ANY_DEPTH,
    ATTENTIONS,
    OP_PORTS,
    OUTPUT,
    STATE_PORTS,
    WEIGHTS,
    Address,
    Name,
    Pattern,
    Site,
    fits_op,
    nearest,
    parse,
)
from gaff.address.names import named_by, standard_names
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

    ``module`` is what is called (for a parameter or buffer the module that owns it, and ``name`` what it is called
    there); ``chain`` are the modules that lead to ``module``, root first, without itself. Holds the model alive.
    """

    site: Site
    module: nn.Module  # for a parameter or buffer: the module that owns it
    chain: tuple[nn.Module, ...] = ()
    name: str = ""  # of the parameter or buffer within its owner

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer itself, as it is now: looked up anew, since code may replace it.

        Raises PlanError when its module has no such tensor any more. Only for sites with a ``name``.
        """
        owned = self.module._buffers if self.site.port == "buffer" else self.module._parameters
        found = owned.get(self.name)
        if found is None:
            raise PlanError(f"{self.site}: {type(self.module).__name__} no longer has a tensor {self.name!r}")
        return found


@cache
def _modules_of_torch() -> Any:
    """``torch.nn``, imported when it is first needed: an import inside a function costs a session 0.3 us a time."""
    from torch import nn

    return nn


def need_module(model: object) -> None:
    """Raises PlanError when ``model`` is no module, or TorchScript. Commonly it is the class, or the output."""
    if not isinstance(model, _modules_of_torch().Module):
        what = f"the class {model.__name__}: make one first" if isinstance(model, type) else f"a {type(model).__name__}"
        what += (
            " that torch.compile made: give the model inside" if hasattr(model, "_torchdynamo_orig_callable") else ""
        )
        raise PlanError(f"expected a model (torch.nn.Module), got {what}")
    if is_script(model):
        raise PlanError("the model is TorchScript, which takes no hooks: expected the model it was made from")


def need_initialised(model: nn.Module) -> None:
    """Raises PlanError where a parameter has no shape yet."""
    is_lazy = _modules_of_torch().parameter.is_lazy
    lazy = next((name for name, one in model.named_parameters() if is_lazy(one)), None)
    if lazy is not None:
        raise PlanError(f"{lazy} is not initialised yet (lazy): run the model once first")


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any number of known wrappers (DDP, torch.compile, checkpoint); of an exported graph its tree.

    A module that is neither is returned as it is. Wrappers are told by the names of their classes, so that nothing of
    the compiler or of torch.distributed is imported for a look.
    """
    while (name := _wrapped_name(type(module))) and (inner := module._modules.get(name)) is not None:  # type: ignore[arg-type]
        module = inner
    if "_graph" in module.__dict__:  # of torch.fx
        from gaff.address import exported

        return exported.tree_of(module)
    return module


@lru_cache(maxsize=1024)
def _wrapped_name(kind: type) -> str | None:
    """The name under which a wrapper, or a class below it, holds what it wraps, or None for any other class."""
    return next((known for base in kind.__mro__ if (known := _WRAPPERS.get(base.__name__))), None)


def is_script(module: nn.Module) -> bool:
    """Whether a module is TorchScript (scripted or traced), which takes no hooks."""
    return _is_script_class(type(module))  # type: ignore[arg-type]  # a class is hashable


@lru_cache(maxsize=1024)
def _is_script_class(kind: type) -> bool:
    return any(base.__name__ == "ScriptModule" and base.__module__.startswith("torch.jit") for base in kind.__mro__)


def resolve(
    model: nn.Module, wanted: str | Address | nn.Module | Callable[[Site], bool], *, is_edit: bool = False
) -> list[Found]:
    """Every exact site that ``wanted`` names, in the order of the model. Raises SiteError with near names if none.

    ``wanted``: the text of an address, a ``Site`` or ``Pattern``, a module of the model (its output is meant), or a
    predicate, which is asked about the output of every module that is called. Of a shared module that is found under
    several names only the first is told, or it would be hooked twice; an exact address keeps the name that it was
    given. ``is_edit``: a standard name means where its value is made, if it goes around the module that is given it.
    """
    need_module(model)
    if isinstance(wanted, _modules_of_torch().Module):
        return [_find_object(model, wanted)]
    if isinstance(wanted, str):
        wanted = parse(wanted)
    if isinstance(wanted, (Site, Pattern)):
        return find_site(model, wanted) if isinstance(wanted, Site) else _find_pattern(model, wanted, is_edit)
    if isinstance(wanted, type):
        raise PlanError(f"the class {wanted.__name__} given as a pattern: expected '**<{wanted.__name__}>', all such "
                        "modules")  # fmt: skip
    if not callable(wanted):
        raise PlanError(f"{wanted!r:.60} names no site: expected an address, a module of the model or a predicate")
    found = [item for item in _iter_outputs(model) if wanted(item.site)]
    if not found:
        raise SiteError(f"predicate {wanted!r} accepted none of the sites of {type(model).__name__}")
    return _without_aliases(found)


def find_site(model: nn.Module, site: Site) -> list[Found]:
    """The one place that an exact address names, as a list of one.

    Raises SiteError where there is none, and for a container such as ``ModuleList``, whose call never happens;
    PlanError for a port that ops do not have. The call and the key are not checked: only a run tells whether they
    exist.
    """
    _refuse_port(site)
    if site.port in STATE_PORTS:
        return [_find_state(model, site)]
    found = _descend(model, site.path)
    if found is None:
        raise SiteError(_no_module(model, site))
    module, chain = found
    if is_container(module):
        if reason := getattr(module, "why_untold", ""):
            raise SiteError(f"{site}: this exported graph cannot tell it: {reason}; torch.export.unflatten(ep) can")
        names = list(module._modules)[:3]
        inside = ", ".join(str(Site(join(site.path, name))) for name in names) or "nothing"
        raise SiteError(
            f"{site}: {site.path!r} is a {type(module).__name__}, a container that is never called itself; "
            f"address what is inside: {inside} ..., or {site.path}.*"
        )
    return [Found(site, module, chain)]


def identity(module: nn.Module, name: str, site: Site) -> tuple[object, ...]:
    """A value that is equal for two addresses of the same stream: a shared module or tied parameter has several names.

    ``module`` and ``name`` are those of a ``Found``. Made of object identities: valid as long as the model lives.
    """
    owned = module._buffers if site.port == "buffer" else module._parameters
    return id(owned.get(name) if name else module), *site.inside


def first_name(model: nn.Module, path: str) -> str:
    """The first of the names of the module at ``path``; ``path`` itself where the model has no module there."""
    found = _descend(model, path)
    if found is None:
        return path
    return next(name for name, module, _ in iter_modules(model) if module is found[0])


def is_there(found: Found) -> bool:
    """Whether the module that was found is still the one at its place, and all those around it are, too.

    It is not where somebody has put another module there meanwhile (``model.fc = ...``): hooks stay on the old one.
    """
    if not found.chain:
        return True
    _, _, child = place_of(found)
    if child is None or (child is not found.module and unwrap(child) is not found.module):
        return False
    for parent, expected in zip(found.chain, found.chain[1:], strict=False):
        inside = parent._modules.values()
        if expected not in inside and not any(inner is not None and unwrap(inner) is expected for inner in inside):
            return False
    return True


def place_of(found: Found) -> tuple[dict[str, nn.Module | None], str, nn.Module | None]:
    """Where the module that was found hangs: the children of its parent, its name there, and what hangs there.

    The children are the parent's own dictionary: by one look-up in it a caller sees later whether the module has been
    replaced. Not for the root, which hangs nowhere.
    """
    inside, name = found.chain[-1]._modules, found.site.owner(found.name).rpartition(".")[2]
    return inside, name, inside.get(name)


def _refuse_port(address: Address) -> None:
    """Raises PlanError for a port that cannot be there: state of an op, weights of what is no op of attention."""
    if address.op is not None and address.port not in (*OP_PORTS, WEIGHTS):
        raise PlanError(f"{address}: an op has no :{address.port}: expected {', '.join(OP_PORTS)}")
    if address.port != WEIGHTS:
        return
    if address.op is None or not any(fits_op(address.op, name) for name in ATTENTIONS):
        whose = f"/{address.op} has" if address.op is not None else "a module has"
        raise PlanError(
            f"{address}: {whose} no :{WEIGHTS}: expected those of the op in a module's forward that attends, "
            f"{' or '.join(f'.../{name}:{WEIGHTS}' for name in ATTENTIONS)}; attention written out has them as /softmax"
        )
    if address.key:
        raise PlanError(f"{address}: the weights are one tensor, without keys: take a part with gaff.keep")


def is_container(module: nn.Module) -> bool:
    """Whether a module has no forward of its own (ModuleList, ModuleDict, ParameterList ...) and so is never called."""
    unset = _modules_of_torch().Module.forward
    return getattr(type(module), "forward", None) is unset and "forward" not in module.__dict__


def iter_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Path, module and chain of every module, root first, every name of a shared module; wrappers skipped.

    Names are joined as ``named_modules(remove_duplicate=False)`` joins them, but for the wrappers' own.
    """
    yield from _walk(unwrap(model), "", ())


def by_path(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by path, wrappers skipped; the empty path is the model itself."""
    return {path: module for path, module, _ in iter_modules(model)}


def called_modules(model: nn.Module) -> Iterator[Found]:
    """The output of every module that is called, root first, each module once, under the first of its names.

    Containers such as ModuleList are left out: nothing calls them.
    """
    yield from _without_aliases(_iter_outputs(model))


def has_class(module: nn.Module, name: str | None) -> bool:
    """Whether a class called ``name`` is among those of a module, bases included; every module has the class None."""
    return name is None or any(base.__name__ == name for base in type(module).__mro__)


def join(path: str, name: str) -> str:
    """The path of a child: parent's path and name with a dot between them, the name alone below the root."""
    return f"{path}.{name}" if path else name


def _walk(
    module: nn.Module, path: str, chain: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """``module`` and all below it, depth first, in the order of ``_modules``; it has been unwrapped already.

    What is TorchScript is left out: it takes no hooks.
    """
    yield path, module, chain
    inner = (*chain, module)
    for name, child in module._modules.items():
        if child is not None and not is_script(child):
            yield from _walk(unwrap(child), join(path, name), inner)


def _descend(model: nn.Module, path: str) -> tuple[nn.Module, tuple[nn.Module, ...]] | None:
    """Follow a path from the root, name by name: the module there and its chain, or None where a name leads nowhere.

    Wrappers are skipped, and may be named all the same: ``module.fc`` of a DDP model is what ``named_modules`` prints.
    Raises PlanError for what is TorchScript, or inside of it.
    """
    module = unwrap(model)
    chain: tuple[nn.Module, ...] = ()
    outer: nn.Module = model
    for name in path.split(".") if path else ():
        child = module._modules.get(name)
        if child is not None and is_script(child):
            raise PlanError(f"{path}: {name!r} is TorchScript, which takes no hooks: expected what it was made from")
        if child is None and outer._modules.get(name) is not None and outer is not module:
            outer = outer._modules[name]  # type: ignore[assignment]  # the wrapper's own name for it: step through
            continue
        if child is None:
            return None
        chain = (*chain, module)
        outer, module = child, unwrap(child)
    return module, chain


def _find_state(model: nn.Module, site: Site) -> Found:
    """The parameter or buffer of an exact address. Raises SiteError where its module has none of that name."""
    kind = "buffer" if site.port == "buffer" else "parameter"
    parts = site.path.split(".")
    for at in range(len(parts) - 1, -1, -1):  # a name may hold dots, as in tables of parameters
        found, name = _descend(model, ".".join(parts[:at])), ".".join(parts[at:])
        if found is not None:
            owned = found[0]._buffers if kind == "buffer" else found[0]._parameters
            if owned.get(name) is not None:
                return Found(site, found[0], found[1], name)
    raise SiteError(_no_state(model, site, kind))


def _find_pattern(model: nn.Module, pattern: Pattern, is_edit: bool) -> list[Found]:
    """Every site of a pattern, each once. Raises SiteError where there is none.

    Patterns for parameters and buffers go over tensors, all others over modules that are called. ``/op`` without a path
    means the ops of the root, which no other pattern names.
    """
    if pattern.is_named:
        sites = named_by(by_path(model), pattern, is_edit=is_edit)
        return [one for site in sites.values() for one in find_site(model, site)]
    _refuse_port(pattern)
    if pattern.port in STATE_PORTS:
        found = _match_states(model, pattern)
    elif pattern.op is not None and not pattern.names and pattern.cls is None:
        found = [Found(_site(pattern, ""), unwrap(model))]  # the ops of the root itself
    else:
        found = [
            Found(_site(pattern, path), module, chain)
            for path, module, chain in _match(unwrap(model), pattern.names, "", ())
            if path and has_class(module, pattern.cls)
            # it is called, or was, and an exported graph cannot tell it any more
            if not (is_container(module) and not getattr(module, "why_untold", ""))
        ]
    if not found:
        raise SiteError(_no_match(model, pattern))
    return _without_aliases(found)


def _match(
    module: nn.Module, names: Sequence[Name], path: str, chain: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """All modules below ``module`` whose names fit ``names``, with path and chain.

    Goes down the tree along with the pattern, and looks literal names up: a deep model is not walked for
    ``layers.3.*``. With several ``**`` one module may come more than once.
    """
    if not names:
        yield path, module, chain
        return
    first, rest = names[0], names[1:]
    if first == ANY_DEPTH:
        yield from _match(module, rest, path, chain)
    elif not first.is_glob:
        child = module._modules.get(first.text)
        if child is not None and not is_script(child):
            yield from _match(unwrap(child), rest, join(path, first.text), (*chain, module))
        return
    inner = (*chain, module)
    prefix = f"{path}." if path else ""
    onward = names if first == ANY_DEPTH else rest
    for name, child in module._modules.items():
        if child is None or is_script(child):
            continue
        if first == ANY_DEPTH or first.text == "*" or first.matches(name):
            if onward:
                yield from _match(unwrap(child), onward, prefix + name, inner)
            else:
                yield prefix + name, unwrap(child), inner


def _match_states(model: nn.Module, pattern: Pattern) -> list[Found]:
    """Every parameter or buffer whose whole path fits; the class is its owner's. Tied ones come under every name."""
    found = []
    for path, module, chain in iter_modules(model):
        owned = module._buffers if pattern.port == "buffer" else module._parameters
        for name, tensor in owned.items():
            if tensor is not None and has_class(module, pattern.cls) and pattern.matches(join(path, name)):
                found.append(Found(_site(pattern, join(path, name)), module, chain, name))
    return found


@lru_cache(maxsize=16384)
def _site(pattern: Pattern, path: str) -> Site:
    """The site that a pattern means at one path. Cached: the same plan is looked up again and again."""
    return Site(path, pattern.op, pattern.op_index, pattern.call, pattern.port, pattern.key)


def _without_aliases(found: Iterable[Found]) -> list[Found]:
    """A shared module or tied parameter once, under the first of its names."""
    kept: dict[object, Found] = {}
    for item in found:
        kept.setdefault((id(item.tensor) if item.name else id(item.module), item.site.port), item)
    return list(kept.values())


def _find_object(model: nn.Module, wanted: nn.Module) -> Found:
    """The site of a module object that was given in the place of an address, under the first of its names.

    Raises SiteError where it is not part of the model, such as a copy of one that is.
    """
    wanted = unwrap(wanted)
    for path, module, _ in iter_modules(model):
        if module is wanted:
            return find_site(model, Site(path))[0]
    for path, module in model.named_modules(remove_duplicate=False):
        if module is wanted and path:  # of an exported graph, for which a tree stands
            return find_site(model, Site(path))[0]
    raise SiteError(f"module {type(wanted).__name__} given as a pattern is not part of {type(model).__name__}")


def _iter_outputs(model: nn.Module) -> Iterator[Found]:
    """The outputs of all modules that are called: what a predicate is asked about."""
    for path, module, chain in iter_modules(model):
        if not is_container(module):
            yield Found(Site(path), module, chain)


# By attributes that other tools give a module: the ports that these are here.
_AS_ATTRIBUTES = {"output": "output", "input": "input", "inputs": "input", "grad": "grad_output"}


def _no_module(model: nn.Module, site: Site) -> str:
    """The message for a path that is no module: it may be a parameter; else the nearest paths."""
    paths = [path for path, _, _ in iter_modules(model) if path]
    states = [join(path, name) for path, module, _ in iter_modules(model) for name in module._parameters]
    what = f"no module {site.path!r} in {type(model).__name__} of {len(paths)} modules"
    if site.path in states:
        return f"{what}: it is a parameter; address it as {site.path}:param or {site.path}:grad"
    owner, _, last = site.path.rpartition(".")
    if owner in states and last == "grad":
        return f"{what}: a gradient is addressed with a colon, {owner}:grad"
    if last in _AS_ATTRIBUTES and owner in paths:
        return f"{what}: what passes there is addressed with a colon, {owner}:{_AS_ATTRIBUTES[last]}"
    if site.path in standard_names(by_path(model)):
        return f"{what}: it is one of its standard names; address it as names:{site.path}"
    graph = "; an exported graph knows only modules that ran operations" if hasattr(unwrap(model), "untold") else ""
    return f"{what}{graph}; nearest: {_nearest(site.path, paths)}"


def _nearest(wanted: str, paths: list[str], port: str = OUTPUT) -> str:
    """The paths most like ``wanted`` as addresses, for a message."""
    return ", ".join(str(Site(path, port=port)) for path in nearest(wanted, paths)) or "none, see gaff.sites(model)"


def _no_state(model: nn.Module, site: Site, kind: str) -> str:
    """The message for a path that is no parameter or buffer: it may be a module, which then tells what it has."""
    found = _descend(model, site.path)
    if found is not None:
        owned = found[0]._buffers if kind == "buffer" else found[0]._parameters
        have = ", ".join(f"{join(site.path, name)}:{site.port}" for name in owned) or f"no {kind} of its own"
        what = f"{site}: {site.path!r} is a module, not a {kind}: it has {have}"
        return f"{what}; its gradient is {site.path}:grad_output"
    states = [
        join(path, name)
        for path, module, _ in iter_modules(model)
        for name in (module._buffers if kind == "buffer" else module._parameters)
    ]
    near = _nearest(site.path, states, site.port)
    return f"no {kind} {site.path!r} in {type(model).__name__} of {len(states)} {kind}s; nearest: {near}"


def _no_match(model: nn.Module, pattern: Pattern) -> str:
    """The message for a pattern that finds nothing: what its port names, classes where it asks for one, or paths."""
    if not pattern.names:
        return f"pattern {str(pattern)!r} names no path: expected names before <{pattern.cls}>; say '**<{pattern.cls}>'"
    paths = [path for path, _, _ in iter_modules(model) if path]
    if pattern.port in STATE_PORTS:
        is_all = str(pattern) == f"**:{pattern.port}"
        of_all = "there is none" if is_all else f"'**:{pattern.port}' is that of every one"
        hint = f":{pattern.port} ends the path of a {'buffer' if pattern.port == 'buffer' else 'parameter'}; {of_all}"
    elif pattern.cls:
        classes = sorted({type(module).__name__ for _, module, _ in iter_modules(model)})
        hint = f"classes here: {', '.join(nearest(pattern.cls, classes) or classes[:8])}"
    else:
        hint = f"nearest: {_nearest('.'.join(name.text for name in pattern.names), paths)}"
    return f"pattern {str(pattern)!r} matches nothing in {type(model).__name__} of {len(paths)} modules; {hint}"
