"""Levels of GPUs -> events: every sample as context, and one event for each thing that is a fault whenever it is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Gpu
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import EVENTS_LIMIT, make, number
from keepstep.sources.snapshots.samples import GpuSample, Level, thinned

SAMPLES_A_GPU = 20
"""Samples of one GPU in one document that become events: enough for a trend, few enough for hours of one a second."""
LOADED_PERCENT = 50
"""From this utilisation on a GPU is at work, and its link should be at full speed."""
LOW_LIMIT = 0.9
"""A power limit below this share of the default was set by somebody."""


APPLICATION_XIDS = (13.0, 31.0, 43.0, 45.0, 68.0, 69.0)


class Check(NamedTuple):
    """`level`: whose line is the evidence. `holds`: whether the levels say so. `latched`: stays until somebody repairs it, so that
    a later sample without it says that it was repaired."""

    signature: str
    level: str
    holds: Callable[[GpuSample], bool]
    latched: bool = False


def level(sample: GpuSample, name: str) -> float | None:
    """A level as a number; None where it was not told."""
    value = sample.levels.get(name)
    return None if value is None or isinstance(value, str) else float(value)


def loaded(sample: GpuSample) -> bool | None:
    """Whether the GPU was at work: by utilisation or performance state; None when neither was told."""
    if sample.levels.get("reason_idle") is True:
        return False
    used = level(sample, "utilisation")
    state = str(sample.levels.get("pstate", ""))
    if used is not None and used >= LOADED_PERCENT:
        return True
    if state[:1].upper() == "P" and state[1:].isdigit():
        return int(state[1:]) <= 2
    return None if used is None else False


def link_below(sample: GpuSample) -> bool:
    """Whether the PCIe link is slower or narrower than it could be."""
    return any(
        now is not None and most is not None and 0 < now < most
        for now, most in (
            (level(sample, "pcie_gen"), level(sample, "pcie_gen_max")),
            (level(sample, "pcie_width"), level(sample, "pcie_width_max")),
        )
    )


def _slow_link(sample: GpuSample) -> bool:
    return link_below(sample) and loaded(sample) is True


def _idle_link(sample: GpuSample) -> bool:
    return link_below(sample) and loaded(sample) is False


def _unclear_link(sample: GpuSample) -> bool:
    return link_below(sample) and loaded(sample) is None


def _low_limit(sample: GpuSample) -> bool:
    now, usual = level(sample, "power_limit"), level(sample, "power_default")
    return now is not None and usual is not None and 0 < now < LOW_LIMIT * usual


def _fabric_incomplete(sample: GpuSample) -> bool:
    state = str(sample.levels.get("fabric_state", "Completed")).lower()
    status = str(sample.levels.get("fabric_status", "Success")).lower()
    return state in {"in progress", "not started"} or (state == "completed" and status not in {"success", "0"})


def _fabric_degraded(sample: GpuSample) -> bool:
    width = str(sample.levels.get("fabric_bandwidth", "Full")).lower()
    summary = str(sample.levels.get("fabric_summary", "Healthy")).lower()
    return width in {"degraded", "partial"} or summary in {"unhealthy", "limited capacity"}


def _uncorrected(sample: GpuSample) -> bool:
    return any(
        (level(sample, name) or 0) > 0
        for name in ("ecc_uncorrected_volatile", "dram_uncorrected_volatile", "sram_uncorrected_volatile")
    )


def _settled(sample: GpuSample) -> bool:
    return sample.levels.get("remap_pending") is False and sample.levels.get("remap_failed") is not True


def _old_application(sample: GpuSample) -> bool:
    return level(sample, "xid_last") in APPLICATION_XIDS


def _flag(name: str) -> Callable[[GpuSample], bool]:
    return lambda sample: sample.levels.get(name) is True


def _wants(action: str) -> Callable[[GpuSample], bool]:
    return lambda sample: sample.levels.get("recovery") == action


CHECKS: tuple[Check, ...] = (
    Check("gpu.remap_failed", "remap_failed", _flag("remap_failed")),
    Check("gpu.remap_pending", "remap_pending", _flag("remap_pending"), latched=True),
    Check("gpu.sram_threshold", "sram_threshold_exceeded", _flag("sram_threshold_exceeded")),
    Check("gpu.retired_pending", "retired_pending", _flag("retired_pending"), latched=True),
    Check("gpu.banks_used_up", "banks_none", lambda s: (level(s, "banks_none") or 0) > 0),
    Check("gpu.ecc_uncorrected", "ecc_uncorrected_volatile", _uncorrected),
    Check("gpu.recovery.reset", "recovery", _wants("reset"), latched=True),
    Check("gpu.recovery.reset", "reset_required", _flag("reset_required"), latched=True),
    Check("gpu.recovery.reboot", "recovery", _wants("reboot"), latched=True),
    Check("gpu.recovery.drain_p2p", "recovery", _wants("drain_p2p"), latched=True),
    Check("gpu.recovery.drain_and_reset", "recovery", _wants("drain_and_reset"), latched=True),
    Check("gpu.recovery.drain_and_reset", "drain_and_reset", _flag("drain_and_reset"), latched=True),
    Check("gpu.fabric_incomplete", "fabric_state", _fabric_incomplete, latched=True),
    Check("gpu.fabric_degraded", "fabric_bandwidth", _fabric_degraded),
    Check("gpu.pcie_degraded", "pcie_gen", _slow_link),
    Check("gpu.pcie_idle", "pcie_gen", _idle_link),
    Check("gpu.idle", "reason_idle", _flag("reason_idle")),
    Check("gpu.pcie_unclear", "pcie_gen", _unclear_link),
    Check("gpu.hw_thermal", "reason_hw_thermal", _flag("reason_hw_thermal")),
    Check("gpu.power_brake", "reason_hw_power_brake", _flag("reason_hw_power_brake")),
    Check(
        "gpu.hw_slowdown",
        "reason_hw_slowdown",
        lambda s: (
            s.levels.get("reason_hw_slowdown") is True
            and not s.levels.get("reason_hw_thermal")
            and not s.levels.get("reason_hw_power_brake")
        ),
    ),
    Check("gpu.sw_thermal", "reason_sw_thermal", _flag("reason_sw_thermal")),
    Check("gpu.power_limit_low", "power_limit", _low_limit),
    Check("gpu.remap_settled", "remap_pending", _settled),
    Check("gpu.recovery.none", "recovery", _wants("none")),
    Check("gpu.xid_gauge", "xid_last", lambda s: (level(s, "xid_last") or 0) > 0 and not _old_application(s)),
    Check("gpu.xid_gauge_application", "xid_last", _old_application),
)


def gpu_events(samples: Sequence[GpuSample], document: Document, catalog: Catalog) -> list[Event]:
    """Events of samples: what is at fault, the driver's version, and every sample as context."""
    found: list[Event] = []
    context: list[Event] = []
    seen: set[tuple[str, str | None, Gpu | None]] = set()
    for sample in samples:
        if sample.lost is not None:
            _add(found, seen, make(catalog, "gpu.lost", document, sample.lost, gpu=sample.gpu, node=sample.node))
        for check in CHECKS:
            if check.holds(sample):
                line = sample.lines.get(check.level) or _first_line(sample)
                attrs = {"value": sample.levels.get(check.level), "sample": sample.number, "loaded": loaded(sample)}
                event = _made(catalog, check.signature, document, line, sample, attrs)
                over = check.latched and _over(check, sample, samples)
                _add(found, seen, msgspec.structs.replace(event, stale="cleared") if over else event)
    for sample in thinned(samples, SAMPLES_A_GPU):
        levels = {"levels": dict(sample.levels), "sample": sample.number, "loaded": loaded(sample)}
        context.append(_made(catalog, "gpu.sample", document, _first_line(sample), sample, levels))
    return (found + drivers(samples, document, catalog) + context)[:EVENTS_LIMIT]


