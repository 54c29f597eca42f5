"""The one seam to tensors and parameters that lie on several processes: DTensor, FSDP2, DistributedDataParallel.

What is told to communicate must be asked on every process of the mesh; nothing else waits for another process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from gaff.errors import PlanError

_PARALLEL = ("torch.distributed.tensor", "transformers.integrations.tensor_parallel")  # whose hooks place tensors
# autograd nodes that hand on what they get: those of DTensor, and by which FSDP2 hands a unit its inputs and casts
CONVERSIONS = ("_FromTorchTensor", "_ToTorchTensor", "Redistribute", "RegisterPostBackwardFunction", "ToCopy")


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor lies on several processes: a DTensor, of tensor parallel or FSDP2."""
    return type(tensor) is not Tensor and hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local_of(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies in this process, without its autograd graph; any other tensor itself. No copy."""
    return tensor._local_tensor if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def known_here(tensor: Tensor) -> Tensor | None:
    """The value of a tensor as far as this process has it whole, without communication; else None.

    A DTensor that is the same everywhere is its local part; one in parts, or a sum that is still due, is not known.
    """
    if not is_spread(tensor):
        return tensor
    is_whole = all(one.is_replicate() for one in tensor.placements)  # type: ignore[attr-defined]
    return local_of(tensor) if is_whole else None


def whole_of(tensor: Tensor) -> Tensor:
    """A DTensor put together, for which all processes of its mesh must ask; any other tensor itself."""
    return tensor.detach().full_tensor() if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """A DTensor like ``tensor`` with another local part. No communication."""
    from torch.distributed.tensor import DTensor

    spread: Any = tensor
    return DTensor.from_local(local, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape,
                              stride=spread.stride())  # fmt: skip


def part_of(whole: Tensor, tensor: Any) -> Tensor:
    """``whole``, or what is broadcast to it, spread as ``tensor`` is: every process has it. No communication."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if whole.requires_grad:
        raise PlanError("a constant that is trained meets a tensor that is spread over processes: expected a DTensor")
    if any(place.is_partial() for place in tensor.placements):
        raise PlanError("a constant meets a tensor whose parts are still to be summed: expected one that is settled")
    whole = whole.expand(tensor.shape) if whole.shape != tensor.shape else whole
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    for dim, (size, begin) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, min(begin, whole.shape[dim]), size)
    return with_local(tensor, whole.contiguous())


def whole_beside(constant: Tensor, tensor: Any) -> Tensor:
    """``constant``, which all processes have, as a DTensor on the mesh of ``tensor``, whole in each."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    return DTensor.from_local(constant, mesh, [Replicate()] * mesh.ndim, run_check=False)


def fsdp_state(module: Any) -> Any:
    """What FSDP2 keeps about a module given to ``fully_shard``, else None."""
    get = getattr(module, "_get_fsdp_state", None)
    return get() if get is not None else None


def units_of(model: Any) -> Iterator[tuple[Any, Any]]:
    """The modules of ``model`` that were given to ``fully_shard``, each with what FSDP2 keeps about it."""
    return ((unit, state) for unit in model.modules() if (state := fsdp_state(unit)) is not None)


def class_of_state(model: Any) -> Any:
    """The class of what FSDP2 keeps about its units, where ``model`` has some; else None."""
    return next((type(state) for _, state in units_of(model)), None)


_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by FSDP2's record of a parameter


def groups_of(state: Any) -> list[Any]:
    """What FSDP2 gathers and reduces together, by its record of a module (``fsdp_state``).

    It is one group or none before torch 2.12, and may be several after that.
    """
    found = getattr(state, "_fsdp_param_groups", None)
    return list(found) if found is not None else [one for one in [state._fsdp_param_group] if one is not None]


def group_of(record: Any) -> Any:
    """What FSDP2 reduces together with the parameter of this record. Known after ``sharded_parameters``."""
    return _GROUPS[record]()


def sharded_parameters(model: Any) -> dict[tuple[int, str], tuple[Any, Any]]:
    """FSDP2's own record of each sharded parameter, and the module it is gathered with.

    By the identity of a module that holds the parameter and its name there: a shared one has several keys.
    """
    found = {}
    for unit, state in units_of(model):
        for group in groups_of(state):
            for one in group.fsdp_params:
                _GROUPS[one] = ref(group)
                info = one._module_info
                found[id(info.module), info.param_name] = one, unit
                for owner, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    found[id(owner), name] = one, unit
    return found


def fsdp_first(module: Any) -> None:
    """Move FSDP2's pre-forward hook before all others of ``module``: it gathers the parameters that others look at."""
    handle: Any = getattr(fsdp_state(module), "_pre_forward_hook_handle", None)
    if getattr(handle, "id", None) in module._forward_pre_hooks:
        module._forward_pre_hooks.move_to_end(handle.id, last=False)


