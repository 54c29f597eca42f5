# ask capture 1:grad_input
import torch
import torch.nn.functional as F
from torch import nn
class Clip(nn.Module):
    def forward(self, h0):
        with torch.no_grad():
            h0.clamp_(-0.1, 0.1)
        return h0
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Clip(), nn.Linear(4, 4)).double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double()
    model(x1).sum().backward()
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe('1:grad_input')) as got:
    drive(model)
print(got.all('1:grad_input'), got.receipt)
