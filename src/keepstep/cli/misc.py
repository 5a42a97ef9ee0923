"""Small verbs: `explain-exit`, `version` and `completion`."""

from __future__ import annotations

import importlib.metadata
import platform

import click

from keepstep import __version__
from keepstep.cli.output import emit, output_option
from keepstep.records.errors import ConfigError
from keepstep.records.exits import explain_exit


@click.command("explain-exit")
@click.argument("code", metavar="N", type=click.IntRange(0, 255))
@output_option
def explain_exit_command(code: int, output: str) -> None:
    """Say what exit code N of keepstep means.

    JSON is `keepstep.exit/1`: code, meaning.
    """
    meaning = explain_exit(code)
    record = {"schema": "keepstep.exit/1", "code": code, "meaning": meaning}
    emit(
        record,
        output,
        table=lambda console, _wide: console.print(f"{code}: {meaning}", markup=False, soft_wrap=True),
        name=lambda _record: str(code),
    )


@click.command("version")
@output_option
def version(output: str) -> None:
    """Print the versions of keepstep, Python and torch (null when torch is not installed; it is not imported).

    JSON is `keepstep.version/1`: keepstep, python, torch.
    """
    try:
        torch: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    record = {
        "schema": "keepstep.version/1",
        "keepstep": __version__,
        "python": platform.python_version(),
        "torch": torch,
    }
    lines = f"keepstep {__version__}\npython {record['python']}\ntorch {torch or 'not installed'}"
    emit(
        record,
        output,
        table=lambda console, _wide: console.print(lines, markup=False),
        name=lambda _record: __version__,
    )


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes keepstep's verbs and flags in SHELL.

    bash: eval "$(keepstep completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc. fish: keepstep completion fish
    > ~/.config/fish/completions/keepstep.fish
    """
    from click.shell_completion import get_completion_class

    from keepstep.cli.main import main

    kind = get_completion_class(shell)
    if kind is None:  # pragma: no cover - click has all three
        raise ConfigError(f"completion {shell}: this click has no completion for it")
    click.echo(kind(main, {}, "keepstep", "_KEEPSTEP_COMPLETE").source())
