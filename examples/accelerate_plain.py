"""An ordinary Hugging Face Accelerate script that knows nothing of keepstep and resumes from its own checkpoint.

    keepstep run      --nproc-per-node 2 examples/accelerate_plain.py --output /tmp/accelerate
    accelerate launch --num_processes 2  examples/accelerate_plain.py --output /tmp/accelerate

It is written the way Accelerate's documentation writes it: `prepare`, `backward`, `save_state` after every epoch,
`load_state` of the newest whole one at the start. A restart therefore repeats the epoch it fell into.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


def toy_data(samples: int = 256) -> TensorDataset:
    """A noisy linear map, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator))


def newest(output: Path) -> int:
    """Epochs that the newest whole checkpoint holds; 0 without one. `latest` is written after the checkpoint."""
    latest = output / "latest"
    return int(latest.read_text()) if latest.exists() else 0


def save(accelerator: Accelerator, output: Path, epochs: int) -> None:
    """Save everything that was prepared, then name it as the newest."""
    accelerator.save_state(str(output / f"epoch_{epochs}"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        new = output / "latest.new"
        new.write_text(str(epochs))
        new.rename(output / "latest")


def main() -> None:
    """Train for `--epochs` epochs in all, counting those of earlier lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="extra time a step takes")
    args = parser.parse_args()

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(toy_data(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    begin = newest(args.output)
    if begin:
        accelerator.load_state(str(args.output / f"epoch_{begin}"))
        accelerator.print(f"resuming after epoch {begin}", flush=True)
    step = begin * len(loader)
    for epoch in range(begin, args.epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(args.step_seconds)
        accelerator.print(f"epoch {epoch + 1} step {step} loss {loss.item():.4f}", flush=True)
        save(accelerator, args.output, epoch + 1)
    accelerator.print(f"finished at step {step} on {accelerator.num_processes} processes", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
