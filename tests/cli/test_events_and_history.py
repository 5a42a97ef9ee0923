"""`keepstep events` and `keepstep history`."""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.cli import events as events_module
from keepstep.cli.events import kind_matches, new_events
from keepstep.cli.runs import since_time
from keepstep.launcher.coordination.journal import Journal
from keepstep.launcher.views.events import EventReader
from keepstep.launcher.views.tailing import JournalTail
from keepstep.records.cycle import Goodput
from keepstep.records.errors import ConfigError
from tests.cli.story import CYCLES, END, FAULT, FIRST, SECOND, S, keepstep, mark, opening, rows, write_run


@pytest.fixture
def story(tmp_path: Path) -> Path:
    return write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND, *END])


def events(*args: str | Path) -> list[dict[str, Any]]:
    result = keepstep("events", *args, "-o", "json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


class TestEvents:
    def test_every_record_that_matters_is_one_event_with_an_id_of_its_own(self, story: Path) -> None:
        found = events(story)
        records = [*FIRST, *FAULT, *SECOND, *END]
        assert len(found) == len(records) - sum(r["type"] == "kv" for r in records)
        assert len({e["id"] for e in found}) == len(found)
        assert {e["schema"] for e in found} == {"keepstep.event/1"}
        assert {e["job"] for e in found} == {"job-1"}

    def test_newest_last(self, story: Path) -> None:
        times = [e["time"] for e in events(story)]
        assert times == sorted(times)
        assert (times[0], times[-1]) == ("2023-11-15T00:00:00.000000000Z", "2023-11-15T00:00:32.000000000Z")

    def test_a_fault_with_its_place(self, story: Path) -> None:
        (exit_,) = events(story, "--kind", "rank.exit")
        assert (exit_["node"], exit_["rank"], exit_["cycle"], exit_["severity"]) == ("b", 2, 0, "error")
        assert exit_["time"] == "2023-11-15T00:00:16.000000000Z"
        (lost,) = events(story, "--kind", "node.lost")
        assert (lost["node"], lost["attrs"]["why"]) == ("b", "lease ran out")

    def test_placement_of_a_cycle(self, story: Path) -> None:
        _, second = events(story, "--kind", "cycle.placed")
        assert (second["cycle"], second["attrs"]["path"], second["attrs"]["ranks"]) == (1, "spare", 4)

    def test_a_restart_is_no_verdict(self, story: Path) -> None:
        (decision,) = events(story, "--kind", "decision")
        assert decision["attrs"]["action"] == "restart"
        assert "verdict" not in decision["attrs"]

    def test_filters(self, story: Path) -> None:
        assert {e["kind"] for e in events(story, "--kind", "checkpoint")} == {
            "checkpoint.restored",
            "checkpoint.committed",
        }
        assert [e["kind"] for e in events(story, "--kind", "*.first", "--cycle", "1")] == ["step.first"]
        assert {e["node"] for e in events(story, "-l", "node=b")} == {"b"}
        assert [e["kind"] for e in events(story, "--since", "2023-11-15T00:00:30Z")] == [
            "cycle.drained", "cycle.ended", "job.ended", "job.verdict",
        ]  # fmt: skip
        assert [e["kind"] for e in events(story, "--limit", "1")] == ["job.verdict"]

    def test_a_table_is_cut_and_stderr_says_so(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "long", [*FIRST, *(mark(20 + n, "step", step=n) for n in range(300))])
        result = keepstep("events", run_dir, "-o", "table")
        assert len(result.stdout.splitlines()) == 201
        assert "showing the newest 200 of 316 events; --limit 0 shows all" in result.stderr
        assert len(events(run_dir)) == 316

    def test_a_second_coordinator_begins_when_it_began(self, tmp_path: Path) -> None:
        later = [opening(2, 0, len(FIRST)), mark(40, "gap", begin_ns=1, end_ns=2)]
        run_dir = write_run(tmp_path / "r", FIRST, later)
        first, second = events(run_dir, "--kind", "coordinator.started")
        assert (first["id"], second["id"]) == ("1.0", "2.0")
        assert second["time"] == "2023-11-15T00:00:40.000000000Z"

    def test_a_failed_job_is_fatal(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "r", [*FIRST, mark(20, "run_ended", outcome="failed", exit_code=1)])
        assert events(run_dir, "--kind", "job.ended")[0]["severity"] == "fatal"

    def test_kinds(self) -> None:
        assert kind_matches("node.lost", ())
        assert kind_matches("node.lost", ("node",))
        assert not kind_matches("nodes.lost", ("node",))

    def test_since(self) -> None:
        assert since_time("10m", 3600 * S) == "1970-01-01T00:50:00.000000000Z"
        assert since_time("1.5s", 2 * S) == "1970-01-01T00:00:00.500000000Z"
        assert since_time("2026-01-31T12:00:00.25Z", 0) == "2026-01-31T12:00:00.250000000Z"
        for text in ("10", "yesterday", "-5m", "2026-01-31"):
            with pytest.raises(ConfigError, match="--since"):
                since_time(text, 0)


class TestFollow:
    def test_it_goes_on_until_the_launcher_is_gone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Records that are written while somebody follows, in an old epoch and in a new one."""
        monkeypatch.setattr(events_module, "POLL_S", 0.001)
        run_dir = write_run(tmp_path / "r")
        lock = (run_dir / "lead.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        journal = Journal.claim(run_dir)
        journal.append(FIRST)
        seen: list[str] = []
        news = threading.Condition()

        def follow() -> None:
            for event in new_events(run_dir, JournalTail(run_dir), EventReader("r")):
                with news:
                    seen.append(event.kind)
                    news.notify_all()

        def wait_for(kind: str) -> None:
            with news:
                assert news.wait_for(lambda: kind in seen, 30), seen

        thread = threading.Thread(target=follow)
        thread.start()
        wait_for("step.completed")
        journal.append(FAULT)
        wait_for("decision.made")
        journal.close()
        taken_over = Journal.claim(run_dir)
        taken_over.append([opening(2, 0, len(FIRST) + len(FAULT)), mark(19, "gap"), *SECOND])
        wait_for("coordinator.gap")
        taken_over.append(END)
        taken_over.close()
        lock.close()
        thread.join(30)
        assert not thread.is_alive()
        assert seen[-1] == "job.verdict"
        assert seen.count("cycle.started") == 2

    def test_of_a_run_that_has_ended_is_its_history(self, story: Path) -> None:
        lines = keepstep("events", story, "-f", "-o", "jsonl").stdout.splitlines()
        assert [json.loads(line) for line in lines] == events(story)
        assert len(rows(keepstep("events", story, "-f", "-o", "table").stdout)) == len(lines)

    def test_yaml_has_no_end(self, story: Path) -> None:
        assert keepstep("events", story, "-f", "-o", "yaml").exit_code == 2


class TestHistory:
    def test_a_line_a_cycle_with_totals(self, story: Path) -> None:
        first, second = json.loads(keepstep("history", story).stdout)
        assert (first["rank"], first["node"], first["fault_kind"], first["duration_s"]) == (2, "b", "exit", 17.0)
        assert (second["recovery"], second["restored_step"], second["restored_from"]) == ("spare", 3, "disk")
        account = Goodput(**json.loads(keepstep("goodput", story).stdout))
        lost = account.cycles[1]["phases"]  # type: ignore[index]
        assert second["lost_s"] == pytest.approx(sum(lost.values()))
        assert second["lost_total_s"] == pytest.approx(first["lost_s"] + second["lost_s"])
        assert (first["restarts_total"], second["restarts_total"]) == (0, 1)

    def test_table(self, story: Path) -> None:
        head, first, second, *rest = rows(keepstep("history", story, "-o", "table").stdout)
        assert head[:2] == ["CYCLE", "STARTED"]
        assert (first[0], second[0]) == ("0/0", "0/1")
        assert " ".join(rest[0]).startswith("2 cycles in 1 attempt, 1 restart (1 counted), 32.0 s of wall-clock")

    def test_all_attempts(self, tmp_path: Path) -> None:
        again = [opening(2, 1, len(FIRST)), mark(50, "run_started", 1, 1), mark(51, "cycle_started", 1, 1)]
        cycles = [CYCLES[0], msgspec.structs.replace(CYCLES[1], attempt=1)]
        run_dir = write_run(tmp_path / "r", FIRST, again, cycles=cycles)
        _, *lines = rows(keepstep("history", run_dir, "-o", "table").stdout)
        assert [line[0] for line in lines[:2]] == ["0/0", "1/1"]
        assert "2 cycles in 2 attempts, 0 restarts" in " ".join(lines[2])


@pytest.mark.parametrize("output", ["table", "wide", "name", "jsonl"])
def test_no_colours_without_a_terminal(story: Path, output: str) -> None:
    for follow in ([], ["-f"]):
        text = keepstep("events", story, *follow, "-o", output).stdout
        assert text
        assert "\x1b" not in text
