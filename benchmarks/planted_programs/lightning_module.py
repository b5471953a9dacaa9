"""A Lightning training that knows nothing of rlprof, with the fault of the first argument."""

import sys
import time

import lightning as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

fault = sys.argv[1] if len(sys.argv) > 1 else ""


class Prompts(torch.utils.data.Dataset):
    """Random vectors; reading one may be slow."""

    def __len__(self):
        return 240

    def __getitem__(self, at):
        if fault == "data-wait":
            time.sleep(0.010)
        return torch.randn(64)


class Policy(pl.LightningModule):
    """A layer that is trained on its own outputs."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        self.kept = []

    def training_step(self, batch, index):
        """Return the loss; it may keep 4 MiB."""
        if fault == "memory-growth":
            self.kept.append(bytearray(b"x" * 4 * 2**20))
        loss = torch.tanh(self.layers(batch)).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Return an optimizer of all layers."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SlowLogger(CSVLogger):
    """A logger whose server answers after 20 ms."""

    def log_metrics(self, metrics, step=None):
        """Wait, then log."""
        time.sleep(0.020)
        super().log_metrics(metrics, step)


class SlowDisk(TorchCheckpointIO):
    """A disk that takes 50 ms for a checkpoint."""

    def save_checkpoint(self, *args, **options):
        """Wait, then write."""
        time.sleep(0.050)
        super().save_checkpoint(*args, **options)


callbacks: list[Callback] = []
if fault == "checkpoint-eval":
    callbacks = [ModelCheckpoint("checkpoints", every_n_train_steps=1, save_top_k=-1)]
trainer = pl.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=SlowLogger("logs") if fault == "logging" else False,
    log_every_n_steps=1,
    callbacks=callbacks,
    plugins=[SlowDisk()],
    enable_checkpointing=fault == "checkpoint-eval",
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Policy(), torch.utils.data.DataLoader(Prompts(), batch_size=4))
