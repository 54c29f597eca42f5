"""Tiny models, one peculiarity each. ``ZOO`` holds functions that build (model, args, kwargs)."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Convolution, in-place ReLU, view, linear."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 2, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.fc1 = nn.Linear(160, 5)

    def forward(self, x):
        return self.fc1(self.relu(self.conv(x)).view(x.shape[0], -1))


class Residual(nn.Module):
    """Every block adds to its input."""

    def __init__(self, blocks=3, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Shared(nn.Module):
    """One linear layer under two names, called three times."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.again = self.shared
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.again(torch.relu(self.shared(torch.tanh(self.shared(x))))))


class Tree(nn.Module):
    """Calls itself until ``depth`` is used up."""

    def __init__(self):
        super().__init__()
        self.leaf = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        x = torch.tanh(self.leaf(x))
        return self(x, depth - 1) if depth else x


@dataclass
class Outputs:
    hidden: Tensor
    extra: object = None


Pair = namedtuple("Pair", "first second")


class Structured(nn.Module):
    """Returns a dataclass with a dict, a named tuple, None and a number inside."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.pair = PairModule()

    def forward(self, x):
        hidden = self.lin(x)
        first, second = self.pair(hidden)
        return Outputs(hidden=hidden + first, extra={"second": second, 3: [hidden * 2, None, 7]})


class PairModule(nn.Module):
    def forward(self, x):
        return Pair(torch.sigmoid(x), x - 1)


class Keywords(nn.Module):
    """Its submodule is called with keywords only."""

    def __init__(self):
        super().__init__()
        self.inner = Scaled()

    def forward(self, x, scale=2.0):
        return self.inner(tensor=x, scale=scale)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *, tensor, scale):
        return tensor * self.weight * scale


class InPlace(nn.Module):
    """Adds into what a submodule returned, and into a view of it."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        y = self.lin(x)
        y += 1
        y[:, :2] *= 3
        return self.out(self.act(y))


class Checkpointed(nn.Module):
    """Two segments under activation checkpointing."""

    def __init__(self, use_reentrant=False):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.second, x, use_reentrant=self.use_reentrant)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.cell = nn.GRUCell(3, 3)

    def forward(self, x):
        out, (h, _) = self.lstm(x)
        state = h[0]
        for step in range(out.shape[1]):
            state = self.cell(out[:, step], state)
        return state


class Normed(nn.Module):
    """Batch norm and dropout: buffers and random numbers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x):
        return self.body(x)


class Tied(nn.Module):
    """Input and output embeddings share their weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class PassThrough(nn.Module):
    """Submodules that return their input, a parameter, a buffer."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()
        self.table = Table()

    def forward(self, x):
        return self.same(x) + self.table()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self):
        return self.weight


def net():
    return Net(), (torch.randn(2, 3, 8, 8),), {}


def residual():
    return Residual(), (torch.randn(2, 8),), {}


def shared():
    return Shared(), (torch.randn(2, 4),), {}


def tree():
    return Tree(), (torch.randn(2, 4),), {}


def structured():
    return Structured(), (torch.randn(2, 4),), {}


def keywords():
    return Keywords(), (), {"x": torch.randn(2, 4, requires_grad=True), "scale": 3.0}


def in_place():
    return InPlace(), (torch.randn(2, 4),), {}


def checkpointed():
    return Checkpointed(), (torch.randn(2, 4, requires_grad=True),), {}


def checkpointed_reentrant():
    return Checkpointed(use_reentrant=True), (torch.randn(2, 4, requires_grad=True),), {}


def recurrent():
    return Recurrent(), (torch.randn(2, 5, 4),), {}


def normed():
    return Normed(), (torch.randn(6, 4),), {}


def tied():
    return Tied(), (torch.randint(10, (2, 3)),), {}


def attention():
    return Attention(), (torch.randn(2, 5, 8),), {}


def pass_through():
    return PassThrough(), (torch.randn(2, 4),), {}


ZOO = [
    net,
    residual,
    shared,
    tree,
    structured,
    keywords,
    in_place,
    checkpointed,
    checkpointed_reentrant,
    recurrent,
    normed,
    tied,
    attention,
    pass_through,
]


def loss_of(output):
    """A scalar that depends on every floating tensor of an output."""
    from gaff.address.nested import iter_tensors

    return sum(tensor.float().pow(2).mean() for _, tensor in iter_tensors(output) if tensor.is_floating_point())
