"""A small convolutional network, trained on scikit-learn's real 8x8 digits, and one digit it has never seen.

    gaff trace examples/digits.py:model examples/digits.py:image --backward

The weights lie beside this file; ``examples/train_digits.py`` made them and makes them again.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_name("digits.safetensors")
TEST_FROM = 1500  # the digits from here on are not trained on


class Head(nn.Module):
    """Two linear layers; the flattening between is a call of ``flatten``, no module."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16 * 2 * 2, 32)
        self.classes = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(torch.relu(self.hidden(x.flatten(1))))


class DigitNet(nn.Module):
    """1x8x8 grey values from 0 to 1 in, ten class scores out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images as [N, 1, 8, 8] and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels.reshape(-1, 1, 8, 8), dtype=torch.float32) / 16, torch.tensor(labels)


def model() -> DigitNet:
    """The trained network, in evaluation mode."""
    net = DigitNet()
    net.load_state_dict(load_file(WEIGHTS))
    return net.eval()


def image() -> Tensor:
    """One real digit as a batch of one."""
    return digits()[0][TEST_FROM : TEST_FROM + 1]


if __name__ == "__main__":
    import gaff

    net, x = model(), image()
    print(gaff.trace(net, x, backward=lambda scores: scores.logsumexp(1).mean()))
    print("this digit is a", net(x).argmax().item())
