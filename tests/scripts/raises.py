import atexit

import torch
from common import digest, digits
from torch import nn

torch.manual_seed(0)
x, y = digits()
model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
atexit.register(lambda: print("at exit", digest(model)))
for step in range(20):
    loss = nn.functional.cross_entropy(model(x[:32]), y[:32])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 12:
        model(torch.zeros(2, 3))  # of the wrong size
