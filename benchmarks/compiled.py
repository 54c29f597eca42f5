"""What looking inside compiled training steps costs, beside the same compiled step without."""

import contextlib
import copy

import torch
import torch.nn.functional as F
from torch import nn

import gaff
from benchmarks.harness import measure, table
from benchmarks.watch import resnet


class Block(nn.Module):
    """Of a transformer with attention before its feed-forward part, both after a norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


def transformer(width=256, blocks=12):
    return nn.Sequential(*(Block(width, 8) for _ in range(blocks)), nn.LayerNorm(width)), torch.randn(2, 256, width)


def compiled_step(make, watch):
    """A training step of a compiled model, with ``watch`` open on it for good."""
    torch.manual_seed(0)
    model, x = make()
    model, x = copy.deepcopy(model), x.clone()
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    stack = contextlib.ExitStack()
    opened = stack.enter_context(watch(compiled, optimizer))

    def step():
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()
        if hasattr(opened, "clear"):
            opened.clear()

    step()
    told = getattr(opened, "receipt", None) or opened
    assert not any("ran eagerly" in note for note in getattr(told, "notes", ())), "this would compare something else"
    return step


def norms(model, optimizer):
    sites = [f"{path}{port}" for path, _ in model.named_modules() if path for port in ("", ":grad_output")]
    return gaff.capture(model, *sites, reduce=gaff.keep.norm())


def convolutional():
    return resnet()[0], torch.randn(16, 3, 32, 32)


WAYS = {
    "compiled": lambda model, optimizer: contextlib.nullcontext(),
    "watched, no step is looked at": lambda model, optimizer: gaff.watch(model, optimizer, every=10**9),
    "watched, full statistics at every step": lambda model, optimizer: gaff.watch(model, optimizer, every=1),
    "norms of all outputs and their gradients": norms,
    "guard": lambda model, optimizer: gaff.guard(model),
}


def prices(rounds=15):
    torch._dynamo.config.recompile_limit = 64  # variants of one function: these models share theirs
    for name, make in (("a transformer of 12 blocks", transformer), ("a ResNet of 6 blocks", convolutional)):
        ways = {}
        for way, watch in WAYS.items():
            ways[way] = compiled_step(make, watch)
        table(f"Compiled training step of {name}", measure(ways, rounds), base="compiled")