def parallel_first(module: Any) -> None:
    """Move the hooks by which a layer is made parallel before all others of ``module``: they belong to the layer.

    They make of what the layer itself returns, a sum that is still due, say, what its caller gets.
    """
    _put_first(module._forward_hooks, _PARALLEL)


def checkpoint_first(module: Any) -> None:
    """Move the hook by which torch's composable checkpoint begins at ``module`` before all others at its entry.

    The recomputation calls the module with all its hooks, so what they do in the first pass must be inside the region.
    """
    _put_first(module._forward_pre_hooks, "torch.distributed._composable.checkpoint_activation")


def _put_first(hooks: Any, origin: str | tuple[str, ...]) -> None:
    """Move those of a table of hooks that are functions of the modules ``origin`` before the others."""
    theirs = [number for number, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(origin)]
    for number in reversed(theirs):
        hooks.move_to_end(number, last=False)


def can_stop(model: Any) -> bool:
    """Whether a forward of ``model`` may be left by an exception: FSDP2 must be able to forget what it was doing."""
    return all(hasattr(unit, "reset_iter_state") for unit, _ in units_of(model))


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 shards parameters of ``model`` that require grad."""
    return any(True for _ in units_of(model)) and any(one.requires_grad for one in model.parameters())


def reset_sharded(model: Any) -> None:
    """Have FSDP2 forget a forward of ``model`` that was left by an exception."""
    for unit, state in units_of(model):
        if state._is_root:
            unit.reset_iter_state()


def settled(tensor: Tensor) -> Tensor:
    """``tensor``, summed up over processes where it is a sum that is still due (Partial). Communicates then."""
    if not is_spread(tensor) or not any(one.is_partial() for one in tensor.placements):  # type: ignore[attr-defined]
        return tensor
    from torch.distributed.tensor import Replicate

    spread: Any = tensor
    places = [Replicate() if one.is_partial() else one for one in spread.placements]
    found: Tensor = spread.redistribute(placements=places)
    return found


def arrived(tensor: Tensor) -> Tensor:
    """The tensor that a collective under way brings (``AsyncCollectiveTensor``), waited for; every other one as it is.

    What lies inside such a wrapper before that is memory that the collective has still to write.
    """
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    found: Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
    return found


def place() -> tuple[int, int]:
    """This process's rank and how many ranks there are, as torch or the environment of a launcher says; else 0, 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return (rank, count) if rank < count else (0, 1)  # one variable alone says nothing


def has_others() -> bool:
    """Whether other processes take part in what this one computes, as torch says."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and place()[1] > 1


def has_threads() -> bool:
    """Whether collectives of CPU tensors may run on threads of their own in this process, as gloo's do."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return "cpu:" in torch.distributed.get_backend_config()


def meshes_of(model: Any) -> list[Any]:
    """The process meshes over which a model's parameters are spread, in order; empty for one that is not (and DDP)."""
    return _meshes((*model.parameters(), *model.buffers()))


def _meshes(tensors: Iterable[Any]) -> list[Any]:
    """The process meshes over which ``tensors`` are spread, each once, in order."""
    return list(dict.fromkeys(one.device_mesh for one in tensors if is_spread(one)))


def ranks_of(tensors: Iterable[Any]) -> tuple[int, ...]:
    """The ranks over which ``tensors`` are spread."""
    return tuple(sorted({rank for mesh in _meshes(tensors) for rank in mesh.mesh.flatten().tolist()}))


def told_by_all(value: Any, group: Any = None) -> list[Any]:
    """What every process (of ``group``) has said, by rank. All must ask, and wait for each other."""
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def groups_along(meshes: Iterable[Any]) -> Iterator[Any]:
    """The process group of each dimension of ``meshes``: what one has told its members is told along the next."""
    return (mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))


def any_process(flag: bool, meshes: Iterable[Any]) -> bool:
    """Whether ``flag`` is set in any process of ``meshes``. All of them must ask, and wait for each other."""
    for mesh in meshes:
        for dim in range(mesh.ndim):
            flag = any_of(flag, mesh.get_group(dim), mesh.device_type)
    return flag


def best_of(value: Any, meshes: Iterable[Any], rating: Callable[[Any], Any]) -> Any:
    """The value of the process of ``meshes`` that ``rating`` calls lowest, of equal ones the first.

    All processes must ask, and wait for each other. ``value`` is pickled and sent to all of them.
    """
    for group in groups_along(meshes):
        value = min(told_by_all(value, group), key=rating)
    return value


def any_of(flag: bool, group: Any, device: Any) -> bool:
    """Whether ``flag`` is set in any process of ``group``; all of its processes must ask, and wait for each other.

    ``device``: that by which the group communicates, which is waited for, too.
    """
    told = torch.tensor([float(flag)], device=device)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=group)
    return bool(told.item())


