import logging
import tempfile
import warnings

import torch
import torch.nn.functional as F
from common import digest, digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
import pytorch_lightning as pl  # noqa: E402


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, number):
        x, y = batch
        return F.cross_entropy(self.body(x), y)

    def validation_step(self, batch, number):
        x, y = batch
        self.log("val", F.cross_entropy(self.body(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
x, y = digits()
loader = DataLoader(TensorDataset(x[:320], y[:320]), 32, shuffle=True)
lit = Lit()
with tempfile.TemporaryDirectory() as folder:
    trainer = pl.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(lit, loader, DataLoader(TensorDataset(x[320:480], y[320:480]), 32))
print(trainer.callback_metrics["val"].item(), digest(lit))
