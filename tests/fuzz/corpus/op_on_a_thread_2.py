# ask capture :grad_input
import torch
import torch.nn.functional as F
from torch import nn
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(8)
def in_thread(function, *args): return pool.submit(function, *args).result()
class Net(nn.Module):
    def forward(self, h0): return in_thread(lambda: h0 * 3.0) + h0 * 5.0
def build():
    torch.manual_seed(0)
    return Net().double()
def drive(model):
    seen = []
    x1 = torch.randn(2, 4).double().requires_grad_()
    model(x1).sum().backward()
    return seen
import gaff
model = build()
with gaff.capture(model, gaff.maybe(':grad_input')) as got:
    drive(model)
print(got.all(':grad_input'), got.receipt)
