"""Trains ``examples/digits.py`` in a few seconds and writes its weights as safetensors."""

import torch
from digits import TEST_FROM, WEIGHTS, DigitNet, digits
from safetensors.torch import save_file
from torch import nn

torch.manual_seed(0)
images, labels = digits()
net = DigitNet()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for _ in range(30):
    for batch in torch.randperm(TEST_FROM).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
net.eval()
right = (net(images[TEST_FROM:]).argmax(1) == labels[TEST_FROM:]).float().mean().item()
print(f"{right:.1%} of {len(images) - TEST_FROM} unseen digits are right")
save_file(net.state_dict(), WEIGHTS)
