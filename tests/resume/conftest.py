"""One server of ranks for all tests of this folder, started when the first of them needs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.resume.lives import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Forks the ranks of each life."""
    one = Server()
    yield one
    one.close()