def drivers(samples: Iterable[GpuSample], document: Document, catalog: Catalog) -> list[Event]:
    """One event for each driver version that samples tell."""
    events: dict[str, Event] = {}
    for sample in samples:
        version = str(sample.levels.get("driver", ""))
        if version and version not in events:
            events[version] = driver_event(version, document, sample.lines.get("driver"), catalog)
    return list(events.values())


def driver_event(version: str, document: Document, line: Line | None, catalog: Catalog) -> Event:
    """The driver's version, and its branch, which decides how some Xids are decoded."""
    branch = number(version.partition(".")[0])
    attrs = {"version": version, "branch": None if branch is None else int(branch)}
    return make(catalog, "driver.version", document, line, attrs=attrs)


def process_event(
    catalog: Catalog, document: Document, line: Line | None, pid: int, used: str, gpu: Gpu | None
) -> Event:
    """A process that holds memory of a GPU."""
    mib = number(used)
    if mib is not None and "gib" in used.lower():
        mib *= 1024
    return make(catalog, "gpu.process", document, line, gpu=gpu, attrs={"pid": pid, "used_mib": mib})


def _over(check: Check, sample: GpuSample, samples: Sequence[GpuSample]) -> bool:
    """Whether the last sample of the same GPU that tells the level no longer has it."""
    own = [s for s in samples if (s.node, s.gpu) == (sample.node, sample.gpu) and check.level in s.levels]
    return len(own) > 1 and not check.holds(own[-1])


def _add(found: list[Event], seen: set[tuple[str, str | None, Gpu | None]], event: Event) -> None:
    """Keep the first of the same thing on the same GPU: a level that stays is one event."""
    key = (event.signature, event.node, event.gpu)
    if key not in seen:
        seen.add(key)
        found.append(event)


def _made(
    catalog: Catalog, signature: str, document: Document, line: Line | None, sample: GpuSample, attrs: dict[str, Any]
) -> Event:
    return make(
        catalog,
        signature,
        document,
        line,
        gpu=sample.gpu,
        node=sample.node,
        time_ns=sample.time_ns,
        attrs=attrs,
    )


def _first_line(sample: GpuSample) -> Line | None:
    return next((line for line in sample.lines.values() if line is not None), None)


__all__ = ["CHECKS", "Level", "driver_event", "gpu_events", "level", "link_below", "loaded", "process_event"]
