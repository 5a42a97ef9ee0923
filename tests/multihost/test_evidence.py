"""Evidence of a host that does not share the run folder reaches the coordinator's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.harness import wait_until
from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import check_success, pids_of, wait_cycle

Reference = Callable[[int], str]

pytestmark = pytest.mark.slow


def test_evidence_is_sent_up(make_net: MakeNet, reference: Reference, tmp_path: Path) -> None:
    net = make_net(2)
    folders = [tmp_path / "run-h1", tmp_path / "run-h2"]
    launches = [h.launch("--nnodes", "2", run_dir=f) for h, f in zip(net.hosts, folders, strict=True)]
    wait_cycle(folders[0], 0)
    launches[0].wait_line(r"completed 12$")
    (pid,) = pids_of(folders[0], 0, "h2")
    os.kill(pid, signal.SIGKILL)
    wait_cycle(folders[0], 1)
    sent = folders[0] / "evidence" / "cycle-0000" / "h2" / "host.json"
    wait_until(sent.exists)
    assert json.loads(sent.read_text())["schema"] == "keepstep.host_evidence/1"
    assert not (folders[1] / "evidence" / "cycle-0000").exists()
    assert (folders[1] / "nodes" / "h2" / "evidence" / "cycle-0000").is_dir()
    net.open_gate()
    check_success(launches, reference(2), printed_by=2)
    times = launches[0].cycles[0].times
    order = ["rendezvous", "process_start", "restore_begin", "first_step", "fault", "detected", "stopped", "decided"]
    in_order = [times[name] for name in order]
    assert in_order == sorted(in_order)
