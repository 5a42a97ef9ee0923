"""Ranks of the memory benchmark: many saves of a small state; after each, memory of the rank and of its writer process."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from ckpt_state import make_model, start, train_step

import keepstep.trainer as ks


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, with what it has mapped of shared memory (proc_pid_status(5), VmRSS)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} has no VmRSS")


def writer_pid() -> int:
    """The writer process this rank has started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == os.getpid() and b"writerproc" in command:
                return int(entry.name)
    raise RuntimeError("there is no writer process")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--saves", type=int, required=True)
    args = parser.parse_args()
    mesh = start()
    model = make_model(mesh, layers=10, width=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = ks.Checkpointer(args.folder / "soak", {"model": model, "optim": optimizer}, every_steps=1_000_000)
    checkpointer.restore()
    train_step(model, optimizer)
    rows: dict[str, list[int]] = {"rank": [], "writer": [], "agent": []}
    for step in range(1, args.saves + 1):
        checkpointer.save(step)
        checkpointer.wait()
        rows["rank"].append(resident_bytes(os.getpid()))
        rows["writer"].append(resident_bytes(writer_pid()))
        rows["agent"].append(resident_bytes(os.getppid()))
    (args.folder / f"soak-{dist.get_rank()}.json").write_text(json.dumps(rows))
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
