import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn

torch.manual_seed(0)
x, y = digits()
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # overflows at first
for _ in range(40):
    chosen = torch.randint(0, len(x), (32,))
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x[chosen]).float(), y[chosen])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print(loss.item(), scaler.get_scale(), digest(model))
