"""An ordinary elastic PyTorch script that knows nothing of keepstep: own snapshot file, `@record`, DDP.

    keepstep run --standalone --nproc-per-node 2 examples/elastic_plain.py --snapshot /tmp/snapshot.pt
    torchrun     --standalone --nproc-per-node 2 examples/elastic_plain.py --snapshot /tmp/snapshot.pt

It is written the way the PyTorch elastic tutorials write it: every epoch rank 0 saves a snapshot, and whoever starts
looks for one first. A restart therefore repeats the epoch it fell into.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def toy_data(samples: int = 512) -> TensorDataset:
    """A noisy linear map, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 20, generator=generator)
    weights = torch.randn(20, 1, generator=generator)
    return TensorDataset(inputs, inputs @ weights + 0.1 * torch.randn(samples, 1, generator=generator))


class Trainer:
    """Model, data and the snapshot they are saved to and loaded from."""

    def __init__(self, snapshot: Path, step_seconds: float) -> None:
        self.rank = int(os.environ["RANK"])
        self.snapshot, self.step_seconds = snapshot, step_seconds
        self.epochs_run = 0
        self.sampler: DistributedSampler[tuple[torch.Tensor, ...]]
        dataset = toy_data()
        self.sampler = DistributedSampler(dataset, seed=1)
        self.data = DataLoader(dataset, batch_size=32, sampler=self.sampler)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        if snapshot.exists():
            self.load_snapshot()
        self.ddp = DDP(self.model)

    def load_snapshot(self) -> None:
        saved = torch.load(self.snapshot, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epochs_run = saved["epochs_run"]
        print(f"[rank {self.rank}] resuming from the snapshot after epoch {self.epochs_run}", flush=True)

    def save_snapshot(self) -> None:
        # Renamed into place: a rank killed while writing leaves the old snapshot whole.
        partial = self.snapshot.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
        }
        torch.save(state, partial)
        partial.replace(self.snapshot)

    def run_epoch(self) -> float:
        self.sampler.set_epoch(self.epochs_run)
        total = 0.0
        for inputs, targets in self.data:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.ddp(inputs), targets)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
            time.sleep(self.step_seconds)
        return total / len(self.data)

    def train(self, epochs: int) -> None:
        while self.epochs_run < epochs:
            loss = self.run_epoch()
            self.epochs_run += 1
            if self.rank == 0:
                self.save_snapshot()
                print(f"[rank 0] epoch {self.epochs_run}/{epochs} loss {loss:.4f}", flush=True)


@record
def main() -> None:
    parser = argparse.ArgumentParser(description="Elastic training with an ordinary snapshot file.")
    parser.add_argument("--snapshot", type=Path, required=True, help="file of the snapshot")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.01, help="pause a step, to make the work visible")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    Trainer(args.snapshot, args.step_seconds).train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
