"""A training loop as large models have it: tensor parallel, checkpointed, compiled block by block, sharded; on four
processes, for ``slow/test_trainer_loop.py``."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gaff

WORLD, STEPS, LAYERS, WIDTH, TOKENS = 4, 4, 2, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x):
        given = self.norm1(x)
        q, k, v = (one(given).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(how):
    """``how``: some of "tp", "checkpoint", "compile", "fsdp"; nothing for one process."""
    torch.manual_seed(0)
    model = Model()
    if not how:
        return model
    from torch.distributed._composable import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = RowwiseParallel, ColwiseParallel
    for layer in model.layers:
        if "tp" in how:
            plan = {"wq": columns(), "wk": columns(), "wv": columns(), "wo": rows(), "up": columns(), "down": rows()}
            parallelize_module(layer, mesh["tp"], plan)
        if "checkpoint" in how:
            checkpoint(layer)
        if "compile" in how:
            layer.compile(backend="aot_eager")
        if "fsdp" in how:
            fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]) if "fsdp" in how else model


def batches():
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (4, TOKENS + 1), generator=drawn) for _ in range(STEPS)]


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def rows_of(tokens, how):
    """This process's rows: those of its replica."""
    return tokens.chunk(2)[dist.get_rank() // 2] if how and "fsdp" in how else tokens


EDIT = {"layers.0.up": gaff.edits.scale(0.5), "layers.1.act:grad_output": gaff.edits.scale(2.0)}
SITES = (
    "layers.0",
    "layers.1.act",
    "layers.1.down:input",
    "layers.0.wq",
    "layers.1:grad_output",
    "layers.1.up:grad_output",
)


def train(how, out=None, *, is_edited=False):
    """Losses, norms before clipping, and the last step's values; weights at the end."""
    model = build(how)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    told = {"losses": [], "seen": {}}
    watch = gaff.watch(model, optimizer, out=out, every=1) if out else None
    clipping = gaff.clip_gradients(optimizer, model=model, norm=0.5)
    for number, tokens in enumerate(batches()):
        mine = rows_of(tokens, how)
        if is_edited and number == 1:
            with gaff.edit(model, EDIT):
                loss = loss_of(model, mine)
                loss.backward()
        elif number == STEPS - 1:
            with gaff.capture(model, *SITES) as got:
                loss = loss_of(model, mine)
                loss.backward()
            told["seen"] = {site: seen(got, site) for site in got}
        else:
            loss = loss_of(model, mine)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told["losses"].append(float(loss.detach()))
    if watch is not None:
        watch.remove()
    told["norms"] = [row.norm for row in clipping.audit.rows]
    told["weights"] = {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
        for name, one in model.named_parameters()
    }
    return told


def seen(got, site):
    """The whole of what passed there, or why nobody can tell it."""
    try:
        return got.full(site).detach().clone()
    except gaff.PlanError as error:
        return str(error)


HOWS = (
    ("tp", "fsdp"),
    ("tp", "checkpoint", "fsdp"),
    ("compile", "fsdp"),
    ("tp", "compile", "fsdp"),
    ("tp", "checkpoint", "compile", "fsdp"),
)


def found_by(rank, out, how):
    """What is told of training in one of the ways, edited and not; or why that is refused."""
    found = {}
    for is_edited in (False, True):
        torch._dynamo.reset()
        try:
            found[is_edited] = train(how, f"{out}/{is_edited}", is_edited=is_edited)
        except gaff.GaffError as error:
            found[is_edited] = f"{type(error).__name__}: {error}"
    return found
