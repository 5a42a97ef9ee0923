"""What is said of a job or a machine from outside, and what refutes it: steps after a probe, peers that are all alike, counters
that stand still, readings that cannot be.

All of it calms only where nothing failed by its own word: what the kernel, the driver or the job said stays.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import failed_inside, number, of
from keepstep.attribution.worked import worked
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 256
SLOW_FIRST = 3.0
"""Times the usual: from this on the first one is no ordinary variation."""
ALIKE = 1.3
"""Later ones vary by less than this around their median."""
LEAST_LATER = 3
APART = 0.5
"""Share by which a sample that is out of line differs from all others."""
BUSY = 90.0
AT_LIMIT = (0.95, 1.1)
"""Share of its power limit that a GPU at full work draws; readings overshoot a little."""
CLOCKS_ALIKE = 0.85
"""Slowest of the fastest: silicon differs by a few percent."""
FEW = 3
"""Corrected errors that are a single event."""
STILL_SAMPLES = 8
IMPOSSIBLE = 1.5
"""Times the limit. Peaks above it last milliseconds and reach 1.2."""


def tool_alone(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A tool's own traceback with nothing else that failed, and nobody who says that the job stands still."""
    raised = of(events, "python.tool_exception")
    if not raised or of(events, "fact.hang_told") or failed_inside(events, catalog):
        return []
    return [derive(catalog, "derived.tool_alone", min(raised, key=canonical), placed=False)]


