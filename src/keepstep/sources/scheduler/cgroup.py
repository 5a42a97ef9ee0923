"""Files of the memory controller: what a cgroup used, of which kind, and whether the kernel killed for it.

Formats: Linux Documentation/admin-guide/cgroup-v2.rst (memory.current, memory.max, memory.stat, memory.events) and
cgroup-v1/memory.rst (memory.usage_in_bytes, memory.limit_in_bytes, memory.stat, memory.failcnt). A file may be a document of its
own, or its name stands before its value on one line.
"""

from __future__ import annotations

import re

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.scheduler.making import note

_VALUES = {
    "memory.current": "current", "memory.usage_in_bytes": "current", "memory.max": "max",
    "memory.limit_in_bytes": "max", "memory.failcnt": "failures",
}  # fmt: skip
_STAT = {
    "anon": "anon", "total_rss": "anon", "file": "file", "total_cache": "file", "shmem": "shmem", "total_shmem": "shmem",
    "inactive_file": "inactive_file", "total_inactive_file": "inactive_file", "slab_unreclaimable": "kernel",
    "unevictable": "unevictable", "total_unevictable": "unevictable",
}  # fmt: skip
_KILLS = ("oom_kill", "oom_group_kill")

_NAMED = re.compile(
    r"(?:^|/|\s)(memory\.(?:current|max|stat|events(?:\.local)?|usage_in_bytes|limit_in_bytes|failcnt))\b[:=]?\s*(.*)$"
)
_PAIR = re.compile(r"\b([a-z_]+)[ =:]+(\d{1,20})\b")
_NUMBER = re.compile(r"(\d{1,20}|max)\b")


def memory_events(document: Document, catalog: Catalog) -> list[Event]:
    """Figures of one document: an event of facts, and one for kills that the kernel counted."""
    figures: dict[str, int] = {}
    first: Line | None = None
    killed: Line | None = None
    titled = _NAMED.search(document.title)
    file = titled[1] if titled is not None else ""
    for line in document.lines:
        text = line.raw.strip()
        named = _NAMED.search(line.raw)
        if named is not None:
            file, text = named[1], named[2]
        if not file or not text:
            continue
        read = _read(file, text)
        if not read and titled is None:
            file = ""  # what follows is no longer that file
        if read:
            first = first or line
            figures |= read
            killed = killed or (line if any(read.get(k) for k in _KILLS) else None)
    found = [] if first is None else [note(catalog, "cgroup.memory", document, first, attrs=figures)]
    if killed is not None:
        found.append(note(catalog, "cgroup.oom_kill", document, killed, attrs=figures))
    return found


def _read(file: str, text: str) -> dict[str, int]:
    """The figures of a line of one file. A limit of "max" is none."""
    if file in _VALUES:
        match = _NUMBER.match(text)
        return {_VALUES[file]: int(match[1])} if match is not None and match[1] != "max" else {}
    pairs = {m[1]: int(m[2]) for m in _PAIR.finditer(text)}
    if file.startswith("memory.events"):
        return {k: v for k, v in pairs.items() if k in _KILLS}
    return {_STAT[k]: v for k, v in pairs.items() if k in _STAT}
