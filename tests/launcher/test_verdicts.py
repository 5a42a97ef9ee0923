"""Failed cycles of real runs become incidents with a verdict; what a verdict may end; and that no restart waits for one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher.coordination.journal import read_marks
from keepstep.records.verdict import NODE_ACTIONS
from tests.launcher.harness import Launch, training

SHAPE = ("--standalone", "--nproc-per-node", "2")


def launch(folder: Path, script: str, *flags: str) -> Launch:
    return Launch(folder, script, *SHAPE, *flags, "--attribution", "on")


def incident(run: Launch, number: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.run_dir / "incidents" / f"INC-{number:04d}.json").read_bytes())
    return found


@pytest.mark.skipif(not os.access("/dev/kmsg", os.W_OK), reason="only root may write to the kernel's log")
def test_an_xid_in_the_kernel_log_is_the_cause_of_a_death(tmp_path: Path) -> None:
    xid = "xid@step=6,rank=1,code=79,pci=0000:3b:00"
    run = launch(tmp_path, training(), "--node-name", "n7", "--inject", xid, "--inject", "kill@step=8,rank=1")
    assert run.finish() == 0, run.output
    verdict = incident(run)["verdict"]
    assert (verdict["class"], verdict["action"], verdict["signature"]) == ("hardware", "cordon_node", "xid.79")
    assert verdict["tier"] in ("probable", "certain")
    assert (verdict["entity"]["node"], verdict["entity"]["gpu"]) == ("n7", "0000:3b:00.0")
    assert verdict["first_cause"]["time"].startswith("20"), "a line of the kernel's log without a time"
    assert "INC-0001: hardware" in run.output
    (mark,) = [m for m in read_marks(run.run_dir) if m.kind == "attributed"]
    assert (mark.cycle, mark.attrs["incident"], mark.attrs["class"]) == (0, "INC-0001", "hardware")
    assert run.cycles[0].incident == "INC-0001"
    summary = json.loads((run.run_dir / "summary.json").read_bytes())
    assert set(summary["lost_by_cause"]) <= {"hardware", "startup"}
    run.check_partition()


def test_an_exception_of_the_script_is_the_scripts(tmp_path: Path) -> None:
    script = training().replace("    step += 1\n", "    step += 1\n    {}['learning_rate'] if step == 7 else None\n", 1)
    run = launch(tmp_path, script, "--max-restarts", "0")
    assert run.finish() == 1
    verdict = incident(run)["verdict"]
    assert (verdict["class"], verdict["action"]) == ("user_code", "fail_fast")
    assert "INC-0001: user_code" in run.output, "said also when the job is over"
    assert json.loads((run.run_dir / "verdict.json").read_bytes())["incident"] == "INC-0001"


@pytest.mark.slow
def test_a_verdict_may_end_the_job(tmp_path: Path) -> None:
    """Each life fails somewhere else, so that the launcher's own rule of the same failure twice never holds."""
    script = """
    import os, time
    import keepstep.trainer as ks
    run = ks.init()
    for step in range(500):
        with run.step(step):
            time.sleep(0.02)
        if step == 3 and os.environ["RANK"] == "0" and os.environ["KEEPSTEP_CYCLE"] == "0":
            raise ValueError("loss weight of task 3 is missing")
    run.finish()
    """
    run = launch(tmp_path, script, "--attribution-stop", "no-restart")
    assert run.finish() == 93, run.output
    verdict = json.loads((run.run_dir / "verdict.json").read_bytes())
    assert (verdict["outcome"], verdict["cause"]) == ("no_restart", "attribution_stop")
    assert "INC-0001" in verdict["message"]
    assert len(run.cycles) == 2, "no restart waits for a verdict"


@pytest.mark.slow
def test_a_hang_names_who_is_waited_for(tmp_path: Path) -> None:
    run = launch(tmp_path, training(), "--hang-timeout", "3", "--inject", "hang@step=8,rank=1")
    assert run.finish() == 0, run.output
    verdict = incident(run)["verdict"]
    assert verdict["entity"]["rank"] == 1
    assert verdict["action"] not in NODE_ACTIONS
    bearings = {e["signature"]: e["bearing"] for e in verdict["evidence"]}
    assert bearings["keepstep.hang"] == "symptom" and "keepstep.rank_waits" in bearings


@pytest.mark.slow
def test_the_coordinator_dies_before_its_verdict(tmp_path: Path) -> None:
    """The next one finds a failed cycle without a verdict, and gives it one."""
    kills = ("--inject", "kill@step=8,rank=1", "--inject", "coordinator-kill@step=10,rank=0,cycle=1")
    run = launch(tmp_path, training(), *kills)
    assert run.finish() == 0, run.output
    assert incident(run)["kind"] == "cycle.failed"
    marks = [m for m in read_marks(run.run_dir) if m.kind == "attributed"]
    assert [m.attrs["incident"] for m in marks] == ["INC-0001"]


def test_without_attribution_the_launchers_own_word_stands(tmp_path: Path) -> None:
    run = Launch(tmp_path, training(), *SHAPE, "--attribution", "off", "--inject", "kill@step=8,rank=1")
    assert run.finish() == 0
    assert incident(run)["verdict"]["tier"] == "unknown"
    assert not [m for m in read_marks(run.run_dir) if m.kind == "attributed"]
