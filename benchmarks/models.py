"""Models that several benchmarks measure."""

from torch import nn

BLOCKS = 48


class Block(nn.Module):
    """Eleven microseconds: the price of a site can be seen."""

    def __init__(self, width=16):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.act(self.lin(x))


class Blocks(nn.Module):
    """So many blocks, one after the other."""

    def __init__(self, make=Block, count=BLOCKS):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def transformer():
    """Twelve blocks of 256 features: what people run."""
    return Blocks(lambda: nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0), 12)
