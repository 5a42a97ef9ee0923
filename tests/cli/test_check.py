"""`keepstep check`: its output, exit codes, and the whole way of `gang` through a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from keepstep.cli.main import main
from keepstep.launcher.health import nodecheck
from keepstep.launcher.health.nodecheck import CheckResult

LIMIT_S = 100


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class TestNode:
    def test_this_host(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(main, ["check", "node", "-o", "json", "--checkpoint-root", str(tmp_path)])
        record = json.loads(result.stdout)
        assert set(record) == {"schema", "node", "level", "ok", "took_s", "checks"}
        assert (record["schema"], record["level"]) == ("keepstep.node_check/1", 1)
        assert set(record["checks"][0]) == {"name", "ok", "value", "limit", "detail", "next_step"}
        assert result.exit_code == (0 if record["ok"] else 3)
        assert record["ok"] == all(c["ok"] is not False for c in record["checks"])

    def test_a_missing_gpu_is_a_problem(self) -> None:
        result = CliRunner().invoke(main, ["check", "node", "--gpus", "1000", "-o", "json"])
        assert result.exit_code == 3
        assert json.loads(result.stdout)["ok"] is False

    def test_a_table_has_what_to_do_next_and_takes_text_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bad = CheckResult(name="gpu.0.ecc", ok=False, value="3", detail="errors [red]", next_step="reset [it]")
        unknown = CheckResult(name="clock", ok=None, next_step="chronyc tracking")
        monkeypatch.setattr(nodecheck, "run_checks", lambda *_: [bad, unknown])
        result = CliRunner().invoke(main, ["check", "node", "-o", "table"])
        assert result.exit_code == 3
        assert "errors [red]; reset [it]" in result.stdout and "FAILED" in result.stdout
        assert "unknown" in result.stdout and "chronyc" not in result.stdout
        assert "chronyc" in CliRunner().invoke(main, ["check", "node", "-o", "wide"]).stdout

    def test_what_cannot_be_checked_is_no_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nodecheck, "run_checks", lambda *_: [CheckResult(name="clock", ok=None)])
        assert CliRunner().invoke(main, ["check", "node"]).exit_code == 0


class TestGang:
    def gang(self, home: Path, *flags: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "keepstep.cli.main", "check", "gang", "--nproc-per-node", "2", "-o", "json"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "SLURM_", "KEEPSTEP_"))}
        done = subprocess.run(
            [*command, "--sizes-mb", "0.25", "--iterations", "5", *flags],
            env={**clean, "KEEPSTEP_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def test_a_baseline_is_kept_and_missing_it_is_a_problem(self, home: Path) -> None:
        code, first = self.gang(home, "--save-baseline")
        assert (code, first["ok"], first["ranks"], first["backend"]) == (0, None, 2, "gloo")
        (baseline,) = (home / "baselines").iterdir()
        # A baseline that no machine reaches.
        baseline.write_text(json.dumps({**first, "bandwidth_gb_per_s": 1e6}))
        code, second = self.gang(home)
        assert (code, second["ok"], second["baseline_gb_per_s"]) == (3, False, 1e6)
        # Of two ranks that are alike nobody is accused alone.
        assert len(second["suspects"]) == 2

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--nnodes", "2"], "--rdzv-id"),
            (["--tolerance", "1"], "--tolerance"),
            (["--nproc-per-node", "0"], "did not end"),
        ],
    )
    def test_flags_that_cannot_work_are_refused(self, flags: list[str], says: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "keepstep.cli.main", "check", "gang", *flags],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode in (1, 2)
        assert says in done.stderr

    def test_a_test_that_takes_too_long_is_stopped(self, home: Path) -> None:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "keepstep.cli.main", "check", "gang", "--nproc-per-node", "1"),
                *("--iterations", "1000000", "--sizes-mb", "64", "--timeout", "4"),
            ],
            env={**os.environ, "KEEPSTEP_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 1
        assert "--timeout 4 s" in done.stderr.splitlines()[-1]
