"""Train a small GPT on the source text of the Python standard library.

    keepstep run --standalone --nproc-per-node 2 examples/train_gpt.py --root /tmp/ckpt
    torchrun     --standalone --nproc-per-node 2 examples/train_gpt.py --root /tmp/ckpt
    python                                       examples/train_gpt.py --root /tmp/ckpt

The same file runs under all three. With one seed, thread and world size the final weights are the same to the last bit,
however often the run was interrupted: weights, optimizer, schedule, data position and random state come back together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import keepstep.trainer as ks

TEXT_LIMIT_BYTES = 2_000_000
CONTEXT = 64  # bytes a sample; one token is one byte


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            t.view(batch, time, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, width)), drop)
        return x + F.dropout(self.mlp(self.norm2(x)), drop)


class GPT(nn.Module):
    """Byte-level GPT; returns the mean cross entropy of the next byte."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Loader:
    """Windows of the text in a seeded order, sharded by rank. Its state says exactly which samples were used."""

    def __init__(self, batch: int, seed: int, rank: int, world: int) -> None:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(stdlib.glob("*.py")))[:TEXT_LIMIT_BYTES]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.samples = (len(self.text) - 1) // CONTEXT
        self.batch, self.seed, self.rank, self.world = batch, seed, rank, world
        self.epoch = self.position = 0
        self.order = self._shuffled()

    def _shuffled(self) -> Tensor:
        # A generator of its own: the order must not depend on, or disturb, the random numbers of dropout.
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch))

    def next(self) -> tuple[list[int], Tensor, Tensor]:
        """This rank's next batch: sample ids (counting on over epochs), inputs, targets."""
        stride = self.batch * self.world
        if self.position + stride > self.samples:  # too little is left for a batch on every rank
            self.epoch, self.position = self.epoch + 1, 0
            self.order = self._shuffled()
        begin = self.position + self.rank * self.batch
        ids = self.order[begin : begin + self.batch]
        self.position += stride
        window = self.text[ids[:, None] * CONTEXT + torch.arange(CONTEXT + 1)].long()
        return (ids + self.epoch * self.samples).tolist(), window[:, :-1], window[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.order = self._shuffled()


def accumulate(s: Any, net: nn.Module, loader: Loader, accum: int, device: torch.device) -> tuple[float, list[int]]:
    """Gradients of one optimizer step, over `accum` micro-batches; returns the loss and the samples used."""
    total, used = 0.0, []
    for micro in range(accum):
        with s.section("data"):
            ids, inputs, targets = loader.next()
            used += ids
        with s.section("compute"):
            # Ranks exchange gradients once a step, with the last micro-batch.
            hold = micro + 1 < accum and isinstance(net, DistributedDataParallel)
            with net.no_sync() if hold else contextlib.nullcontext():
                loss = net(inputs.to(device), targets.to(device)) / accum
                loss.backward()
            total += loss.item()
    return total, used


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the Python standard library's source text.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    parser.add_argument("--batch", type=int, default=4, help="samples a rank and micro-batch")
    parser.add_argument("--accum", type=int, default=2, help="micro-batches an optimizer step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", required=True, help="folder of the checkpoints")
    parser.add_argument("--save-every", type=int, default=None, help="steps between saves (default: by time)")
    parser.add_argument("--ledger", help="folder for a record of every sample used")
    parser.add_argument("--out", help="file for the final weights, written by rank 0")
    parser.add_argument("--torch-threads", type=int, default=1, help="more than one may change the last bits")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.torch_threads)
    run = ks.init()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cycle = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(args.seed)
    model = GPT().to(device)
    torch.manual_seed(args.seed * 1000 + rank)  # every rank its own dropout
    net: nn.Module = DistributedDataParallel(model, device_ids=[device] if cuda else None) if world > 1 else model
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    warmup = max(1, args.steps // 20)
    sched = torch.optim.lr_scheduler.LambdaLR(
        optim, lambda s: min((s + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * s / args.steps)))
    )
    loader = Loader(args.batch, args.seed, rank, world)
    state = {"model": model, "optim": optim, "sched": sched, "loader": loader}
    ckpt = ks.Checkpointer(args.root, state=state, every_steps=args.save_every)
    step = ckpt.restore()
    ledger = None
    if args.ledger:  # one file a cycle and rank: no two processes ever write the same one
        Path(args.ledger).mkdir(parents=True, exist_ok=True)
        ledger = (Path(args.ledger) / f"ledger-c{cycle:04d}-rank{rank}.jsonl").open("a")

    while step < args.steps:
        with run.step(step) as s:
            loss, used = accumulate(s, net, loader, args.accum, device)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            s.observe(loss=loss, grad_norm=float(grad_norm))  # before the weights can take up a NaN
            optim.step()
            optim.zero_grad(set_to_none=True)
            sched.step()
            if ledger:
                line = {"cycle": cycle, "step": step, "rank": rank, "samples": used, "done_ns": time.time_ns()}
                print(json.dumps(line), file=ledger, flush=True)
        step += 1
        if rank == 0 and (step % 50 == 0 or step == args.steps):
            print(f"step {step}/{args.steps} loss {loss:.4f}", flush=True)
        ckpt.maybe_save(step)
        if run.stop_requested:
            break

    if rank == 0 and args.out and step == args.steps:
        torch.save(model.state_dict(), args.out)
    ckpt.close()
    run.finish()
    if world > 1:
        del net  # before its process group: freed later, DDP joins gloo's thread under the GIL and can deadlock
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
