import multiprocessing

import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def square(number):
    return number * number


def main():
    torch.manual_seed(0)
    x, y = digits()
    data = TensorDataset(x[:256], y[:256])
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for context in ("fork", "spawn"):
        for inputs, labels in DataLoader(data, 32, shuffle=True, num_workers=2, multiprocessing_context=context):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(square, range(4)))
    print(digest(model))


if __name__ == "__main__":
    main()
