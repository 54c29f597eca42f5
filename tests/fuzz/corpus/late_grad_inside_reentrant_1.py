# ask capture late/detach#0:grad_output
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
class Late(nn.Module):
    def forward(self, h0): return h0.detach().requires_grad_()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.late = Late()
    def forward(self, h0): return checkpoint(self.late, self.l(h0), use_reentrant=True)
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
with gaff.capture(model, gaff.maybe('late/detach#0:grad_output')) as got:
    drive(model)
print(got.all('late/detach#0:grad_output'), got.receipt)
