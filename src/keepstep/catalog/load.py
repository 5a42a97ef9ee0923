"""The catalog in memory: entries of `data/signatures/*.toml` and of the code tables, by id, with what a site changed."""

from __future__ import annotations

import functools
import hashlib
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from keepstep.catalog import overrides as site
from keepstep.catalog import sxid, xid
from keepstep.catalog.overrides import Change
from keepstep.catalog.signature import Signature
from keepstep.records.errors import ConfigError

VERSION = "2026.11"
"""Of the shipped data: year and month of its last change."""


class Catalog:
    """Signatures by id. `changes`: what a site changed in the shipped ones."""

    def __init__(self, signatures: Iterable[Signature], changes: Sequence[Change] = ()) -> None:
        self._by_id = {s.id: s for s in signatures}
        self.changes = tuple(changes)

    def __getitem__(self, signature_id: str) -> Signature:
        """Raises KeyError for an id that no entry has."""
        return self._by_id[signature_id]

    def __contains__(self, signature_id: object) -> bool:
        return signature_id in self._by_id

    def __iter__(self) -> Iterator[Signature]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over all entries in the order of their ids: two outputs with one digest used the same catalog."""
        encoder = msgspec.json.Encoder(order="sorted")
        state = hashlib.sha256()
        for signature_id in sorted(self._by_id):
            state.update(encoder.encode(self._by_id[signature_id]))
        return state.hexdigest()

    @functools.cached_property
    def _clearing(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for entry in self:
            for pattern in entry.clears:
                for signature_id in self._by_id:
                    if named(pattern, signature_id):
                        found.setdefault(signature_id, []).append(entry.id)
        return {signature_id: tuple(ids) for signature_id, ids in found.items()}

    def cleared_by(self, signature_id: str) -> tuple[str, ...]:
        """Ids of entries that take this one back on the same entity."""
        return self._clearing.get(signature_id, ())

    def describe(self) -> dict[str, Any]:
        """For outputs: version of the shipped data, digest of what was used, changes of the site with their reasons."""
        return {
            "version": VERSION,
            "digest": self.digest,
            "changes": [msgspec.to_builtins(change) for change in self.changes],
        }


def named(pattern: str, signature_id: str) -> bool:
    """Whether an id in `clears` names this one; "xid.*" names all that begin so."""
    return pattern == signature_id or (pattern.endswith(".*") and signature_id.startswith(pattern[:-1]))


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
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    read = [(file.name, signature) for file in files for signature in entries(file.read_text("utf-8"), file.name)]
    for name, signature in [*read, *(("code tables", s) for s in (*xid.entries(), *sxid.entries()))]:
        if signature.id in found:
            raise ConfigError(f"{name}: a second entry {signature.id!r}; ids are unique over all files")
        found[signature.id] = signature
    return Catalog(found.values())


def load(overrides: Sequence[Path] = ()) -> Catalog:
    """The shipped catalog with the changes of a site's files, in their order. Raises ConfigError (overrides.py)."""
    if not overrides:
        return shipped()
    merged = {entry.id: entry for entry in shipped()}
    changes: list[Change] = []
    for path in overrides:
        merged, changed = site.apply(path, merged)
        changes += changed
    return Catalog(merged.values(), changes)


def site_files(home: Path) -> list[Path]:
    """Files of changes that are always taken: `catalog.d/*.toml` under keepstep's home, by name."""
    return sorted((home / "catalog.d").glob("*.toml"))
