import sys

import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn


def main():
    torch.manual_seed(0)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(40):
        chosen = torch.randint(0, len(x), (32,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())
    model.eval()
    with torch.no_grad():
        print((model(x).argmax(1) == y).float().mean().item())
    print(digest(model), sys.argv[1:], __name__, __file__.rpartition("/")[2], sys.path[0] == sys.path[0])


if __name__ == "__main__":
    main()
    sys.exit(5)
