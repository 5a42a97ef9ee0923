"""The fact tables of `data/`: rows of text, each with the version and source of what it says."""

from __future__ import annotations

import csv
from importlib import resources


def data_text(name: str) -> str:
    """A file of `data/`."""
    return (resources.files("keepstep.catalog") / "data" / name).read_text(encoding="utf-8")


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table of `data/`."""
    return list(csv.DictReader(data_text(name).splitlines()))
