"""What a site changes in the catalog: files of its own, each change with its reason.

[[override]]                     # changes an entry
id = "mlx5.slot_power"
reason = "all servers of model X print it at every boot"
disabled = true                  # or: action, role, severity, depth, weights

[[signature]]                    # adds one, with the fields of catalog/signature.py and a reason
id = "site.storage_gateway_down"
reason = "our gateway's own message"
...
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from keepstep.catalog.signature import Role, Signature
from keepstep.records.errors import ConfigError
from keepstep.records.event import Severity
from keepstep.records.verdict import NODE_ACTIONS, Action, FaultClass


class Override(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change to one entry. What is None stays as it is. `disabled`: it is seen and means nothing."""

    id: str
    reason: str
    disabled: bool = False
    action: Action | None = None
    role: Role | None = None
    severity: Severity | None = None
    depth: int | None = None
    weights: dict[FaultClass, float] | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What a site changed: for the outputs that name the catalog they used."""

    id: str
    reason: str
    file: str
    added: bool = False
    disabled: bool = False


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at names like `word`, "" when none is."""
    close = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def apply(path: Path, entries: Mapping[str, Signature]) -> tuple[dict[str, Signature], list[Change]]:
    """The entries with the changes of one file, and what was changed. Raises ConfigError naming file, entry, key and value."""
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"catalog file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"catalog file {path}: not TOML: {error}") from error
    for key, value in found.items():
        if key not in ("override", "signature") or not isinstance(value, list):
            hint = nearest(key, ("override", "signature"))
            raise ConfigError(
                f"catalog file {path}: {key}: it may hold [[override]] and [[signature]] tables only{hint}"
            )
    merged = dict(entries)
    changes = []
    for number, fields in enumerate(found.get("override", []), 1):
        where = f"catalog file {path}, override {number}"
        change = _converted(fields, Override, where)
        _reasoned(change.reason, where, change.id)
        old = merged.get(change.id)
        if old is None:
            hint = nearest(change.id, merged)
            raise ConfigError(f"{where}: no entry {change.id!r}{hint}; `keepstep get patterns -o name` lists all")
        merged[change.id] = _changed(old, change, where)
        changes.append(Change(id=change.id, reason=change.reason, file=str(path), disabled=change.disabled))
    for number, fields in enumerate(found.get("signature", []), 1):
        where = f"catalog file {path}, signature {number}"
        reason = fields.get("reason") if isinstance(fields, dict) else None
        own = {k: v for k, v in fields.items() if k != "reason"} if isinstance(fields, dict) else {}
        new = _converted({"source": "site", **own}, Signature, where)
        _reasoned(reason, where, new.id)
        if new.id in merged:
            raise ConfigError(f"{where}: there is an entry {new.id!r}; change it with an [[override]] table")
        _checked_addition(new, merged.values(), where)
        if new.role == "root" and not new.weights:
            raise ConfigError(
                f"{where} ({new.id}): a root without weights says nothing of whose fault it is; give natural log-odds of classes, "
                "such as weights = { storage = 2.0 }"
            )
        merged[new.id] = new
        changes.append(Change(id=new.id, reason=str(reason), file=str(path), added=True))
    return merged, changes


def _converted(fields: Any, kind: Any, where: str) -> Any:
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: it is a {type(fields).__name__}, not a table")
    known = kind.__struct_fields__
    for key in fields:
        if key not in known:
            hint = nearest(key, known)
            raise ConfigError(f"{where} ({fields.get('id', 'without id')}): unknown key {key!r}{hint}")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} ({fields.get('id', 'without id')}): {error}") from error


def _reasoned(reason: object, where: str, entry_id: str) -> None:
    if not isinstance(reason, str) or not reason.strip():
        raise ConfigError(
            f'{where} ({entry_id}): give a reason = "...": it is shown with every verdict that used the change'
        )


def _changed(old: Signature, change: Override, where: str) -> Signature:
    if change.action in old.never:
        raise ConfigError(
            f"{where}: action {change.action!r} is ruled out for {old.id!r} (never = {', '.join(old.never)}) and cannot be allowed"
        )
    if change.disabled:
        return msgspec.structs.replace(
            old, role="noise", severity="info", weights={}, action="none", clears=(), by_code=""
        )
    wanted = {name: getattr(change, name) for name in ("action", "role", "severity", "depth", "weights")}
    return msgspec.structs.replace(old, **{name: value for name, value in wanted.items() if value is not None})


def _checked_addition(new: Signature, entries: Iterable[Signature], where: str) -> None:
    """An added entry may not lead to taking hardware out for lines of entries that must not lead there."""
    if not new.pattern:
        return
    try:
        import re2
    except ImportError:  # the base install only shows entries, and decides nothing by them
        return
    for text in new.pattern:
        try:
            pattern = re2.compile(text)
        except re2.error as error:
            raise ConfigError(f"{where} ({new.id}): pattern {text!r}: {error}") from error
        if new.action not in NODE_ACTIONS:
            continue
        for entry in entries:
            example = next((e for e in entry.examples if new.action in entry.never and pattern.search(e)), None)
            if example is not None:
                raise ConfigError(
                    f"{where} ({new.id}): pattern {text!r} also matches lines of {entry.id!r}, which may never lead to "
                    f"{new.action!r}: {example!r}"
                )
