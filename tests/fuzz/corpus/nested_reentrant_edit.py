# ask edit m.c.k:output with gaff.edits.scale(0.5)
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.Linear(4, 4)
    def forward(self, h0):
        with torch.enable_grad():
            h1 = self.k(h0)
        return h1
class Mid(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = Inner()
    def forward(self, h0): return checkpoint(self.c, h0 * 1.0, use_reentrant=True)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = Mid()
    def forward(self, h0): return checkpoint(self.m, h0, use_reentrant=True)
def build():
    torch.manual_seed(0)
    return Net().double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double().requires_grad_()
    model(x1).sum().backward()
    seen.append(x1.grad)
    return seen
import gaff
model = build()
with gaff.edit(model, {"m.c.k:output": gaff.edits.scale(0.5)}) as edited:
    print(drive(model))
print({name: p.grad for name, p in model.named_parameters()}, edited.receipt)
