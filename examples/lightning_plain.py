"""An ordinary PyTorch Lightning script that knows nothing of keepstep and resumes from its own checkpoint.

    keepstep run --nproc-per-node 2 examples/lightning_plain.py --output /tmp/lightning --devices 2
    torchrun     --nproc-per-node 2 examples/lightning_plain.py --output /tmp/lightning --devices 2

It is written the way Lightning's documentation writes it: a module, a `ModelCheckpoint` that keeps the last epoch, and
`fit(ckpt_path="last")`. A restart therefore repeats the epoch it fell into.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


def toy_data(samples: int = 256) -> TensorDataset:
    """A noisy linear map, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator))


class Regression(pl.LightningModule):
    """One linear layer; every step takes `step_seconds` longer than it needs."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)
        self.step_seconds = step_seconds

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _index: int) -> torch.Tensor:
        """Loss of one batch."""
        inputs, targets = batch
        time.sleep(self.step_seconds)
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def on_train_start(self) -> None:
        """Say where training goes on from."""
        if self.current_epoch and self.global_rank == 0:
            print(f"resuming after epoch {self.current_epoch}", flush=True)

    def on_train_epoch_end(self) -> None:
        """Say how far training is."""
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch + 1} step {self.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main() -> None:
    """Train for `--epochs` epochs in all, counting those of earlier lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1, help="processes on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="extra time a step takes")
    args = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy="ddp",
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(dirpath=args.output, save_last=True, every_n_epochs=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.output,
    )
    loader = DataLoader(toy_data(), batch_size=16, shuffle=True)
    trainer.fit(Regression(args.step_seconds), loader, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"finished at step {trainer.global_step} on {trainer.world_size} processes", flush=True)


if __name__ == "__main__":
    main()
