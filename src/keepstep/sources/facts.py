"""What texts say about machines as a whole: when they were booted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from keepstep.sources.timestamps import SECOND_NS, stamp_at, stamp_in

_BOOT_PHRASE = re.compile(r"\b(?:system boot|boot(?:ed)?(?: time)?(?: at|:|=)|up since|uptime since)[ :=]+(?=[\dA-Z])")
_BTIME = re.compile(r"^btime (?P<s>\d{9,10})$")

Titled = tuple[str, "str | None", Sequence[str]]
"""Title, node and lines of a document."""


def boots(documents: Iterable[Titled]) -> dict[str | None, int]:
    """The last known time of boot (UTC nanoseconds) by node; under None where the node is not named.

    From `uptime -s`, `who -b`, `btime` of /proc/stat, and phrases such as "boot at 2031-07-28 06:00:00".
    """
    found: dict[str | None, int] = {}
    for title, node, lines in documents:
        for text in lines:
            ns = _boot_in(title, text)
            if ns is not None:
                found[node] = max(ns, found.get(node, ns))
    return found


def _boot_in(title: str, text: str) -> int | None:
    if "boot" not in text and "up" not in text and "btime" not in text and "uptime" not in title:
        return None
    match = _BTIME.match(text)
    if match is not None:
        return int(match["s"]) * SECOND_NS
    if title.endswith("uptime -s"):
        stamp = stamp_in(text)
        return stamp.ns if stamp is not None and stamp.kind in ("utc", "local") else None
    match = _BOOT_PHRASE.search(text)
    found = stamp_at(text, match.end()) if match is not None else None
    return found.stamp.ns if found is not None and found.stamp.kind in ("utc", "local") else None
