"""Forecasts kept in a run folder (`forecasts.jsonl`, one record a line, oldest first), and what became of them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from keepstep.goodput.calibration import Calibration, Forecast, Happened, calibrate, make_forecast
from keepstep.goodput.campaign import RateKnowledge
from keepstep.goodput.history import interrupts
from keepstep.goodput.job import Job, RestartPhases, Tier
from keepstep.goodput.partition import CAUSE_STARTUP, RECOVERY_PHASES, START_PHASES, Partition, partition
from keepstep.launcher.coordination.journal import read_marks
from keepstep.records.codec import from_json, from_rfc3339, rfc3339, to_json
from keepstep.records.errors import StorageError
from keepstep.records.timeline import Mark

FILE = "forecasts.jsonl"
LEFT_OUT = frozenset({"queue", "init", "drain"})
"""Phases that no forecast is about."""
NS_PER_S = 1_000_000_000
ADVICE_DAYS = 30.0
"""What an interval that is chosen anew all the time is a forecast for; comparisons take the time that has passed."""
ADVICE = "advice"
"""Source of forecasts that nobody asked for: the trainer chose an interval."""


def keep(run_dir: Path, forecast: Forecast) -> Path:
    """Append a forecast to those of a run; returns the file. Raises StorageError."""
    path = run_dir / FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, to_json(forecast) + b"\n")  # one write: a reader never sees half a line of it
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"cannot keep the forecast in {path}: {error.strerror}") from error
    return path


def read(run_dir: Path) -> list[Forecast]:
    """The forecasts of a run, oldest first; none without a file. Raises StorageError naming the line that is none."""
    path = run_dir / FILE
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(from_json(line, Forecast))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise StorageError(f"{path} line {number} is no keepstep.forecast/1: {error}") from None
    return found


def calibrations(run_dir: Path, now_ns: int | None = None) -> list[Calibration]:
    """Each forecast of a run beside what happened since, oldest first: those kept, and the trainer's choices of interval.

    `now_ns`: end of a run that goes on. Raises StorageError.
    """
    seen, found = _all(run_dir, now_ns)
    return [_compared(each, seen) for each in found]


def telling(run_dir: Path, now_ns: int | None = None) -> Calibration | None:
    """The forecast that says most, beside what happened since: the first that was kept, else the first choice of an interval after
    a restart was seen, else the first. None without any, or when nothing happened since. Raises StorageError."""
    seen, made = _all(run_dir, now_ns)
    found = [each for each in made if from_rfc3339(each.made_at) < seen.part.end_ns]
    kept = [each for each in found if each.source != ADVICE]
    informed = [each for each in found if each.job.restart.start_s > 0.0]
    chosen = (kept or informed or found)[:1]
    return _compared(chosen[0], seen) if chosen else None


class _Seen(NamedTuple):
    """A run so far. `restarts`: (end of its last part, seconds) of each, in order."""

    marks: Sequence[Mark]
    part: Partition
    restarts: list[tuple[int, float]]


def _all(run_dir: Path, now_ns: int | None) -> tuple[_Seen, list[Forecast]]:
    kept = read(run_dir)
    marks = read_marks(run_dir)
    if not kept and not any(mark.kind == "advised" for mark in marks):
        return _Seen(marks, partition([]), []), []
    part = partition(marks, now_ns=now_ns, whole_history=True)
    seen = _Seen(marks, part, _restarts(part))
    return seen, sorted([*kept, *_advised(seen)], key=lambda each: each.made_at)


class _Chosen(msgspec.Struct, frozen=True):
    """A mark of the trainer's interval and what it was computed from; ranks send it, so it is checked."""

    what: Literal["interval_s"]
    value: Annotated[float, msgspec.Meta(gt=0.0)]
    block_s: Annotated[float, msgspec.Meta(ge=0.0)]
    persist_lag_s: Annotated[float, msgspec.Meta(ge=0.0)]
    nodes: Annotated[int, msgspec.Meta(ge=1)]
    rate_shape: Annotated[float, msgspec.Meta(gt=0.0)]
    rate_node_days: Annotated[float, msgspec.Meta(gt=0.0)]
    dispersion: Annotated[float, msgspec.Meta(ge=1.0)]
    reason: str = ""


