"""`keepstep goodput --fleet` on run folders that a real journal wrote."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.cli.goodput_fleet import since_ns
from keepstep.goodput.fleet import FleetGoodput
from keepstep.launcher.files import write_durable
from keepstep.launcher.views.ledger import read_ledger
from keepstep.records.codec import from_json, rfc3339, to_json
from keepstep.records.cycle import Goodput
from keepstep.records.errors import ConfigError, StorageError
from keepstep.records.label import Label, label_path
from keepstep.records.losses import LOSSES
from tests.cli.story import BASE_NS, CYCLES, END, FAULT, FIRST, SECOND, Record, S, keepstep, mark, opening, write_run
from tests.cli.test_goodput_verb import BASE_INSTALL

WHOLE: list[Record] = [*FIRST, *FAULT, *SECOND, *END]
VERDICT = {
    "class": "hardware",
    "tier": "probable",
    "signature": "nvrm.xid.79",
    "confidence": 0.9,
    "action": "cordon_node",
    "entity": {"node": "b"},
    "summary": "fell off the bus",
}
ATTRIBUTED = mark(16, "attributed", incident="INC-0001", **VERDICT)
EXCLUDED: Record = {"type": "excluded", "node": "b", "reason": "GPU fell off the bus"}
EVICTED: list[Record] = [*FIRST, EXCLUDED, *FAULT, ATTRIBUTED, *SECOND, *END]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    return tmp_path / "runs"


def account(*args: str | Path) -> FleetGoodput:
    result = keepstep("goodput", "--fleet", *args, "-o", "json")
    assert result.exit_code == 0, result.output
    return from_json(result.stdout, FleetGoodput)


def shifted(records: list[Record], by_s: float) -> list[Record]:
    """The same records at another time."""

    def moved(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: moved(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [moved(v) for v in value]
        return value + int(by_s * S) if key.endswith("_ns") and isinstance(value, int) and value >= BASE_NS else value

    return [moved(record) for record in records]


def labelled(run_dir: Path, name: str, incident: str = "INC-0001") -> None:
    path = label_path(run_dir, incident)
    path.parent.mkdir(exist_ok=True)
    made = Label(
        incident=incident,
        run_id=run_dir.name,
        fault_class=name,  # type: ignore[arg-type]
        said="hardware",
        reason="tested",
        by="me",
        time=rfc3339(BASE_NS),
    )
    write_durable(path, to_json(made))


class TestWhichRuns:
    def test_all_runs_of_the_home_without_names(self, home: Path) -> None:
        for name in ("job-1", "job-2"):
            write_run(home / name, WHOLE)
        found = account()
        assert sorted(run.run_id for run in found.runs) == ["job-1", "job-2"]
        assert keepstep("goodput", "--fleet", "-o", "name").stdout.split() == ["job-1", "job-2"]

    def test_names_folders_and_folders_of_runs_each_once(self, home: Path, tmp_path: Path) -> None:
        write_run(home / "job-1", WHOLE)
        write_run(tmp_path / "other" / "job-2", WHOLE)
        found = account("job-1", home / "job-1", tmp_path / "other", tmp_path / "other" / "job-2")
        assert sorted(run.run_id for run in found.runs) == ["job-1", "job-2"]
        assert {run.folder for run in found.runs} == {str(home / "job-1"), str(tmp_path / "other" / "job-2")}

    def test_no_runs_at_all(self, home: Path) -> None:
        result = keepstep("goodput", "--fleet")
        assert (result.exit_code, result.stdout) == (6, "")
        assert f"{home} holds no runs" in result.stderr

    def test_a_name_that_is_none(self, home: Path) -> None:
        write_run(home / "job-1", WHOLE)
        result = keepstep("goodput", "--fleet", "job-9")
        assert (result.exit_code, "no run 'job-9'" in result.stderr) == (6, True)

    def test_no_run_in_the_window(self, home: Path) -> None:
        write_run(home / "job-1", WHOLE)
        result = keepstep("goodput", "--fleet", "--since", "1h")
        assert (result.exit_code, "none of 1 runs has any time since" in result.stderr) == (6, True)

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (("--since", "30d", "job-1"), "--since 30d is about many runs; add --fleet"),
            (("--by", "node", "job-1"), "--by node is about many runs"),
            (("--slo", "0.9", "job-1"), "--slo 0.9 is about many runs"),
            (("job-1", "job-2"), "give one RUN, not 2"),
            ((), "give one RUN, not 0"),
            (("--fleet", "--attempt", "0"), "--fleet counts all attempts"),
            (("--fleet", "--since", "soon"), "--since soon: give a time before now"),
            (("--fleet", "--since", "2026-99-01T00:00:00Z"), "not an RFC 3339 time"),
            (("--fleet", "--since", "2999-01-01T00:00:00Z"), "not in the past"),
            (("--fleet", "--slo", "90"), "--slo 90: give a share"),
            (("--fleet", "--price", "0"), "--price 0: give a number of dollars above 0"),
        ],
    )
    def test_flags_that_make_no_sense(self, home: Path, args: tuple[str, ...], said: str) -> None:
        write_run(home / "job-1", WHOLE)
        result = keepstep("goodput", *args)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr


class TestDamage:
    def test_damaged_folders_are_named_and_left_out(self, home: Path) -> None:
        for name in ("good", "torn", "sizeless", "odd"):
            write_run(home / name, WHOLE)
        (home / "empty" / "journal").mkdir(parents=True)
        write_run(home / "markless", [opening()])
        journal = home / "torn" / "journal" / "000001.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join([*lines[:5], b"{}\n", *lines[6:]]))
        bare = [r for r in WHOLE if r["type"] in ("mark", "open")]
        (home / "sizeless" / "journal" / "000001.jsonl").unlink()
        for path in (home / "sizeless" / "cycles").glob("*"):
            path.unlink()
        write_run(home / "x", bare, cycles=[]).joinpath("journal/000001.jsonl").rename(
            home / "sizeless" / "journal" / "000001.jsonl"
        )
        write_run(home / "odd2", [*FIRST, {"type": "mark", "mark": {"kind": "no such", "t_ns": 1}}])
        result = keepstep("goodput", "--fleet", "-o", "json")
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        assert [run["run_id"] for run in found["runs"]] == ["good", "odd"]
        reasons = {Path(one["folder"]).name: one["reason"] for one in found["left_out"]}
        assert set(reasons) == {"empty", "markless", "torn", "sizeless", "odd2", "x"}
        assert "line 6 is damaged, and there are records behind it" in reasons["torn"]
        assert "how many ranks" in reasons["sizeless"]
        assert "mark of unknown form" in reasons["odd2"]
        for reason in reasons.values():
            assert f"left out: {reason}" in result.stderr

    def test_all_of_them_damaged(self, home: Path) -> None:
        (home / "empty" / "journal").mkdir(parents=True)
        result = keepstep("goodput", "--fleet")
        assert (result.exit_code, "none of 1 run folders can be accounted" in result.stderr) == (6, True)

    def test_a_torn_end_is_no_damage(self, home: Path) -> None:
        file = write_run(home / "job-1", WHOLE) / "journal" / "000001.jsonl"
        file.write_bytes(file.read_bytes() + b'{"seq":99,"ty')
        assert account().left_out == []

    def test_a_bad_cycle_record_is_named_and_the_journal_speaks(self, home: Path) -> None:
        (write_run(home / "job-1", WHOLE) / "cycles" / "cycle-0000.json").write_text("{")
        result = keepstep("goodput", "--fleet", "-o", "json")
        assert "cycle-0000.json is not a cycle record and is left out" in result.stderr
        assert json.loads(result.stdout)["runs"][0]["gpus"] == 4

    def test_a_bad_label_is_named(self, home: Path) -> None:
        run_dir = write_run(home / "job-1", WHOLE)
        label_path(run_dir, "INC-0001").parent.mkdir()
        label_path(run_dir, "INC-0001").write_text("{}")
        result = keepstep("goodput", "--fleet", "-o", "json")
        assert (result.exit_code, "not a label" in result.stderr) == (0, True)


class TestRecord:
    def test_one_run_by_hand(self, home: Path) -> None:
        write_run(home / "job-1", [*WHOLE, ATTRIBUTED])
        found = account("--price", "3600")
        parts = {name: p for name, p in found.totals.parts.items() if p is not None}
        assert {name: parts[name].time_s for name in LOSSES[:4]} == {
            "detection": 1.0,
            "decision": 3.0,
            "replacement": 4.0,
            "rollback": 6.25,
        }
        assert sum(p.time_ns for p in parts.values()) == 32 * S
        assert parts["detection"].gpu_h == pytest.approx(4 / 3600)
        assert parts["detection"].usd == pytest.approx(4.0)
        assert found.totals.paid is not None
        assert found.totals.paid.gpu_ns == (19 * 6 + 13 * 4) * S
        (incident,) = found.incidents
        assert (incident.incident, incident.fault_class, incident.cause) == ("INC-0001", "hardware", "nvrm.xid.79")
        assert (incident.node, incident.rack, incident.cost.time_s, incident.wrong) == ("b", "rack", 14.25, None)
        assert [(row.key, row.lost.time_s) for row in found.by_class] == [("hardware", 14.25), ("startup", 4.0)]
        assert [row.key for row in found.by_rack] == ["rack"]
        assert [(r.fault_class, r.failures) for r in found.rates.rates] == [("all", 1), ("hardware", 1)]

    def test_without_a_verdict_the_kind_of_the_fault_is_the_cause(self, home: Path) -> None:
        write_run(home / "job-1", WHOLE)
        found = account()
        assert [row.key for row in found.by_cause] == ["exit", "startup"]
        assert found.totals.parts["rollback"] is not None
        assert (found.price_usd_per_gpu_h, found.totals.parts["rollback"].usd) == (None, None)

    def test_the_goodput_of_one_run_agrees(self, home: Path) -> None:
        write_run(home / "job-1", WHOLE)
        alone = from_json(keepstep("goodput", "job-1", "-o", "json").stdout, Goodput)
        assert alone.losses is not None
        assert alone.losses.parts == account().totals.parts

    def test_the_window_cuts(self, home: Path) -> None:
        write_run(home / "job-1", WHOLE)
        since = rfc3339(BASE_NS + 20 * S)
        found = account("--since", since)
        assert found.since == since
        assert found.wall.time_s == 12
        assert found.totals.parts["detection"] is not None
        assert found.totals.parts["detection"].time_s == 0

    def test_a_lost_run_ends_at_its_last_mark_and_a_led_one_goes_on(self, home: Path) -> None:
        run_dir = write_run(home / "job-1", [*FIRST, *FAULT, *SECOND])
        now_ns = BASE_NS + 100 * S
        record, _ = read_ledger(run_dir, now_ns)
        assert (record.part.wall_ns, record.vanished_ns) == (27 * S, (BASE_NS + 27 * S,))
        assert account().rates.incidents == 1  # they are less than ten minutes apart
        with (run_dir / "lead.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record, _ = read_ledger(run_dir, now_ns)
        assert (record.part.wall_ns, record.vanished_ns) == (100 * S, ())

    def test_attempts_are_one_run_and_what_lies_between_is_queue(self, home: Path) -> None:
        again = shifted([*FIRST[1:], mark(20, "run_ended", outcome="failed")], 100)
        for record in again:
            if record["type"] == "mark":
                record["mark"] |= {"attempt": 1, "cycle": 2}
            elif record["type"] == "cycle":
                record["cycle"] = 2
        write_run(home / "job-1", WHOLE, [opening(2, 1, len(WHOLE)), *again])
        (run,) = account().runs
        assert run.losses.parts["queue"] is not None
        assert run.losses.parts["queue"].time_s == 68
        ratios = run.losses.ratios
        assert ratios.ettr_with_queue is not None
        assert ratios.ettr_without_queue == pytest.approx(ratios.ettr_with_queue * 120 / 52)

    def test_gpu_models_from_evidence_or_the_flag(self, home: Path) -> None:
        run_dir = write_run(home / "job-1", WHOLE)
        assert {row.sku for row in account("--sku", "A100").rates.rates} == {"A100"}
        folder = run_dir / "evidence" / "cycle-0000" / "a"
        folder.mkdir(parents=True)
        (folder / "gpus.json").write_text(json.dumps({"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]}))
        assert {row.sku for row in account("--sku", "A100").rates.rates} == {"H100"}
        (folder / "gpus.json").write_text(json.dumps({"gpus": [{"name": "NVIDIA B200"}]}))
        assert {row.sku for row in account().rates.rates} == {"NVIDIA B200"}

    def test_gpus_of_the_cycle_record_go_before_ranks_of_the_journal(self, home: Path) -> None:
        cycles = []
        for cycle in CYCLES:
            ranks = [msgspec.structs.replace(r, gpu_uuid=f"GPU-{r.node}") for r in cycle.ranks]
            cycles.append(msgspec.structs.replace(cycle, ranks=ranks))
        write_run(home / "job-1", WHOLE, cycles=cycles)
        assert account().runs[0].gpus == 2  # two ranks share one

    def test_racks_of_a_topology_file_go_first(self, home: Path, tmp_path: Path) -> None:
        run_dir = write_run(home / "job-1", WHOLE)
        topology = tmp_path / "topology"
        topology.write_text("a spine1 leaf1\nb spine1 leaf2\n")
        config = json.loads((run_dir / "run.json").read_bytes()) | {"topology": str(topology)}
        (run_dir / "run.json").write_text(json.dumps(config))
        assert [row.key for row in account().by_rack] == ["spine1/leaf2"]
        topology.unlink()
        result = keepstep("goodput", "--fleet", "-o", "json")
        assert "racks are what nodes said of themselves" in result.stderr
        assert [row["key"] for row in json.loads(result.stdout)["by_rack"]] == ["rack"]

    def test_records_of_unknown_forms_are_passed_over(self, home: Path) -> None:
        odd: list[Record] = [
            {"type": "cycle", "cycle": 7, "layout": [["a"], 3, ["a", "h", "two"]]},
            {"type": "node", "node": "z", "nproc": "many", "levels": "rack"},
            {"type": "excluded", "node": ["z"]},
            mark(16, "attributed", incident=4, tier="certain", entity="b", **{"class": 3}),
        ]
        write_run(home / "job-1", [*WHOLE, *odd])
        assert account().wall.time_s == 32
        assert keepstep("goodput", "job-1", "-o", "json").exit_code == 0


class TestFalsePositiveTax:
    def test_unknown_until_somebody_verifies(self, home: Path) -> None:
        write_run(home / "job-1", EVICTED)
        found = account()
        assert found.totals.parts["false_positive"] is None
        assert (found.totals.actions, found.totals.actions_verified, found.totals.actions_wrong) == (1, 0, None)
        assert [(i.acted, i.wrong) for i in found.incidents] == [("evicted", None)]

    @pytest.mark.parametrize(("verified", "tax_s"), [("user_code", 14.25), ("hardware", 0.0), ("unknown", None)])
    def test_a_label_tells(self, home: Path, verified: str, tax_s: float | None) -> None:
        labelled(write_run(home / "job-1", EVICTED), verified)
        part = account().totals.parts["false_positive"]
        assert (None if part is None else part.time_s) == tax_s
        alone = from_json(keepstep("goodput", "job-1", "-o", "json").stdout, Goodput)
        assert alone.false_positive_tax_s == tax_s

    def test_a_job_ended_on_a_verdict_that_was_wrong(self, home: Path) -> None:
        stop: Record = {"type": "attribution_stop", "incident": "INC-0001", "summary": "x"}
        labelled(write_run(home / "job-1", [*FIRST, *FAULT, ATTRIBUTED, stop, *END[-2:]]), "user_code")
        (incident,) = account().incidents
        assert (incident.acted, incident.wrong) == ("ended", True)

    def test_a_node_that_is_not_of_the_cycle_was_not_taken_from_it(self, home: Path) -> None:
        spare = {**EXCLUDED, "node": "c"}
        write_run(home / "job-1", [*FIRST, spare, *FAULT, *SECOND, *END])
        assert account().totals.actions == 0


class TestTable:
    @pytest.mark.parametrize("by", ["cause", "class", "node", "rack", "incident", "run"])
    def test_every_grouping(self, home: Path, by: str) -> None:
        write_run(home / "job-1", [*WHOLE, ATTRIBUTED])
        result = keepstep("goodput", "--fleet", "--by", by, "--price", "2", "--slo", "0.9", "-o", "table")
        assert result.exit_code == 0, result.output
        shown = {"cause": "nvrm.xid.79", "class": "hardware", "node": "b", "rack": "rack", "incident": "INC-0001"}
        words = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
        assert {shown.get(by, "job-1"), *LOSSES, "objective"} <= words
        assert ["straggler", "unknown"] in [line.split()[:2] for line in result.stdout.splitlines()]
        assert "burn rate 6.6" in result.stdout
        assert "…" not in result.stdout

    def test_a_list_that_is_cut_says_so(self, home: Path) -> None:
        for number in range(21):
            write_run(home / f"job-{number}", shifted(WHOLE, 1000 * number))
        args = ("goodput", "--fleet", "--by", "incident")
        short, wide = keepstep(*args, "-o", "table"), keepstep(*args, "-o", "wide")
        assert "showing the first 20 of 21 incidents" in short.stderr
        assert short.stdout.count("INC-0001") == 20
        assert (wide.stdout.count("INC-0001"), wide.stderr) == (21, "")

    def test_no_racks_is_said(self, home: Path) -> None:
        flat = [{**r, "levels": []} if r["type"] == "node" else r for r in WHOLE]
        write_run(home / "job-1", flat)
        assert "no run's records name racks" in keepstep("goodput", "--fleet", "--by", "rack", "-o", "table").stderr

    def test_names_have_no_power_over_the_terminal(self, home: Path) -> None:
        bad = mark(16, "attributed", incident="INC-0001", **{**VERDICT, "signature": "[red]\x1b[2J"})
        write_run(home / "job-1", [*WHOLE, bad])
        text = keepstep("goodput", "--fleet", "-o", "table").stdout
        assert "[red]^[[2J" in text
        assert "\x1b" not in text

    def test_one_run_has_its_losses_by_name(self, home: Path) -> None:
        labelled(write_run(home / "job-1", EVICTED), "user_code")
        text = keepstep("goodput", "job-1", "--price", "3600", "-o", "table").stdout
        line = next(words for words in map(str.split, text.splitlines()) if words[:1] == ["false_positive"])
        assert line[1:] == ["14.250", "44.5", "%", "0.016", "57.00"]
        assert "actions on a verdict: 1, 1 verified, wrong: 1" in text
        assert "ETTR without queue 0.336, ETTR with queue 0.336, paid-GPU goodput 0.259" in text


class TestSince:
    def test_spans_and_times(self) -> None:
        assert since_ns("30d", 100 * 86_400 * S) == 70 * 86_400 * S
        assert since_ns("1.5h", 10_000 * S) == 4600 * S
        assert since_ns("1970-01-01T00:00:02Z", 5 * S) == 2 * S
        assert since_ns("1970-01-01T01:00:02+01:00", 5 * S) == 2 * S

    def test_refusals_name_flag_and_value(self) -> None:
        for text in ("0d", "-3d", "x", "T", "1970-01-01T00:00:09Z", "1970-01-01T00:00:02"):
            with pytest.raises(ConfigError, match=f"--since {text}"):
                since_ns(text, 5 * S)


def test_a_folder_that_cannot_be_read_is_named(home: Path) -> None:
    run_dir = write_run(home / "job-1", WHOLE)
    (run_dir / "journal" / "000001.jsonl").unlink()
    (run_dir / "journal" / "000001.jsonl").mkdir()
    with pytest.raises(StorageError, match="job-1: cannot read the journal: Is a directory"):
        read_ledger(run_dir, BASE_NS)


def test_it_works_on_the_base_install(home: Path, tmp_path: Path) -> None:
    write_run(home / "job-1", WHOLE)
    blocked = {"starlette", "uvicorn", "websockets", "cryptography", "torch", "numpy", "yaml", "re2", "zstandard"}
    command = [sys.executable, "-c", BASE_INSTALL.format(blocked=blocked), "goodput", "--fleet", "-o", "table"]
    env = {**os.environ, "NO_COLOR": "1", "KEEPSTEP_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fleet: 1 runs" in done.stdout
