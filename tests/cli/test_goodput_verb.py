"""`keepstep goodput RUN` on run folders written with the launcher's own journal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from keepstep.cli.goodput import load_goodput, render_goodput
from keepstep.cli.main import main
from keepstep.goodput import summarise
from keepstep.launcher.coordination.journal import Journal
from keepstep.records.codec import from_json, to_json
from keepstep.records.cycle import PHASES, Cycle, Goodput
from keepstep.records.timeline import Mark, MarkKind

S = 1_000_000_000


def mark(t_s: float, kind: MarkKind, cycle: int = 0, attempt: int = 0, **attrs: Any) -> Mark:
    return Mark(t_ns=int(t_s * S), kind=kind, cycle=cycle, attempt=attempt, attrs=attrs)


FIRST = [
    mark(0, "run_started"),
    mark(1, "cycle_started"),
    mark(2, "assigned"),
    mark(3, "attached"),
    mark(4, "restored", step=0, source="none"),
    mark(5, "first_step", step=1),
    mark(9, "committed", step=3, checkpoint="c3"),
    mark(15, "step", step=11),
    mark(16, "fault", occurred_ns=15 * S, detected_ns=16 * S, cause="hardware", completed_step=11),
    mark(17, "stopped"),
]
SECOND = [
    mark(18, "decided", counted=True),
    mark(19, "cycle_started", 1),
    mark(20, "attached", 1),
    mark(22, "restored", 1, step=3, source="disk"),
    mark(23, "first_step", 1, step=4),
]
END = [mark(30, "drain", 1, completed_step=11), mark(32, "run_ended", 1, outcome="succeeded")]
CYCLES = [
    Cycle(run_id="job-1", attempt=0, cycle=0, started_at="t0", ended_at="t1", end_reason="hardware", restored_step=0),
    Cycle(run_id="job-1", attempt=0, cycle=1, started_at="t2", restored_step=3, restored_from="disk"),
]


def write_run(run_dir: Path, *epochs: list[Mark], cycles: list[Cycle] = CYCLES) -> Path:
    """A run folder with one journal file an epoch."""
    (run_dir / "cycles").mkdir(parents=True)
    for marks in epochs:
        journal = Journal.claim(run_dir)
        journal.append([{"type": "open", "t_ns": 0}])
        journal.append([{"type": "mark", "t_ns": m.t_ns, "mark": msgspec.to_builtins(m)} for m in marks])
        journal.close()
    for cycle in cycles:
        (run_dir / "cycles" / f"cycle-{cycle.cycle:04d}.json").write_bytes(to_json(cycle))
    return run_dir


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    return tmp_path / "runs"


def goodput(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["goodput", *map(str, args)])


class TestFindingTheRun:
    def test_by_path_and_by_id(self, home: Path) -> None:
        run_dir = write_run(home / "job-1", [*FIRST, *SECOND, *END])
        by_path, by_id = goodput(run_dir), goodput("job-1")
        assert by_path.exit_code == 0
        assert by_path.stdout == by_id.stdout != ""

    def test_a_missing_run_names_where_it_looked_and_the_nearest(self, home: Path) -> None:
        for name in ("job-1", "job-2", "other"):
            write_run(home / name, FIRST)
        result = goodput("job-3")
        assert (result.exit_code, result.stdout) == (6, "")
        assert f"no run folder at {home / 'job-3'}" in result.stderr
        assert "job-1" in result.stderr
        assert "job-2" in result.stderr
        assert "other" not in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_a_missing_path(self, home: Path, tmp_path: Path) -> None:
        result = goodput(tmp_path / "nothing")
        assert result.exit_code == 6
        assert f"no run folder at {tmp_path / 'nothing'}; {home} holds no runs" in result.stderr

    def test_a_folder_without_a_journal(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text("{}")
        result = goodput(tmp_path)
        assert (result.exit_code, "has no journal" in result.stderr) == (6, True)

    def test_a_journal_without_marks(self, tmp_path: Path) -> None:
        result = goodput(write_run(tmp_path / "r", []))
        assert (result.exit_code, "has no marks yet" in result.stderr) == (6, True)

    def test_the_id_comes_from_the_cycles_or_run_json_or_the_folder(self, tmp_path: Path) -> None:
        assert goodput(write_run(tmp_path / "a", FIRST), "-o", "name").stdout == "job-1\n"
        run_dir = write_run(tmp_path / "b", FIRST, cycles=[])
        assert goodput(run_dir, "-o", "name").stdout == "b\n"
        (run_dir / "run.json").write_text('{"run_id": "job-9"}')
        assert goodput(run_dir, "-o", "name").stdout == "job-9\n"


class TestRecord:
    def test_json_is_exactly_the_goodput_record(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "r", FIRST, [*SECOND, *END])  # two coordinators, one run
        expected = summarise("job-1", 0, [*FIRST, *SECOND, *END], CYCLES)
        assert from_json(goodput(run_dir, "-o", "json").stdout, Goodput) == expected
        assert goodput(run_dir, "-o", "jsonl").stdout.encode() == to_json(expected) + b"\n"
        assert (expected.phases["productive"], expected.phases["rolled_back"]) == (11.0, 6.0)

    def test_a_torn_last_line_of_the_journal_is_left_out(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "r", [*FIRST, *SECOND])
        file = run_dir / "journal" / "000001.jsonl"
        before = load_goodput(run_dir, now_ns=40 * S)
        file.write_bytes(file.read_bytes() + b'{"seq":99,"type":"mark"')
        assert load_goodput(run_dir, now_ns=40 * S) == before

    def test_a_running_run_is_counted_up_to_now(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "r", [*FIRST, *SECOND])
        assert load_goodput(run_dir, now_ns=40 * S).wall_ns == 40 * S
        assert load_goodput(run_dir).wall_ns > 10**18  # the clock of today, the marks of 1970

    def test_an_ended_run_does_not_grow(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "r", [*FIRST, *SECOND, *END])
        assert load_goodput(run_dir).wall_ns == 32 * S

    def test_attempts(self, tmp_path: Path) -> None:
        later = [mark(50, "run_started", 1, 1), mark(51, "cycle_started", 2, 1), mark(53, "run_ended", 2, 1)]
        run_dir = write_run(tmp_path / "r", [*FIRST, *SECOND, *END], later)

        def account(*args: str) -> tuple[int, float, float]:
            record = from_json(goodput(run_dir, *args).stdout, Goodput)
            return record.attempt, record.wall_s, record.phases["queue"] or 0.0

        assert account() == (1, 3.0, 0.0)
        assert account("--attempt", "0") == (0, 32.0, 0.0)
        assert account("--all-attempts") == (1, 53.0, 18.0)
        missing = goodput(run_dir, "--attempt", "4")
        assert (missing.exit_code, "has no attempt 4; it has 0, 1" in missing.stderr) == (6, True)
        assert goodput(run_dir, "--attempt", "0", "--all-attempts").exit_code == 2

    def test_a_broken_cycle_record_is_named_and_left_out(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "r", [*FIRST, *SECOND, *END])
        (run_dir / "cycles" / "cycle-0000.json").write_text("{")
        result = goodput(run_dir)
        assert [c["cycle"] for c in json.loads(result.stdout)["cycles"]] == [1]
        assert "cycle-0000.json is not a cycle record and is left out" in result.stderr

    def test_yaml_has_the_same_keys(self, tmp_path: Path) -> None:
        text = goodput(write_run(tmp_path / "r", [*FIRST, *SECOND, *END]), "-o", "yaml").stdout
        assert "wall_ns: 32000000000\n" in text
        assert "  productive: 11.0\n" in text
        assert "schema: keepstep.goodput/1\n" in text


def rows(text: str) -> dict[str, list[str]]:
    """First word of each line to the other words."""
    return {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words}


class TestTable:
    @pytest.fixture
    def text(self, tmp_path: Path) -> str:
        return goodput(write_run(tmp_path / "r", [*FIRST, *SECOND, *END]), "-o", "table").stdout

    def test_headline(self, text: str) -> None:
        assert text.splitlines()[0] == (
            "run job-1, attempt 0: ETTR 0.344, 11.0 s of 32.0 s became training that survived"
        )

    def test_phases_with_seconds_and_share(self, text: str) -> None:
        table = rows(text)
        assert table["productive"] == ["11.000", "34.4", "%"]
        assert table["rolled_back"] == ["6.000", "18.8", "%"]
        assert table["wall"] == ["32.000", "100.0", "%"]
        assert "replace" not in table
        assert table["hardware"] == ["14.000", "43.8", "%"]

    def test_cycles_with_cost_and_where_they_went_on_from(self, text: str) -> None:
        lines = [line.split() for line in text.splitlines()]
        names = next(words for words in lines if words[:1] == ["cycle"])
        assert names[1:-2] == ["detect", "capture", "decide", "rendezvous", "start", "restore", "first_step", "total"]
        row = next(words for words in lines if words[:1] == ["1"])
        assert row[1:9] == ["1.000", "1.000", "2.000", "1.000", "0.000", "2.000", "1.000", "8.000"]
        assert row[9:] == ["step", "3", "(disk)", "running"]

    def test_where_the_table_of_cycles_does_not_fit_there_is_a_line_a_cycle(self) -> None:
        console = Console(file=io.StringIO(), width=60)
        render_goodput(summarise("r", 0, [*FIRST, *SECOND, *END], CYCLES), console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert (
            "1: 8.0 s (detect 1.0 s, capture 1.0 s, decide 2.0 s, rendezvous 1.0 s, restore 2.0 s, first_step 1.0 s); "
            "restored step 3 (disk); ended running\n"
        ) in text
        assert "…" not in text

    def test_many_cycles_are_cut_and_stderr_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        cycles = [msgspec.structs.replace(CYCLES[0], cycle=number) for number in range(30)]
        record = summarise("r", 0, [*FIRST, *SECOND, *END], cycles)
        for wide, shown in ((False, set(range(10, 30))), (True, set(range(30)))):
            console = Console(file=io.StringIO(), width=150)
            render_goodput(record, console, wide=wide)
            text = console.file.getvalue()  # type: ignore[attr-defined]
            assert {int(word) for word in rows(text) if word.isdigit()} == shown
            assert ("showing the newest 20 of 30 cycles" in capsys.readouterr().err) is not wide

    def test_counts(self, text: str) -> None:
        assert "steps: 11 final, 19 completed, 8 rolled back, newest committed 3" in text
        assert "restarts: 1 (1 counted, 0 free)" in text
        assert "checkpoints: 1 committed, 0 failed, median block -" in text

    def test_wide_shows_empty_phases_too(self, tmp_path: Path) -> None:
        text = goodput(write_run(tmp_path / "r", [*FIRST, *SECOND, *END]), "-o", "wide").stdout
        assert set(PHASES) <= set(rows(text))

    def test_a_script_without_steps_is_never_guessed_about(self) -> None:
        record = summarise("r", 0, [*FIRST[:4], mark(10, "run_ended")], [])
        console = Console(file=io.StringIO(), width=100)
        render_goodput(record, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "ETTR unknown (no steps reported)" in text
        assert rows(text)["productive"] == ["unknown", "-"]

    def test_markup_in_names_is_text(self) -> None:
        fault = mark(6, "fault", occurred_ns=6 * S, detected_ns=6 * S, cause="[red]x[/nope]")
        record = summarise("[bold]r", 0, [*FIRST[:6], fault, mark(8, "run_ended")], [])
        console = Console(file=io.StringIO(), width=100)
        render_goodput(record, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "run [bold]r, attempt 0" in text
        assert "[red]x[/nope]" in text


BASE_INSTALL = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
from keepstep.cli.main import main
main()
"""


def test_it_works_on_the_base_install(tmp_path: Path) -> None:
    blocked = {"starlette", "uvicorn", "websockets", "cryptography", "torch", "numpy", "yaml"}
    run_dir = write_run(tmp_path / "r", [*FIRST, *SECOND, *END])
    for args in (["goodput", str(run_dir)], ["version"], ["explain-exit", "3"], ["--help"]):
        for output in [[]] if args == ["--help"] else [["-o", "json"], ["-o", "table"], ["-o", "yaml"]]:
            command = [sys.executable, "-c", BASE_INSTALL.format(blocked=blocked), *args, *output]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"}
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout
            assert "\x1b" not in done.stdout
