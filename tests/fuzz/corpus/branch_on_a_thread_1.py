# ask capture par:grad_input
import torch
import torch.nn.functional as F
from torch import nn
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(8)
def in_thread(function, *args): return pool.submit(function, *args).result()
class Par(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
    def forward(self, h0): return in_thread(self.b, h0) + self.a(h0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Linear(4, 4)
        self.par = Par()
    def forward(self, h0): return self.par(self.pre(h0))
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
with gaff.capture(model, gaff.maybe('par:grad_input')) as got:
    drive(model)
print(got.all('par:grad_input'), got.receipt)
