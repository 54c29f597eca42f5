"""Cells run one after the other in one namespace, as a notebook does."""

CELLS = [
    "import torch\nimport torch.nn.functional as F\nfrom torch import nn\nfrom common import digest, digits",
    "torch.manual_seed(0)\nx, y = digits()\nmodel = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))",
    "optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)",
    "def closure():\n    optimizer.zero_grad()\n    loss = F.cross_entropy(model(x[:200]), y[:200])\n    loss.backward()\n"
    "    return loss",
    "for _ in range(5):\n    loss = optimizer.step(closure)\nprint(loss.item(), digest(model))",
]
space = {"__name__": "__main__"}
for cell in CELLS:
    exec(compile(cell, "<cell>", "exec"), space)
