"""Ranks under watch, in real runs: sections, heartbeats, memory that runs out, and a stop with little notice."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher import messages as m
from keepstep.launcher.config import RunConfig
from keepstep.launcher.ranks.environment import cycle_environment
from keepstep.records.frames import ENV_INJECT, ENV_PREEMPT_NOTICE_S
from keepstep.records.inject import parse_injection
from tests.launcher.harness import Launch, run, training

QUICK = ("--no-zygote", "--preload", "")

LOOP = """
import os, time
import keepstep.trainer as ks
run = ks.init()
first = os.environ["KEEPSTEP_CYCLE"] == "0"
for step in range(5):
    with run.step(step) as s:
        with s.section("outer"):
            for _ in range(3):
                with s.section("inner"):
                    pass
            while first and step == 3 and WHERE == "inside":
                # Progress all the time, in the inner section; the outer one is what takes too long.
                with s.section("inner"):
                    time.sleep(0.02)
        while first and step == 3 and WHERE == "outside":
            time.sleep(0.02)
run.finish()
"""


@pytest.mark.parametrize(
    ("where", "flags", "said"),
    [
        ("inside", ("--section-timeout", "outer=1"), "section 'outer' open for 1 s, in step 3"),
        ("outside", ("--out-of-section-timeout", "1"), "in no section for 1 s, in step 3"),
    ],
)
def test_time_in_and_out_of_sections_is_limited(where: str, flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, launch = run(tmp_path, LOOP.replace("WHERE", repr(where)), *QUICK, *flags)
    assert code == 0, launch.output
    fault = launch.cycles[0].fault
    assert fault is not None and fault["kind"] == "hang" and said in fault["detail"]
    assert len(launch.cycles) == 2


def test_a_script_of_heartbeats_is_watched_and_has_no_steps(tmp_path: Path) -> None:
    script = """
        import os, time
        import keepstep.trainer as ks
        run = ks.init()
        run.heartbeat()
        if os.environ["KEEPSTEP_CYCLE"] == "0":
            begin = time.monotonic()
            while time.monotonic() < begin + 1.2:
                run.heartbeat()
                time.sleep(0.01)
            time.sleep(3600)
        run.finish()
    """
    code, launch = run(tmp_path, script, *QUICK, "--hang-timeout", "0.6")
    assert code == 0, launch.output
    fault = launch.cycles[0].fault
    assert fault is not None and "no progress for 0.6 s, after its last heartbeat" in fault["detail"]
    assert launch.mark("fault").t_ns - launch.mark("attached").t_ns > 1_200_000_000, "heartbeats were progress"
    assert launch.summary["productive_s"] is None


def test_a_rank_out_of_memory_is_one_more_fault(tmp_path: Path) -> None:
    script = """
        import keepstep.trainer as ks
        run = ks.init()
        for step in range(8):
            with run.step(step):
                pass
        run.finish()
    """
    code, launch = run(tmp_path, script, *QUICK, "--inject", "oom@step=5")
    assert code == 0, launch.output
    fault = launch.cycles[0].fault
    assert fault is not None
    killed = "allocating in memory cgroup" in launch.output
    assert ("SIGKILL" if killed else "exit 1") in fault["detail"]
    assert len(launch.cycles) == 2


def environment_of(node: str, first_rank: int, local_rank: int, *specs: str, **config: Any) -> dict[str, str]:
    """What a rank of node "a" or "b" (two ranks each) finds in its environment."""
    run_config = RunConfig(
        run_id="r",
        run_dir="/nowhere",
        node=node,
        script="s.py",
        nproc=2,
        nnodes=2,
        inject=list(map(parse_injection, specs)),
        **config,
    )
    command = m.StartCycle(
        epoch=1,
        cycle=0,
        attempt=0,
        first_rank=first_rank,
        node_index=first_rank // 2,
        nnodes=2,
        world_size=4,
        master_addr="127.0.0.1",
        master_port=1,
        agent_store=False,
    )
    return cycle_environment(run_config, command, local_rank, Path("/nowhere/socket"), None, None)


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("kill@step=3", [0]),
        ("kill@step=3,rank=3", [3]),
        ("kill@step=3,rank=3,node=a", []),
        ("node-loss@step=3", [0]),
        ("node-loss@step=3,rank=3", [3]),
        ("node-loss@step=3,node=b", [2]),
        ("partition@step=3,seconds=2,node=b", [2]),
        ("partition@after=3,node=b", []),
        ("node-loss@step=3,cycle=1", []),
    ],
)
def test_one_rank_comes_to_the_step_of_an_injection(spec: str, ranks: list[int]) -> None:
    """At most one rank causes it; that of a whole node is told to its launcher by a rank there."""
    found = [
        first + local
        for node, first in (("a", 0), ("b", 2))
        for local in (0, 1)
        if ENV_INJECT in environment_of(node, first, local, spec)
    ]
    assert found == ranks


@pytest.mark.parametrize(("notice_s", "seen"), [(None, "15"), (120.0, "115"), (8.0, "6")])
def test_ranks_know_how_long_they_have_once_asked_to_stop(notice_s: float | None, seen: str) -> None:
    assert environment_of("a", 0, 0, preempt_notice_s=notice_s)[ENV_PREEMPT_NOTICE_S] == seen


SLOW_DISK = """
import time
from keepstep.checkpoint.save.saver import Saver
store = Saver._store
def slow(self, job, folder, number):
    if job.durable:
        time.sleep(1.5)
    return store(self, job, folder, number)
