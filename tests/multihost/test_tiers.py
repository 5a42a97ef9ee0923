"""Hosts are lost while a Checkpointer keeps images in memory: from where ranks go on, and that nothing is lost or used twice."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.launcher.harness import Launch
from tests.launcher.tiers_script import SCRIPT, all_memory_ids, check_ledger, digests, memory_ids, restored
from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import Host, Net, pids_of, records, seats, wait_cycle, wait_record

pytestmark = pytest.mark.slow


def start(net: Net, *flags: str, own_roots: bool = False, **env: Any) -> dict[str, Launch]:
    """A launcher on each host. `own_roots`: each has a checkpoint root of its own, which no other sees."""
    (net.folder / "script.py").write_text(SCRIPT)
    roots: dict[str, dict[str, Any]] = {h.name: {"ROOT": str(h.own / "ckpt")} if own_roots else {} for h in net.hosts}
    return {h.name: h.launch(*flags, **roots[h.name], **env) for h in net.hosts}


def wait_copied(net: Net, step: int) -> None:
    """Wait until all of the image of `step` is in two memories."""
    wait_record(
        net.run_dir, "mark", lambda r: r["mark"]["kind"] == "tier_reached" and r["mark"]["attrs"]["step"] == step
    )


def lose(net: Net) -> Host:
    """Kill the host in the present cycle that does not lead, with everything on it."""
    victim = next(h for h in net.hosts if h.name in seats(records(net.run_dir, "cycle")[-1]) and h.name != "h1")
    victim.kill()
    return victim


def open_gates(net: Net, *cycles: int) -> None:
    for cycle in cycles:
        net.gate.with_name(f"{net.gate.name}.{cycle}").touch()
    net.open_gate()


def kill_ranks(net: Net, cycle: int) -> None:
    """SIGKILL to all ranks of the first host."""
    for pid in pids_of(net.run_dir, cycle, "h1"):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("wrap", "own_roots"), [("plain", False), ("fsdp", False), ("fsdp", True)])
def test_a_spare_goes_on_from_a_peers_memory(wrap: str, own_roots: bool, make_net: MakeNet) -> None:
    """Images in memory need no storage that the nodes share; a save, which every rank writes a file of, does."""
    net = make_net(3)
    every = "1000" if own_roots else "10"
    launches = start(net, "--nnodes", "2", "--spares", "1", own_roots=own_roots, WRAP=wrap, HOLD="17", EVERY=every)
    (spare,) = wait_cycle(net.run_dir, 0)["spares"]
    wait_copied(net, 15)
    for name in seats(records(net.run_dir, "cycle")[0]):
        launches[name].wait_line("cycle 0 rank . holds")
    victim = lose(net)
    open_gates(net, 1)
    living = [launches[h.name] for h in net.hosts if h is not victim]
    assert [launch.finish() for launch in living] == [0, 0]
    cycle = launches["h1"].cycles[1]
    assert (cycle.restored_from, cycle.recovery, cycle.restored_step) == ("peer", "spare", 15)
    assert launches["h1"].verdict["last_committed_step"] == (None if own_roots else 20)
    before, after = digests(launches["h1"], 0), digests(launches["h1"], 1) | digests(launches[spare], 1)
    assert all(before[step] == after[step] for step in (15, 16, 17))
    check_ledger(net.folder, {0: 0, 1: 15}, worlds={0: 2, 1: 2}, total=20)
    launches["h1"].check_partition()


@pytest.mark.parametrize(("wrap", "tier"), [("fsdp", "peer"), ("plain", "node")])
def test_a_job_shrinks_and_grows_with_its_nodes(wrap: str, tier: str, make_net: MakeNet) -> None:
    """Two ranks, one, two. Without copies on other nodes what the lost one held is gone, and the disk is what is left."""
    net = make_net(2)
    flags = ("--nnodes", "1:2", "--memory-tier", tier)
    launches = start(net, *flags, WRAP=wrap, HOLD="17")
    wait_cycle(net.run_dir, 0)
    if tier == "peer":
        wait_copied(net, 15)
    for launch in launches.values():
        launch.wait_line("cycle 0 rank . holds")
    victim = lose(net)
    begin = 15 if tier == "peer" else 10
    assert restored(launches["h1"], 1, world=1) == {(0, begin)}
    # One node again, of whose images nothing was lost when the other comes back.
    launches["h1"].wait_line("cycle 1 rank 0 holds")
    victim.heal()
    late = victim.launch(*flags, WRAP=wrap, HOLD="17")
    late.wait_line("this node is a spare")
    kill_ranks(net, 1)
    wait_cycle(net.run_dir, 2)
    open_gates(net, 1, 2)
    assert [launch.finish() for launch in (launches["h1"], late)] == [0, 0]
    cycles = launches["h1"].cycles
    assert [c.placement for c in cycles] == ["first", "shrink", "grow"]
    assert [(c.restored_from, c.restored_step) for c in cycles[:2]] == [
        ("none", 0),
        ("shm" if tier == "peer" else "disk", begin),
    ]
    assert (cycles[2].restored_from, cycles[2].restored_step) == ("peer", 15)
    said = [digests(launches["h1"], cycle) for cycle in (0, 1, 2)]
    assert said[1][begin] == said[0][begin]
    assert said[2][15] == said[1][15]
    check_ledger(net.folder, {0: 0, 1: begin, 2: 15}, worlds={0: 2, 1: 1, 2: 2}, total=20)


def test_the_coordinator_is_killed_while_images_are_fetched(make_net: MakeNet) -> None:
    """Just when a cycle began whose ranks have to ask where the lost node's images are. At the end no memory stays behind."""
    net = make_net(3)
    launches = start(net, "--nnodes", "2", "--spares", "1", HOLD="17", WIDTH="60000")
    wait_cycle(net.run_dir, 0)
    wait_copied(net, 15)
    held = {name: memory_ids(launch.process.pid) for name, launch in launches.items()}
    victim = lose(net)
    wait_record(net.run_dir, "cycle", lambda r: r["cycle"] == 1)
    (opened,) = records(net.run_dir, "open")
    os.kill(opened["pid"], signal.SIGKILL)
    wait_record(net.run_dir, "open", count=2)
    (moved,) = set(seats(wait_cycle(net.run_dir, 1))) - {"h1"}
    for name in ("h1", moved):
        launches[name].wait_line("cycle 1 rank . holds")
        held[name] |= memory_ids(launches[name].process.pid)
        assert len(held[name]) >= 4, "this does not look at the memory of images"
    open_gates(net, 1)
    assert [launches[h.name].finish() for h in net.hosts if h is not victim] == [0, 0]
    cycle = launches["h1"].cycles[1]
    assert (cycle.restored_from, cycle.restored_step) == ("peer", 15)
    assert not (set().union(*held.values()) & all_memory_ids())
