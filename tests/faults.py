"""Planted faults: steps that make a NaN or inf, with the op, the module and words of the cause that are the truth."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Fault:
    """``build`` returns (model, step)."""

    name: str
    build: object
    op: str
    module: str
    direction: str
    cause: str


class Apply(nn.Module):
    """A layer, a function in its own forward, a layer."""

    def __init__(self, function, width=4):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = Function(function)
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def small(function, *, positive=False, is_double=False):
    def build():
        torch.manual_seed(0)
        model = Apply(function)
        x = torch.rand(3, 4) if positive else torch.randn(3, 4)
        return model, lambda: model(x).square().sum().backward()

    return build


def forward_only(function, x):
    def build():
        model = Function(function)
        return model, lambda: model(x())

    return build


def transformer(change):
    """A tiny encoder block with attention written out; ``change`` plants the fault."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.out = nn.Linear(8, 8)

        def forward(self, x, mask):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-1, -2) / 8**0.5
            scores = scores.masked_fill(~mask, float("-inf"))
            return self.out(F.softmax(scores, -1) @ v)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.attn = Attention()
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x, mask):
            x = x + self.attn(self.norm(x), mask)
            return x + self.mlp(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(8, 11)

        def forward(self, ids, mask):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x)

    def build():
        torch.manual_seed(0)
        model = Model()
        ids = torch.randint(0, 11, (2, 5))
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        mask = change(model, mask)
        return model, lambda: F.cross_entropy(model(ids, mask).flatten(0, 1), ids.flatten()).backward()

    return build


def close_a_row(model, mask):
    mask[2] = False
    return mask


def bad_weight(model, mask):
    with torch.no_grad():
        model.blocks[1].mlp[0].weight[3, 2] = float("nan")
    return mask


def huge_weights(model, mask):
    model.half()
    with torch.no_grad():
        model.blocks[0].mlp[2].weight.fill_(3e4)
        model.blocks[0].mlp[0].bias.fill_(30)
    return mask


def under_checkpoint(function, use_reentrant):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Apply(function)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    def build():
        torch.manual_seed(0)
        model = Around()
        x = torch.randn(3, 4, requires_grad=True)
        return model, lambda: model(x).square().sum().backward()

    return build


def structured():
    class Gives(nn.Module):
        def forward(self, x):
            return {"good": x * 1, "bad": [torch.log(x * 0)]}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gives = Gives()

        def forward(self, x):
            return self.gives(x)["bad"][0] * 2

    model, x = Model(), torch.randn(3)
    return model, lambda: model(x)


def loss_outside():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), torch.randn(3, 4) * 1000
    return model, lambda: torch.log(model(x)).sum().backward()


def under_autocast():
    torch.manual_seed(0)
    model = Apply(lambda x: (x * 3e38).square())
    x = torch.randn(3, 4)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()

    return model, step


def bad_input():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    x[1, 2] = float("nan")
    return model, lambda: model(x).sum().backward()


def ignored_targets():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    target = torch.full((3,), -100)
    return model, lambda: F.cross_entropy(model(x), target).backward()


def real_fault_under_a_scaler():
    torch.manual_seed(0)
    model = Apply(lambda x: torch.sqrt((x - 10) * (x > 10)))
    x = torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step():
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, step


