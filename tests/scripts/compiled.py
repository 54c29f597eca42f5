import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn

torch.manual_seed(0)
x, y = digits()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.body(x)


plain = Net()
model = torch.compile(plain, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
for _ in range(20):
    chosen = torch.randint(0, len(x), (32,))
    loss = F.cross_entropy(model(x[chosen]), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
from torch._dynamo.utils import counters  # noqa: E402

print(loss.item(), counters["stats"]["unique_graphs"], dict(counters["graph_break"]), digest(plain))
