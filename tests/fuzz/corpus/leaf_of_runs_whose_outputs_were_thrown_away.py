# ask capture m5:input_grad
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
class Part2(nn.Module):
    def __init__(self):
        super().__init__()
        self.m5 = nn.Linear(4, 4)
    def forward(self, h0):
        h2 = h0 * 1.0
        h6 = checkpoint(self.m5, h0, use_reentrant=False)
        return h2
def build():
    torch.manual_seed(301012)
    return Part2().double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double().requires_grad_()
    y2 = model(x1)
    y3 = model(x1)
    y2.sum().backward()
    return seen
import gaff
model = build()
torch.manual_seed(301013)
with gaff.capture(model, gaff.maybe('m5:input_grad')) as got: seen = drive(model)
print('expected', '[]')
print('got', got.all('m5:input_grad'))
print(got.receipt)
