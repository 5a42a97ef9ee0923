"""`keepstep get` and `keepstep describe` on run folders."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.goodput import summarise
from keepstep.launcher.coordination.journal import read_marks
from keepstep.records.codec import to_json
from keepstep.records.cycle import VerdictFile
from tests.cli.story import CYCLES, END, FAULT, FIRST, SECOND, joined, keepstep, mark, opening, rows, write_run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    return tmp_path / "runs"


@pytest.fixture
def story(home: Path) -> Path:
    """A run that has lost a node and goes on."""
    return write_run(home / "job-1", [*FIRST, *FAULT, *SECOND])


@pytest.fixture
def led(story: Path) -> Iterator[Path]:
    """The same while a launcher holds its lead."""
    with (story / "lead.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield story


def get(*args: str | Path) -> list[dict[str, Any]]:
    result = keepstep("get", *args, "-o", "json")
    assert result.exit_code == 0, result.output
    records: list[dict[str, Any]] = json.loads(result.stdout)
    return records


def finish(run_dir: Path) -> None:
    """What the coordinator leaves at the end."""
    verdict = VerdictFile(run_id=run_dir.name, attempt=0, outcome="succeeded", exit_code=0, cause="finished")
    (run_dir / "verdict.json").write_bytes(to_json(verdict))
    (run_dir / "summary.json").write_bytes(to_json(summarise(run_dir.name, 0, read_marks(run_dir), CYCLES)))


class TestWhichRun:
    def test_without_a_name_the_run_that_changed_last_and_stderr_says_which(self, home: Path) -> None:
        for name, age_s in (("old", 50), ("new", 5), ("older", 100)):
            run_dir = write_run(home / name, FIRST)
            os.utime(run_dir / "journal" / "000001.jsonl", (time.time() - age_s,) * 2)
        result = keepstep("get", "nodes", "-o", "name")
        assert result.stdout == "a\nb\nc\n"
        assert "run new (changed last of 3" in result.stderr

    def test_a_named_run_is_not_announced(self, story: Path) -> None:
        assert keepstep("get", "nodes", "job-1").stderr == ""
        assert keepstep("get", "nodes", story).stdout == keepstep("get", "nodes", "job-1").stdout

    def test_no_such_run(self, story: Path) -> None:
        result = keepstep("get", "ranks", "job-2")
        assert (result.exit_code, result.stdout) == (6, "")
        assert "job-1" in result.stderr

    def test_no_runs_at_all(self, home: Path) -> None:
        result = keepstep("history")
        assert (result.exit_code, f"{home} holds no runs" in result.stderr) == (6, True)
        assert get("jobs") == []


class TestJobs:
    def test_a_running_one(self, led: Path) -> None:
        (job,) = get("jobs")
        assert job["state"] == "running"
        assert job["phase"] == "training"
        assert {k: job[k] for k in ("run_id", "attempt", "cycle", "step", "restarts", "restarts_counted", "ranks")} == {
            "run_id": "job-1", "attempt": 0, "cycle": 1, "step": 12, "restarts": 1, "restarts_counted": 1, "ranks": 4,
        }  # fmt: skip
        assert (job["started_at"], job["ended_at"]) == ("2023-11-15T00:00:00.000000000Z", None)

    def test_one_whose_launcher_is_gone_without_a_verdict(self, story: Path) -> None:
        (job,) = get("jobs")
        assert (job["state"], job["phase"], job["ended_at"]) == ("lost", None, "2023-11-15T00:00:27.000000000Z")

    def test_the_probe_leaves_the_lock_to_the_launcher(self, story: Path) -> None:
        (story / "lead.lock").touch()
        get("jobs")
        with (story / "lead.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @pytest.mark.parametrize(
        ("host", "age_s", "state"), [("elsewhere", 5, "running"), ("elsewhere", 60, "lost"), ("", 5, "lost")]
    )
    def test_led_from_another_host_whose_lock_cannot_be_seen(
        self, story: Path, host: str, age_s: int, state: str
    ) -> None:
        (story / "lead.lock").write_text(json.dumps({"host": host or socket.gethostname(), "pid": 1}))
        os.utime(story / "journal" / "000001.jsonl", (time.time() - age_s,) * 2)
        assert get("jobs")[0]["state"] == state

    def test_ended_from_the_journal_and_from_its_summary_alike(self, home: Path) -> None:
        run_dir = write_run(home / "job-1", [*FIRST, *FAULT, *SECOND, *END])
        (from_journal,) = get("jobs")
        finish(run_dir)
        (from_files,) = get("jobs")
        assert from_journal["state"] == from_files["state"] == "succeeded"
        same = (
            "run_id",
            "attempt",
            "cycle",
            "step",
            "restarts",
            "restarts_counted",
            "nodes",
            "ranks",
            "started_at",
            "cause",
        )
        assert {k: from_journal[k] for k in same} == {k: from_files[k] for k in same}
        assert from_journal["step"] == 13

    def test_an_ended_run_is_read_without_its_journal(self, home: Path) -> None:
        """A list of many long runs must not read every journal."""
        run_dir = write_run(home / "job-1", [*FIRST, *FAULT, *SECOND, *END])
        finish(run_dir)
        whole = (run_dir / "journal" / "000001.jsonl").read_bytes()
        (run_dir / "journal" / "000001.jsonl").write_bytes(whole[: whole.index(b"assigned")])
        assert get("jobs")[0]["step"] == 13

    def test_a_new_attempt_counts_anew(self, home: Path) -> None:
        again = [opening(2, 1, 100), mark(50, "run_started", 1, 1), joined("a")]
        write_run(home / "job-1", [*FIRST, *FAULT, *SECOND], again)
        (job,) = get("jobs")
        assert (job["attempt"], job["restarts"], job["cycle"], job["state"]) == (1, 0, None, "lost")
        assert get("nodes")[0]["role"] == "waiting"

    def test_a_folder_without_records_is_empty(self, home: Path) -> None:
        write_run(home / "job-1", cycles=[])
        assert get("jobs")[0]["state"] == "empty"

    def test_table_and_wide(self, story: Path) -> None:
        head, line = rows(keepstep("get", "jobs", "-o", "table").stdout)
        assert (head[1], line[1]) == ("STATE", "lost")
        assert str(story) in keepstep("get", "jobs", "-o", "wide").stdout


class TestNodes:
    def test_roles_after_a_loss(self, story: Path) -> None:
        a, b, c = get("nodes", "job-1")
        assert (a["role"], a["ranks"], a["host"]) == ("active", [0, 1], "host-a")
        assert (b["role"], b["ranks"], b["reason"], b["lost"]) == ("lost", [], "lease ran out", 1)
        assert (c["role"], c["ranks"]) == ("active", [2, 3])

    def test_spares_before_it(self, home: Path) -> None:
        write_run(home / "job-1", FIRST)
        assert [n["node"] for n in get("spares", "job-1")] == ["c"]

    def test_a_node_that_comes_back_is_a_spare(self, home: Path) -> None:
        write_run(home / "job-1", [*FIRST, *FAULT, *SECOND, joined("b")])
        assert [(n["node"], n["joined"]) for n in get("spares", "job-1")] == [("b", 2)]

    def test_excluded_with_its_reason(self, home: Path) -> None:
        write_run(home / "job-1", [*FIRST, {"type": "excluded", "node": "c", "reason": "disk full"}])
        (node,) = get("nodes", "job-1", "-l", "role=excluded")
        assert (node["node"], node["reason"]) == ("c", "disk full")

    def test_records_of_other_versions_are_passed_over(self, home: Path) -> None:
        write_run(home / "job-1", [*FIRST, {"type": "unheard_of", "node": "a", "x": 1}, {"type": "mark", "mark": {}}])
        assert len(get("nodes", "job-1")) == 3
        assert keepstep("events", "job-1").exit_code == 0


class TestOthers:
    def test_ranks_of_the_newest_and_of_a_given_cycle(self, story: Path) -> None:
        assert [(r["rank"], r["node"], r["running"]) for r in get("ranks", "job-1", "-l", "node=c")] == [
            (2, "c", True),
            (3, "c", True),
        ]
        assert [r["exit"] for r in get("ranks", "job-1", "--cycle", "0")] == ["SIGTERM", "SIGTERM", "SIGKILL", None]
        missing = keepstep("get", "ranks", "job-1", "--cycle", "7")
        assert (missing.exit_code, "no cycle 7; it has 0-1" in missing.stderr) == (6, True)

    def test_cycles(self, story: Path) -> None:
        assert [c["schema"] for c in get("cycles", "job-1")] == ["keepstep.cycle/1"] * 2
        head, first, second = rows(keepstep("get", "cycles", "job-1", "-o", "table").stdout)
        assert head[:3] == ["CYCLE", "ATTEMPT", "STARTED"]
        assert first[-6:] == ["2", "b", "-", "0", "2", "4"]
        assert "running" in second

    def test_checkpoints_and_what_became_of_them(self, home: Path) -> None:
        refused = mark(28, "quarantined", 1, checkpoint="c3", step=3, reason="hash differs")
        write_run(
            home / "job-1", [*FIRST, *FAULT, *SECOND, mark(27, "committed", 1, step=10, checkpoint="c10"), refused]
        )
        found = {c["checkpoint"]: c for c in get("checkpoints", "job-1")}
        assert {k: c["state"] for k, c in found.items()} == {
            "c3": "quarantined",
            "c8": "rolled_back",
            "c10": "committed",
        }
        assert found["c3"]["persist_s"] == 0.25
        assert found["c3"]["reason"] == "hash differs"
        assert [c["checkpoint"] for c in get("checkpoints", "job-1", "--cycle", "1")] == ["c10"]

    def test_which_tiers_a_checkpoint_reached(self, home: Path) -> None:
        marks = [
            mark(26, "kept", 1, step=9, checkpoint="c9"),
            mark(26, "tier_reached", 1, step=9, checkpoint="c9", tier="peer"),
            mark(27, "tier_reached", 1, step=10, checkpoint="c10", tier="peer"),
            mark(28, "committed", 1, step=10, checkpoint="c10", tier="disk", kept=True),
            mark(40, "tier_reached", 1, step=10, checkpoint="c10", tier="object"),
            mark(41, "image_refused", 1, step=10, checkpoint="c10", tier="shm", reason="memory alone"),
        ]
        write_run(home / "job-1", [*FIRST, *FAULT, *SECOND, *marks])
        newest = get("checkpoints", "job-1")[-1]
        assert (newest["checkpoint"], newest["state"]) == ("c10", "committed")  # c9 was never committed
        assert [one["tier"] for one in newest["tiers"]] == ["peer", "shm", "disk", "object"]
        assert newest["tiers"][-1]["time"] == "2023-11-15T00:00:40.000000000Z"
        assert "peer,shm,disk,object" in keepstep("get", "checkpoints", "job-1", "-o", "table").stdout
        assert "tier object" in keepstep("describe", "job", "job-1", "-o", "table").stdout

    def test_incidents(self, story: Path) -> None:
        assert get("incidents", "job-1") == []
        (story / "incidents" / "INC-0001.json").write_text('{"verdict": {"class": "hardware"}, "cycle": 0}')
        (story / "incidents" / "INC-0002.json").write_text("torn {")
        result = keepstep("get", "incidents", "job-1")
        assert [(i["id"], i["class"]) for i in json.loads(result.stdout)] == [("INC-0001", "hardware")]
        assert "INC-0002.json is not an incident record" in result.stderr

    @pytest.mark.parametrize("kind", ["job", "cycle", "node", "rank", "checkpoint", "spare", "incident", "ckpt"])
    @pytest.mark.parametrize("output", ["table", "wide", "json", "jsonl", "yaml", "name"])
    def test_every_kind_in_every_format(self, story: Path, kind: str, output: str) -> None:
        result = keepstep("get", kind, "job-1", "-o", output)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.stdout

    def test_unknown_kind_key_and_selector(self, story: Path) -> None:
        for args, text in (
            (["gpus"], "there are jobs, cycles"),
            (["nodes", "-l", "colour=red"], "no such field; there are"),
            (["nodes", "-l", "role"], "write KEY=VALUE"),
            (["jobs", "--cycle", "1"], "--cycle 1 says nothing about jobs"),
        ):
            result = keepstep("get", *args)
            assert (result.exit_code, text in result.stderr) == (2, True), result.stderr

    def test_nothing_to_show_is_said_on_stderr(self, story: Path) -> None:
        assert "no spares" in keepstep("get", "spares", "job-1", "-o", "table").stderr

    def test_a_wide_table_is_not_cut(self, home: Path) -> None:
        reason = "x" * 300
        write_run(home / "job-1", [*FIRST, {"type": "excluded", "node": "c", "reason": reason}])
        assert reason in keepstep("get", "nodes", "job-1", "-o", "wide").stdout
        assert "…" in keepstep("get", "nodes", "job-1", "-o", "table").stdout

    def test_text_from_elsewhere_has_no_power_over_the_terminal(self, home: Path) -> None:
        write_run(home / "job-1", [*FIRST, {"type": "excluded", "node": "c", "reason": "\x1b]0;owned\x07[red]"}])
        text = keepstep("get", "nodes", "job-1", "-o", "table").stdout
        assert "^[]0;owned^G[red]" in text


class TestDescribe:
    def test_a_rank_with_its_progress_and_evidence(self, story: Path) -> None:
        folder = story / "evidence" / "cycle-0000"
        folder.mkdir()
        page = {"completed": 11, "phase": "train", "sections": [["forward", 1]]}
        (folder / "rank-00001.json").write_text(
            json.dumps({"rank": 1, "state": "S", "in_collective": True, "page": page})
        )
        (folder / "rank-00001.stacks.txt").write_text("stack")
        text = keepstep("describe", "rank", "1", "job-1", "--cycle", "0", "-o", "table").stdout
        assert rows(text)[0] == ["rank", "1"]
        assert ["exit:", "SIGTERM"] in rows(text)
        assert ["waits", "for", "other", "ranks:", "True"] in rows(text)
        assert ["open", "sections:", "forward"] in rows(text)
        assert str(folder / "rank-00001.stacks.txt") in text
        record = json.loads(keepstep("describe", "rank", "2", "job-1", "--cycle", "0").stdout)
        assert record["fault"]["kind"] == "exit"
        assert record["evidence"] == []
        assert {e["kind"] for e in record["events"]} == {"rank.exit", "cycle.fault"}

    def test_what_its_agent_said_when_it_stopped(self, story: Path) -> None:
        record = json.loads(keepstep("describe", "rank", "0", "job-1", "--cycle", "0").stdout)
        assert record["progress"]["completed steps"] == 11
        assert record["progress"]["failure"]["status"] == -15

    def test_a_cycle(self, story: Path) -> None:
        record = json.loads(keepstep("describe", "cycle", "0", "job-1").stdout)
        assert record["ranks"] == {"total": 4, "by node": {"a": "0-1", "b": "2-3"}}
        assert [r["rank"] for r in record["failed ranks"]] == [0, 1, 2]
        assert json.loads(keepstep("describe", "cycle", "current", "job-1").stdout)["name"] == "1"

    def test_a_node(self, story: Path) -> None:
        record = json.loads(keepstep("describe", "node", "b", "job-1").stdout)
        assert record["node"]["role"] == "lost"
        assert [e["kind"] for e in record["events"]] == [
            "node.joined", "node.started", "rank.exit", "node.lost", "cycle.fault",
        ]  # fmt: skip
        assert json.loads(keepstep("describe", "node", "c", "job-1").stdout)["processes"] == {
            "rank 2": "pid 1002",
            "rank 3": "pid 1003",
        }

    def test_a_job(self, story: Path) -> None:
        record = json.loads(keepstep("describe", "job", "job-1").stdout)
        assert record["job"]["script"] == "train.py --x"
        assert record["checkpoints"] == {"committed": 1, "rolled_back": 1, "quarantined": 0}
        assert record["flags given"] == {"nproc": 2}

    @pytest.mark.parametrize("kind", ["job job-1", "cycle 0 job-1", "node a job-1", "rank 0 job-1"])
    @pytest.mark.parametrize("output", ["table", "json", "yaml", "name"])
    def test_every_kind_in_every_format(self, story: Path, kind: str, output: str) -> None:
        assert keepstep("describe", *kind.split(), "-o", output).exit_code == 0

    def test_mistakes_name_what_there_is(self, story: Path) -> None:
        for args, code, text in (
            (["rank", "9", "job-1"], 6, "no rank 9; it has 0-3"),
            (["node", "aa", "job-1"], 6, "it has a"),
            (["rank", "x", "job-1"], 2, "give its number"),
            (["node"], 2, "needs a name"),
            (["checkpoint", "c3"], 2, "get checkpoints -o wide"),
            (["node", "a", "--cycle", "1"], 2, "is for describe rank"),
            (["cycle", "5", "job-1"], 6, "no cycle 5"),
        ):
            result = keepstep("describe", *args)
            assert (result.exit_code, text in result.stderr) == (code, True), result.stderr


@pytest.mark.parametrize(
    "verb", ["get", "describe", "events", "logs", "history", "top", "inject", "convert", "convert cycle-info"]
)
def test_every_verb_has_help(verb: str) -> None:
    result = keepstep(*verb.split(), "--help")
    assert (result.exit_code, "Usage: " in result.stdout) == (0, True)
