"""Signs of machines, monitors and slow jobs in relation to their peers, to what came after, and to what was changed."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

ALARMS = (
    "condition.",
    "check.",
    "monitor.",
    "dcgm.health",
    "k8s.node_condition",
    "k8s.node_cordoned",
    "slurm.",
    "sched.",
)
"""Beginnings of signatures of what somebody holds against a machine, other than the machine itself."""
WORKS = ("fact.works_now", "fact.test_passed", "job.progress")
LEAST_JOBS = 5
"""Jobs on a machine that all failed, from which on it is the machine."""
LEAST_RUNS = 3
LEAST_HOSTS = 3
"""Machines to which a failure must have followed a job."""
FAST, SLOW = 0.9, 0.8
"""Shares of the median speed."""
FABRIC_SIGNS = (
    "nccl.nvls_failed",
    "nccl.nvls_warning",
    "cuda.system_not_ready",
    "fabricmanager.stopped",
    "fabricmanager.aborted",
    "fabricmanager.error",
)
"""What fails where the fabric manager of a machine did not do its part."""
APPLICATION = frozenset({"13", "31", "43"})
AT_LIMIT = 0.95
MOST = 256

HELD = ("condition.", "monitor.event", "monitor.state", "k8s.node_condition")
STANDSTILL = ("condition.platform", "condition.own", "condition.storage", "condition.other")
LONG_NS = 86_400_000_000_000
_SINCE = re.compile(r"(?i)\b(?:since|transition\w*)\W{1,4}(?P<at>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)")
_GSP_INDEX = re.compile(r"\bGPU(?P<index>\d{1,3}) GSP")
_CODE = re.compile(r"(?i)(?:error ?code|s?xid)\W{0,3}(?P<code>\d{1,4})")


def _failing(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What failed by the word of the machine or the job themselves."""
    return [e for e in events if catalog[e.signature].role in FAILING and not e.signature.startswith(ALARMS)]


