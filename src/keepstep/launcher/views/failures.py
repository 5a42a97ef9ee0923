"""How often a run was interrupted, from its journal, for those who look at it from outside."""

from __future__ import annotations

import statistics
from pathlib import Path

from keepstep.goodput.history import HistoryFold
from keepstep.launcher.coordination.journal import read_records
from keepstep.launcher.views.view import is_led
from keepstep.records.cycle import FailureHistory, Goodput


def read_failures(run_dir: Path, now_ns: int) -> FailureHistory | None:
    """Interruptions and node time of a run, None before its first cycle. A run that is led now counts up to `now_ns`.

    One whose launchers are gone without a verdict lost its work: that is a failure, as it will be for the attempt that goes
    on with it.
    """
    fold = HistoryFold()
    attempt = -1
    for record in read_records(run_dir):
        kind = record.get("type")
        if kind == "open" and record.get("attempt") != attempt:
            attempt = record.get("attempt", attempt)
            fold.take_attempt()
        elif kind == "cycle":
            fold.take_cycle(len(record.get("layout") or []), probe=bool(record.get("probe")))
        elif kind == "mark":
            mark = record["mark"]
            fold.take_mark(mark["kind"], mark["t_ns"], mark.get("attrs") or {})
    if is_led(run_dir):
        return fold.history(now_ns)
    fold.take_attempt()
    return fold.history()


def restart_s(goodput: Goodput) -> float | None:
    """Median seconds from a fault to training again over the restarts of a run; None before the first."""
    spent = []
    for before, cycle in zip(goodput.cycles, goodput.cycles[1:], strict=False):
        if before.attempt == cycle.attempt:
            phases = cycle.phases
            spent.append(sum(float(getattr(phases, name)) for name in phases.__struct_fields__))
    return statistics.median(spent) if spent else None
