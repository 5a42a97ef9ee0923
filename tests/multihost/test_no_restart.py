"""A job that makes no progress stops for good: every host ends with the code that says so, also one that was not there."""

from __future__ import annotations

import signal

import pytest

from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import LEASE_S, records, seats, wait_cycle, wait_record

pytestmark = pytest.mark.slow

STUCK = """
import os, pathlib, time
import torch.distributed as dist
import keepstep.trainer as ks

dist.init_process_group("gloo")
run = ks.init()
for step in range(3 + run.cycle):
    with run.step(step):
        dist.barrier()
while not pathlib.Path(f"{os.environ['GATE']}.{run.cycle}").exists():
    time.sleep(0.05)
raise RuntimeError(f"the same trouble after {3 + run.cycle} steps")
"""


def test_no_progress_ends_every_host_with_the_same_code(make_net: MakeNet) -> None:
    net = make_net(4)
    (net.folder / "script.py").write_text(STUCK)
    marker = net.folder / "marker"
    marker.write_text("5\n")
    flags = [
        *(
            "--nnodes",
            "2",
            "--spares",
            "2",
            "--checkpoint-iteration-file",
            str(marker),
            "--max-no-progress-cycles",
            "2",
        ),
        f"--rdzv-conf=lease={LEASE_S:g},join_timeout=6",
    ]
    launches = {h.name: h.launch(*flags) for h in net.hosts}
    cycle = wait_cycle(net.run_dir, 0)
    assert "h1" in seats(cycle)
    late, never = cycle["spares"]
    # One stands still until nobody can tell it any more, the other only over the end itself, for less than its lease.
    launches[never].signal(signal.SIGSTOP)
    wait_record(net.run_dir, "node_lost", lambda r: r["node"] == never)
    net.gate.with_name("gate.0").touch()
    wait_cycle(net.run_dir, 1)
    launches[late].signal(signal.SIGSTOP)
    net.gate.with_name("gate.1").touch()
    verdict = wait_record(net.run_dir, "verdict")["verdict"]
    assert (verdict["outcome"], verdict["cause"], verdict["exit_code"]) == ("no_restart", "no_progress", 93)
    launches[late].signal(signal.SIGCONT)
    for node in (*seats(cycle), late):
        assert launches[node].finish() == 93, launches[node].output
        assert "no_progress" in launches[node].output
    launches[never].signal(signal.SIGCONT)
    assert launches[never].finish() == 1
    assert "no coordinator at" in launches[never].output
    launches["h1"].check_partition()
    assert len(records(net.run_dir, "cycle")) == 2
