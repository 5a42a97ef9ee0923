"""Run as a process: a rank that saves to an object store, forked anew for each line on standard input.

Usage: store_rank.py URL ENDPOINT. Each line is a cycle number. A forked process restores, says its pid and the step it has, and
waits for a line before it saves the next step. `ended STATUS` is printed when it is over.
"""

from __future__ import annotations

import os
import sys

import torch
from tests.checkpoint.support import FakeRun, Loader, checkpointer

from keepstep.checkpoint.storage.source import StoreOptions
from keepstep.trainer.channel import MemoryChannel


def say(text: str) -> None:
    """A line for the test."""
    print(text, flush=True)


def rank(url: str, endpoint: str, cycle: int) -> None:
    """One life."""
    store = StoreOptions(endpoint=endpoint, region="us-east-1", allow_http=True, retry_for_s=20.0)
    state = {"w": torch.full((40_000,), -1.0), "loader": Loader(0)}
    ckpt = checkpointer(url, state, FakeRun(MemoryChannel(), cycle=cycle), store=store)  # type: ignore[arg-type]
    step = ckpt.restore()
    whole = step == 0 or set(ckpt.state["w"].tolist()) == {float(step)}
    say(f"{os.getpid()} {step if whole else -1}")
    sys.stdin.readline()
    ckpt.state["w"] = torch.full((40_000,), float(step + 1))
    ckpt.save(step + 1)
    ckpt.close()


def main() -> int:
    """Until the end of standard input."""
    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            try:
                rank(sys.argv[1], sys.argv[2], int(line))
            finally:
                os._exit(0)
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
