"""`keepstep demo` with another seed and other faults, and that it says so when something does not hold."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from keepstep.cli.demo import Evidence, RunFiles, default_faults, demo, judge, parse_faults, work_folder
from keepstep.records.errors import ConfigError
from keepstep.records.inject import parse_injection

SEED, STEPS = 5, 60
FAULTS = [
    "hang@step=15,rank=1",
    "corrupt-checkpoint@step=33,rank=1,cycle=1",
    "kill@step=34,rank=0,cycle=1",
    "coordinator-kill@step=32,rank=1,cycle=2",
]


def run_demo(*flags: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it."""
    command = [sys.executable, "-m", "keepstep.cli.main", "demo", *flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCHELASTIC_"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One real demo: (folder of both runs, its JSON, what it said on stderr)."""
    folder = tmp_path_factory.mktemp("demo") / "kept"
    flags = ["--seed", str(SEED), "--steps", str(STEPS), "--keep", str(folder), "-o", "json"]
    result = run_demo(*flags, "--faults", ";".join(FAULTS[:2]), "--faults", FAULTS[2], "--faults", FAULTS[3])
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout), result.stderr


def test_everything_held(kept: tuple[Path, dict[str, Any], str]) -> None:
    _, report, _ = kept
    assert report["schema"] == "keepstep.demo/1"
    assert report["bitwise_equal"] is True
    assert report["samples_exactly_once"] is True
    assert report["failures"] == []
    assert (report["seed"], report["steps"], report["samples_used"]) == (SEED, STEPS, STEPS * 16)


def test_each_fault_is_reported_with_its_times_and_class(kept: tuple[Path, dict[str, Any], str]) -> None:
    _, report, _ = kept
    faults = report["faults"]
    assert [fault["kind"] for fault in faults] == ["hang", "corrupt-checkpoint", "kill", "coordinator-kill"]
    # The rank that hung stood in its script; nothing tells who killed one.
    assert [fault["class"] for fault in faults] == ["user_code", "unknown", "unknown", "unknown"]
    assert report["goodput"]["lost_by_cause"]["user_code"] > 4.0
    assert 4.0 <= faults[0]["detected_s"] < 6.0 < faults[0]["first_step_s"] + 2.0
    assert all(fault["detected_s"] >= 0 for fault in faults)
    assert all(0 < fault["first_step_s"] < 60 for fault in faults)


def test_corrupted_checkpoint_is_quarantined_and_the_older_one_used(kept: tuple[Path, dict[str, Any], str]) -> None:
    folder, report, _ = kept
    (bad,) = report["quarantined"]
    assert (bad["step"], bad["used_step"], bad["cycle"]) == (30, 24, 2)
    assert (folder / "faulted" / "checkpoints" / bad["used_instead"]).is_dir()
    assert "are not what was written" in bad["reason"]


def test_phases_add_up_to_the_nanosecond(kept: tuple[Path, dict[str, Any], str]) -> None:
    _, report, _ = kept
    goodput = report["goodput"]
    assert sum(goodput["phases_ns"].values()) == goodput["wall_ns"]
    assert 0 < goodput["ettr"] < 1
    assert [cycle["restored_step"] for cycle in goodput["cycles"]] == [0, 12, 24]
    assert goodput["steps"]["final"] == STEPS


def test_progress_is_told_on_stderr(kept: tuple[Path, dict[str, Any], str]) -> None:
    _, _, progress = kept
    assert "reference run: 60 steps on 2 ranks, seed 5" in progress
    assert "faulted run: cycle 0 ended by hang of rank 1" in progress
    assert "faulted run: cycle 2 goes on at step 24" in progress


def test_kept_material_lets_anyone_recompute_the_claim(kept: tuple[Path, dict[str, Any], str]) -> None:
    folder, report, _ = kept
    digests = {
        hashlib.sha256((folder / run / "weights.pt").read_bytes()).hexdigest() for run in ("reference", "faulted")
    }
    assert digests == set(report["weights_sha256"].values())
    assert list((folder / "faulted" / "run" / "journal").glob("*.jsonl"))
    samples: dict[str, list[int]] = {}
    for run in ("reference", "faulted"):
        last: dict[tuple[int, int], tuple[int, list[int]]] = {}
        for path in sorted((folder / run / "ledger").glob("*.jsonl")):  # sorted: later cycles replace earlier ones
            for line in map(json.loads, path.read_text().splitlines()):
                last[line["step"], line["rank"]] = (line["cycle"], line["samples"])
        samples[run] = [sample for key in sorted(last) for sample in last[key][1]]
    assert samples["reference"] == samples["faulted"]
    assert len(set(samples["faulted"])) == len(samples["faulted"]) == report["samples_used"]


