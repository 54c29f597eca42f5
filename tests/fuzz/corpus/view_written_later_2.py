# ask edit 1:grad_input with gaff.edits.zero()
import torch
import torch.nn.functional as F
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 4)).double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double()
    model(x1).sum().backward()
    return seen
import gaff
model = build()
with gaff.edit(model, {'1:grad_input': gaff.edits.zero()}) as edited:
    print(drive(model))
print({name: p.grad for name, p in model.named_parameters()}, edited.receipt)
