"""The frame of the command line: loading of verbs, errors, exit codes."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from keepstep.cli.main import VERBS, LazyGroup, Verb, main
from keepstep.records.errors import ConfigError


def invoke(error: BaseException | None, monkeypatch: pytest.MonkeyPatch, *args: str) -> Result:
    """Run a group whose only verb, `fail`, raises `error`."""

    @click.command()
    def fail() -> None:
        if error is not None:
            raise error

    module = ModuleType("keepstep_test_verbs")
    module.fail = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    group = LazyGroup(verbs={"fail": Verb("keepstep_test_verbs:fail", "Fails.")}, params=list(main.params))
    return CliRunner().invoke(group, [*args, "fail"])


class TestVerbs:
    def test_verbs_of_the_contract_so_far(self) -> None:
        assert {"run", "demo", "goodput", "explain-exit", "version"} <= set(VERBS)

    @pytest.mark.parametrize("name", ["goodput", "explain-exit", "version"])
    def test_every_verb_has_help(self, name: str) -> None:
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0
        assert "Usage: " in result.stdout

    @pytest.mark.parametrize("name", VERBS)
    def test_every_extra_is_one_of_the_distribution(self, name: str) -> None:
        extra = VERBS[name].extra
        assert extra in [None, *importlib.metadata.metadata("keepstep").get_all("Provides-Extra", [])]

    def test_help_lists_all_verbs_and_loads_none(self) -> None:
        code = (
            "import sys; from keepstep.cli.main import main; main(['--help'], standalone_mode=False);"
            "print([m for m in sys.modules if m.startswith(('keepstep.cli.', 'keepstep.launcher', 'rich', 'torch'))])"
        )
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert output.splitlines()[-1] == "['keepstep.cli.main']"
        assert all(f"  {name} " in output for name in VERBS)

    def test_unknown_verb_names_the_nearest(self) -> None:
        result = CliRunner().invoke(main, ["godput"])
        assert result.exit_code == 2
        assert "no such verb 'godput'. Did you mean 'goodput'?" in result.stderr
        assert result.stdout == ""

    def test_unknown_verb_with_no_near_one(self) -> None:
        result = CliRunner().invoke(main, ["zzz"])
        assert (result.exit_code, "Did you mean" in result.stderr) == (2, False)

    def test_version_flag(self) -> None:
        from keepstep import __version__

        result = CliRunner().invoke(main, ["--version"])
        assert (result.exit_code, result.stdout) == (0, f"keepstep {__version__}\n")


class TestMissingExtra:
    @staticmethod
    def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, extra: str | None) -> Result:
        (tmp_path / "keepstep_test_extra.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "keepstep_test_extra", raising=False)
        verbs = {"fly": Verb("keepstep_test_extra:fly", "Flies.", extra)}
        return CliRunner().invoke(LazyGroup(verbs=verbs), ["fly"])

    def test_the_pip_line_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.invoke(tmp_path, monkeypatch, "import keepstep_no_such_wings.feathers", "launch")
        assert result.exit_code == 2
        assert result.stderr == (
            "keepstep: fly needs keepstep_no_such_wings, which is not installed: pip install 'keepstep[launch]'\n"
        )

    def test_a_missing_part_of_keepstep_is_not_cured_by_pip(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result = self.invoke(tmp_path, monkeypatch, "import keepstep.no_such_part", "launch")
        assert result.exit_code == 2
        assert "fly is not part of this installation" in result.stderr
        assert "pip install" not in result.stderr


class TestErrors:
    def test_an_error_of_ours_is_one_line_and_its_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = invoke(ConfigError("--x: 3 is wrong;\n  valid: 1, 2"), monkeypatch)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "keepstep: --x: 3 is wrong; valid: 1, 2\n"

    def test_a_bug_is_one_line_with_its_type(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = invoke(KeyError("k"), monkeypatch)
        assert result.exit_code == 1
        assert result.stderr == "keepstep: KeyError: 'k' (--debug before the verb shows the traceback)\n"

    def test_an_operating_system_error_speaks_for_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = invoke(PermissionError(13, "Permission denied", "/x"), monkeypatch)
        assert result.exit_code == 1
        assert result.stderr.startswith("keepstep: [Errno 13] Permission denied: '/x' (")

    def test_debug_shows_the_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = invoke(ConfigError("x"), monkeypatch, "--debug")
        assert result.exit_code == 2
        assert result.stderr.startswith("Traceback (most recent call last):")
        assert result.stderr.endswith("keepstep: x\n")

    @pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
    def test_debug_by_environment(self, value: str, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KEEPSTEP_DEBUG", value)
        assert ("Traceback" in invoke(ConfigError("x"), monkeypatch).stderr) is shown

    def test_interrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = invoke(KeyboardInterrupt(), monkeypatch)
        assert (result.exit_code, result.stderr) == (130, "keepstep: interrupted\n")

    @pytest.mark.parametrize("code", [42, 43, 93])
    def test_exit_codes_of_a_verb_are_kept(self, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        assert invoke(SystemExit(code), monkeypatch).exit_code == code

    def test_usage_errors_of_a_verb_stay_usage_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = invoke(click.UsageError("--x needs a value"), monkeypatch)
        assert (result.exit_code, "Error: --x needs a value" in result.stderr) == (2, True)

    def test_success(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = invoke(None, monkeypatch)
        assert (result.exit_code, result.output) == (0, "")


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keepstep.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


class TestProcess:
    def test_diagnostics_go_to_stderr_only(self) -> None:
        done = run("goodput", "no-such-run")
        assert (done.returncode, done.stdout) == (6, "")
        assert done.stderr.startswith("keepstep: no run 'no-such-run'")

    def test_without_a_verb_it_shows_the_verbs(self) -> None:
        done = run()
        assert done.returncode == 2
        assert "goodput" in done.stderr


def test_python_m_keepstep_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", "version", "-o", "name"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
