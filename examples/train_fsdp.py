"""Train a transformer sharded over all ranks (FSDP2), on however many nodes there are.

    keepstep run --nnodes 1:2 --nproc-per-node 2 --rdzv-id demo examples/train_fsdp.py --root /tmp/ckpt     # once on each node
    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py --root /tmp/ckpt

When a node is lost and no spare is left the job goes on with fewer ranks, and with more at the next restart after it came back:
shards are put together anew for the ranks there are, from the nodes' memory where that holds all of them, and every sample is
used exactly once. The batch of a rank stays the same, so the global batch changes with the number of ranks; `ks.batch_plan` is
for runs in which it must not.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import keepstep.trainer as ks

VOCABULARY, CONTEXT, WIDTH = 64, 32, 64


class Patterns(Dataset[tuple[int, Tensor]]):
    """Number series with a step of their own: the next number follows from the two before it."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        begin, step = divmod(index, VOCABULARY)
        return index, (begin + step * torch.arange(CONTEXT + 1)) % VOCABULARY


class Model(nn.Module):
    """A causal transformer; returns the mean cross entropy of the next number."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, numbers: Tensor) -> Tensor:
        inputs, targets = numbers[:, :-1], numbers[:, 1:]
        x = self.token(inputs) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def sharded_model(device: str, world: int) -> Model:
    """Each block's parameters divided over all ranks, gathered only while the block computes."""
    mesh = init_device_mesh(device, (world,))
    model = Model().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Elastic training with FSDP2.")
    parser.add_argument("--root", required=True, help="folder or object store of the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="samples a rank")
    parser.add_argument("--save-every", type=int, default=None, help="steps between saves (default: by time)")
    parser.add_argument("--ledger", type=Path, help="folder for a record of every sample used")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)  # the same weights on every rank, before they are sharded
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    run = ks.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded_model(device, world)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Patterns()
    sampler = ks.ResumableSampler(len(dataset), args.batch, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = {"model": model, "optim": optim, "loader": sampler}
    # On another number of ranks dropout goes on with new random numbers: those of a rank cannot be divided.
    ckpt = ks.Checkpointer(args.root, state, every_steps=args.save_every, rng_on_reshard="reseed")
    step = ckpt.restore()
    if rank == 0:
        print(f"{world} ranks go on from step {step}, sample {sampler.consumed} of epoch {sampler.epoch}", flush=True)
    stop = False
    while step < args.steps and not stop:
        for samples, numbers in sampler.deliver(loader):
            with run.step(step) as s:
                loss = model(numbers.to(device))
                loss.backward()
                s.observe(loss=loss)
                optim.step()
                optim.zero_grad(set_to_none=True)
            step += 1
            if args.ledger:
                args.ledger.mkdir(parents=True, exist_ok=True)
                with (args.ledger / f"c{run.cycle:04d}-r{rank}.jsonl").open("a") as ledger:
                    print(json.dumps({"step": step, "samples": samples.tolist()}), file=ledger)
            if rank == 0 and step % 20 == 0:
                print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
            ckpt.maybe_save(step)
            stop = run.stop_requested
            if step == args.steps or stop:
                break
    ckpt.close()
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
