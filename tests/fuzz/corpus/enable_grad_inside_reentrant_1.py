# ask capture c.k:grad_output
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)
    def forward(self, h0):
        with torch.enable_grad():
            h1 = self.k(h0)
        return self.l(h0) + h1 * 0.5
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = Inner()
    def forward(self, h0): return checkpoint(self.c, h0, use_reentrant=True) + h0
def build():
    torch.manual_seed(0)
    return Net().double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double().requires_grad_()
    model(x1 * 1.0).sum().backward()
    seen.append(x1.grad)
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe('c.k:grad_output')) as got:
    drive(model)
print(got.all('c.k:grad_output'), got.receipt)
