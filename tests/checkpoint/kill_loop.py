"""Run as a process: forks a trainer that saves as fast as it can, kills it at a random moment, and again.

Usage: kill_loop.py ROOT ROUNDS SEED. Prints one line a round: the step restored and how long the trainer lived.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from tests.checkpoint.support import FakeRun

from keepstep.trainer.channel import MemoryChannel
from keepstep.trainer.checkpointer import Checkpointer


def train(root: Path, cycle: int, started: int) -> None:
    """Restore, check that the state is whole and of the step it claims, then save one step after another."""
    run = FakeRun(MemoryChannel(), cycle=cycle)
    ckpt = Checkpointer(root, {"w": torch.full((300_000,), -1.0), "n": 0}, run=run)
    step = ckpt.restore()
    if step and (ckpt.state["n"] != step or set(ckpt.state["w"].tolist()) != {float(step)}):
        os._exit(3)
    os.write(started, step.to_bytes(8, "little"))
    parent = os.getppid()
    while os.getppid() == parent:  # a loop whose parent was killed must not save for ever
        step += 1
        ckpt.state["w"].fill_(float(step))
        ckpt.state["n"] = step
        ckpt.save(step)
        if cycle == 0:
            ckpt.wait()
            os.write(started, step.to_bytes(8, "little"))


def main() -> int:
    """Returns 0 when every round restored something whole, and never an older step than before."""
    root, rounds, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    best = 0
    save_s = 0.0  # how long a save takes on this machine, seen in the first round
    for cycle in range(rounds):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                train(root, cycle, writer)
            finally:
                os._exit(4)
        os.close(writer)
        told = os.read(reader, 8)
        if cycle == 0 and told:
            began_s = time.monotonic()
            os.read(reader, 8)
            save_s = time.monotonic() - began_s
        os.close(reader)
        if len(told) != 8:
            _, status = os.waitpid(pid, 0)
            print(f"round {cycle}: the trainer ended by itself: {os.waitstatus_to_exitcode(status)}", flush=True)
            return 1
        restored = int.from_bytes(told, "little")
        life_s = rng.uniform(0.0, 3 * save_s)
        time.sleep(life_s)  # the moment of the kill is the input of this test
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print(f"{restored} {life_s:.4f}", flush=True)
        if restored < best:
            return 2
        best = restored
    return 0 if best > 0 else 5


if __name__ == "__main__":
    sys.exit(main())
