"""Ends that others brought about: a rendezvous closed by whoever left, errors of ranks that were being stopped, a port or shared
memory that was not this job's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.current import PROGRESS
from keepstep.attribution.order import canonical, compare, same_text
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, before, of, within_s
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

LEFT = ("exit.stopped_from_outside", "exit.sigterm", "signal.stop_received")
STOPS = (*LEFT, "sched.taken_away", "cloud.preempted")
STOP_KINDS = ("sched.preempt", "sched.evict", "sched.cancel", "sched.time_limit")
TAKEN = ("sched.taken_away", "cloud.preempted", "cloud.maintenance")
OF_PROCESS = (
    "cuda.contained",
    "cuda.illegal_address",
    "cuda.launch_failure",
    "cuda.unknown_error",
    "cuda.other_error",
    "cuda.nvlink_uncorrectable",
)
"""What a process says of its GPU or its peer's, without the driver."""
OF_DRIVER = ("xid.", "nvrm.", "gpu.ecc", "gpu.lost", "nvlink.", "dcgm.", "derived.xid")
AFTER_STOP_S = 180.0
"""A stop gives processes half a minute, and slow ones another."""
MOST = 64

_RANGE = re.compile(r"--nnodes[= ]\"?(?P<least>\d{1,6}):(?P<most>\d{1,6})\b")


def closed_by_leaver(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A rendezvous that was closed after one agent had been asked to leave, in a job that may go on with fewer nodes."""
    closed, left = of(events, "elastic.rendezvous_closed")[:MOST], of(events, *LEFT)[:MOST]
    allowed = _range(events)
    # What was taken away is the platform's doing, whatever the launcher makes of it.
    if not closed or not left or allowed is None or allowed[0] >= allowed[1] or of(events, *TAKEN):
        return []
    # Who was told to leave says so itself; whoever finds it closed afterwards is another.
    first = min(left, key=canonical)
    other = next((c for c in closed if not _same_writer(first, c) and compare(first, c) != "after"), None)
    if other is None:
        return []
    explains = [*LEFT, "elastic.rendezvous_closed"]
    attrs = {"least": allowed[0], "most": allowed[1]}
    conclusion = "derived.rendezvous_closed_by_leaver"
    return [derive(catalog, conclusion, first, attrs=attrs, explains=explains, placed=False)]


def _range(events: Sequence[Event]) -> tuple[int, int] | None:
    """How many nodes the job may have, by the command line in a title or a line."""
    for event in events:
        match = _RANGE.search(event.source) or _RANGE.search(event.evidence.text)
        if match is not None:
            return int(match["least"]), int(match["most"])
    return None


def _same_writer(one: Event, other: Event) -> bool:
    if one.node is not None and other.node is not None:
        return one.node == other.node
    return same_text(one, other) and _head(one) == _head(other)


def _head(event: Event) -> str:
    """The first names in a line, of a pod or a container that a collector put there."""
    return event.evidence.text.partition("|")[0][-40:].strip() if "|" in event.evidence.text else ""


def errors_of_stop(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Errors of GPUs that ranks tell only after the job was told to stop, with no word of the driver."""
    stops = [e for e in events if e.signature in STOPS or e.kind in STOP_KINDS]
    errors = of(events, *OF_PROCESS)
    if not stops or not errors or any(e.signature.startswith(OF_DRIVER) for e in events):
        return []
    first = min(stops, key=canonical)
    # The launcher stops the others of a rank that failed: then somebody was told to leave, and an error stands before.
    if not all(before(first, e) and within_s(first, e, AFTER_STOP_S) for e in errors[:MOST]):
        return []
    roots = (e for e in events if catalog[e.signature].role == "root" and e not in stops and e not in errors)
    if any(before(e, first) for e in roots):
        return []  # then the launcher may have stopped the others for it
    explains = sorted({e.signature for e in errors})
    return [derive(catalog, "derived.errors_of_stop", first, explains=explains, placed=False)]


def port_of_other(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A port that is held by a program which is seen to work, in an output of its own."""
    failed, holders = of(events, "torch.port_in_use")[:MOST], of(events, "port.holder")
    if not failed or not holders or of(events, "process.orphan", "process.absent"):
        return []
    texts = {(e.evidence.path, e.source) for e in failed}
    works = [e for e in events if e.kind == PROGRESS or e.signature == "job.serving"]
    if not any((w.evidence.path, w.source) not in texts and compare(w, failed[0]) != "before" for w in works):
        return []
    attrs = {"program": holders[0].attrs.get("program"), "port": holders[0].attrs.get("port")}
    explains = ["torch.port_in_use"]
    return [derive(catalog, "derived.port_of_other", failed[0], attrs=attrs, explains=explains, placed=False)]


def shm_not_asked(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The default size of /dev/shm, full, beside a specification of the job that asks for no more."""
    default = of(events, "container.shm_default")
    if not default or not of(events, "container.spec_shown") or of(events, "container.shm_asked"):
        return []
    explains = ["container.shm_default", "fs.no_space", "nccl.shared_memory_full"]
    return [derive(catalog, "derived.shm_not_asked", default[0], explains=explains, placed=False)]


def ended_badly(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A status that is not 0 after the remark of any exit, and nothing that says why: no good end, though nothing is wrong."""
    status = [e for e in of(events, "ckpt.exit_status") if e.attrs.get("code")]
    if not status or not of(events, "torch.group_not_destroyed"):
        return []
    failing = (catalog[e.signature] for e in events)
    if any(e.role in FAILING for e in failing):
        return []
    return [derive(catalog, "derived.ended_badly", status[-1], attrs={"code": status[-1].attrs.get("code")})]


FINISHED = ("job.finished_rank", "job.train_ended", "job.ended_well")
PASSING = ("rank.", "collective.", "nccl.", "dataloader.", "job.")
"""Beginnings of kinds of what a process says of itself and its peers."""


def good_end(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Work that was finished and a status of 0, with errors of processes between: of taking down, however they read."""
    finished = of(events, *FINISHED)[:MOST]
    zero = [e for e in of(events, "ckpt.exit_status") if e.attrs.get("code") == 0] or of(events, "slurm.job_completed")
    if not finished or len(zero) != 1 or of(events, "job.started", "elastic.restarting", "derived.teardown_error"):
        return []
    errors = [e for e in events if catalog[e.signature].role in FAILING]
    # `train | tee log` has a status of 0 whatever became of it: what is a cause by itself stays one.
    if not errors or any(catalog[e.signature].role == "root" or e.signature == "slurm.job_failed" for e in errors):
        return []
    first = max(finished, key=canonical)
    if not all(e.kind.startswith(PASSING) and before(first, e) for e in errors):
        return []
    attrs = {"after": first.evidence.text[:200]}
    return [derive(catalog, "derived.teardown_error", min(errors, key=canonical), attrs=attrs)]


ENDING_RULES = (closed_by_leaver, errors_of_stop, port_of_other, shm_not_asked, good_end, ended_badly)
"""Each: `(events, catalog) -> list[Event]`."""
