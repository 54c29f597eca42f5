"""Where programs run, if not as they stand: compiled, on several ranks, in mixed precision, under checkpoints.

Each kind of setting has a few variants, and the seed of a program draws one. Ranks are given the same numbers: averages
over them are what one process has, so the truth, one eager process without gaff, is the same for all. Parts are put
together before they are compared.
"""

from __future__ import annotations

import datetime
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import inside
from fuzz.program import Program, Script
from gaff.compat.placements import placement_of, whole_of

PORTS = ("output", "input", "grad_output", "outer_grad", "grad_input", "input_grad", "grad", "param")
OF_PARALLEL = ("output", "grad_output", "outer_grad")  # of a layer that is given parts, and returns the whole


def same(source: str) -> str:
    return source


@dataclass(frozen=True)
class Setting:
    """``prepare`` makes of a model what the program calls; ``source`` changes the program, also that of the truth."""

    kind: str
    prepare: Callable[[nn.Module], Any] = lambda model: model
    ports: tuple[str, ...] = PORTS
    ranks: int = 0
    source: Callable[[str], str] = same
    has_parts: bool = False  # tensors of which each rank has a part, which meet whole ones
    has_rows: bool = False  # norms are given rows: sequence parallelism
    rtol: float = 0.0  # where the setting itself rounds
    casts: bool = False  # modules are given their inputs in another type
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    asked: Callable[[Any], Any] = lambda used: used  # what gaff is given of what the program calls
    gathered: Callable[[Any], AbstractContextManager[Any]] = nullcontext  # in which parameters and gradients are whole

    def program(self, program: Program) -> Program:
        """The program as it is in this setting, for the truth as well."""
        changed = self.source(program.source)
        if changed == program.source:
            return program
        return Script(program.seed, program.parts, program.driver, program.is_double, program.kinds, text=changed)


# ---------------------------------------------------------------- compiled


def whole_model(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **options)


def blocks(model: nn.Module, **options: Any) -> nn.Module:
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            child.compile(**options)
    return model


class Function:
    """A compiled function around the model; all else is asked of the model."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.__dict__["model"] = model
        self.__dict__["call"] = torch.compile(lambda *args: model(*args), **options)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)


@contextmanager
def one_way_of_drawing() -> Iterator[None]:
    """Inductor draws the random numbers that eager code draws."""
    import torch._inductor.config as config

    with config.patch(fallback_random=True):
        yield


def compiled(prepare: Callable[..., Any], **options: Any) -> Setting:
    is_inductor = options["backend"] == "inductor"
    around = one_way_of_drawing if is_inductor else nullcontext
    return Setting(
        "compile",
        partial(prepare, **options),
        around=around,
        rtol=1e-7 if is_inductor else 0.0,
        asked=lambda used: used.model if isinstance(used, Function) else used,
    )


# ---------------------------------------------------------------- several ranks


class Wrapped(nn.parallel.DistributedDataParallel):
    """What its model has is found on it, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Unsynchronised(Wrapped):
    """Gradients stay those of this rank, which are the same on all."""

    def forward(self, *args: Any) -> Any:
        with self.no_sync():
            return super().forward(*args)


def replicated(model: nn.Module) -> nn.Module:
    from torch.distributed._composable import replicate

    replicate(model)
    replicate.state(model).lazy_init()  # at once: it writes into parameters
    return model


