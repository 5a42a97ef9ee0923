"""The coordinator dies, alone or with its host; another host carries on from the journal in the shared folder."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.launcher.harness import alive
from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import (
    GATED_STEP,
    LONG_LEASE_S,
    PORT,
    Death,
    check_success,
    pids_of,
    records,
    seats,
    wait_cycle,
    wait_record,
)

pytestmark = pytest.mark.slow

Reference = Callable[[int], str]


def test_a_dead_coordinator_comes_back_while_ranks_train(make_net: MakeNet, reference: Reference) -> None:
    net = make_net(2)
    launches = {h.name: h.launch("--nnodes", "2") for h in net.hosts}
    wait_cycle(net.run_dir, 0)
    ranks = [pid for node in ("h1", "h2") for pid in pids_of(net.run_dir, 0, node)]
    launches["h2"].wait_line(r"completed 3$")
    for life in (1, 2):
        opened = wait_record(net.run_dir, "open", count=life)
        os.kill(opened["pid"], signal.SIGKILL)
        wait_record(net.run_dir, "open", count=life + 1)
    launches["h2"].wait_line(r"completed 27$")
    assert all(alive(pid) for pid in ranks), "ranks were restarted"
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)
    assert len(records(net.run_dir, "cycle")) == 1
    assert not records(net.run_dir, "node_lost")


def test_another_host_takes_over_when_the_coordinators_host_dies(make_net: MakeNet, reference: Reference) -> None:
    net = make_net(3)
    net.endpoints = f"{net.hosts[0].address}:{PORT},{net.hosts[1].address}:{PORT}"
    launches = {h.name: h.launch("--nnodes", "2", "--spares", "1") for h in net.hosts}
    before = wait_cycle(net.run_dir, 0)
    assert "h1" in seats(before)
    (spare,) = before["spares"]
    other = next(node for node in seats(before) if node != "h1")
    launches[other].wait_line(r"completed 7$")
    net.hosts[0].kill()
    after = wait_cycle(net.run_dir, 1)
    assert [n if n != spare else "h1" for n in seats(after)] == seats(before), "ranks moved"
    opened = records(net.run_dir, "open")
    assert len(opened) == 2
    assert opened[1]["attempt"] == opened[0]["attempt"], "the job goes on, it does not begin again"
    lost = records(net.run_dir, "node_lost")
    assert "h1" in [r["node"] for r in lost]
    launches["h2"].wait_line("taking over")
    net.open_gate()
    living = [launches[n] for n in ("h2", "h3")]
    check_success(living, reference(2), printed_by=2)


def test_the_old_leader_returns_after_a_takeover(make_net: MakeNet, reference: Reference) -> None:
    """The host that led is cut off, another takes over; when it is back there is one coordinator and no second job."""
    net = make_net(2)
    net.endpoints = f"{net.hosts[0].address}:{PORT},{net.hosts[1].address}:{PORT}"
    launches = {h.name: h.launch("--nnodes", "2") for h in net.hosts}
    before = wait_cycle(net.run_dir, 0)
    launches["h2"].wait_line(r"completed 7$")
    net.hosts[0].kill()
    launches["h2"].wait_line("taking over")
    wait_record(net.run_dir, "node_lost", lambda r: r["node"] == "h1")
    net.hosts[0].heal()
    launches["h1"] = net.hosts[0].launch("--nnodes", "2")
    launches["h1"].wait_line(r"completed 9$")
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)
    assert {tuple(seats(c)) for c in records(net.run_dir, "cycle")} == {tuple(seats(before))}, "ranks moved"


def test_a_takeover_in_time_costs_no_cycle(make_net: MakeNet, reference: Reference) -> None:
    """Only the coordinator's host dies, which has no ranks; they train on until the other one is there.

    The one that stands by waits for 0.4 of a lease; starting a coordinator takes a part that a loaded machine makes seconds.
    """
    net = make_net(3)
    head, *others = net.hosts
    net.endpoints = f"{head.address}:{PORT},{others[0].address}:{PORT}"
    shape = ("--nnodes", "2", f"--rdzv-conf=lease={LONG_LEASE_S:g}")
    head.launch(*shape, verb="coordinator")
    launches = {h.name: h.launch(*shape) for h in others}
    wait_cycle(net.run_dir, 0)
    launches["h2"].wait_line(r"completed 3$")
    head.kill()
    opened = wait_record(net.run_dir, "open", count=2)
    assert opened["attempt"] == 0
    launches["h3"].wait_line(rf"completed {GATED_STEP}$")
    assert len(records(net.run_dir, "cycle")) == 1
    # The host that took over has rank 0: the other one must reach the next cycle's store there.
    (pid,) = pids_of(net.run_dir, 0, "h3")
    os.kill(pid, signal.SIGKILL)
    assert wait_cycle(net.run_dir, 1)["master_addr"] == others[0].address
    net.open_gate()
    check_success([launches["h2"], launches["h3"]], reference(2), printed_by=2)


def test_a_coordinator_that_stood_still_leaves_when_another_has_taken_over(
    make_net: MakeNet, reference: Reference
) -> None:
    net = make_net(3)
    net.endpoints = f"{net.hosts[0].address}:{PORT},{net.hosts[1].address}:{PORT}"
    launches = {h.name: h.launch("--nnodes", "2", "--spares", "1") for h in net.hosts}
    before = wait_cycle(net.run_dir, 0)
    launches["h1"].wait_line(r"completed 7$")
    old = wait_record(net.run_dir, "open")["pid"]
    gone = Death(old)
    os.kill(old, signal.SIGSTOP)
    wait_record(net.run_dir, "open", count=2)
    woken_ns = time.time_ns()
    os.kill(old, signal.SIGCONT)
    assert gone.at_ns() > woken_ns
    launches["h1"].wait_line(r"completed 25$")
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)
    opened = records(net.run_dir, "open")
    assert [(r["epoch"], r["attempt"]) for r in opened] == [(1, 0), (2, 0)], "they took it from each other"
    assert set(seats(records(net.run_dir, "cycle")[-1])) <= {*seats(before), *before["spares"]}
