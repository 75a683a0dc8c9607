"""Lightning `Trainer` with validation and a metric; the strategy is DDP on as many devices as there are ranks."""

import argparse
import os
import time

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class PrintLoss(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.is_global_zero:
            print(f"loss={outputs['loss'].item()!r} time={time.perf_counter()!r}")


if __name__ == "__main__":
    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(1024, 256), torch.randint(0, 10, (1024,)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "2")),
        strategy="ddp",
        max_epochs=1000,
        val_check_interval=8,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[PrintLoss()],
    )
    trainer.fit(Module(), DataLoader(data, args.batch_size, shuffle=True), DataLoader(data, 512))
