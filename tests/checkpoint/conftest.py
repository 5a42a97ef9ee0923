"""Fixtures: every test has its own key, and no variable of the shell leaks in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# `tests.checkpoint.support` is imported by its full name, also when pytest is not started as `python -m pytest`.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.checkpoint.faults import hold  # noqa: F401 - fixtures
from tests.checkpoint.s3 import moto_server, s3  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def keepstep_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for the signing key."""
    home = tmp_path / "home"
    monkeypatch.setenv("KEEPSTEP_HOME", str(home))
    monkeypatch.delenv("KEEPSTEP_FRESH_START", raising=False)
    return home


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint root that does not exist yet."""
    return tmp_path / "root"
