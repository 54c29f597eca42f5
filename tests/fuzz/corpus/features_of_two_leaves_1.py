# ask capture 0:input_grad
import torch
import torch.nn.functional as F
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
def drive(model):
    seen = []
    o1 = []
    hook = model[1].register_forward_hook(lambda mod, given, out: o1.append(out))
    x2 = torch.randn(2, 4).double().requires_grad_()
    model(x2)
    x3 = torch.randn(2, 4).double().requires_grad_()
    model(x3)
    hook.remove()
    (o1[0] - o1[1]).pow(2).sum().backward()
    seen.append(x2.grad)
    seen.append(x3.grad)
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe('0:input_grad')) as got:
    drive(model)
print(got.all('0:input_grad'), got.receipt)
