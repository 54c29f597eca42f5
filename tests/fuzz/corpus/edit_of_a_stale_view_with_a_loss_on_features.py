# ask edit m7.m4:grad_output with gaff.edits.zero()
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
class Part0(nn.Module):
    def __init__(self):
        super().__init__()
        self.m3 = nn.Conv2d(1, 1, 3, padding=1)
        self.m4 = nn.Flatten()
    def forward(self, h0):
        h5 = self.m4(self.m3(h0.reshape(2, 1, 2, 2)))
        h5.mul_(2.0)
        return h5
class Part1(nn.Module):
    def __init__(self):
        super().__init__()
        self.m7 = Part0()
    def forward(self, h0):
        h8 = checkpoint(self.m7, h0, use_reentrant=False)
        return h0
def build():
    torch.manual_seed(400632)
    return Part1().double()
def drive(model):
    seen = []
    o1 = []
    hook = model.m7.register_forward_hook(lambda mod, given, out: o1.append(out))
    x2 = torch.randn(2, 4).double()
    model(x2)
    x3 = torch.randn(2, 4).double()
    model(x3)
    (o1[0] - o1[1]).pow(2).sum().backward()
    return seen
import gaff
model = build()
torch.manual_seed(400633)
with gaff.edit(model, {'m7.m4:grad_output': gaff.edits.zero()}): seen = drive(model)
print('expected', 'm7.m3.weight.grad = [0, 0, 0, 0, ...]')
print('got', [*seen, {name: p.grad for name, p in model.named_parameters()}])
