# ask capture log:grad_input
import torch
import torch.nn.functional as F
from torch import nn
class Log(nn.Module):
    def forward(self, h0): return h0.detach().abs()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.log = Log()
    def forward(self, h0):
        h1 = self.l(h0)
        with torch.no_grad():
            v2 = h1[:, :1]
        h1.mul_(2.0)
        self.log(v2)
        return h1
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
with gaff.capture(model, gaff.maybe('log:grad_input')) as got:
    drive(model)
print(got.all('log:grad_input'), got.receipt)
