import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn

torch.manual_seed(0)
data, _ = digits()
netG = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
netD = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optG = torch.optim.Adam(netG.parameters(), lr=1e-3)
optD = torch.optim.Adam(netD.parameters(), lr=1e-3)
for _ in range(30):
    real = data[torch.randint(0, len(data), (16,))]
    fake = netG(torch.randn(16, 8))
    netD.zero_grad()
    errD_real = F.binary_cross_entropy_with_logits(netD(real), torch.ones(16, 1))
    errD_real.backward()
    errD_fake = F.binary_cross_entropy_with_logits(netD(fake.detach()), torch.zeros(16, 1))
    errD_fake.backward()
    optD.step()
    netG.zero_grad()
    errG = F.binary_cross_entropy_with_logits(netD(fake), torch.ones(16, 1))
    errG.backward()
    optG.step()
print(errG.item(), digest(netG, netD))
