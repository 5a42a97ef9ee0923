"""`keepstep doctor`: exit codes, formats and what a user sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keepstep.cli.main import main
from keepstep.launcher.config import RunConfig
from keepstep.launcher.doctor import RULES
from keepstep.records.codec import to_json

FIELDS = {"id", "severity", "title", "seen", "why", "fix", "source"}


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_TIMEOUT", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def doctor(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, args)])


def report(*args: str | Path) -> Any:
    return json.loads(doctor(*args, "-o", "json").stdout)


def test_errors_end_with_three(tmp_path: Path) -> None:
    saved = tmp_path / "slurm"
    saved.write_text("RequeueExit = 93\nKillOnBadExit = 1\n")
    result = doctor("--slurm-config", saved, "-o", "json")
    assert result.exit_code == 3
    record = json.loads(result.stdout)
    assert record["schema"] == "keepstep.doctor/1"
    assert [f["id"] for f in record["findings"]][:2] == ["slurm-requeue", "slurm-kill-on-bad-exit"]
    assert all(set(f) == FIELDS and set(f["seen"]) == {"value", "where"} for f in record["findings"])
    counted = len(record["findings"]) + len(record["passed"]) + len(record["skipped"])
    assert counted == len(RULES)


def test_warnings_end_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    result = doctor("-o", "name")
    assert (result.exit_code, result.stdout) == (0, "nccl-timeout-variable\n")


def test_table_says_why_and_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('nccl')\n")
    result = doctor("--script", script, "--gpus", "64", "--price", "3", "-o", "wide")
    assert result.exit_code == 0
    assert "warning  process-group time-out is outside two to five minutes  [group-timeout-range]" in result.stdout
    assert f"seen  600 s  ({script}:2, torch's default)" in result.stdout
    assert "10.7 GPU-hours on 64 GPUs, 32.00 at 3 per GPU-hour" in result.stdout
    assert "timeout=datetime.timedelta(seconds=120)" in result.stdout
    assert "not checked  slurm-requeue:" in result.stdout
    assert "not checked  " not in doctor("--script", script, "-o", "table").stdout


def test_a_run_is_judged_by_its_own_settings(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = RunConfig(
        run_id="r", run_dir=str(run), node="n", script="gone.py", monitor_hang="off", tls=False, endpoints=["h:1"]
    )
    (run / "run.json").write_bytes(to_json(config))
    assert {"hang-limit", "clear-text"} <= {f["id"] for f in report(run)["findings"]}
    assert doctor(run, "-o", "json").exit_code == 3


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("nowhere",), 6, "no run 'nowhere'"),
        (("--script", "none.py"), 2, "none.py"),
        (("--pod", "none.json"), 2, "--pod none.json"),
        (("--slurm-config", "none"), 2, "--slurm-config none"),
        (("--checkpoints", "none"), 2, "--checkpoints none"),
        (("--gpus", "0"), 2, "--gpus"),
    ],
)
def test_bad_input(
    args: tuple[str, ...], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    result = doctor(*args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr


BASE_ONLY = """
import sys
ALLOWED = {"keepstep", "msgspec", "click", "rich", "pygments", "markdown_it", "mdurl"}
class Others:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ALLOWED:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Others())
from keepstep.cli.main import main
main(["doctor", "-o", sys.argv[1]])
"""


@pytest.mark.parametrize("output", ["json", "wide"])
def test_needs_only_the_base_install(output: str) -> None:
    """With every other package out of reach: the verb must work where a job is prepared, not only where it runs."""
    done = subprocess.run([sys.executable, "-c", BASE_ONLY, output], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    assert "nccl-timeout-variable" in done.stdout or "rules passed" in done.stdout
