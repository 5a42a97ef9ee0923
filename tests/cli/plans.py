"""What `keepstep run` makes of its flags, without starting anything."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from keepstep.cli.main import main


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["run", *args])


def plan(*args: str, script: tuple[str, ...] = ("train.py",)) -> dict[str, Any]:
    """The effective configuration that --dry-run prints."""
    result = run(*args, "--dry-run", *script)
    assert result.exit_code == 0, result.stderr
    text, marker, _ = result.stdout.partition("restart rules")
    assert marker
    config: dict[str, Any] = json.loads(text)
    return config
