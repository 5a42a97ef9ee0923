"""What a launcher kept of its host after a failed cycle, as events: `gpus.json` and `ports.json` beside the kernel's log."""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.catalog.load import Catalog
from keepstep.records.codec import from_rfc3339
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.live import ibsysfs
from keepstep.sources.snapshots.fields import BY_NAME
from keepstep.sources.snapshots.gpu_health import gpu_events
from keepstep.sources.snapshots.samples import Building, GpuSample

GPU_KEYS = frozenset({"gpus", "begin", "answering", "taken_at"})
PORT_KEYS = frozenset({"begin", "end", "elapsed_s", "taken_at"})
_LEVELS = {
    "ecc_volatile": "ecc_uncorrected_volatile",
    "ecc_aggregate": "ecc_uncorrected_aggregate",
    "remap_pending": "remap_pending",
    "remap_failed": "remap_failed",
    "recovery_action": "recovery",
}
"""Fields of a GPU's record -> names of levels."""


def gpu_report_events(record: dict[str, Any], document: Document, catalog: Catalog) -> list[Event]:
    """What changed on GPUs between the begin of the cycle and its failure, and GPUs that do not answer.

    A count or a state that was there before is no news of this failure; without a reading of the begin nothing is known to be new.
    Raises KeyError, TypeError or ValueError where the record is not whole.
    """
    begin = {gpu["uuid"]: gpu for gpu in record["begin"] or []}
    samples = [sample for gpu in record["gpus"] if (sample := _sample(gpu, begin.get(gpu["uuid"], gpu))) is not None]
    return _at(gpu_events(samples, document, catalog), record["taken_at"])


def _sample(gpu: dict[str, Any], before: dict[str, Any]) -> GpuSample | None:
    building = Building()
    building.identity = {"index": str(gpu["index"]), "uuid": str(gpu["uuid"] or ""), "pci": str(gpu["pci"] or "")}
    for name, level in _LEVELS.items():
        value = gpu.get(name)
        if value is not None and value != before.get(name):
            text = {True: "Yes", False: "No"}[value] if isinstance(value, bool) else str(value)
            building.set(BY_NAME[level], text, None)
    if gpu["answering"] is False:
        building.lost = Line(1, "the GPU does not answer", "the GPU does not answer")
    return building.finish()


def port_report_events(record: dict[str, Any], document: Document, catalog: Catalog) -> list[Event]:
    """Ports and error counters of InfiniBand and RoCE devices, from the begin of the cycle to its failure.

    Raises KeyError, TypeError or ValueError where the record is not whole.
    """
    begin, end = (ibsysfs.reading_of(record[name] or {}) for name in ("begin", "end"))
    events = ibsysfs.events_of(begin, end, float(record["elapsed_s"]), catalog)
    placed = [
        msgspec.structs.replace(e, evidence=msgspec.structs.replace(e.evidence, path=document.path)) for e in events
    ]
    return _at(placed, record["taken_at"])


def _at(events: list[Event], taken_at: str) -> list[Event]:
    time_ns = from_rfc3339(taken_at)
    return [msgspec.structs.replace(e, time_ns=time_ns, time_quality="exact") for e in events]