def replicas_of(model: Any) -> Any:
    """The process group over which DistributedDataParallel averages gradients; None for any other model.

    None also inside its ``join``, where processes that have no more batches answer to nothing but its own collectives.
    """
    is_replicated = isinstance(model, torch.nn.parallel.DistributedDataParallel) and not model._join_config.enable
    return model.process_group if is_replicated else None


LOCALIZED = (
    "DistributedDataParallel over tensor parallelism (its device_mesh=) keeps this process's parts of weights as plain "
    "tensors, of which nothing tells what they are parts of: expected fully_shard over a mesh of two dimensions"
)


def refuse_localized(parameters: Iterable[Any]) -> None:
    """Raises PlanError where there are parameters that are parts of a whole, and do not say so."""
    is_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_many and any("_st_info" in one.__dict__ for one in parameters):
        raise PlanError(LOCALIZED)


def replica_ranks(model: Any) -> list[int]:
    """The ranks whose copies of ``model`` DistributedDataParallel keeps equal; empty for any other model.

    Empty also where a communication hook of torch's lets them differ between averagings by design (post-local SGD).
    """
    is_replicated = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    group = model.process_group if is_replicated else None
    hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(model, "_comm_hooks", ())]
    if group is None or "post_localSGD_hook" in hooks:
        return []
    return sorted(torch.distributed.get_process_group_ranks(group))


def over_parts(values: list[Tensor], owners: list[Tensor], kind: str) -> list[Tensor]:
    """Numbers of the local parts of the owners, as numbers of the wholes: ``kind`` is "sum" or "max".

    ``values`` has one tensor without dimensions for each of ``owners``. Those of owners that are sharded alike go
    together through one reduction for each mesh dimension; plain and replicated owners keep their number. Every process
    of the owners' meshes must ask for the same owners, in the same order.
    """
    groups: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for at, owner in enumerate(owners):
        if is_spread(owner):
            spread: Any = owner
            dims = tuple(at for at, one in enumerate(spread.placements) if not one.is_replicate())
            if dims:
                groups.setdefault((spread.device_mesh, dims), []).append(at)
    values = list(values)
    for (mesh, dims), places in groups.items():
        joined = torch.stack([values[at] for at in places])
        for dim in dims:
            op = torch.distributed.ReduceOp.SUM if kind == "sum" else torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(joined, op, group=mesh.get_group(dim))
        for at, value in zip(places, joined.unbind(0), strict=True):
            values[at] = value
    return values


def norms_of(tensors: list[Tensor], kind: float) -> tuple[list[Tensor], Tensor]:
    """The norm of each DTensor and of all together, plain tensors among them, equal on every process.

    ``kind`` is the p of the norm, positive or infinite; PlanError is raised for others. Returns plain tensors of
    float32, computed in float64. Every process of the meshes must ask for the same tensors. Plain tensors must be equal
    in all of them: PlanError is raised in each where their norms are not, for each would clip by another norm.
    """
    local = [local_of(one) for one in tensors]
    if kind <= 0:
        raise PlanError(f"norm_type={kind:g} over several processes: expected a positive number, or inf")
    is_max = math.isinf(kind)
    powers = []
    for one in local:  # a process may have no part of a small parameter
        norm = torch.zeros((), dtype=torch.float64, device=one.device)
        if one.numel():
            norm = torch.linalg.vector_norm(one, kind, dtype=torch.float64)
        powers.append(norm if is_max else norm**kind)
    meshes = _meshes(tensors)
    plain = [one for one, tensor in zip(powers, tensors, strict=True) if not is_spread(tensor)]
    if plain and meshes and not _is_alike(torch.stack(plain).sum(), meshes):
        raise PlanError(
            "gradients of parameters that lie whole in each process differ between processes (FSDP2's ignored_params, "
            "say), beside others that are spread: there is no norm of all; average them first, or clip without norm="
        )
    whole = over_parts(powers, tensors, "max" if is_max else "sum")
    norms = [(one if is_max else one ** (1 / kind)).to(torch.float32) for one in whole]
    joined = torch.stack(whole)
    total = joined.max() if is_max else joined.sum() ** (1 / kind)
    return norms, total.to(torch.float32)


