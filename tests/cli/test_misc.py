"""`explain-exit` and `version`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys

import pytest
from click.testing import CliRunner

from keepstep import __version__
from keepstep.cli.main import main
from keepstep.records.exits import MEANINGS


class TestExplainExit:
    @pytest.mark.parametrize("code", MEANINGS)
    def test_every_code_of_the_table(self, code: int) -> None:
        result = CliRunner().invoke(main, ["explain-exit", str(code), "-o", "table"])
        assert (result.exit_code, result.stdout) == (0, f"{code}: {MEANINGS[code]}\n")

    def test_json(self) -> None:
        result = CliRunner().invoke(main, ["explain-exit", "137", "-o", "json"])
        record = json.loads(result.stdout)
        assert (record["schema"], record["code"]) == ("keepstep.exit/1", 137)
        assert record["meaning"].startswith("ended by SIGKILL")

    @pytest.mark.parametrize("word", ["256", "-1", "x"])
    def test_what_is_no_exit_code_is_a_usage_error(self, word: str) -> None:
        assert CliRunner().invoke(main, ["explain-exit", "--", word]).exit_code == 2


class TestVersion:
    def test_json(self) -> None:
        record = json.loads(CliRunner().invoke(main, ["version", "-o", "json"]).stdout)
        assert record == {
            "schema": "keepstep.version/1",
            "keepstep": __version__,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
        }

    def test_without_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", missing)
        result = CliRunner().invoke(main, ["version", "-o", "json"])
        assert json.loads(result.stdout)["torch"] is None
        assert "torch not installed" in CliRunner().invoke(main, ["version", "-o", "table"]).stdout

    def test_torch_is_not_imported(self) -> None:
        code = (
            "import sys; from keepstep.cli.main import main; main(['version'], standalone_mode=False);"
            "print('torch' in sys.modules, 'numpy' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False False"