# ---- on a copy of the kept material: what is broken must be named


@pytest.fixture
def copy(kept: tuple[Path, dict[str, Any], str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept[0], tmp_path / "copy"))


def failures(folder: Path, specs: list[str] | None = None) -> list[str]:
    reference, evidence = RunFiles(folder / "reference"), Evidence(RunFiles(folder / "faulted"))
    return judge(reference, evidence, specs=specs or FAULTS, seed=SEED, steps=STEPS, kept=None).failures


def test_untouched_copy_holds(copy: Path) -> None:
    assert failures(copy) == []


def test_one_changed_bit_of_the_weights_fails(copy: Path) -> None:
    path = copy / "faulted" / "weights.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert [f.partition(":")[0] for f in failures(copy)] == ["the final weights differ"]


def test_one_changed_sample_in_the_surviving_history_fails(copy: Path) -> None:
    path = copy / "faulted" / "ledger" / "ledger-c0002-rank1.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[3])
    record["samples"][0] += 1_000_000
    path.write_text("\n".join([*lines[:3], json.dumps(record), *lines[4:]]) + "\n")
    assert [f.partition(",")[0] for f in failures(copy)] == [f"samples: step {record['step']}"]


def test_lost_ledger_of_a_rank_fails(copy: Path) -> None:
    (copy / "faulted" / "ledger" / "ledger-c0002-rank0.jsonl").unlink()
    assert any("no record of step" in failure for failure in failures(copy))


def test_fault_that_did_not_happen_fails(copy: Path) -> None:
    assert any("kill@step=50" in failure for failure in failures(copy, [*FAULTS, "kill@step=50,rank=0,cycle=2"]))


def test_fault_of_another_rank_fails(copy: Path) -> None:
    assert any("hang of rank 1" in failure for failure in failures(copy, ["hang@step=15,rank=0", *FAULTS[1:]]))


def test_quarantine_that_was_not_asked_for_fails(copy: Path) -> None:
    assert failures(copy, [FAULTS[0], *FAULTS[2:]]) == ["1 checkpoints were quarantined"]


# ---- the flags


def test_usual_faults_are_the_four_of_the_story() -> None:
    kinds = [parse_injection(spec).kind for spec in default_faults(16)]
    assert kinds == ["kill", "hang", "corrupt-checkpoint", "kill", "coordinator-kill"]
    assert parse_faults(default_faults(16), 160) == default_faults(16)


def test_faults_are_split_at_semicolons() -> None:
    assert parse_faults(["kill@step=1; kill@step=2,cycle=1", "hang@step=3,cycle=2"], 40) == [
        "kill@step=1",
        "kill@step=2,cycle=1",
        "hang@step=3,cycle=2",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kil@step=3", "unknown kind 'kil'"),
        ("nan@step=3", "does not go on after nan"),
        ("preempt@step=3", "does not go on after preempt"),
        ("kill@step=40", "from 0 to 39"),
        ("kill@seconds=4", "needs step=N"),
    ],
)
def test_fault_that_cannot_be_part_of_the_demo_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_faults([spec], 40)


def test_folder_with_something_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"), work_folder(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "precious"


def test_help_names_the_flags() -> None:
    assert isinstance(demo, click.Command)
    text = CliRunner().invoke(demo, ["--help"]).output
    assert all(flag in text for flag in ("--seed", "--faults", "--keep", "--steps", "--output"))


@pytest.mark.slow
def test_usual_demo_as_a_table() -> None:
    result = run_demo("--seed", "11", "-o", "table")
    assert result.returncode == 0, result.stderr
    for text in ("coordinator-kill@step", "quarantined:", "bitwise equal to", "each used exactly once", "ETTR"):
        assert text in result.stdout


@pytest.mark.slow
def test_demo_with_stop_exception_and_exit() -> None:
    faults = "stop@step=20,rank=1;raise@step=44,rank=0,cycle=1;exit@step=61,rank=1,cycle=2,code=3"
    result = run_demo("--seed", "12", "--steps", "100", "--faults", faults, "-o", "json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["bitwise_equal"] and report["samples_exactly_once"]
    assert [fault["kind"] for fault in report["faults"]] == ["stop", "raise", "exit"]
