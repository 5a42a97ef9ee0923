"""How a machine stands beside what was said of it: ready by now, idle, kept out by its container, alike but for one device."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.current import end_of, goes_on
from keepstep.attribution.order import canonical, compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import PROGRESS, of
from keepstep.attribution.rules.resumes import follows
from keepstep.attribution.worked import worked
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 64
NOT_READY = ("cuda.system_not_ready", "nccl.nvls_warning", "nccl.nvls_failed")
BROKEN = ("xid.", "sxid.", "nvrm.", "gpu.", "nvlink.", "fabricmanager.")
"""Beginnings of signatures of what a machine itself says of its GPUs and their fabric."""
_HOST = re.compile(r"\b[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*\d+\b")
_NO_HOST = re.compile(r"(?i)(?:rank|step|gpu|cuda|attempt|h|a|b|gb|job|tid|dev)_?\d+\Z")
_SETTING = re.compile(r"[A-Z_0-9]+=|(?:\S*/)?(?:python[\d.]*|torchrun|-m|-u)\Z")
_SAME = re.compile(r"(?i)\bsame (?:node|host|machine)\b")


def not_ready_passed(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A fabric that was not set up, on a machine whose collectives give right results afterwards."""
    failures = of(events, *NOT_READY)[:MOST]
    if not failures or not of(failures, "cuda.system_not_ready"):
        return []
    own = (e for e in events if e.signature.startswith(BROKEN) and catalog[e.signature].role in ("root", "cascade"))
    if any(e.severity in ("error", "fatal") for e in own):
        return []
    last = max((end_of(e) for e in failures), key=canonical)
    for test in of(events, "nccl.test_passed")[:MOST]:
        if follows(last, test) and all(_same_machine(f, test) for f in failures):
            attrs = {"node": failures[0].node or "the machine"}
            return [derive(catalog, "derived.not_ready_passed", failures[0], attrs=attrs, explains=list(NOT_READY))]
    return []


def _same_machine(failure: Event, test: Event) -> bool:
    """Whether a test was on the machine of a failure, by its name or the words of a title."""
    if failure.node is not None and test.node is not None:
        return failure.node == test.node
    if _SAME.search(test.source) is not None:
        return True
    return bool(_names(failure) & _names(test))


def _names(event: Event) -> set[str]:
    """Names of machines that stand with an event: its own, those in the title above it, one in front of its line."""
    words = _HOST.findall(f"{event.source} {event.evidence.text[:60]}")
    named = {w for w in words if _NO_HOST.match(w) is None}
    return named | ({event.node} if event.node else set())


CLAIMS = ("nccl.ib_device_gone", "nccl.no_ib_device", "cuda.no_device")


