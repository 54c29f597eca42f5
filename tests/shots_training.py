"""A training on real digits with everything that a page can mark: evaluations, a schedule, checkpoints, a bug.

Knows nothing of gaff.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_digits import Net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)
    model = Net(options.bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    steps = options.epochs * 30
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
    folder = Path(tempfile.mkdtemp())
    for epoch in range(options.epochs):
        model.train()
        for batch in torch.randperm(1500).split(50):
            loss = F.cross_entropy(model(images[train][batch]), labels[train][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            out = model(images[test])
            print(f"epoch {epoch}: test loss {F.cross_entropy(out, labels[test]):.4f}")
        torch.save(model.state_dict(), folder / f"{epoch}.pt")


if __name__ == "__main__":
    main()
