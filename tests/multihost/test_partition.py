"""Nodes that are cut off or stand still: their ranks are dead before anybody else has them, and they come back as spares."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import pytest

from keepstep.launcher.coordination.leases import RENEWALS
from tests.launcher.harness import alive
from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import (
    GATED_STEP,
    LEASE_S,
    LONG_LEASE_S,
    Death,
    check_success,
    mark_ns,
    pids_of,
    records,
    seats,
    wait_cycle,
    wait_record,
)

pytestmark = pytest.mark.slow

Reference = Callable[[int], str]
SHAPE = ("--nnodes", "2", "--spares", "1")


def test_a_cut_that_heals_within_the_lease_costs_nothing(make_net: MakeNet, reference: Reference) -> None:
    """The collective waits, and nothing else happens, though a renewal falls into the cut.

    A lease has to last for the time since the last renewal, the cut, and what it takes until the first word gets through after
    it: the host whose link went down asks for the coordinator's hardware address once a second.
    """
    net = make_net(3)
    launches = {h.name: h.launch(*SHAPE, f"--rdzv-conf=lease={LONG_LEASE_S:g}") for h in net.hosts}
    before = wait_cycle(net.run_dir, 0)
    victim = next(h for h in net.hosts if h.name in seats(before) and h.name != "h1")
    launches["h1"].wait_line(r"completed 3$")
    victim.cut()
    time.sleep(LONG_LEASE_S / RENEWALS + 0.5)
    done = max(int(step) for step in re.findall(r"^completed (\d+)$", launches["h1"].output, re.M))
    assert done < GATED_STEP, "nobody waited for the node that was cut off"
    victim.heal()
    launches["h1"].wait_line(rf"completed {GATED_STEP}$")
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)
    assert len(records(net.run_dir, "cycle")) == 1
    assert not records(net.run_dir, "node_lost")


def test_a_node_that_is_cut_off_fences_itself_and_comes_back_as_a_spare(
    make_net: MakeNet, reference: Reference
) -> None:
    """Its ranks are dead before anything begins on another node."""
    net = make_net(3)
    launches = {h.name: h.launch(*SHAPE) for h in net.hosts}
    before = wait_cycle(net.run_dir, 0)
    (spare,) = before["spares"]
    victim = next(h for h in net.hosts if h.name in seats(before) and h.name != "h1")
    launches["h1"].wait_line(r"completed 3$")
    (pid,) = pids_of(net.run_dir, 0, victim.name)
    death = Death(pid)
    victim.cut()
    after = wait_cycle(net.run_dir, 1)
    assert [n if n != spare else victim.name for n in seats(after)] == seats(before)
    began_ns = mark_ns(net.run_dir, "cycle_started", 1)
    print(f"fence: dead {(began_ns - death.at_ns()) / 1e9:.3f} s before the next cycle began")
    assert death.at_ns() < began_ns
    launches[victim.name].wait_line("out of touch with the coordinator for the lease")

    victim.heal()
    launches[victim.name].wait_line("this node is a spare")
    assert len(records(net.run_dir, "cycle")) == 2, "its return disturbed the others"
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)
    assert launches["h1"].cycles[1].recovery == "spare"


def test_the_guardian_fences_a_launcher_that_stands_still(make_net: MakeNet, reference: Reference) -> None:
    net = make_net(3)
    launches = {h.name: h.launch(*SHAPE) for h in net.hosts}
    before = wait_cycle(net.run_dir, 0)
    (spare,) = before["spares"]
    victim = next(n for n in seats(before) if n != "h1")
    launches["h1"].wait_line(r"completed 7$")
    (pid,) = pids_of(net.run_dir, 0, victim)
    death = Death(pid)
    stopped_ns = time.time_ns()
    launches[victim].signal(signal.SIGSTOP)
    after = wait_cycle(net.run_dir, 1)
    assert [n if n != spare else victim for n in seats(after)] == seats(before)
    assert death.at_ns() < mark_ns(net.run_dir, "cycle_started", 1)
    assert (death.at_ns() - stopped_ns) / 1e9 <= LEASE_S + 0.5, "killed later than its lease allowed"
    assert state(launches[victim].process.pid) == "T", "somebody woke the launcher"
    launches[victim].signal(signal.SIGCONT)
    launches[victim].wait_line("this node is a spare")
    assert len(records(net.run_dir, "cycle")) == 2
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)


def test_the_coordinators_host_is_cut_off(make_net: MakeNet, reference: Reference) -> None:
    """Everybody else is out of touch then: they fence themselves, and the job goes on when the link is whole again."""
    net = make_net(2)
    launches = {h.name: h.launch("--nnodes", "2") for h in net.hosts}
    wait_cycle(net.run_dir, 0)
    launches["h1"].wait_line(r"completed 7$")
    (pid,) = pids_of(net.run_dir, 0, "h2")
    death = Death(pid)
    net.hosts[0].cut()
    lost = wait_record(net.run_dir, "node_lost", lambda r: r["node"] == "h2")
    assert death.at_ns() < lost["t_ns"]
    net.hosts[0].heal()
    wait_cycle(net.run_dir, 1)
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)
    assert [seats(c) for c in records(net.run_dir, "cycle")] == [["h1", "h2"], ["h1", "h2"]]


def test_a_slow_link_costs_no_lease(make_net: MakeNet, reference: Reference) -> None:
    """One node reaches the coordinator through a relay that adds 150 ms each way: renewals are late, and its lease grows."""
    net = make_net(2)
    slow = net.relay(0.15)
    launches = {
        "h1": net.hosts[0].launch("--nnodes", "2"),
        "h2": net.hosts[1].launch(
            "--nnodes", "2", "--rdzv-endpoint", slow, "--local-addr", net.hosts[1].address, run_dir=net.folder / "own"
        ),
    }
    wait_cycle(net.run_dir, 0)
    launches["h2"].wait_line(r"completed 20$")
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)
    assert len(launches["h1"].cycles) == 1
    assert not records(net.run_dir, "node_lost")


def state(pid: int) -> str:
    """A process's one-letter state."""
    assert alive(pid)
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
