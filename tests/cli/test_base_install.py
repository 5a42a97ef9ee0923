"""What the base install can do: import the trainer without torch, and say which extra a verb needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {"keepstep", "msgspec"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with `pip install keepstep` and nothing else; returns its python."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", ROOT], check=True)
    return python


def _run(python: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PYTHON", "PET_"))}
    return subprocess.run([python, *args], cwd=cwd, capture_output=True, text=True, check=False, env=clean)


def test_trainer_loads_nothing_but_msgspec(base: Path, tmp_path: Path) -> None:
    program = (
        "import sys, json; before = set(sys.modules); import keepstep.trainer as ks; run = ks.init()\n"
        "with run.step(0) as s:\n    s.observe(loss=1.0)\nrun.finish()\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    )
    done = _run(base, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert {m for m in loaded if m not in sys.stdlib_module_names and not m.startswith("_")} == ALLOWED


@pytest.mark.parametrize("verb", ["run", "demo"])
def test_verb_without_its_extra_says_the_pip_line(base: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "script.py").write_text("print('ran')\n")
    args = ["script.py"] if verb == "run" else []
    done = _run(base, "-m", "keepstep.cli.main", verb, *args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "pip install 'keepstep[launch]'" in done.stderr
    assert "Traceback" not in done.stderr and "ran" not in done.stdout


def test_verbs_of_the_base_install_work(base: Path, tmp_path: Path) -> None:
    assert _run(base, "-m", "keepstep.cli.main", "version", cwd=tmp_path).returncode == 0
    explained = _run(base, "-m", "keepstep.cli.main", "explain-exit", "93", cwd=tmp_path)
    assert "do not requeue" in explained.stdout
    code = _run(base, "-m", "keepstep.cli.main", "xid", "145", "--registers", "0x82 0x40", "-o", "json", cwd=tmp_path)
    assert code.returncode == 0 and json.loads(code.stdout)["decoded"]["bucket"] == "RESET_GPU", code.stderr
    listed = _run(base, "-m", "keepstep.cli.main", "get", "patterns", "-o", "name", cwd=tmp_path)
    assert listed.returncode == 0 and "xid.79" in listed.stdout.split(), listed.stderr
    assert _run(base, "-m", "keepstep.cli.main", "goodput", "nowhere", cwd=tmp_path).returncode == 6
