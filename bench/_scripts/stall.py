"""Training script of the hang benchmark: in each cycle but the last one rank stalls in a step, the other waits for it.

`--stalls sleep,stop` names how each cycle's rank stalls: it sleeps for ever, or it stops itself with SIGSTOP.
"""

import time

STARTED_NS = time.time_ns()  # the first line: torch is not imported yet

import argparse  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import keepstep.trainer as ks  # noqa: E402


def stall(kind: str, times: Path, cycle: int) -> None:
    """Write down when, then do nothing any more."""
    (times / f"stall-c{cycle}").write_text(str(time.time_ns()))
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--stalls", required=True)
    parser.add_argument("--cycle-seconds", type=float, required=True)
    args = parser.parse_args()
    stalls = args.stalls.split(",")
    run = ks.init()
    cycle, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    (args.times / f"start-c{cycle}-r{rank}").write_text(str(STARTED_NS))
    dist.init_process_group("gloo")
    tensor = torch.ones(1024)
    steps = max(1, round(args.cycle_seconds / 0.02))
    for step in range(steps + 1):
        with run.step(step):
            # Either rank in turn, so that no special treatment of rank 0 can hide.
            if step == steps and cycle < len(stalls) and rank == cycle % 2:
                stall(stalls[cycle], args.times, cycle)
            dist.all_reduce(tensor.fill_(1.0))
            time.sleep(0.02)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
