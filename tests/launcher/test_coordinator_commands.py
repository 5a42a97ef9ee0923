"""Many nodes of one job: each is told its own part, and everything once."""

from __future__ import annotations

import json

import pytest

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.runfolder import read_cycles
from keepstep.launcher.trust import fence_key, prove_fence
from tests.launcher.coordinators import LIMIT_S, RUN, TOKEN, Client, Served, serving

NODES = 5


def starts(nodes: dict[str, Client], cycle: int) -> dict[str, m.StartCycle]:
    """The start of a cycle as each node is told it, and nothing else; the nodes start."""
    commands: dict[str, m.StartCycle] = {}
    for name, node in nodes.items():
        (commands[name],) = node.up_to(m.StartCycle)
    assert sorted(command.first_rank for command in commands.values()) == list(range(NODES))
    for name, node in nodes.items():
        assert commands[name].cycle == cycle
        assert node.started(cycle, commands[name].first_rank).ok
    return commands


def stop(nodes: dict[str, Client], kind: type[m.StopCycle | m.AskStop], ranks: dict[str, m.StartCycle]) -> None:
    """The next thing that each node is told is to stop, and it does."""
    for name, node in nodes.items():
        (command,) = node.up_to(kind)
        assert node.stopped(command.cycle, ranks[name].first_rank).ok


def say_dead(served: Served, node: str, pid: int, network: bool) -> None:
    """What a guardian does whose launcher died."""
    proof = prove_fence(fence_key(TOKEN, RUN), node, pid, "b")
    word = {"node": node, "pid": pid, "boot_id": "b", "proof": proof}
    assert served.post(json.dumps(word).encode(), network) == (200, {"ok": True})


@pytest.mark.parametrize("network", [False, True], ids=["unix", "tls"])
def test_each_node_is_told_its_own_part_and_everything_once(network: bool) -> None:
    with serving(network=True, nnodes=NODES, spares=1) as served:
        names = [f"n{number}" for number in range(NODES + 1)]
        nodes = {n: served.join(n, network, host=n, pid=100 + i, boot_id="b") for i, n in enumerate(names)}
        spare = nodes.pop(names[-1])
        first = starts(nodes, 0)
        for node in nodes.values():
            assert node.ask(lambda i: m.GetCycle(id=i, cycle=0)).result["node_spans"] == first["n0"].node_spans
            assert node.beat().result["lease_s"] > 0
        assert first["n0"].node_spans == [[name, name, 1] for name in nodes]

        nodes.pop("n2").close()
        say_dead(served, "n2", 102, network)
        stop(nodes, m.StopCycle, first)

        nodes[names[-1]] = spare
        second = starts(nodes, 1)
        assert second[names[-1]].first_rank == first["n2"].first_rank
        assert spare.ask(lambda i: m.StopRequest(id=i, signum=15, node=names[-1])).ok
        stop(nodes, m.AskStop, second)
        for node in nodes.values():
            (end,) = node.up_to(m.End)
            assert end.outcome == "stopped"
            node.close()
        assert served.processes[0].wait(LIMIT_S) == 0

        ended = [(cycle.cycle, cycle.end_reason, cycle.ended_at is not None) for cycle in read_cycles(served.run_dir)]
        assert ended == [(0, "node_lost", True), (1, "preempted", True)]
        assert (served.run_dir / "cycles" / "current").readlink().name == "cycle-0001.json"
