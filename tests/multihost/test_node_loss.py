"""Launchers and whole hosts that die: who notices, who takes over, and what it costs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.harness import Launch
from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import (
    LEASE_S,
    Net,
    check_success,
    records,
    seats,
    wait_cycle,
    wait_record,
)

pytestmark = pytest.mark.slow

Reference = Callable[[int], str]
CONF = f"--rdzv-conf=lease={LEASE_S:g}"


def start(net: Net, *flags: str, shared: bool = True) -> dict[str, Launch]:
    """One launcher on every host, by name. `shared`: they have one run folder; else only the first host's has the journal."""
    folders = {h.name: net.run_dir if shared or h is net.hosts[0] else net.folder / f"run-{h.name}" for h in net.hosts}
    return {h.name: h.launch(*flags, run_dir=folders[h.name]) for h in net.hosts}


def lost(run_dir: Path, node: str) -> dict[str, Any]:
    """Wait for the record that a node was lost."""
    return wait_record(run_dir, "node_lost", lambda r: r["node"] == node)


def kept_their_ranks(before: dict[str, Any], after: dict[str, Any], gone: dict[str, str]) -> None:
    """Every node but those gone has the ranks it had; each of those was replaced by the one named."""
    assert seats(after) == [gone.get(node, node) for node in seats(before)]
    assert sorted(map(tuple, after["substituted"])) == sorted(gone.items())


@pytest.mark.parametrize("shared", [True, False])
def test_a_dead_launcher_is_replaced_at_once_on_its_guardians_word(
    shared: bool, make_net: MakeNet, reference: Reference
) -> None:
    net = make_net(3)
    launches = start(net, "--nnodes", "2", "--spares", "1", shared=shared)
    before = wait_cycle(net.run_dir, 0)
    (spare,) = before["spares"]
    victim = next(node for node in seats(before) if node != "h1")
    launches["h1"].wait_line(r"completed 7$")
    killed_ns = time.time_ns()
    launches[victim].signal(signal.SIGKILL)
    after = wait_cycle(net.run_dir, 1)
    kept_their_ranks(before, after, {victim: spare})
    assert after["path"] == "spare"
    assert lost(net.run_dir, victim)["why"] == "its launcher died and its ranks with it"
    told_s, started_s = (
        (ns - killed_ns) / 1e9
        for ns in (
            lost(net.run_dir, victim)["t_ns"],
            wait_record(net.run_dir, "started", lambda r: (r["cycle"], r["node"]) == (1, spare))["started_ns"],
        )
    )
    print(
        f"spare swap: launcher killed to its loss known {told_s:.3f} s, to ranks started on the spare {started_s:.3f} s"
    )
    assert told_s < LEASE_S, "found by its lease only"
    net.open_gate()
    living = [launches[n] for n in launches if n != victim]
    check_success(living, reference(2), printed_by=2)
    (fault,) = records(net.run_dir, "mark", lambda r: r["mark"]["kind"] == "fault")
    assert fault["mark"]["cycle"] == 0
    assert launches["h1"].cycles[1].recovery == "spare"


def test_a_dead_host_is_found_by_its_lease(make_net: MakeNet, reference: Reference) -> None:
    net = make_net(3)
    launches = start(net, "--nnodes", "2", "--spares", "1")
    before = wait_cycle(net.run_dir, 0)
    (spare,) = before["spares"]
    victim = next(h for h in net.hosts if h.name in seats(before) and h.name != "h1")
    launches["h1"].wait_line(r"completed 7$")
    killed_ns = time.time_ns()
    victim.kill()
    assert not victim.pids()
    record = lost(net.run_dir, victim.name)
    assert "lease" in record["why"]
    found_s = (record["t_ns"] - killed_ns) / 1e9
    # The lease runs from the last renewal, which was sent up to a fifth of it before.
    assert found_s > 0.8 * LEASE_S, "given away while its ranks might have lived"
    assert found_s < 3 * LEASE_S
    kept_their_ranks(before, wait_cycle(net.run_dir, 1), {victim.name: spare})
    net.open_gate()
    check_success([launches[n] for n in launches if n != victim.name], reference(2), printed_by=2)


def test_two_hosts_at_once(make_net: MakeNet, reference: Reference) -> None:
    """All ranks are lost together, one node with its host and one with its launcher; the coordinator is on a host of its own."""
    net = make_net(5)
    head, *others = net.hosts
    shape = ("--nnodes", "2", "--spares", "2")
    coordinator = head.launch(*shape, verb="coordinator")
    launches = {h.name: h.launch(*shape) for h in others}
    before = wait_cycle(net.run_dir, 0)
    one, two = seats(before)
    launches[one].wait_line(r"completed 7$")
    launches[one].signal(signal.SIGKILL)
    next(h for h in others if h.name == two).kill()
    lost(net.run_dir, two)
    after = wait_record(net.run_dir, "cycle", lambda r: not {one, two} & set(seats(r)))
    assert set(seats(after)) == set(before["spares"])
    net.open_gate()
    living = [coordinator, *(launches[n] for n in before["spares"])]
    check_success(living, reference(2), printed_by=2)


def test_more_failures_than_spares_ends_with_a_named_error(make_net: MakeNet) -> None:
    net = make_net(2)
    launches = start(net, "--nnodes", "2", CONF + ",join_timeout=4")
    wait_cycle(net.run_dir, 0)
    launches["h1"].wait_line(r"completed 7$")
    net.hosts[1].kill()
    assert launches["h1"].finish() == 1
    verdict = launches["h1"].verdict
    assert (verdict["outcome"], verdict["cause"]) == ("failed", "join_timeout")
    assert "1 of 2 nodes within 4 s (h1)" in verdict["message"]
    assert "join_timeout" in launches["h1"].output
    launches["h1"].check_partition()


def test_a_late_joiner_rescues_a_job_without_spares(make_net: MakeNet, reference: Reference) -> None:
    net = make_net(3)
    first, second, late = net.hosts
    launches = {h.name: h.launch("--nnodes", "2") for h in (first, second)}
    before = wait_cycle(net.run_dir, 0)
    launches["h1"].wait_line(r"completed 7$")
    second.kill()
    lost(net.run_dir, "h2")
    wait_record(net.run_dir, "decision")
    assert len(records(net.run_dir, "cycle")) == 1, "a cycle began without the node"
    launches["h3"] = late.launch("--nnodes", "2")
    kept_their_ranks(before, wait_cycle(net.run_dir, 1), {"h2": "h3"})
    net.open_gate()
    check_success([launches["h1"], launches["h3"]], reference(2), printed_by=2)


def test_rolling_restart_of_all_launchers(make_net: MakeNet, reference: Reference) -> None:
    """One launcher after the other is killed and started again; the last one is the one that leads."""
    net = make_net(2)
    launches = start(net, "--nnodes", "2")
    wait_cycle(net.run_dir, 0)
    launches["h2"].wait_line(r"completed 7$")
    for host in reversed(net.hosts):
        newest = records(net.run_dir, "cycle")[-1]["cycle"]
        launches[host.name].signal(signal.SIGKILL)
        launches[host.name].process.wait()
        lost(net.run_dir, host.name)
        launches[host.name] = host.launch("--nnodes", "2")
        launches[host.name].wait_line(r"completed \d+$")
        cycle = records(net.run_dir, "cycle")[-1]
        assert cycle["cycle"] > newest
        assert seats(cycle) == ["h1", "h2"], "ranks moved"
    net.open_gate()
    check_success(list(launches.values()), reference(2), printed_by=2)