FAULTS = [
    Fault("log of zero", small(lambda x: torch.log(F.relu(x))), "log", "middle", "forward", "log of 0: .* exactly 0"),
    Fault("log of a negative", small(lambda x: torch.log(x - 9)), "log", "middle", "forward", "numbers below 0"),
    Fault("sqrt of a negative", small(lambda x: torch.sqrt(x)), "sqrt", "middle", "forward", "sqrt of a negative"),
    Fault("rsqrt of zero", small(lambda x: torch.rsqrt(F.relu(x))), "rsqrt", "middle", "forward", "division by zero"),
    Fault("division by zero", small(lambda x: x / F.relu(x)), "div", "middle", "forward", "division by zero"),
    Fault("one over zero", small(lambda x: 1 / (x * 0)), "div", "middle", "forward", "division by zero"),
    Fault("reciprocal", small(lambda x: F.relu(x).reciprocal()), "reciprocal", "middle", "forward", "division by zero"),
    Fault("power", small(lambda x: F.relu(x) ** -1), "pow", "middle", "forward", "0 to the power of -1"),
    Fault("exp overflow", small(lambda x: torch.exp(x * 1e4)), "exp", "middle", "forward", "overflow: exp"),
    Fault("zero variance", small(lambda x: F.layer_norm(x * 0 + 1, (4,), eps=0)), "layer_norm", "middle", "forward",
          "zero variance: layer_norm with eps=0 on elements that are all equal"),
    Fault("running variance of zero",
          small(lambda x: F.batch_norm(x, torch.zeros(4), torch.zeros(4), eps=0)), "batch_norm", "middle", "forward",
          "zero variance: batch_norm with eps=0 and a running variance of 0"),
    Fault("std of one", small(lambda x: x / x[:, :1].std(1, keepdim=True)), "std", "middle", "forward", "single element"),
    Fault("normalised by hand", small(lambda x: (x * 0) / (x * 0).std(0)), "div", "middle", "forward",
          "division by zero"),
    Fault("acos", small(lambda x: torch.acos(x * 9)), "acos", "middle", "forward", "between -1 and 1"),
    Fault("mean of nothing", small(lambda x: x + x[:0].mean()), "mean", "middle", "forward", "mean of no elements"),
    Fault("softmax of a closed row", small(lambda x: F.softmax(x.masked_fill(x < 9, float("-inf")), -1)), "softmax",
          "middle", "forward", "fully masked row"),
    Fault("in place", small(lambda x: x.mul(0).log_()), "log_", "middle", "forward", "log"),
    Fault("half overflow", forward_only(lambda x: x @ x, lambda: torch.full((8, 8), 300.0, dtype=torch.float16)),
          "matmul", "", "forward", "overflow: matmul gives .*float16 holds up to"),
    Fault("uninitialised", forward_only(lambda x: x * torch.full((3,), 1e30) * torch.full((3,), 1e30),
                                        lambda: torch.ones(3)), "mul", "", "forward", "overflow"),
    Fault("zero times inf", forward_only(lambda x: x * torch.full((3,), float("inf")), lambda: torch.zeros(3)), "mul",
          "", "forward", "0 \\* inf"),
    Fault("structures", structured, "log", "gives", "forward", "log of 0"),
    Fault("loss outside the model", loss_outside, "log", "(step)", "forward", "log of 0"),
    Fault("ignored targets", ignored_targets, "cross_entropy", "(step)", "forward", "ignore_index"),
    Fault("attention", transformer(close_a_row), "softmax", "blocks.0.attn", "forward", "fully masked row: in 2 of 10"),
    Fault("bad weight", transformer(bad_weight), "", "blocks.1.mlp.0.weight", "before", "parameter held 1 nan"),
    Fault("half transformer", transformer(huge_weights), "linear", "blocks.0.mlp.2", "forward", "overflow: linear"),
    Fault("autocast", under_autocast, "square", "middle", "forward", "overflow"),
    Fault("bad input", bad_input, "", "", "before", "input held 1 nan"),
    Fault("sqrt backward", small(lambda x: torch.sqrt(x * (x > 0))), "sqrt", "middle", "backward", "sqrt at 0 is infinite"),
    Fault("where keeps only the value clean",
          small(lambda x: torch.where(x > 0, torch.sqrt(x * (x > 0)), torch.zeros(()))), "sqrt", "middle", "backward",
          "0 \\* inf is NaN"),
    Fault("power backward", small(lambda x: (x * (x > 0)) ** 0.5), "pow", "middle", "backward", "power below 1 at 0"),
    Fault("standard deviation by hand", small(lambda x: x / ((x * 0).var(1, keepdim=True).sqrt() + 1)), "sqrt",
          "middle", "backward", "sqrt at 0"),
    Fault("acos backward", small(lambda x: torch.acos(x / x.abs())), "acos", "middle", "backward", "-1 and 1 is infinite"),
    Fault("backward overflow", small(lambda x: x + x * 0 * 1e38 * 1e38), "mul", "middle", "backward",
          "overflow"),
    Fault("distance of equal points", small(lambda x: torch.sqrt(((x - x) ** 2).sum(1, keepdim=True)) + x), "sqrt",
          "middle", "backward", "sqrt at 0"),
    Fault("sqrt under a checkpoint", under_checkpoint(lambda x: torch.sqrt(x * (x > 0)), False), "sqrt", "inner.middle",
          "backward", "sqrt at 0"),
    Fault("sqrt under a reentrant checkpoint", under_checkpoint(lambda x: torch.sqrt(x * (x > 0)), True), "sqrt",
          "inner.middle", "backward", "sqrt at 0"),
    Fault("log under a checkpoint", under_checkpoint(lambda x: torch.log(F.relu(x)), False), "log", "inner.middle",
          "forward", "log of 0"),
    Fault("a real fault under a scaler", real_fault_under_a_scaler, "sqrt", "middle", "backward", "sqrt at 0"),
]  # fmt: skip


class Chain(nn.Module):
    """Sums over paths through states; transitions that are never to be taken are -inf in a parameter, on purpose."""

    def __init__(self):
        super().__init__()
        never = torch.ones(4, 4).tril(-1).bool()
        self.scores, self.moves = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4).masked_fill(never, -math.inf))

    def forward(self, x):
        scores = self.scores(x)
        reached = scores[0]
        for one in scores[1:]:
            reached = torch.logsumexp(reached[:, None] + self.moves, 0) + one
        return reached.logsumexp(0)
