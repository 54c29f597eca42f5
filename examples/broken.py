"""A training script with a fault that shows only after a while: ``gaff nan examples/broken.py`` says where.

Real digits (8x8, from scikit-learn); cross entropy written out by hand.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.body(x), dim=1)


def main() -> None:
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32)
    wanted = nn.functional.one_hot(torch.tensor(digits)).float()
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(200):
        rows = torch.randint(0, len(images), (64,))
        likely = model(images[rows])
        loss = -(wanted[rows] * likely.log()).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
