"""Logs that tests make themselves, and a small catalog to read them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keepstep.catalog.load import Catalog, shipped
from keepstep.catalog.matcher import Matcher
from keepstep.records.event import Event, Evidence, Gpu
from keepstep.sources.reading import Reading, read_paths

SECOND = 10**9
NOON = 1_939_291_200 * SECOND
"""2031-06-15T12:00:00Z."""
XID = "NVRM: Xid (PCI:0000:{bus}:00): {code}, pid=1201, name=python3, Ch 00000008"

_MATCHERS: list[Matcher] = []


def catalog() -> Catalog:
    """The one that is shipped."""
    return shipped()


def matcher() -> Matcher:
    """Of the shipped catalog, compiled once."""
    if not _MATCHERS:
        _MATCHERS.append(Matcher(shipped()))
    return _MATCHERS[0]


def xid(code: int, bus: str = "1a") -> str:
    """A kernel line."""
    return XID.format(code=code, bus=bus)


def read(*paths: Path, deep: bool = True) -> Reading:
    """Read files and folders."""
    return read_paths([str(p) for p in paths], shipped(), matcher=matcher(), deep=deep)


def read_lines(folder: Path, text: str | bytes, name: str = "input.log") -> Reading:
    """Read one file that holds `text`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read(path)


def event(signature: str = "xid.79", kind: str = "gpu.xid", **fields: Any) -> Event:
    """An event; `pci`, `line`, `path` and `text` are short for what they stand in."""
    pci, line = fields.pop("pci", None), fields.pop("line", 0)
    evidence = Evidence(path=fields.pop("path", "x.log"), line=line, text=fields.pop("text", ""))
    gpu = Gpu(pci=pci) if pci is not None else None
    return Event(kind=kind, signature=signature, order=line, gpu=gpu, evidence=evidence, **fields)
