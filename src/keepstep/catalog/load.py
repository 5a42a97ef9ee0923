"""The catalog in memory: entries of `data/signatures/*.toml` by id."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

import msgspec

from keepstep.catalog import sxid, xid
from keepstep.catalog.signature import Signature
from keepstep.records.errors import ConfigError

VERSION = "2026.11"
"""Of the shipped data: year and month of its last change."""


class Catalog:
    """Signatures by id."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._by_id = {s.id: s for s in signatures}

    def __getitem__(self, signature_id: str) -> Signature:
        """Raises KeyError for an id that no entry has."""
        return self._by_id[signature_id]

    def __contains__(self, signature_id: object) -> bool:
        return signature_id in self._by_id

    def __iter__(self) -> Iterator[Signature]:
        return iter(self._by_id.values())


def entries(text: str, name: str) -> list[Signature]:
    """Entries of one file: tables [[signature]]. Raises ConfigError naming file, entry and key."""
    try:
        found: list[dict[str, Any]] = tomllib.loads(text).get("signature", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from error
    signatures = []
    for number, fields in enumerate(found, 1):
        try:
            signatures.append(msgspec.convert(fields, Signature))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name}: entry {number} ({fields.get('id', 'without id')}): {error}") from error
    return signatures


@functools.cache
def shipped() -> Catalog:
    """The catalog that comes with the package. Raises ConfigError when two entries have one id."""
    found: dict[str, Signature] = {}
    folder = resources.files("keepstep.catalog") / "data" / "signatures"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            for signature in entries(file.read_text(encoding="utf-8"), file.name):
                if signature.id in found:
                    raise ConfigError(f"{file.name}: a second entry {signature.id!r}; ids are unique over all files")
                found[signature.id] = signature
    for signature in (*xid.entries(), *sxid.entries()):
        found[signature.id] = signature
    return Catalog(found.values())
