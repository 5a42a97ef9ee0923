"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell without variables that flags or ranks would read, in a folder with a script."""
    for name in list(os.environ):
        if name.startswith(("PET_", "SLURM_", "KEEPSTEP_", "TORCH", "NCCL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path
