# ask edit c.weight:grad with gaff.edits.add(1.0, 0.25)
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(4, 4)
    def forward(self, h0): return checkpoint(self.c, h0, use_reentrant=True)
def build():
    torch.manual_seed(0)
    return Net().double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double().requires_grad_()
    x2 = torch.randn(2, 4).double().requires_grad_()
    (model(x1).sum() + model(x2).sum()).backward()
    return seen
import gaff
model = build()
with gaff.edit(model, {"c.weight:grad": gaff.edits.add(1.0, 0.25)}) as edited:
    drive(model)
print(model.c.weight.grad, edited.receipt)