def denied(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A device that a process could not use, in a container that may not open it."""
    refused, claims = of(events, "container.device_denied"), of(events, *CLAIMS)[:MOST]
    if not refused or not claims or any(e.signature.startswith(("xid.", "mlx5.")) for e in events):
        return []
    attrs = {"device": refused[0].attrs.get("device")}
    explains = ["container.device_denied", *CLAIMS]
    return [
        derive(catalog, "derived.denied_by_container", claims[0], attrs=attrs, explains=explains, node=refused[0].node)
    ]


LEAST_ALIKE = 2


def refused_of_alike(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The few GPUs that the driver does not take, on a machine whose others are of the same kind and work."""
    failed = of(events, "nvrm.probe_failed")[:MOST]
    devices = {e.gpu.pci for e in failed if e.gpu is not None and e.gpu.pci}
    if not devices or not of(events, "nvrm.not_supported") or of(events, "nvrm.none_probed"):
        return []
    shown, fitted = _count(events, "gpus"), _count(events, "devices")
    linked = sum(e.count for e in of(events, "gpu.product_linked"))
    works = shown if shown is not None else linked
    alike = (fitted is not None and fitted == works + len(devices)) or linked >= LEAST_ALIKE
    if not alike or works < LEAST_ALIKE * len(devices):
        return []
    attrs = {"refused": len(devices), "of": works + len(devices)}
    explains = ["nvrm.not_supported", "nvrm.probe_failed", "nvrm.probe_routine_failed"]
    return [derive(catalog, "derived.gpu.refused_of_alike", failed[0], attrs=attrs, explains=explains)]


def _count(events: Sequence[Event], what: str) -> int | None:
    counts = [e.attrs.get("count") for e in of(events, "command.count") if e.attrs.get("what") == what]
    known = [c for c in counts if isinstance(c, int)]
    return known[0] if known and len(set(known)) == 1 else None


def reset_now(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Memory that waits for a reset on a machine that is told to have no job."""
    waiting = of(events, "gpu.remap_pending")
    asked = [e for e in of(events, "command.count") if e.attrs.get("what") == "jobs"]
    known = {e.node for e in events if e.node is not None}
    # Whose queue was looked at stands in the command.
    other = any(known and not any(node in e.source for node in known) for e in asked)
    idle = _count(events, "jobs") == 0 and not other and not of(events, "slurm.job_running")
    works = [e for e in events if e.kind == PROGRESS]
    if not waiting or not idle or any(compare(w, waiting[0]) == "after" for w in works):
        return []
    return [derive(catalog, "derived.reset_now", e) for e in waiting[:MOST]]


def port_of_own_job(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A port that another launcher on the host holds, which was started with the same fixed port for other work."""
    failed, holders = of(events, "torch.port_in_use")[:MOST], of(events, "port.holder")[:MOST]
    if not failed or of(events, "process.orphan", "process.absent", "derived.port_of_other"):
        return []
    for row in of(events, "process.launcher_port")[:MOST]:
        held = [h for h in holders if h.attrs.get("pid") == row.attrs.get("pid")]
        theirs = set(row.evidence.text.split())
        for own in of(events, "job.fixed_port")[:MOST]:
            port = own.attrs.get("port")
            mine = {w for w in own.evidence.text.split("#")[0].split() if not _SETTING.match(w)}
            # What runs the same command may be what an earlier attempt left behind.
            if (
                own.evidence.line != row.evidence.line
                and mine - theirs
                and any(h.attrs.get("port") == port for h in held)
            ):
                attrs = {"program": held[0].attrs.get("program"), "port": port}
                explains = ["torch.port_in_use"]
                return [
                    derive(catalog, "derived.port_of_other", failed[0], attrs=attrs, explains=explains, placed=False)
                ]
    return []


def setting_warned(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A warning about a setting of the host, steps after it, and nobody who complains of anything."""
    warned = of(events, "host.numa_balancing_warned")[:MOST]
    signs = worked(events, catalog)
    if not warned or not all(signs.after(e) for e in warned) or of(events, "fact.hang_told", "fact.slow_complaint"):
        return []
    return [derive(catalog, "derived.host.setting_warned", warned[0], placed=False)]


def went_on_without(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A device that NCCL could not open, in a job that made steps or ended well without it, and nothing of the machine itself."""
    gone = of(events, "nccl.ib_device_gone")[:MOST]
    of_nics = ("nic.", "pcie.", "ib.")
    others = (e for e in events if e.kind.startswith(of_nics) and e.signature != "nccl.ib_device_gone")
    if not gone or any(catalog[e.signature].role in ("root", "cascade") for e in others):
        return []
    last = max((end_of(e) for e in gone), key=canonical)
    if not any(follows(last, end_of(e)) for e in events if goes_on(catalog[e.signature])):
        return []
    named = next((e for e in gone if e.nic is not None), gone[0])
    return [derive(catalog, "derived.nic_left_out", named, explains=["nccl.ib_device_gone"])]


STANDING_RULES = (
    went_on_without,
    setting_warned,
    port_of_own_job,
    not_ready_passed,
    denied,
    refused_of_alike,
    reset_now,
)
"""Each: `(events, catalog) -> list[Event]`."""
