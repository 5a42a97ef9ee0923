from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.harness import Launch


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """In memory: every append to a journal is synced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_launcher_outlives_its_test() -> Iterator[None]:
    """A failed test must not leave a launcher behind for the next one to meet."""
    yield
    for launch in Launch.started:
        launch.process.kill()
        launch.process.wait()
    Launch.started.clear()