def hooked(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    wrapped = Wrapped(model, find_unused_parameters=True)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def is_linear(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear


def sharded(model: nn.Module, inner: Callable[[nn.Module], bool], mesh: Any = None, **options: Any) -> nn.Module:
    """The modules for which ``inner`` says so are units of their own, those inside first; the model is the last."""
    from torch.distributed.fsdp import fully_shard

    units = [one for one in model.modules() if one is not model and inner(one) and not shares(one, model)]
    for one in reversed(units):
        fully_shard(one, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def shares(unit: nn.Module, model: nn.Module) -> bool:
    """Whether modules outside of it have a parameter of a unit, which torch refuses."""
    own = {id(one) for one in unit.parameters()}
    inside_it = set(unit.modules())
    rest = [one for one in model.modules() if one not in inside_it]
    return any(id(parameter) in own for one in rest for parameter in one.parameters(recurse=False))


def is_unit(module: nn.Module) -> bool:
    """Blocks and their layers: units inside of units."""
    return isinstance(module, (nn.Linear, nn.Sequential)) or type(module).__name__.startswith("Part")


def mixed(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    kept = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=kept, output_dtype=kept)
    return sharded(model, lambda module: False, mp_policy=policy)


def flattened(model: nn.Module, *, has_units: bool) -> Any:
    """In the first FSDP, whole or layer by layer."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Linear}) if has_units else None
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"), auto_wrap_policy=policy)


def unflattened(used: Any) -> AbstractContextManager[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(used)]
    sizes = [sum(map(math.prod, one.flat_param._shapes)) for one in handles if one is not None]
    if min(sizes, default=2) < dist.get_world_size():
        raise RuntimeError("FSDP's ranks miss each other over the gradients of a unit of which one has no part")
    return FullyShardedDataParallel.summon_full_params(used, with_grads=True)


def with_copies(source: str) -> str:
    """Every model is given a copy, as FSDP2 gives it one in another type: what it writes there nobody sees."""
    return re.sub(r"= model\((x\d+)\)", r"= model(\1 * 1.0)", source)


def frozen(source: str) -> str:
    """Every third parameter is not trained."""
    return re.sub(
        r"^(    )return (Part\d+\(\).*)$",
        r"\1model = \2\n\1for p in list(model.parameters())[::3]: p.requires_grad_(False)\n\1return model",
        source,
        flags=re.MULTILINE,
    )


@cache
def mesh(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "parts")[-len(shape) :])


def lies_in_parts(module: nn.Module | None) -> bool:
    """Whether a module is a pair of linear layers with nothing but an activation between them."""
    return isinstance(module, nn.Sequential) and len(module) == 3 and type(module[1]) in (nn.Tanh, nn.ReLU)


def parallel(model: nn.Module, over: Any = None, with_norms: bool = False) -> nn.Module:
    """Pairs of linear layers lie column by column and row by row, with a part between them; others return the whole."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInputOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    over, plan = over or mesh(dist.get_world_size()), {}
    for path, one in model.named_modules():
        if path and is_linear(one) and path not in plan:
            plan[path] = ColwiseParallel(output_layouts=Replicate())
        if lies_in_parts(one):
            plan[f"{path}.0"], plan[f"{path}.2"] = ColwiseParallel(), RowwiseParallel()
    if not with_norms:
        return parallelize_module(model, over, plan)
    for path in [path for path, one in model.named_modules() if path and type(one) is nn.LayerNorm]:
        rows = PrepareModuleInputOutput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),),
            output_layouts=(Shard(0),), desired_output_layouts=(Replicate(),),
        )  # fmt: skip
        parallelize_module(model, over, {path: rows})  # before the layer itself: it is given rows, and returns some
        plan[path] = SequenceParallel(sequence_dim=0)
    return parallelize_module(model, over, plan)


def two_dimensions(model: nn.Module) -> nn.Module:
    both = mesh(2, 2)
    parallel(model, both["parts"])
    return sharded(model, is_linear, mesh=both["replicas"])


# ---------------------------------------------------------------- precision, checkpoints


def in_single(source: str) -> str:
    return source.replace(".double()", ".float()")


def under_autocast(source: str) -> str:
    body = in_single(source).replace("def drive(model):", "def drive_in_it(model):")
    return f"{body}def drive(model):\n    with torch.autocast('cpu', torch.bfloat16): return drive_in_it(model)\n"


def scaled(source: str) -> str:
    """Each loss is scaled, as a ``GradScaler`` does it."""
    source = re.sub(r"^(    )(.*)\.backward\((.*)\)$", r"\1scaler.scale(\2).backward(\3)", source, flags=re.MULTILINE)
    return source.replace("    seen = []", "    scaler, seen = torch.amp.GradScaler('cpu', init_scale=8.0), []")


def on_device(source: str) -> str:
    """Models, inputs and indices lie on a GPU."""
    source = re.sub(r"return (Part\d+\(\))", r"return \1.cuda()", source)
    return re.sub(r"(torch\.randn\(2, 4\)|torch\.tensor\(\[[^]]*\]\))", r"\1.cuda()", source)


def checkpointed(model: nn.Module) -> nn.Module:
    """Blocks are recomputed by torch's hooks on them, as its trainers do it."""
    from torch.distributed._composable import checkpoint

    for one in model.modules():
        if type(one).__name__.startswith("Part") and one is not model:
            checkpoint(one)
    return model


