"""ResNet-50 (He et al. 2015) in plain torch, random weights, and one of scikit-learn's photos.

gaff trace examples/resnet50.py:model examples/resnet50.py:photo
python examples/resnet50.py
"""

import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the photos that such networks are trained on


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide, narrow, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.conv3 = nn.Conv2d(narrow, 4 * narrow, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * narrow)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or wide != 4 * narrow:
            self.downsample = nn.Sequential(
                nn.Conv2d(wide, 4 * narrow, 1, stride, bias=False), nn.BatchNorm2d(4 * narrow)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """Images [N, 3, H, W] to 1,000 class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._stage(64, 64, blocks=3, stride=1)
        self.layer2 = self._stage(256, 128, blocks=4, stride=2)
        self.layer3 = self._stage(512, 256, blocks=6, stride=2)
        self.layer4 = self._stage(1024, 512, blocks=3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, 1000)

    def _stage(self, wide: int, narrow: int, blocks: int, stride: int) -> nn.Sequential:
        first = Bottleneck(wide, narrow, stride)
        return nn.Sequential(first, *(Bottleneck(4 * narrow, narrow, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def model() -> ResNet50:
    torch.manual_seed(0)
    return ResNet50().eval()


def photo() -> Tensor:
    """A photo of a flower as [1, 3, 224, 224], normalised."""
    pixels = torch.tensor(load_sample_image("flower.jpg")).permute(2, 0, 1).float().unsqueeze(0) / 255
    pixels = functional.interpolate(pixels, size=(224, 224), mode="bilinear", antialias=True)
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


if __name__ == "__main__":
    import gaff

    net, x = model(), photo()
    with torch.no_grad():
        print(gaff.trace(net, x).tree())
        features = gaff.take(net, "layer4", "avgpool")(x)
    print({name: tuple(value.shape) for name, value in features.items()})
