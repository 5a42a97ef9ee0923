"""Error counters of links, network ports and memory: their names, and from which rate on they mean something.

A counter is a total since the driver was loaded or somebody cleared it. Only two samples and the time between them give a rate, and
only a rate is compared with a limit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from keepstep.catalog.tables import rows

Per = Literal["poll", "second", "minute", "hour", ""]
SECONDS: Mapping[str, float] = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


class Counter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of counters.csv. More than `limit` in one `per` counts ("poll": more than that between two samples, however far apart);
    `limit` None: no rate of it means a fault. `aliases`: what other tools call it."""

    counter: str
    family: str
    limit: float | None
    per: Per
    severity: str
    aliases: tuple[str, ...]
    source: str

    def exceeded(self, growth: float, elapsed_s: float | None) -> bool | None:
        """Whether a growth over a time is above the limit. None: it cannot be told, for want of the time or of a limit."""
        if self.limit is None:
            return None
        if self.per == "poll":
            return growth > self.limit
        if growth <= 0:
            return False
        if not elapsed_s or elapsed_s <= 0:
            return None
        return growth / elapsed_s * SECONDS[self.per] > self.limit


@functools.cache
def counters() -> Mapping[str, Counter]:
    """All counters by name."""
    found = {}
    for row in rows("counters.csv"):
        fields = row | {
            "aliases": tuple(a for a in row["aliases"].split("|") if a),
            "limit": float(row["limit"]) if row["limit"] else None,
        }
        found[row["counter"]] = msgspec.convert(fields, Counter)
    return found


@functools.cache
def _by_alias() -> Mapping[str, Counter]:
    names = {}
    for counter in counters().values():
        for name in (counter.counter, *counter.aliases):
            names[_plain(name)] = counter
    return names


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.lru_cache(maxsize=4096)
def counter_named(name: str, family: str = "") -> Counter | None:
    """The counter that a tool calls `name`; case, "_" and "-" do not count. With `family` only one of it."""
    plain = _plain(name)
    for form in (plain, plain.removesuffix("total"), plain.removesuffix("count"), plain.removesuffix("s")):
        found = _by_alias().get(form)
        if found is not None and family in {"", found.family}:
            return found
    return None