OF_SHARDS = tuple(port for port in PORTS if port != "input_grad")  # each call has an input of its own there
OF_CALLS = ("output", "input", "grad_output", "grad_input")
SETTINGS: dict[str, Setting] = {
    "aot_eager": compiled(whole_model, backend="aot_eager"),
    "aot_eager:blocks": compiled(blocks, backend="aot_eager"),
    "aot_eager:fullgraph": compiled(whole_model, backend="aot_eager", fullgraph=True),
    "aot_eager:dynamic": compiled(whole_model, backend="aot_eager", dynamic=True),
    "aot_eager:function": compiled(Function, backend="aot_eager"),
    "inductor": compiled(whole_model, backend="inductor"),
    "inductor:blocks": compiled(blocks, backend="inductor"),
    "inductor:fullgraph": compiled(whole_model, backend="inductor", fullgraph=True),
    "inductor:dynamic": compiled(whole_model, backend="inductor", dynamic=True),
    "inductor:function": compiled(Function, backend="inductor"),
    "ddp": Setting("DDP", replicated, ranks=2),
    "ddp:unused": Setting("DDP", partial(Wrapped, find_unused_parameters=True), ranks=2),
    "ddp:static": Setting("DDP", partial(Wrapped, static_graph=True), ranks=2),
    "ddp:views": Setting("DDP", partial(Wrapped, gradient_as_bucket_view=True), ranks=2),
    "ddp:no_sync": Setting("DDP", Unsynchronised, ranks=2),
    "ddp:hook": Setting("DDP", hooked, ranks=2),
    "fsdp2": Setting("FSDP2", partial(sharded, inner=is_linear), OF_SHARDS, 2, has_parts=True),
    "fsdp2:kept": Setting(
        "FSDP2", partial(sharded, inner=is_linear, reshard_after_forward=False), OF_SHARDS, 2, has_parts=True
    ),
    "fsdp2:nested": Setting("FSDP2", partial(sharded, inner=is_unit), OF_SHARDS, 2, has_parts=True),
    "fsdp2:mixed": Setting("FSDP2", mixed, OF_SHARDS, 2, source=with_copies, has_parts=True, rtol=1e-3, casts=True),
    "fsdp2:frozen": Setting(
        "FSDP2", partial(sharded, inner=is_linear), OF_SHARDS, 2, source=frozen, has_parts=True
    ),
    "fsdp1": Setting("FSDP", partial(flattened, has_units=False), OF_CALLS, 2, gathered=unflattened),
    "fsdp1:units": Setting("FSDP", partial(flattened, has_units=True), OF_CALLS, 2, gathered=unflattened),
    "tp": Setting("TP", parallel, ranks=2, has_parts=True),
    "tp:sequence": Setting("TP", partial(parallel, with_norms=True), ranks=2, has_parts=True, has_rows=True),
    "2d": Setting("TP", two_dimensions, OF_SHARDS, ranks=4, has_parts=True),
    "checkpoint": Setting("checkpoint", checkpointed),
    "amp": Setting("AMP", source=under_autocast, rtol=5e-2),
    "amp:scaler": Setting("AMP", source=scaled),
    "cuda": Setting("GPU", source=on_device),
    "cuda:aot_eager": replace(compiled(whole_model, backend="aot_eager"), source=on_device),
    "cuda:inductor": replace(compiled(whole_model, backend="inductor"), source=on_device),
    "cuda:graphs": replace(compiled(whole_model, backend="inductor", mode="reduce-overhead"), source=on_device),
}  # fmt: skip


def variants(name: str) -> list[str]:
    """The settings that a name stands for: ``ddp`` for all of them, ``ddp:views`` for one."""
    return [name] if ":" in name else [one for one in SETTINGS if one.partition(":")[0] == name]


def drawn(name: str, seed: int) -> str:
    """The variant in which the program of a seed runs."""
    return variants(name)[seed % len(variants(name))]


def ranks_of(name: str) -> int:
    """How many processes it needs; those of all its variants are as many."""
    return SETTINGS[variants(name)[0]].ranks