def probe_outlived(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Probes that were not answered, each followed by steps; what else is said in the same lines is the same news."""
    probes = of(events, "probe.unanswered")[:MOST]
    signs = worked(events, catalog)
    if not probes or not all(signs.after(p) for p in probes):
        return []
    # An event stands for all that say the same: the other one may not stand for more lines than the probe.
    lines = {(p.evidence.path, p.evidence.line): p.count for p in probes}
    others = of(events, "monitor.cannot_look")
    if not others or any(o.count > lines.get((o.evidence.path, o.evidence.line), 0) for o in others):
        return []
    return [derive(catalog, "derived.probe.outlived", max(probes, key=canonical), placed=False)]


def slow_for_once(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A complaint about one epoch or step, after which all were alike and fast: the first one, or one among others."""
    complaints = of(events, "fact.slow_complaint")
    if not complaints or failed_inside(events, catalog, "slow."):
        return []
    for series in of(events, "pace.series")[:MOST]:
        at = _odd_one(_numbers(series, "seconds"))
        lines, numbers = _numbers(series, "lines"), _numbers(series, "numbers")
        if at is None or len(lines) != len(numbers) or len(lines) < at + 3 or numbers != sorted(numbers):
            continue
        # A complaint is of the odd one where it stands before the second one after it.
        within = all(c.evidence.path == series.evidence.path for c in complaints)
        if not within or not all(lines[at] <= (c.evidence.line or 0) < lines[at + 2] for c in complaints):
            continue
        began = numbers[0] <= 1 or bool(of(events, "ckpt.resumed"))
        if at == 0 and not began:
            continue
        signature = "derived.slow_once" if at else _warm_up(series, events)
        return [derive(catalog, signature, series, attrs={"unit": series.attrs.get("unit")}, placed=False)]
    return []


def _warm_up(series: Event, events: Sequence[Event]) -> str:
    share = series.attrs.get("data_share")
    if series.attrs.get("compiles") is True:
        return "derived.warm_up.compile"
    of_data = (isinstance(share, float) and share > 0.5) or bool(of(events, "fact.file_cache"))
    return "derived.warm_up.data" if of_data else "derived.warm_up"


def _odd_one(values: Sequence[float]) -> int | None:
    """The place of the only value far above all others, which are alike and some of which come after it."""
    if len(values) < LEAST_LATER + 1:
        return None
    at = max(range(len(values)), key=lambda i: values[i])
    rest = [v for i, v in enumerate(values) if i != at]
    usual = statistics.median(rest)
    odd = usual > 0 and values[at] >= SLOW_FIRST * usual and max(rest) <= ALIKE * usual
    return at if odd and len(values) - 1 - at >= LEAST_LATER else None


def single_sample(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An alarm for a level that one sample alone had, between others that are alike."""
    alarms, series = of(events, "fact.level_alarm"), of(events, "fact.sample_series")
    if not alarms or not series or failed_inside(events, catalog):
        return []
    values = {number(a.attrs.get("value")) for a in alarms}
    for one in series[:MOST]:
        points = [float(p) for p in re.findall(r"\d{1,9}(?:\.\d{1,3})?", str(one.attrs.get("series") or ""))]
        at = _apart(points)
        if at is not None and values == {int(points[at])}:
            return [derive(catalog, "derived.alarm.single_sample", max((*alarms, one), key=canonical), placed=False)]
    return []


def _apart(points: Sequence[float]) -> int | None:
    """The place of the only sample out of line, above or below, with samples on both sides; the others within a tenth."""
    if len(points) < STILL_SAMPLES:
        return None
    usual = statistics.median(points)
    far = [i for i, p in enumerate(points) if abs(p - usual) > APART * usual]
    others = [p for i, p in enumerate(points) if i not in far]
    alike = usual > 0 and all(abs(p - usual) <= 0.1 * usual for p in others)
    return far[0] if len(far) == 1 and alike and 0 < far[0] <= len(points) - 1 - LEAST_LATER else None


def _numbers(event: Event, name: str) -> list[float]:
    """A list of numbers as it was read; events that were stored and read again may hold anything."""
    raw = event.attrs.get(name)
    values = raw if isinstance(raw, list) else []
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]


def all_at_limit(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """GPUs at full work, all at their power limit and alike, with no other reason for their clocks."""
    samples = [e for e in of(events, "gpu.sample")[:MOST] if "power" in _levels(e)]
    if len(samples) < 2 or failed_inside(events, catalog, "gpu.sw_power"):
        return []
    clocks = [_value(s, "clock_sm") for s in samples]
    if not all(_works_at_limit(s) for s in samples) or not all(c > 0 for c in clocks):
        return []
    limits = [_value(s, "power_limit") for s in samples]
    if min(clocks) < CLOCKS_ALIKE * max(clocks) or min(limits) < AT_LIMIT[0] * max(limits):
        return []
    last = max(samples, key=canonical)
    return [derive(catalog, "derived.alarm.all_at_limit", last, attrs={"gpus": len(samples)}, placed=False)]


def _works_at_limit(sample: Event) -> bool:
    levels = _levels(sample)
    draw, limit, default = (_value(sample, n) for n in ("power", "power_limit", "power_default"))
    other = any(levels.get(n) is True for n in levels if str(n).startswith("reason_") and n != "reason_sw_power_cap")
    lowered = default > 0 and limit < 0.9 * default  # somebody set it so: a matter of its own
    held = levels.get("reason_sw_power_cap") is True
    busy = _value(sample, "utilisation") >= BUSY
    return held and busy and not other and not lowered and AT_LIMIT[0] * limit <= draw <= AT_LIMIT[1] * limit


def _levels(sample: Event) -> dict[str, Any]:
    levels = sample.attrs.get("levels")
    return levels if isinstance(levels, dict) else {}


def _value(sample: Event, name: str) -> float:
    """A level; -1 where it was not read."""
    value = _levels(sample).get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0


def settled(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An alarm for a few corrected errors of a counter that has stood still since."""
    alarms = of(events, "fact.counter_alarm")
    still = of(events, "fact.counter_still")
    values = [number(a.attrs.get("value")) for a in alarms]
    if not alarms or not still or failed_inside(events, catalog):
        return []
    if not all(v is not None and v <= FEW for v in values) or not all(_stands(s) for s in still):
        return []
    return [derive(catalog, "derived.alarm.settled", max((*alarms, *still), key=canonical), placed=False)]


def _stands(event: Event) -> bool:
    """Whether a series ends in many equal samples of a small number; what is said in words is believed."""
    series = event.attrs.get("series")
    if not isinstance(series, str):
        return True
    points = [int(p) for p in re.findall(r"\d{1,6}", series)]
    return len(points) > STILL_SAMPLES and len(set(points[-STILL_SAMPLES:])) == 1 and points[-1] <= FEW


def reading_stuck(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A GPU that reads busy without anybody on it, and on which a program ran at full speed."""
    claims = of(events, "fact.busy_unowned", "fact.load_unowned")
    beside = of(events, "fact.probe_beside_peers")
    works = [*of(events, "fact.probe_worked"), *beside]
    if not claims or not works or failed_inside(events, catalog) or not all(_as_fast(e) for e in works):
        return []
    return [derive(catalog, "derived.alarm.reading_stuck", max((*claims, *works), key=canonical), placed=False)]


AS_FAST = 0.95
_BESIDE = re.compile(
    r"(?i)(?P<value>\d{1,7}(?:\.\d{1,4})?) ?[GTP]FLOP\w{0,2}(?:/s)?\s{0,3}\((?:[a-z]{1,10} ){0,2}[a-z]{2,10}[ \d,-]{0,30}?[:=]? ?"
    r"(?P<low>\d{1,7}(?:\.\d{1,4})?)(?=\.\.|[ )-]|$)"
)
"""What a program reached, and the least that stands beside it for peers."""


def _as_fast(probe: Event) -> bool:
    """Whether a program ran as fast as on the peers that stand beside it; True where none do."""
    low, value = probe.attrs.get("low"), probe.attrs.get("value")
    if low is None:
        told = _BESIDE.search(probe.evidence.text)
        low, value = (told["low"], told["value"]) if told is not None else (None, None)
    if low is None or value is None:
        return True
    return float(str(value)) >= AS_FAST * float(str(low))


def power_impossible(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Power far above what the board may draw; where a peer under other versions reads well, those are what differs."""
    readings = [(e, *_power(e)) for e in of(events, "fact.power_reading")[:MOST]]
    wrong = [(e, d, lim) for e, d, lim in readings if 0 < IMPOSSIBLE * lim < d]
    right = [e for e, d, lim in readings if 0 < d <= AT_LIMIT[1] * lim]
    if not wrong:
        return []
    event, draw, limit = wrong[0]
    differs = any(_versions(event) and _versions(r) and _versions(event) != _versions(r) for r in right)
    signature = "derived.power.impossible_here" if differs else "derived.power.impossible"
    explains = ["gpu.sw_thermal", "derived.gpu.clock_low", "derived.straggler.constant", "derived.straggler.once"]
    attrs = {"draw": draw, "limit": limit}
    return [derive(catalog, signature, event, attrs=attrs, explains=explains)]


def _power(event: Event) -> tuple[float, float]:
    try:
        return float(str(event.attrs.get("draw"))), float(str(event.attrs.get("limit")))
    except ValueError:
        return 0.0, 0.0


def _versions(event: Event) -> frozenset[str]:
    """Versions that the title of its text names."""
    return frozenset(re.findall(r"\b\d+(?:\.\d+)+\S*", event.source))


WAITS_FOR_OTHERS = re.compile(
    r"(?i)(?:read|readinto|readline|recv\w*|open|stat|poll|select|wait|acquire|get|download|request|urlopen|mmap)$"
)
"""Innermost functions of a process that waits for storage, the network or another process."""


def own_data(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """One rank whose host work is slow, and a stack of it in the program's own data code."""
    late = of(events, "derived.straggler.host")
    stacks = [s for s in of(events, "stack.outside")[:MOST] if s.attrs.get("doing") == "data"]
    if len({e.rank for e in late}) != 1 or not stacks:
        return []
    for stack in stacks:
        rank = _rank_of(stack)
        frame, innermost = str(stack.attrs.get("frame") or ""), str(stack.attrs.get("innermost") or "")
        if rank not in (None, late[0].rank) or not frame or WAITS_FOR_OTHERS.match(innermost):
            continue
        attrs = {"about_rank": late[0].rank, "frame": frame}
        return [
            derive(catalog, "derived.straggler.own_data", late[0], attrs=attrs, explains=["derived.straggler.host"])
        ]
    return []


def _rank_of(stack: Event) -> int | None:
    """The rank that a stack is of: that of its writer, or the one in the title of its text."""
    told = re.search(r"(?i)\brank[ =_]?(\d{1,7})\b", stack.source)
    return stack.rank if stack.rank is not None else int(told[1]) if told is not None else None


OUTSIDE_RULES = (
    tool_alone,
    probe_outlived,
    slow_for_once,
    single_sample,
    all_at_limit,
    settled,
    reading_stuck,
    power_impossible,
    own_data,
)
"""Each: `(events, catalog) -> list[Event]`. After those on stragglers and levels of GPUs."""