def alarm_of_check(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An alarm of a check that was changed, does not fit or holds old totals, where the work goes on and nothing else failed."""
    complaints, works = _complaints(events, catalog), of(events, *WORKS)
    harmless = of(events, "fact.declared_harmless")
    if not (complaints or harmless) or not works or _failing(events, catalog):
        return []
    if harmless:
        return [_last(catalog, "derived.alarm.of_check", events, catalog[harmless[0].signature].title)]
    if of(events, "fact.gauge_zero") and of(events, "fact.gpus_busy"):
        return [_last(catalog, "derived.alarm.of_check", events, "a gauge that stands still beside one that moves")]
    reasons = of(events, "fact.check_changed", "fact.check_does_not_fit", "fact.record_old")
    if reasons:
        return [_last(catalog, "derived.alarm.of_check", events, catalog[reasons[0].signature].title)]
    if of(events, "fact.resolved"):
        return [_last(catalog, "derived.alarm.normal_level", events, catalog["fact.resolved"].title)]
    if any(_outworked(c, works) for c in complaints):
        return [_last(catalog, "derived.alarm.of_check", events, "a condition that the work went on under for days")]
    return []


def _complaints(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What somebody holds against a machine; not what says that it is well."""
    return [
        e
        for e in events
        if e.signature == "fact.alarm" or (e.signature.startswith(ALARMS) and catalog[e.signature].role in FAILING)
    ]


def _outworked(condition: Event, works: Sequence[Event]) -> bool:
    """Whether a condition that claims that the machine stands still (a hung kernel, a dead service) was worked under for a day."""
    since = _SINCE.search(condition.evidence.text[:2000]) if condition.signature in STANDSTILL else None
    stamp = stamp_ns(since["at"]) if since is not None else None
    return stamp is not None and any(w.time_ns is not None and w.time_ns - stamp > LONG_NS for w in works)


def stamp_ns(text: str) -> int | None:
    """UTC ns of an ISO time with Z; None for what is no such time."""
    try:
        return int(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1e9)
    except (ValueError, OverflowError):
        return None


def disk_writable(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A file system that was read-only, with a later mount or a write that worked."""
    bad = of(events, "fs.readonly", "fs.read_only", "condition.storage")[:MOST]
    good = of(events, "fact.disk_writable")[:MOST]
    if not bad or not good:
        return []
    timed = [e.time_ns for e in bad if e.time_ns is not None]
    # How it is now: a mount that takes writes, said below what was said to be wrong.
    untimed = [e for e in good if not timed or e.time_quality in ("none", "neighbour")]
    shown = [e for e in untimed if e.evidence.path == bad[0].evidence.path]
    last_bad = max(_line(e) for e in bad)
    mounted = [e for e in good if e.time_ns is not None and timed and e.time_ns > max(timed)]
    if mounted or any(_line(e) > last_bad for e in shown):
        return [_last(catalog, "derived.disk.writable", events, "writable")]
    return []


def remapped(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """One GPU whose row waited for a reset, and rows of one GPU of which none waits."""
    waiting, settled = of(events, "xid.63"), of(events, "gpu.remap_settled")
    if not waiting or not settled or len({str(e.gpu) for e in waiting}) > 1:
        return []
    if of(events, "gpu.remap_pending", "gpu.remap_failed", "xid.64", "xid.48", "xid.94", "xid.95"):
        return []
    last = max(waiting, key=lambda e: e.evidence.line or 0)
    after = [s for s in settled if s.evidence.path == last.evidence.path]
    if any((s.evidence.line or 0) > (last.evidence.line or 0) for s in after):
        return [_last(catalog, "derived.gpu.remapped", events, "remapped")]
    return []


def alarm_of_replaced(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A record of a machine that is another one by now, which passes its checks."""
    instances = {str(e.attrs.get("instance")) for e in of(events, "fact.instance")}
    replaced = len(instances) > 1 or of(events, "fact.machine_replaced")
    complaints = _complaints(events, catalog)
    if not replaced or not complaints or not of(events, "fact.test_passed"):
        return []
    if any(e.signature.startswith(("xid.", "cuda.", "nvrm.")) for e in _failing(events, catalog)):
        return []
    return [_last(catalog, "derived.alarm.of_replaced", events, "replaced")]


def _last(catalog: Catalog, signature: str, events: Sequence[Event], reason: str) -> Event:
    """An event at the place of the last one: it speaks of how things are in the end."""
    last = max((e for e in events if e.evidence.line), key=canonical, default=events[-1])
    return derive(catalog, signature, last, attrs={"reason": reason}, placed=False)


def normal_level(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The power limit of GPUs at full work, or the low clocks of GPUs at rest, and nothing else."""
    if [e for e in _failing(events, catalog) if not e.signature.startswith(("gpu.sw_power", "gpu.pcie"))]:
        return []
    capped = of(events, "fact.power_capped")
    if capped and any(_at_limit(e) for e in of(events, "fact.at_power_limit")):
        # The check that complains of it is at fault, where one does.
        checked = of(events, "fact.alarm")
        signature = "derived.alarm.of_check" if checked else "derived.alarm.normal_level"
        return [_last(catalog, signature, events, "held by the power limit at full work")]
    idle = of(events, "fact.gpus_idle")
    resting = [e for e in idle if "P8" in e.evidence.text]
    if resting and not of(events, "fact.gpus_busy", "job.progress"):
        return [_last(catalog, "derived.alarm.normal_level", events, "GPUs at rest")]
    return []


def _at_limit(event: Event) -> bool:
    try:
        draw, limit = float(str(event.attrs.get("draw"))), float(str(event.attrs.get("limit")))
    except ValueError:
        return False
    return 0 < AT_LIMIT * limit <= draw <= 1.1 * limit


def quoted_code_over(live: Sequence[Event], past: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A condition that quotes a code of which the driver took back, or a boot ended, every sighting."""
    now = {str(e.attrs.get("xid")) for e in live if e.kind == "gpu.xid"}
    over = {str(e.attrs.get("xid")) for e in past if e.kind == "gpu.xid"} - now
    for event in live:
        if not event.signature.startswith(HELD):
            continue
        codes = _quotes(event)
        if codes and codes <= over:
            return [_last(catalog, "derived.alarm.taken_back", live, "taken back")]
    return []


def machine_drill(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Signs of a machine that were injected: said in their own line, or between the begin of a drill and steps after it."""
    signs = [e for e in events if e.signature.startswith(("xid.", "nvrm."))]
    asked = of(events, "job.drill", "fact.injected")
    if not signs or not asked:
        return []
    lines = {(e.evidence.path, e.evidence.line) for e in asked}
    own = all((s.evidence.path, s.evidence.line) in lines or "/dev/kmsg" in s.source for s in signs)
    first = min(asked, key=_line)
    after = all(s.evidence.path == first.evidence.path and _line(first) <= _line(s) for s in signs)
    if own or (after and of(events, "job.progress", "fact.works_now")):
        return [_last(catalog, "derived.machine_drill", events, "drill")]
    return []


def _line(event: Event) -> int:
    """Where an event stands in its text: drills are told of in lines without a time."""
    return event.evidence.line or 0


def quoted_recovered(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A condition that quotes a code, where the driver's newest word is that nothing is needed any more."""
    if not of(events, "derived.xid.recovered"):
        return []
    takes = catalog["derived.xid.recovered"].clears
    left = {str(e.attrs.get("xid")) for e in events if e.kind == "gpu.xid" and e.signature not in takes}
    over = {str(e.attrs.get("xid")) for e in events if e.kind == "gpu.xid"} - (left - {"154"})
    if any(_quotes(e) and _quotes(e) <= over for e in events if e.signature.startswith(HELD)):
        return [_last(catalog, "derived.alarm.taken_back", events, "taken back")]
    return []


def _quotes(event: Event) -> set[str]:
    return {m["code"] for m in _CODE.finditer(event.evidence.text[:2000])}


def fleet_versions(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A sign of machines that goes with another version or setting, or that all of one image have."""
    signs = [e for e in _failing(events, catalog) if not e.signature.startswith(("slow.", "derived."))]
    found = []
    hardware = [e for e in signs if catalog[e.signature].weights.get("hardware", 0.0) > 0 or e.kind == "gpu.xid"]
    other = of(events, "slow.other_version_fast")
    if other and hardware:
        found.append(_over(catalog, "derived.version.of_fleet", hardware, other[0]))
    image = of(events, "fact.all_of_image")
    if image and signs:
        found.append(_over(catalog, "derived.image.of_fleet", signs, image[0]))
    return found


def _over(catalog: Catalog, signature: str, signs: Sequence[Event], said: Event) -> Event:
    explains = sorted({s.signature for s in signs})
    attrs = {"said": said.evidence.text[:160]}
    return derive(catalog, signature, min(signs, key=canonical), attrs=attrs, explains=explains, placed=False)


def unreadable_firmware(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A GPU of which nothing can be read after its firmware stopped answering, with a reset as all that the driver asks for."""
    stopped = of(events, "xid.119", "xid.120")
    lost = of(events, "gpu.lost")
    wants = of(events, "xid.154.reset")
    gone = [e for e in events if e.signature in ("xid.79", "nvrm.fallen_off_bus", "xid.154.reboot")]
    if not stopped or not wants or gone or len({e.gpu for e in stopped}) > 1:
        return []
    explains = ["gpu.lost", "xid.154.reset", "xid.119", "xid.120"]
    first = min(stopped, key=canonical)
    # The driver prints the index of the GPU, under which tools show it as lost.
    index = _GSP_INDEX.search(first.evidence.text)
    named = [e.gpu for e in lost if e.gpu is not None and index is not None and str(e.gpu.index) == index["index"]]
    gpu = named[0] if len(lost) == 1 and named else None
    return [derive(catalog, "derived.gpu.gsp_unreadable", first, explains=explains, gpu=gpu)]


def persists(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A GPU that the driver could not bring up, or whose memory failed, the same after booting again."""
    if not of(events, "fact.persists"):
        return []
    broken = of(events, "nvrm.init_failed", "cuda.ecc", "xid.48", "xid.95", "xid.62", "gpu.ecc_uncorrected")
    return [derive(catalog, "derived.gpu.persists", broken[0], explains=[broken[0].signature])] if broken else []


def ledgers(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What tables of failures show: that they follow a job over machines, or a machine over jobs."""
    found = []
    for event in of(events, "ledger.runs")[:8]:
        runs = [row for row in _rows(event, "runs", 4) if isinstance(row[1], list)]
        found += _follows_job(event, runs, events, catalog) or _follows_node(event, runs, events, catalog)
        counts = [row for row in _rows(event, "counts", 3) if all(isinstance(n, int) for n in row[1:])]
        found += _counted(event, counts, catalog)
    return found


def _rows(event: Event, name: str, width: int) -> list[list[Any]]:
    """Rows of a table as they were read; events that were stored and read again may hold anything."""
    rows = event.attrs.get(name)
    return [row for row in (rows if isinstance(rows, list) else []) if isinstance(row, list) and len(row) == width]


def _follows_job(event: Event, runs: Sequence[list[Any]], events: Sequence[Event], catalog: Catalog) -> list[Event]:
    codes = {str(r[3]) for r in runs}
    if not codes <= APPLICATION or not runs:
        return []
    hosts: dict[str, set[str]] = defaultdict(set)
    for job, machines, _, _ in runs:
        hosts[str(job)].update(map(str, machines))
    job, reached = max(hosts.items(), key=lambda item: len(item[1]))
    if len(hosts) != 1 or len(reached) < LEAST_HOSTS:
        return []
    attrs = {"job": job, "nodes": len(reached), "others_fine": bool(of(events, "fact.others_fine"))}
    explains = [f"xid.{code}" for code in sorted(codes)]
    return [derive(catalog, "derived.ledger.follows_job", event, attrs=attrs, explains=explains, placed=False)]


def _follows_node(event: Event, runs: Sequence[list[Any]], events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A machine on which different jobs failed and none passed, where jobs passed on others."""
    failed: dict[str, set[str]] = defaultdict(set)
    passed: set[str] = set()
    bad = 0
    if of(events, "slurm.job_node_fail"):
        return []  # the scheduler's own word for it has a rule of its own
    for job, machines, good, code in runs:
        names = [str(m) for m in machines]
        bad += not good and not code
        for name in names:
            if good:
                passed.add(name)
            else:
                failed[name].add(str(job))
    able = sorted((n for n in failed if n not in passed), key=lambda n: -len(failed[n]))
    if not passed or not able or len(failed[able[0]]) < LEAST_RUNS or len(failed[able[0]]) < bad - 1:
        return []
    if len(able) > 1 and len(failed[able[1]]) == len(failed[able[0]]):
        return []
    of_fabric = sorted({e.signature for e in of(events, *FABRIC_SIGNS)})
    signature = "derived.ledger.fabric_of_node" if of_fabric else "derived.ledger.follows_node"
    return [derive(catalog, signature, event, attrs={"node": able[0]}, node=able[0], explains=of_fabric)]


def _counted(event: Event, counts: Sequence[list[Any]], catalog: Catalog) -> list[Event]:
    shares = {str(n): (f, ran) for n, ran, f in counts if ran > 0}
    all_failed = [n for n, (f, ran) in shares.items() if ran >= LEAST_JOBS and f >= 0.9 * ran]
    healthy = [n for n, (f, ran) in shares.items() if ran >= LEAST_JOBS and f <= 0.1 * ran]
    if len(all_failed) != 1 or len(healthy) < 2:
        return []
    return [derive(catalog, "derived.ledger.follows_node", event, attrs={"node": all_failed[0]}, node=all_failed[0])]


def pair_routes(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """One slow pair of machines, each of which is fast with another."""
    for event in of(events, "ledger.pairs")[:8]:
        rows = [row for row in _rows(event, "pairs", 3) if isinstance(row[2], int | float)]
        pairs = [(str(a), str(b), float(speed)) for a, b, speed in rows[:MOST]]
        usual = statistics.median(p[2] for p in pairs) if pairs else 0.0
        slow = [p for p in pairs if p[2] < SLOW * usual]
        fast = {name for a, b, speed in pairs if speed >= FAST * usual for name in (a, b)}
        if len(slow) == 1 and slow[0][0] in fast and slow[0][1] in fast:
            attrs = {"pair": f"{slow[0][0]} - {slow[0][1]}", "speed": slow[0][2], "usual": usual}
            explains = ["derived.node.bandwidth_low"]
            return [derive(catalog, "derived.pair.route", event, attrs=attrs, explains=explains, placed=False)]
    return []


def fewer_devices(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Fewer network devices than other machines have."""
    found = []
    for event in of(events, "ledger.counts")[:1]:
        have, others = event.attrs.get("have"), event.attrs.get("others")
        if isinstance(have, int) and isinstance(others, int) and have < others and event.attrs.get("network"):
            attrs = {"have": have, "others": others}
            found.append(derive(catalog, "derived.devices.fewer", event, attrs=attrs))
    return found


def slow_in_place(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What is known to make all ranks slow, said after the table that shows it: it explains that the slowest one changes."""
    known = [e for e in events if e.signature.startswith("slow.")]
    shown = [e for e in events if e.signature in ("derived.straggler.rotating", "derived.straggler.all_slow")]
    if not known or not shown:
        return []
    first = min(known, key=canonical)
    explains = sorted({e.signature for e in shown})
    return [derive(catalog, first.signature, shown[0], explains=explains, attrs=dict(first.attrs), placed=False)]


MACHINE_RELATION_RULES = (
    ledgers,
    pair_routes,
    fewer_devices,
    fleet_versions,
    unreadable_firmware,
    persists,
    slow_in_place,
    quoted_recovered,
    machine_drill,
    disk_writable,
    remapped,
    alarm_of_replaced,
    normal_level,
    alarm_of_check,
)
"""Each: `(events, catalog) -> list[Event]`."""
