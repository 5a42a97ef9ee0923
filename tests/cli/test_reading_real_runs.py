"""The verbs that look at runs, on real runs: while one trains, after a fault, after the end; and on the base install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.story import END, FAULT, FIRST, SECOND, keepstep, write_run
from tests.launcher.harness import Launch, training, wait_until

VERBS = (
    "get jobs", "get cycles", "get nodes", "get ranks", "get checkpoints", "get spares", "get incidents", "history", "events",
    "describe job", "describe cycle", "describe rank 0", "top",
)  # fmt: skip


def read(*args: str | Path) -> Any:
    result = keepstep(*args, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def files(run_dir: Path) -> dict[str, int]:
    return {str(p): p.lstat().st_mtime_ns for p in run_dir.rglob("*")}


def test_a_run_is_read_while_it_trains_and_goes_on_undisturbed(tmp_path: Path) -> None:
    launch = Launch(tmp_path, training(100_000, 20), "--nproc-per-node=2", "--inject", "raise@step=25,rank=1")
    try:
        launch.wait_line("restored 20")
        launch.wait_line("completed 4[0-9]")
        run_dir = launch.run_dir
        wait_until(lambda: (read("get", "jobs", run_dir)[0]["step"] or 0) > 25)
        (job,) = read("get", "jobs", run_dir)
        assert (job["state"], job["phase"], job["cycle"], job["restarts"], job["ranks"]) == (
            "running",
            "training",
            1,
            1,
            2,
        )
        for rank in read("get", "ranks", run_dir):
            assert Path(f"/proc/{rank['pid']}").exists()
            assert rank["running"]
        assert [r["exit"] is not None for r in read("get", "ranks", run_dir, "--cycle", "0")] == [True, True]
        first, second = read("history", run_dir)
        assert (first["rank"], first["ended_at"] is not None, second["ended_at"]) == (1, True, None)
        assert (second["restored_step"], second["restored_from"]) == (20, "shm")
        assert {"committed", "rolled_back"} >= {c["state"] for c in read("get", "checkpoints", run_dir)}
        top = read("top", run_dir)
        assert top["steps_per_s"] is None or top["steps_per_s"] > 0
        assert 0 < top["ettr"] < 1
        text = keepstep("logs", run_dir, "--rank", "1", "--previous", "--grep", "injecting").stdout
        assert re.search(r"\[rank 1\] .*injecting raise", text)
        described = read("describe", "rank", "0", run_dir, "--cycle", "0")
        assert described["progress"]["completed steps"] == 25
        assert any(path.endswith(".stacks.txt") for path in described["evidence"])
    finally:
        launch.signal(15)
        launch.finish()
    (job,) = read("get", "jobs", launch.run_dir)
    assert job["state"] == launch.verdict["outcome"]
    assert job["step"] == launch.summary["steps"]["final"]
    kinds = [e["kind"] for e in read("events", launch.run_dir)]
    assert {"job.started", "node.joined", "rank.exit", "decision.made", "checkpoint.committed", "job.ended"} <= set(
        kinds
    )
    assert kinds.count("cycle.started") == 2
    assert "job.stop_requested" in kinds
    before = files(launch.run_dir)
    for verb in VERBS:
        for output in ("table", "json"):
            assert keepstep(*verb.split(), launch.run_dir, "-o", output).exit_code == 0, verb
    assert files(launch.run_dir) == before  # nothing written, nothing touched


BASE_INSTALL = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
from keepstep.cli.main import main
for verb in {verbs}:
    for output in ("table", "json"):
        try:
            main([*verb.split(), {run!r}, "-o", output])
        except SystemExit as end:
            assert not end.code, (verb, output)
try:
    main(["logs", {run!r}])
except SystemExit as end:
    assert not end.code
main(["inject", "kill@rank=1", {run!r}])
"""


def test_on_the_base_install(tmp_path: Path) -> None:
    """Everything but inject works with msgspec, click and rich alone; inject says what to install."""
    run_dir = write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND, *END])
    (run_dir / "logs" / "cycle-0001.log").write_text("[rank 0] x\n")
    blocked = {"starlette", "uvicorn", "websockets", "cryptography", "torch", "numpy", "yaml", "google"}
    program = BASE_INSTALL.format(blocked=blocked, verbs=[*VERBS, "convert cycle-info"], run=str(run_dir))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "pip install 'keepstep[launch]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "job-1", FIRST)
    (run_dir / "logs" / "cycle-0000.log").write_bytes(b"[rank 0] line\n" * 100_000)
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "keepstep.cli.main", "logs", str(run_dir)]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.read(reader, 100)
    os.close(reader)
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said


def test_a_fault_asked_for_by_a_person_happens(tmp_path: Path) -> None:
    launch = Launch(tmp_path, training(100_000, 20), "--nproc-per-node=2")
    try:
        launch.wait_line("completed 5[0-9]")
        action = keepstep("inject", "kill@rank=1", launch.run_dir, "--yes", "--reason", "drill", "-o", "json")
        assert action.exit_code == 0, action.output
        launch.wait_line("restored [1-9]", count=2)
        (exited,) = read("events", launch.run_dir, "--kind", "rank.exit")
        assert (exited["rank"], exited["cycle"]) == (1, 0)
        assert [r["exit"] for r in read("get", "ranks", launch.run_dir, "--cycle", "0")][1] == "SIGKILL"
        assert keepstep("inject", "kill@rank=1", launch.run_dir).exit_code == 2
    finally:
        launch.signal(15)
        launch.finish()
