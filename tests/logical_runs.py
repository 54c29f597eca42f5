"""Edits of a model that lies on several processes, and what they make of it: for ``slow/test_logical_tensor.py``."""

from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits, keep

SETTINGS = {"tp": 2, "dtensor": 2, "sequence": 2, "fsdp2": 2, "2d": 4}
WIDTH, HIDDEN, TOKENS, ROWS = 8, 16, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc, self.act = nn.Linear(WIDTH, HIDDEN), nn.Tanh()
        self.drop, self.out = nn.Dropout(0.0), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.out(self.drop(self.act(self.fc(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.first, self.b, self.last = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, 2)
        self.mode = mode

    def forward(self, x):
        x = self.first(x)
        if self.mode is None:
            return self.last(x + self.b(x))
        return self.last(x + checkpoint(self.b, x, use_reentrant=self.mode == "reentrant"))


class Twice(Net):
    """Calls a block whose output nobody uses, and then again."""

    def forward(self, x):
        x = self.first(x)
        self.b(x)
        return self.last(x + self.b(x))


class Writes(Net):
    """Writes into what a block returned."""

    def forward(self, x):
        x = self.first(x)
        h = self.b(x)
        h.add_(x)
        return self.last(h)


@cache
def meshes(setting):
    """That of replicas and parts, if there are replicas, and that of parts."""
    if setting == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return mesh, mesh["tp"]
    return None, init_device_mesh("cpu", (2,))


def build(setting, mode, kind=Net):
    torch.manual_seed(0)
    model = kind(mode)
    if setting is None:
        return model
    if setting == "fsdp2":
        for unit in (model.b.fc, model.b, model):
            fully_shard(unit)
        return model
    mesh, tp = meshes(setting)
    plans = {
        "tp": {"fc": ColwiseParallel(), "out": RowwiseParallel()},
        "dtensor": {
            "fc": ColwiseParallel(use_local_output=False),
            "out": RowwiseParallel(use_local_output=True),
        },
        "sequence": {
            "norm": SequenceParallel(),
            "fc": ColwiseParallel(input_layouts=Shard(1)),
            "out": RowwiseParallel(output_layouts=Replicate()),
        },
    }
    plan = plans["tp" if setting == "2d" else setting]
    if setting == "sequence":
        parallelize_module(
            model.b,
            tp,
            PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
        )
    parallelize_module(model.b, tp, plan)
    if setting == "2d":
        fully_shard(model.b, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def batch(scale=1.0):
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5)) * scale


def values(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixing(tensor):
    """A function of the user in which every element depends on all."""
    return tensor * torch.softmax(tensor.flatten(), 0).view(tensor.shape) * 3


SOURCES = {(3, 4, 8): "b.norm", (3, 4, 16): "b.fc"}  # by shape: where a patch of the same run is from


# by name: the edit, made anew for a tensor of the shape that passes in one process
EDITS = {
    "noise": lambda shape: edits.noise(0.5, seed=3),
    "heads": lambda shape: edits.at(keep.heads(1, 4), edits.zero()),
    "rows": lambda shape: edits.at(keep.rows(1), edits.scale(3.0)),
    "positions": lambda shape: edits.at(keep.positions(-1), edits.scale(3.0)),
    "mask": lambda shape: edits.at(values(*shape, seed=2) > 0, edits.zero()),
    "add": lambda shape: edits.add(values(shape[-1])),
    "scale by tensor": lambda shape: edits.scale(values(*shape)),
    "replace": lambda shape: edits.replace(values(*shape)),
    "project": lambda shape: edits.project(values(2, shape[-1])),
    "mean": lambda shape: edits.ablate("mean", values(5, *shape[1:])),
    "resample": lambda shape: edits.ablate("resample", values(5, *shape[1:])),
    "patch rows": lambda shape: edits.patch(values(*shape), rows={0: 1}),
    "patch same run": lambda shape: edits.patch(source=SOURCES[shape], rows={0: 1}),
    "clip": lambda shape: edits.clip(0.5),
    "clip rows": lambda shape: edits.clip(0.5, per="row"),
    "quantize": lambda shape: edits.quantize("float8_e4m3fn", scaled=True),
    "function": lambda shape: mixing,
    "scale": lambda shape: edits.scale(0.5),
    "clamp": lambda shape: edits.clamp(-0.3, 0.3),
    "fill": lambda shape: edits.fill(0.25),
    "chain": lambda shape: edits.chain(edits.scale(2.0), edits.clamp(-1, 1), edits.noise(0.1, seed=1)),
}
SITES = {
    "b.norm": (ROWS, TOKENS, WIDTH),
    "b.fc": (ROWS, TOKENS, HIDDEN),
    "b.act": (ROWS, TOKENS, HIDDEN),
    "b.drop": (ROWS, TOKENS, HIDDEN),
    "b.out:input": (ROWS, TOKENS, HIDDEN),
    "b.out": (ROWS, TOKENS, WIDTH),
    "b.fc:grad_output": (ROWS, TOKENS, HIDDEN),
    "b.act:grad_output": (ROWS, TOKENS, HIDDEN),
    "b.out:grad_output": (ROWS, TOKENS, WIDTH),
    "b.fc.weight:param": (HIDDEN, WIDTH),
    "b.out.weight:param": (WIDTH, HIDDEN),
    "b.fc.weight:grad": (HIDDEN, WIDTH),
}
ONLY_VALUES = ("positions", "heads")  # in two dimensions they mean something else
FROM_BEFORE = ("b.act", "b.drop", "b.out:input", "b.out")  # where a patch of the same run can go


def outcome(model, site, name):
    """The loss, the value at the site and all gradients of one step; or the refusal."""
    edit = EDITS[name](SITES[site])
    try:
        with gaff.edit(model, {site: edit}), gaff.capture(model, site) as got:
            loss = model(batch()).square().sum()
            loss.backward()
        found = {"loss": loss.detach(), "value": got.full(site)}
    except gaff.GaffError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        return f"CRASH {error}"
    for key, one in model.named_parameters():
        gradient = one.grad
        found[key] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {key: None if one is None else one.detach().clone() for key, one in found.items()}


def every():
    """Modes of checkpointing, sites and edits."""
    for mode in (None, "other", "reentrant"):
        for site, name in ((site, name) for site in SITES for name in EDITS):
            is_of_weights = name in ONLY_VALUES and SITES[site] == SITES["b.fc.weight:grad"]
            is_too_early = name == "patch same run" and (site not in FROM_BEFORE or mode == "reentrant")
            if not (is_of_weights or is_too_early):
                yield mode, site, name


def whole(setting):
    """What of a model that no edit touched is put together, and what a capture makes of a patch."""
    model, x = build(setting, None), batch()
    with gaff.capture(model, "b.fc", "b.act", "b.out") as clean:
        y = model(x)
    with gaff.edit(model, {"b.act": edits.patch(clean)}):
        patched = model(x * 2)
    with gaff.edit(model, {"b.fc": edits.patch(clean["b.fc"])}):
        by_tensor = model(x * 2)
    with gaff.edit(model, {"b.fc": edits.ablate("mean", clean)}), gaff.capture(model, "b.fc") as mean:
        model(x)
    some = {}
    for name, kept in {
        "rows": keep.rows([0, 2]),
        "channels": keep.channels([1, -1]),
        "projected": keep.project(2),
    }.items():
        again = build(setting, None)
        with gaff.capture(again, "b.fc.weight:grad", reduce=kept) as reduced:
            again(x).square().sum().backward()
        told = reduced["b.fc.weight:grad"]
        some[name] = told.full_tensor() if isinstance(told, DTensor) else told
    twice = build(setting, None, Twice)
    with gaff.edit(twice, {"b.fc.weight:param": edits.scale(0.5)}):
        twice(batch().requires_grad_()).square().sum().backward()
    writes = build(setting if setting == "fsdp2" else None, None, Writes)  # torch allows it under none of the others
    with gaff.capture(writes, "b.out:outer_grad"):
        writes(batch()[:, 0]).square().sum().backward()
    plain = build(setting, None)  # whose norm has all ones and zeros, and is in no plan but that of sequences
    with gaff.capture(plain, "b.norm.weight:param", "b.norm.bias:param") as state:
        plain(x)
    with gaff.edit(plain, {"b.norm.weight:param": edits.clip(norm=0.5)}):
        clipped = plain(x)
    return {
        "of one value": torch.stack([state.full(site) for site in state]),
        "clipped": clipped.detach(),
        "twice": gradient_of(twice),
        "written": gradient_of(writes),
        "output": y.detach(),
        "patched": patched.detach(),
        "by tensor": by_tensor.detach(),
        "mean": mean.full("b.fc"),
        **some,
        **{site: clean.full(site) for site in clean},
    }, [row.reason for row in clean.receipt.rows]


def gradient_of(model):
    gradient = model.b.fc.weight.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def found_by(rank, setting):
    """By edit: what came of it; and what of a model that no edit touched is put together."""
    to_local = DTensor.to_local
    found = {one: outcome(build(setting, one[0]), *one[1:]) for one in every()}
    assert DTensor.to_local is to_local
    return found, whole(setting)
