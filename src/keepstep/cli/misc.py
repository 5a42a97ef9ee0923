"""Small verbs: `explain-exit` and `version`."""

from __future__ import annotations

import importlib.metadata
import platform

import click

from keepstep import __version__
from keepstep.cli.output import emit, output_option
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