def start_ranks() -> None:
    """Meet the other processes, which torchrun has started."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        Tensor.register_hook = _on_a_fresh_node(Tensor.register_hook)


def _on_a_fresh_node(register_hook: Any) -> Any:
    """``register_hook`` for FSDP, whose hook on a view that was changed by way of its base ends the process."""

    @wraps(register_hook)
    def register(tensor: Tensor, hook: Any) -> Any:
        _ = tensor.grad_fn  # made anew where it is out of date
        return register_hook(tensor, hook)

    return register


def leave(code: int) -> None:
    """End this process, together with the other ranks where there are some."""
    inside.leave_together(code)
    sys.exit(code)


@contextmanager
def parts_mix(setting: Setting | None) -> Iterator[None]:
    """Lets parts of tensors meet whole ones, as the losses of programs have them."""
    if setting is None or not setting.has_parts:
        yield
        return
    from torch.distributed.tensor.experimental import implicit_replication

    with implicit_replication():
        yield


def whole(tensor: Any) -> Any:
    """A tensor of which each rank has a part, put together, as ``got.full`` does it: all ranks must ask."""
    if not isinstance(tensor, Tensor):
        return tensor
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    placement = placement_of(tensor)
    return tensor if placement is None else whole_of(tensor, placement)


def means_the_same(model: nn.Module, path: str, port: str, setting: Setting) -> bool:
    """Whether the port of a module, or of an op, means in a setting what it means in one process."""
    modules = dict(model.named_modules())
    around = modules.get(path.partition("/")[0].rpartition(".")[0])
    if setting.kind == "TP" and "/" in path and lies_in_parts(around):
        return False  # what an op makes of a part lies nowhere that is known
    is_layer = is_linear(modules.get(path)) or (setting.has_rows and type(modules.get(path)) is nn.LayerNorm)
    return port in (OF_PARALLEL if is_layer and setting.kind == "TP" else setting.ports)


def why_not(source: str, setting: Setting) -> str:
    """Why a program means something else there than one process has; empty if it does not."""
    kind, is_sharded = setting.kind, setting.kind in ("FSDP", "FSDP2") or setting.prepare is two_dimensions
    reasons = (
        (setting.ranks, r"in_thread\(", "ranks meet on one thread"),
        (setting.ranks, r"new_linear\(|deepcopy\(|pickled\(", "a module that is replaced or copied is not spread"),
        (is_sharded, "create_graph=True", "FSDP knows no double backward: torch reads memory that it has freed"),
        (is_sharded, "retain_graph=True", "FSDP knows no second backward pass: torch reads memory that it has freed"),
        (
            is_sharded,
            r"backward\([^\n]*\n[^\n]*backward\(",
            "FSDP knows one backward pass after another's forward only",
        ),
        (
            kind == "TP" and (r"autocast" in source or ".float()" in source),
            "create_graph=True",
            "collectives of tensor parallelism know no second derivatives, which is not told from rounding here",
        ),
        (is_sharded, r"\.append\(out\)", "FSDP hears of a backward pass at what the model returns, not inside it"),
        (is_sharded, r"self\.held", "a list that holds a weight which is sharded elsewhere trains otherwise"),
        (is_sharded, r"new_weight\(model", "FSDP goes on with the parameter that it knows"),
        (is_sharded or kind == "TP", r"list\(model.parameters", "FSDP2 reduces no gradient of autograd.grad"),
        (kind == "FSDP2" and setting.rtol, "BatchNorm1d", "a norm over two rows makes signs of what is rounded"),
        (
            kind == "compile" and "Norm" in source,
            r"if h\d+\.sum\(\) > 0",
            "a norm's values sum to what is rounded: the branch goes either way",
        ),
        (kind == "compile", r"autograd\.grad\(", "compiled code answers autograd.grad with more than was asked"),
        (kind == "compile", r"enable_grad\(\)", "a graph is compiled in the grad mode in which it is called"),
        (
            kind == "checkpoint",
            "create_graph=True|retain_graph=True",
            "torch's composable checkpoint recomputes a region once",
        ),
        (
            kind != "checkpoint",
            r"\.register_hook\(",
            "the model may return another tensor than it made: hooks come first",
        ),
        (setting.source is under_autocast, r"\.clamp_?\(", "a clamp takes what is rounded for another number"),
        (setting.source is under_autocast, r"p\.sub_\(", "autocast keeps its copy of a parameter that was changed"),
    )
    return next((why for is_there, pattern, why in reasons if is_there and re.search(pattern, source)), "")
