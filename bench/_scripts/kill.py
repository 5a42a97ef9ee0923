"""Training script of the kill benchmark: plain torch, nothing of any launcher imported.

In each cycle but the last, rank 1 writes down the time and sends itself SIGKILL; the ranks of the next cycle write down
when their first line ran and when they had completed their first step. Times are CLOCK_MONOTONIC, one clock for all.
"""

import time

STARTED_NS = time.monotonic_ns()  # the first line: torch is not imported yet

import argparse  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def bare_step() -> Callable[[], None]:
    """A step that only exchanges a tensor."""
    tensor = torch.ones(1024)
    return lambda: dist.all_reduce(tensor.fill_(1.0))


def ddp_step() -> Callable[[], None]:
    """A step of a small model under DDP and AdamW."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optim.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optim.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("bare", "ddp"), required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--faults", type=int, required=True)
    parser.add_argument("--cycle-seconds", type=float, required=True)
    args = parser.parse_args()
    cycle, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    step = bare_step() if args.kind == "bare" else ddp_step()
    step()
    first_ns = time.monotonic_ns()
    (args.times / f"start-c{cycle}-r{rank}").write_text(f"{STARTED_NS} {first_ns}")
    steps = max(1, round(args.cycle_seconds / 0.02))
    for _ in range(steps):
        step()
        time.sleep(0.02)
    if cycle < args.faults and rank == 1:
        (args.times / f"fault-c{cycle}").write_text(str(time.monotonic_ns()))
        os.kill(os.getpid(), signal.SIGKILL)
    step()  # a survivor waits here for the peer that is gone
    # DDP must let go of the process group first: freed later, it joins gloo's thread while holding the GIL, and that
    # thread may be waiting for the GIL (seen with torch 2.13, under any launcher).
    del step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