def _advised(seen: _Seen) -> list[Forecast]:
    """What each change of the trainer's interval forecast, by what had been measured up to then.

    A restart takes as long as the median of those before it, and no time when there was none.
    """
    found = []
    for mark in seen.marks:
        if mark.kind != "advised":
            continue
        try:
            a = msgspec.convert(mark.attrs, _Chosen)
        except msgspec.ValidationError:
            continue  # another setting, or nothing that makes sense
        rate = RateKnowledge(shape=a.rate_shape, node_days=a.rate_node_days, source="the run", dispersion=a.dispersion)
        before = [seconds for end_ns, seconds in seen.restarts if end_ns <= mark.t_ns]
        job = Job(
            nodes=a.nodes,
            rate_per_node_day=rate.mean,
            interval_s=a.value,
            tiers=(Tier(name="checkpoint", block_s=a.block_s, persist_lag_s=a.persist_lag_s),),
            restart=RestartPhases(start_s=_median(before) or 0.0),
        )
        made_at = rfc3339(mark.t_ns)
        found.append(make_forecast(job, rate, ADVICE_DAYS, made_at=made_at, source=ADVICE, reason=a.reason))
    return found


def _restarts(part: Partition) -> list[tuple[int, float]]:
    """Each restart: what follows a failure is spread over the cycle that failed and the next, whose number names it."""
    spent: dict[int, int] = {}
    ends: dict[int, int] = {}
    for interval in part.intervals:
        recovers = interval.phase in RECOVERY_PHASES
        if (
            (recovers or interval.phase in START_PHASES)
            and interval.cause != CAUSE_STARTUP
            and interval.cycle is not None
        ):
            number = interval.cycle + recovers
            spent[number] = spent.get(number, 0) + interval.end_ns - interval.begin_ns
            ends[number] = interval.end_ns
    return sorted((ends[number], ns / NS_PER_S) for number, ns in spent.items())


def _compared(forecast: Forecast, seen: _Seen) -> Calibration:
    return calibrate(forecast, _happened(seen, from_rfc3339(forecast.made_at)))


def _happened(seen: _Seen, since_ns: int) -> Happened:
    """A run from `since_ns` on. Start-up is left out, the starts after failures are not."""
    wall_ns = productive_ns = 0
    for interval in seen.part.intervals:
        length_ns = interval.end_ns - max(interval.begin_ns, since_ns)
        if length_ns > 0 and interval.phase not in LEFT_OUT and interval.cause != CAUSE_STARTUP:
            wall_ns += length_ns
            productive_ns += length_ns if interval.phase == "productive" else 0
    later = [mark for mark in seen.marks if mark.t_ns >= since_ns]
    commits = [mark for mark in later if mark.kind == "committed" and _whole(mark, "persist_ns")]
    blocks = _blocks(later)
    return Happened(
        wall_s=wall_ns / NS_PER_S,
        productive_s=productive_ns / NS_PER_S if seen.part.reports_steps else None,
        failures=sum(interrupts(mark.kind, mark.attrs) for mark in later),
        interval_s=_median([(b[0] - a[1]) / NS_PER_S for a, b in pairwise(blocks) if a[2] == b[2]]),
        block_s=_median([(end - begin) / NS_PER_S for begin, end, _ in blocks]),
        persist_lag_s=_median([mark.attrs["persist_ns"] / NS_PER_S for mark in commits]),
        restart_s=_median([seconds for end_ns, seconds in seen.restarts if end_ns >= since_ns]),
    )


def _blocks(marks: Sequence[Mark]) -> list[tuple[int, int, int]]:
    """Begin, end and cycle of each time that training stood still for a save, in order."""
    found = [
        (mark.attrs["begin_ns"], mark.attrs["end_ns"], mark.cycle)
        for mark in marks
        if mark.kind == "ckpt_block" and _whole(mark, "begin_ns") and _whole(mark, "end_ns")
    ]
    return sorted(found)


def _whole(mark: Mark, name: str) -> bool:
    value = mark.attrs.get(name)
    return isinstance(value, int) and not isinstance(value, bool)


def _median(values: Sequence[float]) -> float | None:
    kept = [value for value in values if value >= 0.0]
    return statistics.median(kept) if kept else None
