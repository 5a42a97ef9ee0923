"""`keepstep completion`: the script, and what the shell gets when TAB is pressed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from keepstep.cli.main import VERBS, LazyGroup, Verb, main


def press_tab(*words: str) -> list[str]:
    """Completions of the last word, as bash asks for them."""
    env = os.environ | {
        "_KEEPSTEP_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["keepstep", *words]),
        "COMP_CWORD": str(len(words)),
    }
    # The name of the program decides the name of the variable.
    code = "import sys; sys.argv[0] = 'keepstep'; from keepstep.cli.main import main; main(prog_name='keepstep')"
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    return [line.partition(",")[2] for line in result.stdout.split()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_asks_keepstep(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_KEEPSTEP_COMPLETE={shell}_complete" in result.stdout


def test_an_unknown_shell() -> None:
    result = CliRunner().invoke(main, ["completion", "csh"])
    assert (result.exit_code, "'csh'" in result.stderr) == (2, True)


def test_bash_completes_with_it(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    program = tmp_path / "keepstep"
    program.write_text(f"#!{sys.executable}\nfrom keepstep.cli.main import main\nmain(prog_name='keepstep')\n")
    program.chmod(0o755)
    script = CliRunner().invoke(main, ["completion", "bash"]).stdout
    asked = 'COMP_WORDS=(keepstep explain); COMP_CWORD=1; _keepstep_completion keepstep; echo "${COMPREPLY[@]}"'
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [bash, "-c", f"{script}\n{asked}"], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split() == ["explain-exit"]


def test_verbs_and_flags() -> None:
    assert set(press_tab("")) >= set(VERBS)
    assert press_tab("explain") == ["explain-exit"]
    assert "--nproc-per-node" in press_tab("run", "--nproc")
    assert press_tab("run", "--attribution-stop", "no") == ["no-restart"]
    assert press_tab("config", "s") == ["show"]


def test_what_is_wrong_on_the_line_says_nothing() -> None:
    assert press_tab("no-such-verb", "--x") == []
    assert press_tab("run", "--nnodes", "many", "--spa") == ["--spares"]
    assert "--tee" in press_tab("run", "--config", "gone.toml", "--te")


def test_a_verb_that_is_not_installed_says_nothing() -> None:
    group = LazyGroup("keepstep", verbs={"gone": Verb("no.such.module:x", "not there", "launch")})
    ctx = group.make_context("keepstep", [], resilient_parsing=True)
    assert [item.value for item in group.shell_complete(ctx, "g")] == ["gone"]
    assert group.get_command(ctx, "gone") is None


def test_names_of_verbs_import_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_group: LazyGroup, _ctx: object, name: str) -> None:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(LazyGroup, "get_command", refuse)
    ctx = main.make_context("keepstep", [], resilient_parsing=True)
    assert {item.value for item in main.shell_complete(ctx, "")} == set(VERBS)
