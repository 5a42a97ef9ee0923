"""One flight-recorder dump, as pickle or JSON, parsed as data.

Format: torch's FlightRecorder.hpp and FlightRecorderDetail.hpp (2.13 writes version "2.10"). The two spellings differ: in JSON the
numbers of pg_status are texts, missing times are 0 instead of null, process_group is a list, an empty `entries` is left out, and
there are no stacks.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from keepstep.records.errors import KeepstepError, VerificationError
from keepstep.records.pickles import parse_plain

MAJOR, NEWEST_MINOR = 2, 10
"""Minor versions add fields, major ones change them."""
MAX_DUMP_BYTES = 64 << 20
"""Uncompressed. 2,000 operations with stacks have about 1.3 MB."""
MAX_CONTAINERS = 2_000_000
"""Lists, dicts and tuples in a dump, as far as their beginnings can be counted: each takes 60 bytes and more, and is made of one or
two. 2,000 operations with a stack of their own have about 100,000."""
MAX_ENTRIES = 200_000
MAX_GROUPS = 20_000
MAX_NAME = 200
"""Characters that are kept of a name."""

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\Z")
_INTEGER = re.compile(r"-?[0-9]{1,19}\Z")
_DUMP_KEYS = frozenset({"entries", "pg_config", "pg_status", "version"})


class DumpError(KeepstepError):
    """Raised when bytes are no dump that can be read; says why."""


class NotADumpError(DumpError):
    """Raised for bytes that were never meant to be a dump, as a log file beside the dumps."""


class Status(NamedTuple):
    """Last sequence number of a process group that was enqueued, whose kernel started, that was completed; -1: none."""

    enqueued: int
    started: int
    completed: int


class Configured(NamedTuple):
    """A process group as its members know it. `ranks` is the text in the dump, "[0, 1]"; "" when there is none."""

    name: str
    desc: str
    ranks: str


class Dump(NamedTuple):
    """`groups` by name. `status` by the number that this rank gave to a group, which is `pg_id` in `entries`."""

    minor: int
    groups: dict[str, Configured]
    status: dict[int, Status]
    entries: list[Any]


def parse_dump(data: bytes) -> Dump:
    """Parse a whole dump. Raises NotADumpError or DumpError."""
    tree = _tree(data)
    if type(tree) is not dict or not _DUMP_KEYS & tree.keys():
        raise NotADumpError("not a flight-recorder dump: none of its keys is there")
    minor = _minor(tree.get("version"))
    entries = tree.get("entries", [])
    if type(entries) is not list or len(entries) > MAX_ENTRIES:
        raise DumpError(f"`entries` is no list of at most {MAX_ENTRIES} operations")
    return Dump(minor, _groups(tree.get("pg_config")), _status(tree.get("pg_status")), entries)


def _tree(data: bytes) -> Any:
    if len(data) > MAX_DUMP_BYTES:
        raise DumpError(f"larger than {MAX_DUMP_BYTES >> 20} MiB")
    if data[:1] == b"\x80":
        if _count(data, b"]}(\x85\x86\x87") > MAX_CONTAINERS:
            raise DumpError(f"more than {MAX_CONTAINERS} lists, dicts and tuples")
        try:
            return parse_plain(data, "pickle")
        except VerificationError as error:
            raise DumpError(f"damaged, or no plain data: {error}") from None
    if data.lstrip()[:1] == b"{":
        if _count(data, b"[{") > MAX_CONTAINERS:
            raise DumpError(f"more than {MAX_CONTAINERS} lists and objects")
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise DumpError(f"damaged, or no JSON: {error}") from None
    raise NotADumpError("not a flight-recorder dump: neither a pickle nor JSON")


def _count(data: bytes, what: bytes) -> int:
    """At least how many containers a dump makes: bytes that begin one, or its values. In texts and numbers they do not matter."""
    return sum(data.count(byte) for byte in what) if len(data) > MAX_CONTAINERS else 0


def _minor(version: Any) -> int:
    match = _VERSION.match(version) if isinstance(version, str) else None
    if match is None:
        raise DumpError(f"no version of the form 2.10, but {_shown(version)}")
    if int(match[1]) != MAJOR:
        raise DumpError(f"version {match[0]}: this keepstep reads {MAJOR}.x, other major versions have other fields")
    return int(match[2])


def _shown(value: Any) -> str:
    """A value for a message; of a container only its type: it may be deep, or contain itself."""
    if type(value) is int and value.bit_length() > 64:
        return "a large number"
    return repr(value)[:80] if isinstance(value, str | int | float | None) else type(value).__name__


def _groups(config: Any) -> dict[str, Configured]:
    found: dict[str, Configured] = {}
    if type(config) is not dict or len(config) > MAX_GROUPS:
        return found
    for name, fields in config.items():
        if type(name) is str and type(fields) is dict:
            desc, ranks = fields.get("desc"), fields.get("ranks")
            found[name] = Configured(text(name), text(desc), ranks if type(ranks) is str else "")
    return found


def text(value: Any) -> str:
    """A text of a dump, cut to MAX_NAME, without what could control a terminal; "" for anything else."""
    if type(value) is not str:
        return ""
    cut = value[:MAX_NAME]
    return cut if cut.isprintable() else "".join(char if char.isprintable() else "?" for char in cut)


def _status(status: Any) -> dict[int, Status]:
    found: dict[int, Status] = {}
    if type(status) is not dict or len(status) > MAX_GROUPS:
        return found
    for name, fields in status.items():
        number = _integer(name)
        if number is not None and type(fields) is dict:
            values = [_integer(fields.get(f"last_{what}_collective")) for what in ("enqueued", "started", "completed")]
            found[number] = Status(*(-1 if value is None else value for value in values))
    return found


def _integer(value: Any) -> int | None:
    """A sequence number, which JSON dumps write as text."""
    if type(value) is str and _INTEGER.match(value):
        value = int(value)
    return value if type(value) is int and -1 <= value < 1 << 63 else None
