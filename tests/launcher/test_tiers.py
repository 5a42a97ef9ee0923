"""Real runs with a Checkpointer on one host: from which tier ranks go on, and that nothing is lost or mixed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher.coordination.journal import read_records
from tests.launcher.harness import Launch, wait_until
from tests.launcher.test_memory_runs import opened
from tests.launcher.tiers_script import (
    SCRIPT,
    all_memory_ids,
    buffers,
    check_ledger,
    digests,
    last_line,
    memory_ids,
    restored,
)

Reference = Callable[[str], str]


def start(folder: Path, *flags: str, **env: Any) -> Launch:
    """Two ranks; images in memory every 3 steps, saves every 10, 20 steps in all, unless `env` says otherwise."""
    folder.mkdir(exist_ok=True)
    shape = ("--standalone", "--nproc-per-node", "2", *flags)
    return Launch(folder, SCRIPT, *shape, GATE=str(folder / "gate"), OMP_NUM_THREADS="1", **env)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The line that ends an uninterrupted run, without memory, by kind of state."""
    known: dict[str, str] = {}

    def of(wrap: str) -> str:
        if wrap not in known:
            folder = tmp_path_factory.mktemp("reference")
            (folder / "gate").touch()
            launch = start(folder, "--memory-tier", "off", WRAP=wrap, MEMORY_EVERY="0")
            assert launch.finish() == 0, launch.output
            Launch.started.remove(launch)
            assert len(launch.cycles) == 1
            known[wrap] = last_line(launch)
        return known[wrap]

    return of


def open_gates(folder: Path, *cycles: int) -> None:
    """Let these cycles go on, and the job come to its end."""
    for name in ("gate", *(f"gate.{cycle}" for cycle in cycles)):
        (folder / name).touch()


def kill_rank(launch: Launch, rank: int, cycle: int = 0) -> None:
    """SIGKILL, once all ranks hold, so that everything kept before is known."""
    for number in (0, 1):
        launch.wait_line(rf"cycle {cycle} rank {number} holds")
    started = next(r for r in read_records(launch.run_dir) if r["type"] == "started" and r["cycle"] == cycle)
    os.kill(next(r["pid"] for r in started["ranks"] if r["rank"] == rank), signal.SIGKILL)


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    with path.open("r+b") as memory:
        memory.seek(at)
        byte = memory.read(1)
        memory.seek(at)
        memory.write(bytes([byte[0] ^ 0x10]))


def test_a_killed_rank_goes_on_from_a_step_newer_than_the_disk(tmp_path: Path) -> None:
    launch = start(tmp_path, HOLD="17")
    kill_rank(launch, 1)
    open_gates(tmp_path, 0, 1)
    assert launch.finish() == 0
    (cycle,) = launch.cycles[1:]
    assert (cycle.restored_from, cycle.restored_step, cycle.recovery) == ("shm", 15, "respawn")
    assert restored(launch, 1) == {(0, 15), (1, 15)}
    assert launch.mark("committed").attrs["step"] == 10
    # Steps 16 and 17 were executed twice: to the same bits, and so was the state that was restored.
    assert {15, 16, 17} <= digests(launch, 0).keys() & digests(launch, 1).keys()
    assert all(digests(launch, 0)[step] == digests(launch, 1)[step] for step in (15, 16, 17))
    check_ledger(tmp_path, {0: 0, 1: 15}, worlds={0: 2, 1: 2}, total=20)
    launch.check_partition()


@pytest.mark.slow
def test_sharded_weights_are_those_of_an_uninterrupted_run(tmp_path: Path, reference: Reference) -> None:
    launch = start(tmp_path, WRAP="fsdp", HOLD="17")
    kill_rank(launch, 0)
    open_gates(tmp_path, 0, 1)
    assert launch.finish() == 0
    assert (launch.cycles[1].restored_from, launch.cycles[1].restored_step) == ("shm", 15)
    assert last_line(launch) == reference("fsdp")


@pytest.mark.slow
def test_a_damaged_image_is_not_taken(tmp_path: Path, reference: Reference) -> None:
    """First that of the newest step, then, in the next cycle, all there are: what lasts is taken, and not blamed."""
    launch = start(tmp_path, HOLD="17")
    launch.wait_line("cycle 0 rank 1 holds")
    # Steps 10, 12 and 15 went into slots 1, 0 and 1.
    flip(buffers(launch.process.pid)["1-ckpt-0-slot-1"], 4500)
    kill_rank(launch, 1)
    launch.wait_line(
        r"keepstep: checkpoint run-step-00000015-c0000-a0000 in memory is refused by rank [01]: rank-00001-of"
    )
    assert restored(launch, 1) == {(0, 12), (1, 12)}
    launch.wait_line("cycle 1 rank 1 holds")
    for name, path in buffers(launch.process.pid).items():
        if re.fullmatch(r"1-ckpt-0-slot-\d", name):
            flip(path, 4500)
    kill_rank(launch, 0, cycle=1)
    open_gates(tmp_path, 0, 1, 2)
    assert launch.finish() == 0
    assert [(c.restored_from, c.restored_step) for c in launch.cycles] == [("none", 0), ("shm", 12), ("disk", 10)]
    assert not list((tmp_path / "ckpt").glob(".keepstep/quarantine/*"))
    assert last_line(launch) == reference("plain")