def _is_alike(number: Tensor, meshes: list[Any]) -> bool:
    """Whether all processes of ``meshes`` have about the same number (to 1e-3), finite or not. All must ask."""
    told = torch.stack([number.double(), torch.ones((), dtype=torch.float64, device=number.device)])
    for group in groups_along(meshes):
        others = [torch.empty_like(told) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(others, told, group=group)
        is_same = torch.stack([torch.isclose(one[0], told[0], 1e-3, 0.0, equal_nan=True) for one in others]).all()
        told[1] = torch.stack([one[1] for one in others]).min() * is_same
    return bool(told[1])


_ASKED: Counter[str] = Counter()  # how often this process has asked for something with others
_WAITS = "gaff/waits/{}"  # by rank: what it waits for others to ask for
PATIENCE_S = 300.0  # how long others may take to ask for the same


def processes_of(model: Any) -> tuple[int, ...]:
    """The ranks that hold a part or a replica of ``model`` (FSDP2, tensor parallel, DistributedDataParallel)."""
    ranks = set(ranks_of((*model.parameters(), *model.buffers())))
    group = replicas_of(model)
    if group is not None:
        ranks.update(torch.distributed.get_process_group_ranks(group))
    return tuple(sorted(ranks))


def places_of(model: Any) -> dict[str, str]:
    """By name of a DTensor parameter which of its parts this process holds, as text that is equal for equal parts.

    So are the parameters which DistributedDataParallel was told to ignore: each process has its own.
    """
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    # nn.Module's own: a model may have one of its name that takes no such argument
    named: list[tuple[str, Any]] = list(torch.nn.Module.named_parameters(model, remove_duplicate=False))
    found = {name: f"rank {place()[0]}" for name, _ in named if name in ignored}
    for name, one in named:
        if is_spread(one):
            where = one.device_mesh.get_coordinate() or ()
            held = [at for at, place in zip(where, one.placements, strict=False) if not place.is_replicate()]
            found[name] = ",".join(map(str, held))
    return found


def shares_rows(model: Any) -> bool:
    """Whether several processes compute on the same rows of a batch, each with a part of the weights."""
    return bool(meshes_of_rows(model))


def meshes_of_rows(model: Any) -> list[Any]:
    """The meshes of processes that compute on the same rows of a batch, each with a part of the weights.

    FSDP2 shards what lay whole in each process, in a mesh of one or two dimensions; tensor parallelism, also below it,
    has parameters that are spread already.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    own = {one for _, state in units_of(model) for group in groups_of(state) for one in group.fsdp_params}
    sharded = {id(one.sharded_param) for one in own}
    specs = [getattr(one, "_unsharded_dtensor_spec", None) or getattr(one, "_tp_spec", None) for one in own]
    others = _meshes(one for one in model.parameters() if id(one) not in sharded)
    return list(dict.fromkeys([*(one.mesh for one in specs if one is not None), *others]))


def agree(ranks: tuple[int, ...], request: str | Callable[[], str]) -> None:
    """All of ``ranks`` must ask for ``request``, a text or what makes it.

    Raises PlanError where one has not within ``PATIENCE_S`` seconds, or soon where it waits for others to ask for
    something else. Talks through the store by which the processes found each other: no collective is left half done.
    """
    if len(ranks) < 2 or not torch.distributed.is_initialized():
        return
    request = request if isinstance(request, str) else request()
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    own = torch.distributed.get_rank()
    name = hashlib.sha256(f"{ranks} {request}".encode()).hexdigest()[:24]
    _ASKED[name] += 1
    which = f"gaff/{name}/{_ASKED[name]}"
    keys = {rank: f"{which}/{rank}" for rank in ranks}
    store.set(keys[own], "asked")
    store.set(_WAITS.format(own), json.dumps([which, ranks, request]))
    try:
        _await(store, keys, request)
    except BaseException:
        store.delete_key(keys[own])
        _ASKED[name] -= 1
        raise
    finally:
        store.set(_WAITS.format(own), "")


def _await(store: Any, keys: dict[int, str], request: str) -> None:
    """Wait until all ranks have asked; ``keys``: by rank what it sets then. Raises as ``agree``.

    A rank that is seen to wait for another request, at two glances, will not come. It is given time to see the same.
    """
    own, until, glance_s = torch.distributed.get_rank(), monotonic() + PATIENCE_S, max(PATIENCE_S / 60, 0.1)
    before: dict[int, str] = {}
    while True:
        try:
            store.wait(list(keys.values()), timedelta(seconds=glance_s))
            return
        except RuntimeError:
            missing = [rank for rank, key in keys.items() if not store.check([key])]
        waits = [rank for rank in missing if store.check([_WAITS.format(rank)])]
        now = {rank: text for rank in waits if (text := store.get(_WAITS.format(rank)).decode())}
        told = []
        for rank, text in now.items():
            which, ranks, other = json.loads(text)
            # what this process has asked for before, the other is about to leave; what it has no part in, it will leave
            if before.get(rank) == text and own in ranks and not store.check([f"{which}/{own}"]):
                told.append(f"rank {rank} for {other!r}")
        before = now
        if told:
            sleep(3 * glance_s)
        elif missing and monotonic() > until:
            absent = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            told = [f"{absent} did not within {PATIENCE_S:g} s"]
        if told:
            raise PlanError(
                f"rank {own} asks for {request!r}, and {', '.join(told)}: expected the same on all {len(keys)} "
                "processes that share the model"
            )
