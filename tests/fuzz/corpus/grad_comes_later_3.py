# ask capture pos:output
import torch
import torch.nn.functional as F
from torch import nn
class Pos(nn.Module):
    def forward(self, h0): return torch.ones_like(h0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos = Pos()
        self.l = nn.Linear(4, 4)
    def forward(self, h0):
        h1 = self.pos(h0)
        h1.mul_(self.l(h0))
        return h1
def build():
    torch.manual_seed(0)
    return Net().double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double()
    (model(x1) * 2).sum().backward()
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe('pos:output')) as got:
    drive(model)
print(got.all('pos:output'), got.receipt)
