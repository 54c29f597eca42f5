# ask capture 1:grad_input
import torch
import torch.nn.functional as F
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)).double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double().requires_grad_()
    y2 = model(x1)
    g3 = torch.autograd.grad(y2.sum(), x1, create_graph=True)[0]
    (y2.sum() + (g3 ** 2).sum()).backward()
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe('1:grad_input')) as got:
    drive(model)
print(got.all('1:grad_input'), got.receipt)
