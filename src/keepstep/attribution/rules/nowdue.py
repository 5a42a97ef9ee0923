"""What is due now: a reset of a GPU that nobody holds, a reboot of a node whose CPU is gone, a drain by the right scheduler."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.current import PROGRESS
from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import number, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

STUCK_S = 600
"""Seconds after which a CPU is not given back: what is only slow is over in one or two minutes."""
NEAR_LINES = 60
"""Lines of a stack below the report of a stuck CPU."""
PENDING = ("gpu.retired_pending", "gpu.remap_pending")
HELD_BACK = ("gpu.remap_failed", "gpu.banks_used_up", "xid.64", "gpu.lost", "xid.79")
"""Then a reset is not enough."""
WORKS = ("gpu.process", PROGRESS, "slurm.job_running", "job.serving")
WAITS_FOR_RESET = ("condition.dcgm.reset", "gpu.remap_pending", "gpu.retired_pending", "xid.63")
MOST = 64
_SLURM_POD = re.compile(r"(?i)\bevict\w*\b[^\n]{0,40}\bpods?\b[^\n]{0,60}\b(?:slurm/|slurmd\b|slurm-\w+|slinky)")


def driver_spins(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A CPU that was stuck for minutes or days, with the poll of a network driver in the stack below."""
    for stuck in of(events, "kernel.soft_lockup")[:MOST]:
        seconds = number(stuck.attrs.get("stuck_s")) or 0
        frame = next((f for f in of(events, "nic.poll_frame")[:MOST] if _in_stack(stuck, f)), None)
        if seconds >= STUCK_S and frame is not None:
            attrs = {"driver": frame.attrs.get("driver"), "seconds": seconds}
            explains = ["kernel.soft_lockup", "nic.transmit_timeout", "kernel.rcu_stall"]
            return [derive(catalog, "derived.nic.driver_spins", stuck, attrs=attrs, explains=explains)]
    return []


def _in_stack(stuck: Event, frame: Event) -> bool:
    lines = (frame.evidence.line or 0) - (stuck.evidence.line or 0)
    return frame.evidence.path == stuck.evidence.path and 0 < lines <= NEAR_LINES


def reset_now(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Memory that waits for a reset on a GPU which no process holds, on a machine where nothing works."""
    free = of(events, "gpu.no_process")
    if not free or of(events, *WORKS, *HELD_BACK):
        return []
    for waiting in of(events, *PENDING)[:MOST]:
        if any(_same_gpu(waiting, f) for f in free):
            explains = [*PENDING, "gpu.ecc_uncorrected"]
            return [derive(catalog, "derived.gpu.reset_now", waiting, explains=explains)]
    return []


def _same_gpu(waiting: Event, free: Event) -> bool:
    """Whether the GPU is free: by its index, or because all of the machine are."""
    if waiting.node != free.node or waiting.evidence.path != free.evidence.path:
        return False
    return free.gpu is None or (waiting.gpu is not None and waiting.gpu.index == free.gpu.index)


def slurm_in_pod(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A pod of Slurm that Kubernetes is about to evict, with a job that runs on it."""
    taken = [e for e in of(events, "sched.taken_away")[:MOST] if _SLURM_POD.search(e.evidence.text)]
    waits = of(events, *WAITS_FOR_RESET)
    if not taken or not of(events, "slurm.job_running"):
        return []
    # What failed in the job, or asks for more than a reset, is heard first.
    explains = {*WAITS_FOR_RESET, "sched.taken_away"}
    roots = [e for e in events if catalog[e.signature].role == "root" and e.severity != "info"]
    if any(e.signature not in explains for e in roots):
        return []
    first = min((*taken, *waits), key=canonical)
    return [derive(catalog, "derived.sched.slurm_in_pod", first, explains=sorted(explains))]


NOW_DUE_RULES = (driver_spins, reset_now, slurm_in_pod)
"""Each: `(events, catalog) -> list[Event]`."""
