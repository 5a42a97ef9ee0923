"""Gang checks as cycles of a job: when they run, what follows from them, and what they do not count for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.journal import read_records
from tests.launcher.harness import run
from tests.launcher.lives import TWO, Event, Lead, broken, finish, hello, shape, started, stopped, training

PLACES = {"a": [0, 1], "b": [2, 3]}
OTHERS = {"a": [0, 1], "c": [2, 3]}


def result(*suspects: str) -> dict[str, Any]:
    return {"bandwidth_gb_per_s": 1.5, "baseline_gb_per_s": 4.0, "suspects": list(suspects)}


def checked(cycle: int, places: dict[str, list[int]], *suspects: str) -> list[Event]:
    """The cycle tests the nodes; the first one has the result."""
    events = [started(node, cycle, ranks, expect_steps=False) for node, ranks in places.items()]
    ends = [stopped(n, cycle, dict.fromkeys(ranks, 0)) for n, ranks in places.items()]
    node, first = ends[0]
    assert isinstance(first, m.Stopped)
    return [*events, (node, msgspec.structs.replace(first, notes={"gang": result(*suspects)})), *ends[1:]]


def probes(lead: Lead, run_dir: Path) -> list[bool]:
    return [r["probe"] for r in read_records(run_dir) if r["type"] == "cycle"]


def test_before_the_first_cycle_and_then_training(run_dir: Path) -> None:
    lead = Lead(run_dir, shape(2, gang_check="first"))
    lead.tell(hello("a"), hello("b"))
    command = lead.job.command_for("a")
    assert isinstance(command, m.StartCycle) and command.probe
    lead.tell(*checked(0, PLACES))
    command = lead.job.command_for("b")
    assert isinstance(command, m.StartCycle) and not command.probe and command.cycle == 1
    lead.tell(*training(1, 3, TWO), *finish(1, TWO, 3))
    assert lead.ending == ("succeeded", 0, "finished")
    assert probes(lead, run_dir) == [True, False]
    assert lead.job.counted == 0


def test_a_slow_node_is_left_out_and_the_new_set_is_tested_again(run_dir: Path) -> None:
    lead = Lead(run_dir, shape(2, spares=1, gang_check="first"))
    lead.tell(hello("a"), hello("b"), hello("c"), *checked(0, PLACES, "b"))
    assert lead.job.excluded == {"b": "gang check: with it 1.5 GB/s, the baseline is 4.0"}
    c = lead.job.cycle
    assert c is not None and c.probe and c.nodes == ["a", "c"]
    lead.tell(*checked(1, OTHERS))
    assert lead.job.cycle is not None and not lead.job.cycle.probe
    assert lead.job.cycle.path == "spare"


def test_nobody_is_left_out_where_nobody_could_take_the_place(run_dir: Path) -> None:
    lead = Lead(run_dir, shape(2, gang_check="first"))
    lead.tell(hello("a"), hello("b"), *checked(0, PLACES, "b"))
    assert lead.job.excluded == {}
    assert lead.job.cycle is not None and not lead.job.cycle.probe
    assert [r["result"]["suspects"] for r in read_records(run_dir) if r["type"] == "gang"] == [["b"]]


@pytest.mark.parametrize(
    ("mode", "expected"), [("off", [False, False]), ("swap", [False, True]), ("first", [True, False])]
)
def test_after_a_swap(run_dir: Path, mode: str, expected: list[bool]) -> None:
    lead = Lead(run_dir, shape(2, spares=1, gang_check=mode))
    lead.tell(hello("a"), hello("b"), hello("c"))
    number = 0
    if expected[0]:
        lead.tell(*checked(0, PLACES))
        number = 1
    lead.tell(*training(number, 3, TWO), ("b", None), stopped("a", number, {0: -15, 1: -15}, step=3))
    assert probes(lead, run_dir)[:: max(1, number + 1)][0] is expected[0]
    c = lead.job.cycle
    assert c is not None and c.nodes == ["a", "c"] and c.probe is expected[1]


def test_a_check_that_fails_is_no_failure_of_the_script(run_dir: Path) -> None:
    lead = Lead(run_dir, shape(2, gang_check="first", max_restarts=0))
    lead.tell(hello("a"), hello("b"), *broken(0, places=PLACES))
    assert lead.job.phase == "running"
    assert lead.job.cycle is not None and not lead.job.cycle.probe
    assert (lead.job.counted, lead.job.last_fingerprint, lead.job.progress.count) == (0, None, 0)


def test_nodes_with_a_node_rank_are_in_that_order(run_dir: Path) -> None:
    lead = Lead(run_dir, shape(3))
    lead.tell(hello("a", node_rank=2), hello("b", node_rank=0), hello("c", node_rank=1))
    assert lead.job.cycle is not None
    assert lead.job.cycle.nodes == ["b", "c", "a"]
    assert lead.job.cycle.scatter is None


def test_topology_goes_before_node_ranks(run_dir: Path) -> None:
    lead = Lead(run_dir, shape(2))
    lead.tell(hello("a", node_rank=1, levels=["x"]), hello("b", node_rank=0, levels=["y"]))
    assert lead.job.cycle is not None
    assert lead.job.cycle.nodes == ["a", "b"]


@pytest.mark.slow
def test_a_real_check_and_then_the_script(tmp_path: Path) -> None:
    script = "import os\nprint('script in cycle', os.environ['KEEPSTEP_CYCLE'])\n"
    code, launch = run(tmp_path, script, "--nproc-per-node", "2", "--gang-check", "first")
    assert code == 0, launch.output
    assert launch.wait_line(r"gang check: [\d.]+ GB/s, no baseline stored")
    assert launch.wait_line(r"^script in cycle 1$", count=2)
    assert [c.end_reason for c in launch.cycles] == ["gang_check", "finished"]
    assert launch.cycles[0].node_notes[launch.cycles[0].active_nodes[0]]["gang"]["bandwidth_gb_per_s"] > 0
    launch.check_partition()
