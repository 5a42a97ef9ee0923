"""Which signature a Python exception has: by its type, its message and whose code raised it (`data/exceptions.toml`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib import resources
from typing import Literal

import msgspec

from keepstep.records.errors import ConfigError

Whose = Literal["user", "library", "launcher"]


class ExceptionRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Types (their last names), a pattern of the message, whose code; what is not given is not asked."""

    signature: str
    types: tuple[str, ...] = ()
    message: str = ""
    where: Literal["user", "library", "launcher", "any"] = "any"
    why: str = ""


class ExceptionTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. `library`, `launcher`, `communication`: parts of a path that tell whose a frame is."""

    version: str
    library: tuple[str, ...]
    launcher: tuple[str, ...]
    communication: tuple[str, ...]
    rule: tuple[ExceptionRule, ...]


def exception_table(text: str | bytes, name: str) -> ExceptionTable:
    """Decode and check a table. Raises ConfigError naming the file and what is wrong."""
    try:
        table = msgspec.toml.decode(text, type=ExceptionTable)
        for rule in table.rule:
            re.compile(rule.message)
    except (msgspec.MsgspecError, ValueError, re.error) as error:
        raise ConfigError(f"{name}: {error}") from error
    return table


@functools.cache
def shipped_exceptions() -> ExceptionTable:
    """The table that comes with the package."""
    file = resources.files("keepstep.catalog") / "data" / "exceptions.toml"
    return exception_table(file.read_bytes(), "exceptions.toml")


@functools.lru_cache(maxsize=4096)
def whose(path: str) -> Whose:
    """Whose code a file is."""
    table = shipped_exceptions()
    if any(part in path for part in table.launcher):
        return "launcher"
    return "library" if any(part in path for part in table.library) else "user"


def communicates(path: str) -> bool:
    """Whether a file only passes messages between processes."""
    return any(part in path for part in shipped_exceptions().communication)


def raised_by(paths: Sequence[str]) -> Whose:
    """Whose an exception is by the files of its frames, outermost first: the user's if any frame is theirs."""
    kinds = [whose(path) for path in paths]
    if "user" in kinds:
        return "user"
    return "launcher" if "launcher" in kinds[-3:] or (kinds and kinds[0] == "launcher") else "library"


def exception_signature(type_name: str, message: str, owner: Whose) -> str:
    """Id of the signature of an exception. `type_name`: with or without its module."""
    last = type_name.rpartition(".")[2]
    for types, pattern, where, signature in _rules():
        if types and last not in types:
            continue
        if pattern is not None and pattern.search(message) is None:
            continue
        if where in ("any", owner):
            return signature
    return "python.exception"


@functools.cache
def _rules() -> tuple[tuple[frozenset[str], re.Pattern[str] | None, str, str], ...]:
    return tuple(
        (frozenset(r.types), re.compile(r.message) if r.message else None, r.where, r.signature)
        for r in shipped_exceptions().rule
    )
