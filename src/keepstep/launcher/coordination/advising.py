"""Settings of a job that follow the failure rate (`--advice auto`, goodput/settings.py), and marks that say why they changed."""

from __future__ import annotations

from keepstep.goodput.settings import hang_floor, spares_to_wait_for
from keepstep.launcher.coordination.state import JobState, Record


def awaited_spares(job: JobState) -> int:
    """Spares that the first cycle waits for: as many as were asked for, or as are best of these."""
    source, shape = job.shape.advice, job.shape
    if source is None or not shape.spares:
        return shape.spares
    return int(spares_to_wait_for(source, job.failures.history(), shape.nnodes, shape.spares).value)


def advice(job: JobState, cycle: int, nodes: int, now_ns: int) -> list[Record]:
    """Marks of the settings that change with a new cycle on so many nodes. What agents do follows from the same functions."""
    source, shape = job.shape.advice, job.shape
    if source is None:
        return []
    history = job.failures.history()
    settings = [hang_floor(source, history, nodes)]
    if shape.spares:
        settings.append(spares_to_wait_for(source, history, shape.nnodes, shape.spares))
    records = []
    for setting in settings:
        before = job.advised.get(setting.what)
        if setting.value != before:
            record = job.mark("advised", now_ns, **setting.attrs(before))
            record["mark"]["cycle"] = cycle
            records.append(record)
    return records
