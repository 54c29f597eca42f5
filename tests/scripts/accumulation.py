import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
x, y = digits()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.head(checkpoint(self.second, x, use_reentrant=True))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(20):
    optimizer.zero_grad()
    for _ in range(3):
        chosen = torch.randint(0, len(x), (16,))
        (F.cross_entropy(model(x[chosen]), y[chosen]) / 3).backward()
    optimizer.step()
print(digest(model))
