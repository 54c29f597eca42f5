# ask capture q:grad_input
import torch
import torch.nn.functional as F
from torch import nn
class Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.expand_as(x)
    @staticmethod
    def backward(ctx, g): return g * 0.5
class Pass(nn.Module):
    def forward(self, h0): return Alias.apply(h0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = Pass()
        self.q = nn.Linear(4, 4)
    def forward(self, h0):
        with torch.no_grad():
            h1 = self.p(h0)
        return self.q(h1)
def build():
    torch.manual_seed(0)
    return Net().double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double()
    model(x1).sum().backward()
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe('q:grad_input')) as got:
    drive(model)
print(got.all('q:grad_input'), got.receipt)
