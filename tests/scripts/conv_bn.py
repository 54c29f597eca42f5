import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn

torch.manual_seed(0)
x, y = digits()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = self.relu(self.bn(self.conv(x)))
        x = F.max_pool2d(x, 2)
        x += 0.1
        return self.fc(x.flatten(1))


model = Net()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for step in range(25):
    chosen = torch.randint(0, len(x), (32,))
    loss = F.cross_entropy(model(x[chosen].view(-1, 1, 8, 8)), y[chosen])
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        model.eval()
        with torch.inference_mode():
            print(F.cross_entropy(model(x[:64].view(-1, 1, 8, 8)), y[:64]).item())
        model.train()
print(digest(model))
