"""Small real file systems, so that a full disk in a test is a full disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_tmpfs(place: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with these options (e.g. "size=1m") at the new folder `place`; skips where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root (run the tests as root)")
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
