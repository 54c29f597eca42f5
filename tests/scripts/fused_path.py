"""torch's own encoder takes a fused path in eval mode, which hooks on its modules would switch off."""

import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn

torch.manual_seed(0)
x, y = digits()
layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    chosen = torch.randint(0, len(x), (16,))
    loss = F.cross_entropy(model(x[chosen].view(-1, 8, 8)), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            print(model(x[:64].view(-1, 8, 8)).double().sum().item())
        model.train()
print(digest(model))
