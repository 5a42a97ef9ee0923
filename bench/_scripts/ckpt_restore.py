"""Ranks of the restore benchmark: the first cycle saves and is killed; each later one restores, and is killed again.

Odd cycles restore from the memory of the node, which outlived the ranks; even ones from the disk with a cold page cache. Every
restore is the first one of its process. Before or after it each rank reads its own file raw, cold as well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ckpt_state import faulted_buffer, make_cold, make_model, read_raw, start, timed, touch_memory, train_step, view_of

import keepstep.trainer as ks


def restore_once(args: argparse.Namespace, cycle: int, checkpointer: ks.Checkpointer) -> None:
    """Measure one cycle: the raw read before the restore in one, after it in the next of its kind."""
    rank = dist.get_rank()
    files = sorted(next(args.root.glob("*-step-*")).glob("*.safetensors"))
    mine = files[rank]
    buffer = faulted_buffer(mine.stat().st_size)
    times = {"file_bytes": float(mine.stat().st_size)}

    def raw() -> None:
        make_cold([mine])
        touch_memory(len(buffer))
        times["raw read"] = timed(lambda: read_raw(mine, view_of(buffer, len(buffer))))

    def restore() -> None:
        make_cold([mine])
        touch_memory(2 * len(buffer))
        times["restore"] = timed(checkpointer.restore)

    steps = [raw, restore] if cycle // 2 % 2 else [restore, raw]
    for step in steps:
        step()
    (args.times / f"restore-c{cycle}-r{rank}.json").write_text(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mesh = start()
    model = make_model(mesh, seed=args.seed + cycle)  # other numbers than those that were saved
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory = None if cycle % 2 or cycle == 0 else False
    checkpointer = ks.Checkpointer(
        args.root, {"model": model, "optim": optimizer}, every_steps=1_000_000, memory=memory
    )
    checksum = args.times / f"sum-r{dist.get_rank()}"
    if cycle == 0:
        checkpointer.restore()
        train_step(model, optimizer)
        checkpointer.save(1)
        checkpointer.wait()
        checksum.write_text(repr(fingerprint(model, optimizer)))
    else:
        restore_once(args, cycle, checkpointer)
        if repr(fingerprint(model, optimizer)) != checksum.read_text():
            raise RuntimeError("what was restored is not what was saved")
    dist.barrier()
    if cycle < args.cycles:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # the launcher ends this rank when it has seen the other one die
    checkpointer.close()
    dist.destroy_process_group()


def groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    moments = [[state[name].to_local() for state in optimizer.state.values()] for name in ("exp_avg", "exp_avg_sq")]
    return [[parameter.to_local().detach() for parameter in model.parameters()], *moments]


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Sums over this rank's part of the parameters and of both moments, to the last bit."""
    return [sum(float(tensor.double().sum()) for tensor in group) for group in groups(model, optimizer)]


if __name__ == "__main__":
    main()
