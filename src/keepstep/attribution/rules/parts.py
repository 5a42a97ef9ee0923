"""A part against its peers, a run against its twin: GPUs that alone do not come up, memory that fails in each run, disks of an
array, an upload that the others wait for, a resume that leaves the run it came from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import before, number, of
from keepstep.attribution.rules.resumes import SECOND_LIVES
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 128
LEAST_ALIKE = 2
TIMES = 2
ENOUGH_TIMES = 3
"""Runs that fail alike from which on it needs no other machine that works."""
IDLE = frozenset({"idle"})
SAME = 1e-4
"""Share by which the first losses of two runs may differ."""
APART = 0.01
"""Share by which a later one differs: kernels that add in another order make less."""
_RUN = re.compile(r"(?i)\b(?:attempt|run|restart|cycle|try|job)[ =#:_-]{0,2}(?P<number>\d{1,9})\b")
_HOST = re.compile(r"\b[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*\d+\b")


def init_failed_of_alike(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The few GPUs that do not come up, on a machine where the driver shows all others."""
    failed = of(events, "nvrm.init_failed")[:MOST]
    devices: set[object] = {e.gpu.pci for e in failed if e.gpu is not None and e.gpu.pci}
    devices = devices or {e.attrs.get("minor") for e in of(events, "nvrm.minor_failed")}
    shown, fitted = _counts(events, "gpus"), _counts(events, "devices", "nvidia devices")
    if not failed or not devices or len(shown) != 1 or len(fitted) != 1:
        return []
    (works,), (there,) = shown, fitted
    if works + len(devices) != there or works < LEAST_ALIKE * len(devices):
        return []
    attrs = {"failed": len(devices), "of": there}
    explains = ["nvrm.init_failed"]
    return [derive(catalog, "derived.gpu.init_failed_of_alike", failed[0], attrs=attrs, explains=explains)]


def _counts(events: Sequence[Event], *what: str) -> set[int]:
    counts = [e.attrs.get("count") for e in of(events, "command.count") if e.attrs.get("what") in what]
    return {c for c in counts if isinstance(c, int)}


def ecc_each_run(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Memory that fails for one rank of one machine in several runs, whose titles name both."""
    runs: dict[tuple[str, int | None], dict[int, Event]] = defaultdict(dict)
    for event in of(events, "cuda.ecc")[:MOST]:
        place, run = _place(event), _RUN.search(event.source)
        if place is not None and run is not None:
            runs[place, event.rank].setdefault(int(run["number"]), event)
    steps = [e for e in events if e.kind == "job.progress"]
    for (place, _), seen in runs.items():
        newest = max(seen)
        elsewhere = any(_place(s) not in (None, place) for s in steps)
        # A later run on the same machine that works takes it back.
        well = any(
            _place(s) == place and (run := _RUN.search(s.source)) is not None and int(run["number"]) > newest
            for s in steps
        )
        if not well and (len(seen) >= ENOUGH_TIMES or (len(seen) >= TIMES and elsewhere)):
            attrs = {"place": place, "times": len(seen)}
            first, explains = seen[min(seen)], ["cuda.ecc"]
            return [derive(catalog, "derived.gpu.ecc_each_run", first, attrs=attrs, explains=explains, node=place)]
    return []


def _place(event: Event) -> str | None:
    """The machine of an event: its own, else the only one that the title above it names."""
    if event.node is not None:
        return event.node
    names = {w for w in _HOST.findall(_RUN.sub(" ", event.source)) if not re.fullmatch(r"(?i)(?:rank|gpu|step)\d+", w)}
    return names.pop() if len(names) == 1 else None


def raid_degraded(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A disk that the kernel has put out of an array; whether a job is on the machine decides what to do."""
    failed = of(events, "md.member_failed")[:MOST]
    if not failed or any(not before(e, failed[-1]) for e in of(events, "md.recovered")):
        return []
    states = of(events, "command.node_state")[:MOST]
    own = [s for s in states if failed[0].node in (None, s.node)]
    idle = bool(own) and all(s.attrs.get("state") in IDLE for s in own)
    steps = any(e.kind == "job.progress" for e in events)
    signature = "derived.raid.degraded_idle" if idle and not steps else "derived.raid.degraded"
    attrs = {"member": failed[0].attrs.get("member")}
    node = own[0].node if own else None
    return [derive(catalog, signature, failed[0], attrs=attrs, explains=["block.io_error"], node=node)]


def upload_stalled(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A save that others wait for, where the stack of a rank in it stands in an object store's client."""
    stalled, stacks = of(events, "derived.ckpt.stalled"), of(events, "stack.object_store")[:MOST]
    saving = of(events, "ckpt.at_work")[:MOST]
    for stack in stacks:
        if stalled and any((s.evidence.path, s.source) == (stack.evidence.path, stack.source) for s in saving):
            explains = ["derived.ckpt.stalled"]
            return [derive(catalog, "derived.ckpt.upload_stalled", stalled[0], explains=explains, placed=False)]
    return []


def runs_part(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A resumed run whose first loss is that of the continuous one, and whose later ones are worse and worse."""
    series = of(events, "loss.series")[:MOST]
    lives = of(events, *SECOND_LIVES)
    resumed = [s for s in series if any((e.evidence.path, e.source) == _text(s) for e in lives)]
    whole = [s for s in series if s not in resumed]
    if len(resumed) != 1 or len(whole) != 1:
        return []
    one, other = _losses(whole[0]), _losses(resumed[0])
    common = sorted(set(one) & set(other))
    if len(common) < 2 or min(one) >= min(other):
        return []
    first, last = common[0], common[-1]
    near = abs(one[first] - other[first]) <= SAME * abs(one[first])
    if not near or other[last] - one[last] <= APART * abs(one[last]):
        return []
    attrs: dict[str, Any] = {"step": last, "one": one[last], "other": other[last]}
    return [derive(catalog, "derived.ckpt.runs_part", resumed[0], attrs=attrs, placed=False)]


def _text(event: Event) -> tuple[str, str]:
    return event.evidence.path, event.source


def _losses(series: Event) -> dict[int, float]:
    values = series.attrs.get("losses")
    if not isinstance(values, list):
        return {}
    return {step: float(loss) for step, loss in values if number(step) is not None and isinstance(loss, int | float)}


PART_RULES = (init_failed_of_alike, ecc_each_run, raid_degraded, upload_stalled, runs_part)
"""Each: `(events, catalog) -> list[Event]`."""
