"""`keepstep doctor resume` catches and names what a script forgets, with real runs and a real SIGKILL."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from keepstep.launcher.doctor.resume import CheckOptions, ResumeCheck, RunFolder, Runner, check_resume
from keepstep.launcher.doctor.resumestate import Data, Key, Leaf, compare_states
from keepstep.records import frames
from keepstep.records.codec import to_json
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.inject import parse_injection
from keepstep.records.resumecheck import CheckPlan
from keepstep.trainer.observed import MAX_TENSOR_BYTES, observe
from tests.resume.lives import Server

SCRIPT = Path(__file__).with_name("script.py")
Check = Callable[..., ResumeCheck]


def forked(server: Server) -> Runner:
    """Runs the script in ranks that the server forks, which takes a tenth of the time of `keepstep run`."""

    def run_script(options: CheckOptions, run: RunFolder, inject: str | None) -> None:
        run.path.mkdir(parents=True)
        plan = CheckPlan(folder=str(run.observed), until_step=options.steps)
        env = {
            "KEEPSTEP_HOME": str(Path(options.folder, "home")),
            frames.ENV_CKPT_ROOT: str(run.root),
            frames.ENV_CKPT_EVERY_STEPS: str(options.every),
            frames.ENV_RESUME_CHECK: to_json(plan).decode(),
        }
        request = {"script": options.script, "args": list(options.args)}
        killing = {frames.ENV_INJECT: to_json([parse_injection(inject)]).decode()} if inject else {}
        statuses = server.live(options.nproc, 0, request, run.log, {**env, **killing})
        if inject and -signal.SIGKILL in statuses:
            statuses = server.live(options.nproc, 1, request, run.log, env)
        if any(statuses):
            raise KeepstepError(f"the script ended with {statuses}: {run.log.read_text()}")

    return run_script


@pytest.fixture
def check(server: Server, tmp_path: Path) -> Check:
    def run(mistake: str = "", **options: int | tuple[str, ...]) -> ResumeCheck:
        plan = CheckOptions(
            script=str(SCRIPT),
            args=("--mistake", mistake),
            folder=str(tmp_path / "runs"),
            **options,  # type: ignore[arg-type]
        )
        return check_resume(plan, forked(server))

    return run


def test_a_correct_script_is_the_same(check: Check) -> None:
    report = check()
    assert (report.outcome, report.differences, report.first) == ("same", [], None)
    assert (report.restored_step, report.compared_steps) == (4, [5, 6, 7, 8]) or report.restored_step == 5


@pytest.mark.parametrize(
    ("mistake", "kind", "key"),
    [
        ("sched", "not_saved", "sched/"),
        ("plain-loader", "variable", "loader.position"),
        pytest.param("scaler", "not_saved", "scaler/", marks=pytest.mark.slow),
        pytest.param("ema", "not_saved", "ema/", marks=pytest.mark.slow),
        pytest.param("loader", "not_saved", "loader/position", marks=pytest.mark.slow),
        pytest.param("rng", "saved", "rng/torch", marks=pytest.mark.slow),
    ],
)
def test_what_is_forgotten_is_named(check: Check, mistake: str, kind: str, key: str) -> None:
    report = check(mistake, steps=7)
    assert report.outcome == "diverged" and report.first is not None
    assert report.first.kind == kind and report.first.key.startswith(key), report.first
    assert report.first.first_step == report.restored_step + 1 == report.compared_steps[0]
    assert report.why and report.fix
    if mistake != "rng":
        assert mistake.removeprefix("plain-") in report.why
    if mistake in ("ema", "scaler"):  # nothing else is lost with them, and nothing else is blamed
        assert {d.key.partition("/")[0] for d in report.differences} == {mistake}
    if mistake == "loader":
        gap = 4 * report.restored_step
        assert (report.first.expected, report.first.max_abs_diff) == (str(gap + 4), gap)


@pytest.mark.slow
def test_data_that_nobody_can_see_shows_in_the_weights(check: Check) -> None:
    report = check("stream", steps=7)
    assert report.outcome == "diverged" and report.first is not None
    assert report.first.key.startswith(("model/", "optim/")) and report.first.max_abs_diff
    assert "other data" in report.why


@pytest.mark.slow
def test_what_is_ignored_is_not_compared(check: Check) -> None:
    assert check("ema", steps=7, ignore=("ema",)).outcome == "same"


@pytest.mark.slow
def test_a_script_that_is_not_seeded_is_not_blamed_on_the_resume(check: Check) -> None:
    report = check("unseeded", steps=7)
    assert report.outcome == "nondeterministic" and report.differences == []
    assert "model/0.weight" in report.nondeterministic and "seed" in report.fix


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "text"), [("no-save", "saved nothing in 8 steps"), ("no-restore", "restore")])
def test_a_script_that_cannot_be_checked(check: Check, mistake: str, text: str) -> None:
    with pytest.raises(KeepstepError, match=text):
        check(mistake)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kill_step": 1}, "--kill-at 1"),
        ({"kill_step": 8}, "--kill-at 8"),
        ({"kill_rank": 1}, "--kill-rank 1"),
        ({"every": 3, "kill_step": 6}, "--every 3"),
    ],
)
def test_numbers_that_leave_nothing_to_compare(check: Check, options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check(**options)


# ---- what it reads and compares


def saved(*pieces: Data) -> Leaf:
    return Leaf(kind="saved", value=pieces)


@pytest.mark.parametrize(
    ("dtype", "one", "two", "gap"),
    [
        ("F32", struct.pack("<3f", 1, 2, 3), struct.pack("<3f", 1, 2.5, 3), 0.5),
        ("F16", struct.pack("<2e", 1, -4), struct.pack("<2e", 1, 4), 8.0),
        ("BF16", bytes.fromhex("803f0040"), bytes.fromhex("803f8040"), 2.0),
        ("I64", struct.pack("<2q", 1, 7), struct.pack("<2q", -1, 7), 2.0),
        ("F64", struct.pack("<d", 1), struct.pack("<d", math.nan), math.inf),
        ("F32", struct.pack("<f", 0.0), struct.pack("<f", -0.0), 0.0),
        ("F8_E4M3", b"\x01", b"\x02", None),
    ],
)
def test_differences_are_found_by_bits_and_told_by_value(dtype: str, one: bytes, two: bytes, gap: float | None) -> None:
    shape = (3,)
    mine, other = (
        saved(Data("F32", (1,), b"same"), Data(dtype, shape, one)),
        saved(Data("F32", (1,), b"same"), Data(dtype, shape, two)),
    )
    (found,) = compare_states({Key("model/w"): mine}, {Key("model/w"): other}, 5)
    assert (found.key, found.first_step, found.max_abs_diff, found.is_tensor) == ("model/w", 5, gap, True)
    assert compare_states({Key("model/w"): mine}, {Key("model/w"): mine}, 5) == []


def test_the_likely_cause_comes_first() -> None:
    leaves = {
        Key("model/w"): saved(Data("F32", (1,), b"abcd")),
        Key("optim/lr"): Leaf(kind="saved", order=1, value="0.1"),
        Key("ema/w", 0): Leaf(kind="not_saved", value="1"),
        Key("loader/at", 1): Leaf(kind="saved", value="4"),
        Key("rng/torch", 1): saved(Data("U8", (1,), b"a")),
        Key("data.at", 0): Leaf(kind="variable", type="int", value="3"),
        Key("loss", 0): Leaf(kind="variable", type="float", value="0.5"),
    }
    found = [difference.key for difference in compare_states(leaves, {}, 1)]
    assert found == ["rng/torch", "loader/at", "ema/w", "optim/lr", "data.at", "model/w", "loss"]


def test_what_a_script_holds_is_seen_and_what_it_saves_is_not_seen_twice(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    wrapped, average = torch.nn.Sequential(model), torch.nn.Linear(3, 1)
    generator, big = torch.Generator(), torch.nn.Linear(1, MAX_TENSOR_BYTES // 4 + 1, bias=False)
    counts = {"seen": 3, "names": ["a"] * 100}
    held = observe({"model": model}, sys._getframe())
    assert wrapped is not None and "model" not in held and "wrapped" not in held
    assert held["average"].kind == held["generator"].kind == "object" and average.weight.numel() == 3
    assert held["counts.seen"].value == counts["seen"] and "counts.names" not in held
    assert held["big"].value["v"][0][1]["dtype"] == "SHA-256 of float32" and big is not None and generator is not None


# ---- the verb, under the launcher


def doctor_resume(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "SLURM_"))}
    command = [sys.executable, "-m", "keepstep.cli.main", "doctor", "resume", *args]
    return subprocess.run(
        command, cwd=folder, env={**env, "TMPDIR": str(folder)}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_verb_on_a_correct_script_with_two_ranks(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    done = doctor_resume(
        tmp_path, "--nproc-per-node", "2", "--kill-rank", "1", "-o", "json", str(example), "--root", "unused"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    assert (record["schema"], record["outcome"], record["nproc"]) == ("keepstep.resume_check/1", "same", 2)
    assert list(tmp_path.glob("keepstep-*")) == [], "a check that found nothing left files behind"


@pytest.mark.slow
def test_verb_names_the_mistake(tmp_path: Path) -> None:
    done = doctor_resume(tmp_path, "--keep", "runs", "--steps", "7", "-o", "table", str(SCRIPT), "--mistake", "sched")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "diverged" in done.stdout and "first sched/" in done.stdout
    assert (
        "`sched` (torch.optim.lr_scheduler.ExponentialLR) has a state of its own, and it is in no checkpoint"
        in done.stdout
    )
    assert (tmp_path / "runs" / "stopped" / "output.log").is_file()


@pytest.mark.slow
def test_verb_passes_on_what_the_script_said(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('no such dataset')\n")
    done = doctor_resume(tmp_path, str(script))
    assert done.returncode == 1 and "no such dataset" in done.stderr and "runs are kept in" in done.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("none.py",), "none.py"),
        (("--kill-at", "9", str(SCRIPT)), "--kill-at 9"),
        (("--keep", ".", str(SCRIPT)), "--keep ."),
        (("--steps", "many", str(SCRIPT)), "--steps"),
    ],
)
def test_bad_input(args: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from keepstep.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = CliRunner().invoke(main, ["doctor", "resume", *args])
    assert (result.exit_code, result.stdout) == (2, "") and text in result.stderr
