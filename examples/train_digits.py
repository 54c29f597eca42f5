"""Train a small convolutional net on real digits, or break it in one of several ways. Knows nothing of gaff.

python examples/train_digits.py --epochs 4
gaff watch --out runs/a -- python examples/train_digits.py --bug dead-relu
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

BUGS = ("dead-relu", "no-zero-grad", "detached", "nan", "lr-too-high", "forgotten-layer", "double-softmax")


class Net(nn.Module):
    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.act2 = nn.ReLU()
        self.fc1 = nn.Linear(32 * 16, 64)
        self.act3 = nn.ReLU()
        self.fc2 = nn.Linear(64, 10)
        if bug == "dead-relu":
            nn.init.constant_(self.fc1.bias, -8.0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.act2(self.conv2(self.act1(self.conv1(x)))), 2)
        x = self.act3(self.fc1(x.flatten(1)))
        if self.bug == "detached":
            x = x.detach()
        if self.bug == "nan":
            x = torch.log(x)
        out = self.fc2(x)
        return out.softmax(1) if self.bug == "double-softmax" else out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", choices=BUGS)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels.reshape(-1, 1, 8, 8), dtype=torch.float32) / 16
    labels = torch.tensor(digits)
    train, test = slice(0, 1500), slice(1500, None)
    model = Net(options.bug)
    owned = list(model.parameters())[:-2] if options.bug == "forgotten-layer" else model.parameters()
    optimizer = torch.optim.Adam(owned, lr=1.0 if options.bug == "lr-too-high" else options.lr)
    loss = torch.zeros(())
    for epoch in range(options.epochs):
        model.train()
        for batch in torch.randperm(1500).split(50):
            loss = F.cross_entropy(model(images[train][batch]), labels[train][batch])
            if options.bug != "no-zero-grad":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
