# ask capture c:input_grad
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
    def forward(self, h0):
        h1 = self.a(h0)
        return checkpoint(self.c, h1, use_reentrant=True) + 10 * h1
def build():
    torch.manual_seed(0)
    return Net().double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double().requires_grad_()
    l2 = model(x1).sum()
    l2.backward(retain_graph=True)
    l2.backward()
    seen.append(x1.grad)
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe('c:input_grad')) as got:
    drive(model)
print(got.all('c:input_grad'), got.receipt)
