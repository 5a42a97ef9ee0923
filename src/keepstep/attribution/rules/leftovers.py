"""GPU memory that is full because somebody else holds it: processes of an earlier life of the job, not the program's appetite."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import number, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

HELD_SHARE = 0.3
"""Share of a GPU that one foreign process must hold to be the reason. Contexts of neighbours on the wrong device hold under 2 %."""
UNKNOWN_SHARE = 0.5
"""Share of a GPU that is held by nobody knows whom, from which on it is not the program's."""
NOT_FREE_SHARE = 0.7
"""A GPU with less than this free before anything was allocated is not empty."""
ALIKE = 0.02
"""Free memory that differs by less than this share from one life to the next was not given back."""

_UNITS = {
    "KiB": 1 / (1 << 20),
    "MiB": 1 / 1024,
    "GiB": 1.0,
    "TiB": 1024.0,
    "KB": 1 / (1 << 20),
    "MB": 1 / 1024,
    "GB": 1.0,
}
_HOLDER = re.compile(r"Process (?P<pid>\d{1,9}) has (?P<size>[\d.]{1,12}) (?P<unit>[KMGT]i?B) memory in use")
_OWN = re.compile(r"this process has (?P<size>[\d.]{1,12}) (?P<unit>[KMGT]i?B) memory in use")
_SIZE = re.compile(r"(?P<size>[\d.]{1,12}) ?(?P<unit>[KMGT]i?B)")


class Holder(NamedTuple):
    """A process and the GiB it holds."""

    pid: int
    gib: float


def gib(size: str, unit: str) -> float:
    """A printed size in GiB; 0 for what is no number."""
    try:
        amount = float(size)
    except ValueError:
        return 0.0
    return amount * _UNITS.get(unit, 0.0) if math.isfinite(amount) else 0.0


def holders(text: str) -> list[Holder]:
    """Other processes that an out-of-memory message names."""
    return [Holder(int(m["pid"]), gib(m["size"], m["unit"])) for m in _HOLDER.finditer(text)]


def leftovers(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A conclusion where an out-of-memory error, or memory at start, is somebody else's doing."""
    found = []
    own_pids = {
        number(e.attrs.get("pid")) for e in of(events, "elastic.rank_failed", "exit.failed", "elastic.closing_workers")
    }
    orphans = {number(e.attrs.get("pid")) for e in events if e.signature.startswith(("proc.orphan", "process.orphan"))}
    for event in of(events, "torch.cuda_oom", "python.exception"):
        holder = _foreign(event, own_pids, orphans)
        if holder is None and _taken_by_unknown(event):
            found.append(derive(catalog, "derived.memory_held_by_unknown", event))
            break
        if holder is not None:
            attrs = {"pid": holder.pid, "held": f"{holder.gib:.1f} GiB", "orphan": holder.pid in orphans}
            found.append(derive(catalog, "derived.memory_held_by_other", event, attrs=attrs))
            break
    return found + _never_free(events, catalog)


def _foreign(event: Event, own_pids: set[int | None], orphans: set[int | None]) -> Holder | None:
    text = event.evidence.text
    if "memory in use" not in text:
        return None
    others = [h for h in holders(text) if h.pid not in own_pids or h.pid in orphans]
    if not others:
        return None
    largest = max(others, key=lambda h: h.gib)
    capacity = _SIZE.search(str(event.attrs.get("capacity", "")))
    total = gib(capacity["size"], capacity["unit"]) if capacity is not None else 0.0
    own = _OWN.search(text)
    mine = gib(own["size"], own["unit"]) if own is not None else 0.0
    if largest.pid in orphans:
        return largest
    if total > 0 and largest.gib >= HELD_SHARE * total and largest.gib > mine:
        return largest
    return None


def _taken_by_unknown(event: Event) -> bool:
    """Whether most of the GPU is neither free nor this process's, in a message that names no holder."""
    text = event.evidence.text
    own = _OWN.search(text)
    capacity, free = (_SIZE.search(str(event.attrs.get(name, ""))) for name in ("capacity", "free"))
    if own is None or capacity is None or free is None or holders(text):
        return False
    total = gib(capacity["size"], capacity["unit"])
    mine = gib(own["size"], own["unit"])
    foreign = total - gib(free["size"], free["unit"]) - mine
    return total > 0 and foreign >= UNKNOWN_SHARE * total and foreign > mine


def _never_free(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The same low amount of free memory at the start of several lives: what holds it does not end by itself."""
    by_gpu: dict[object, list[tuple[Event, float, float]]] = defaultdict(list)
    for event in sorted(of(events, "launcher.memory_at_start"), key=canonical):
        try:
            free, total = float(str(event.attrs.get("free"))), float(str(event.attrs.get("total")))
        except ValueError:
            continue
        by_gpu[event.attrs.get("gpu"), event.node].append((event, free, total))
    for seen in by_gpu.values():
        low = [(e, free, total) for e, free, total in seen if total > 0 and free < NOT_FREE_SHARE * total]
        times = sum(e.count for e, _, _ in low)
        if times >= 2 and max(f for _, f, _ in low) - min(f for _, f, _ in low) <= ALIKE * low[0][2]:
            first = low[0]
            attrs = {"free": first[1], "total": first[2], "times": times}
            return [derive(catalog, "derived.memory_never_freed", first[0], attrs=attrs)]
    return []
