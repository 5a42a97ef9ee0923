"""Which events may not drive an action any more: replayed, from an earlier boot, from before a repair, too old. Pure.

Marked events stay: they may still explain what happened then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from keepstep.records.event import Event, Stale
from keepstep.sources.facts import Boot, Repair

SLACK_NS = 2_000_000_000
"""Boot times are known to a second or two."""

_MACHINE_KINDS = ("gpu.", "nvlink.", "nvswitch.", "pcie.", "host.", "nic.", "rdma.")
"""Kinds of what a machine tells about itself; a job's own words are not taken back by a reboot."""
_ALSO_OF_JOBS = ("storage.", "host.oom")
"""Kinds that jobs and schedulers report too: the machine's own only where the kernel's clock or a journal is beside."""
_CRASHES = ("host.mce", "host.panic", "host.memory", "host.hardware")
"""What makes a machine boot by itself: the boot that follows is no repair."""


def mark(events: Iterable[Event], reason: Stale, when: Callable[[Event], bool]) -> list[Event]:
    """The events, those that `when` holds for marked; a mark that is there stays."""
    return [msgspec.structs.replace(e, stale=reason) if e.stale is None and when(e) else e for e in events]


def replayed(events: Iterable[Event], last_seq: Mapping[str | None, int]) -> list[Event]:
    """Mark what was delivered before: sequence numbers up to the last one that was handled of that boot.

    `last_seq`: by boot id; under None for events whose boot is not named.
    """

    def is_old(event: Event) -> bool:
        last = last_seq.get(event.boot_id, last_seq.get(None) if event.boot_id is None else None)
        return event.seq is not None and last is not None and event.seq <= last

    return mark(events, "replay", is_old)


def about_machine(event: Event) -> bool:
    """Whether an event is what a machine says about itself, so that a reboot or a repair of it matters."""
    if event.kind.startswith(_ALSO_OF_JOBS):
        return event.boot_ns is not None or event.boot_id is not None or event.seq is not None
    return event.kind.startswith(_MACHINE_KINDS)


def from_previous_boots(events: Sequence[Event], boots: Sequence[Boot]) -> list[Event]:
    """Mark what a machine said before its last boot, by time or by position in the same document.

    Not marked is what may itself have brought the machine down: a machine check or a panic is not repaired by booting again.
    """

    def is_old(event: Event) -> bool:
        if not about_machine(event) or event.kind.startswith(_CRASHES):
            return False
        return any(_before(event, boot) for boot in boots)

    return mark(events, "previous_boot", is_old)


def _before(event: Event, boot: Boot) -> bool:
    if event.node is not None and boot.node is not None and event.node != boot.node:
        return False
    if event.boot_id is not None and boot.boot_id is not None and event.boot_id == boot.boot_id:
        return False
    if boot.in_stream and (event.evidence.path, event.source) == (boot.path, boot.title):
        return event.order < boot.line
    if event.time_ns is None or boot.time_ns is None or (event.node is None and boot.node is not None):
        return False
    return event.time_ns < boot.time_ns - SLACK_NS


def before_repairs(events: Iterable[Event], repairs: Sequence[Repair]) -> list[Event]:
    """Mark what was said about a machine or a GPU before it was repaired, replaced or reset."""

    def is_old(event: Event) -> bool:
        return about_machine(event) and any(_predates(event, repair) for repair in repairs)

    return mark(events, "before_repair", is_old)


def _predates(event: Event, repair: Repair) -> bool:
    if event.node is not None and repair.node is not None and event.node != repair.node:
        return False
    if repair.gpu is not None and event.gpu is not None and repair.gpu not in (event.gpu.pci, event.gpu.uuid):
        return False
    if repair.boot_ns is not None and event.boot_ns is not None:
        return event.boot_ns < repair.boot_ns
    return repair.time_ns is not None and event.time_ns is not None and event.time_ns < repair.time_ns


def too_old(events: Iterable[Event], now_ns: int, window_s: float) -> list[Event]:
    """Mark what ended longer than `window_s` before `now_ns`. Events without a time are not marked."""
    oldest = now_ns - int(window_s * 1e9)

    def is_old(event: Event) -> bool:
        end = event.last_ns or event.time_ns
        return end is not None and end < oldest

    return mark(events, "too_old", is_old)
