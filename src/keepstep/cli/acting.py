"""What verbs that change something have in common: whom they ask, and who did it."""

from __future__ import annotations

import getpass
import socket
import sys

import click

from keepstep.records.errors import ConfigError


def confirm(what: str, yes: bool) -> None:
    """Ask on a terminal. Raises ConfigError where nobody can be asked, click.Abort when the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"this would {what}; give --yes, or --dry-run to see it only")
    click.confirm(f"{what[0].upper()}{what[1:]}?", abort=True, err=True)


def user() -> str:
    """Name of whoever calls."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def who() -> str:
    """USER@HOST of whoever calls."""
    return f"{user()}@{socket.gethostname()}"