@pytest.mark.slow
def test_killed_while_staging_the_image_before_is_whole(tmp_path: Path, reference: Reference) -> None:
    """The next life begins in the other slot: killed there too, the image is still whole.

    Sharded, so that the rank that dies has a part of every tensor to write: of replicas this small rank 0 writes all.
    """
    launch = start(tmp_path, "--max-no-progress-cycles", "5", WRAP="fsdp", DIE_STAGING="15:2")
    open_gates(tmp_path)
    assert launch.finish() == 0
    died = re.findall(r"cycle (\d) dies with (\d+) of (\d+) pieces staged", launch.output)
    assert [int(cycle) for cycle, _, _ in died] == [0, 1], launch.output
    assert all(0 < int(staged) < int(count) for _, staged, count in died), died
    assert [(c.restored_from, c.restored_step) for c in launch.cycles] == [("none", 0), ("shm", 12), ("shm", 12)]
    assert not re.search("refused", launch.output), launch.output
    assert last_line(launch) == reference("fsdp")


@pytest.mark.slow
def test_without_the_memory_tier_it_is_the_disk(tmp_path: Path, reference: Reference) -> None:
    launch = start(tmp_path, "--memory-tier", "off", HOLD="17")
    kill_rank(launch, 1)
    open_gates(tmp_path, 0, 1)
    assert launch.finish() == 0
    assert (launch.cycles[1].restored_from, launch.cycles[1].restored_step) == ("disk", 10)
    assert last_line(launch) == reference("plain")


@pytest.mark.slow
def test_the_coordinator_is_killed_while_images_are_kept(tmp_path: Path, reference: Reference) -> None:
    """An image every step, so that some are always on their way. The newest is that of the step at which the ranks are killed."""
    launch = start(tmp_path, MEMORY_EVERY="1", HOLD="17", STEP_S="0.05", NO_WAIT="1")
    launch.wait_line("cycle 0 step 7 ")
    (first,) = opened(launch)
    os.kill(first, signal.SIGKILL)
    launch.wait_line("cycle 0 rank 1 holds")
    wait_until(lambda: len(opened(launch)) == 2)
    held = memory_ids(launch.process.pid)
    kill_rank(launch, 1)
    launch.wait_line("cycle 1 rank 1 holds")
    held |= memory_ids(launch.process.pid)
    assert len(held) >= 8, "this does not look at the memory of images"
    open_gates(tmp_path, 0, 1)
    assert launch.finish() == 0
    assert (launch.cycles[1].restored_from, launch.cycles[1].restored_step) == ("shm", 17)
    assert not held & all_memory_ids(), "memory stays behind when the job has ended"
    assert last_line(launch) == reference("plain")


@pytest.mark.slow
@pytest.mark.parametrize("durable", [True, False])
def test_asked_to_stop_while_a_save_or_an_image_is_in_flight(durable: bool, tmp_path: Path) -> None:
    """What is in flight is brought to its end, and the last step is committed within the notice; another run goes on from it."""
    (tmp_path / "gate").touch()
    env = {"NO_WAIT": "1", "SLOW_SAVE": "0.4", "STEP_S": "0.05", "EVERY": "40", "MEMORY_EVERY": "25", "TOTAL": "200"}
    launch = start(tmp_path, "--preempt-notice", "20", **env)
    # Once it is known what a save takes. An image that falls due while something is in flight is left out, a save is not.
    launch.wait_line(rf"stores ({'80' if durable else '50|75|100'}) durable {durable}")
    launch.signal(signal.SIGTERM)
    assert launch.finish() == 143
    step = int(last_line(launch).split()[1])
    assert step < 200
    assert (launch.verdict["cause"], launch.verdict["last_committed_step"]) == ("preempted", step)
    steps = [m.attrs["step"] for m in launch.marks if m.kind == "committed"]
    assert steps[-1] == step
    assert not durable or 80 in steps
    again = start(tmp_path, "--memory-tier", "off", TOTAL=str(step + 5), STEP_S="0")
    assert again.finish() == 0
    assert restored(again, 1) == {(0, step), (1, step)}
