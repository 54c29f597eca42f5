# ask capture 0.weight:grad
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
    x2 = torch.randn(2, 4).double()
    model(x2)
    model(2 * x2)
    hook.remove()
    o1[0].sum().backward()
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe('0.weight:grad')) as got:
    drive(model)
print(got.all('0.weight:grad'), got.receipt)