Saver._store = slow
"""


def test_a_save_that_does_not_fit_into_the_notice_is_left_out(tmp_path: Path) -> None:
    script = SLOW_DISK + training(total=100000, every=100000).replace(
        "while step", "ckpt.save(step); ckpt.wait()\nwhile step"
    )
    flags = ("--standalone", "--nproc-per-node", "2", "--preempt-notice", "5")
    launch = Launch(tmp_path, script, *flags)
    launch.wait_line(r"^completed 12$", count=2)
    launch.signal(signal.SIGTERM)
    assert launch.finish() == 143
    assert launch.verdict["cause"] == "preempted"
    assert launch.verdict["last_committed_step"] == 0
    said = launch.wait_line(
        r"stopping after step (\d+) without a save: a save may take 2\.\d s and \d\.\d s of the notice"
    )
    assert next(line for line in launch.lines if line.startswith("end ")).split()[1] == said.group(1)


def test_after_a_rank_asked_for_the_end_nothing_more_is_committed(tmp_path: Path) -> None:
    script = training(total=100000, every=10).replace(
        "    step += 1\n",
        """    step += 1
    if step == 13:
        run.announce_rollback(12, "a step is replayed")
        ckpt.wait()
    if step == 15:
        if run.rank == 1:
            run.request_stop("converged")
            print("asked", flush=True)
        dist.barrier()
        ckpt.save(step)
        ckpt.wait()
""",
    )
    code, launch = run(tmp_path, script, "--standalone", "--nproc-per-node", "2")
    assert code != 0
    launch.wait_line("^asked")
    verdict = launch.verdict
    assert (verdict["cause"], verdict["message"], verdict["last_committed_step"]) == (
        "workload_request",
        "converged",
        10,
    )
    assert launch.mark("rollback_announced").attrs == {"to_step": 12, "reason": "a step is replayed"}
    assert len(launch.cycles) == 1


def test_requests_without_a_launcher(tmp_path: Path) -> None:
    script = """
        import keepstep.trainer as ks
        run = ks.init()
        for step in range(1000):
            with run.step(step):
                if step == 5:
                    run.request_stop("converged")
            if run.stop_requested:
                print("stopped after", step)
                break
        run.request_exclude_node("bad memory")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith("stopped after")
    assert int(done.stdout.split()[-1]) >= 5
    assert done.returncode == 1
    assert "no keepstep launcher started this rank" in done.stderr
