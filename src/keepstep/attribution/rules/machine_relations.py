"""Signs of machines, monitors and slow jobs in relation to their peers, to what came after, and to what was changed."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence

from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import of
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
APPLICATION = frozenset({"13", "31", "43"})
AT_LIMIT = 0.95
LEAST_FLEET = 3
MOST = 256

_CODE = re.compile(r"(?i)(?:error ?code|s?xid)\W{0,3}(?P<code>\d{1,4})")


def _failing(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What failed by the word of the machine or the job themselves."""
    return [
        e
        for e in events
        if catalog[e.signature].role in ("root", "cascade", "symptom") and not e.signature.startswith(ALARMS)
    ]


def alarm_of_check(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An alarm of a check that was changed, does not fit or holds old totals, where the work goes on and nothing else failed."""
    complaints = [e for e in events if e.signature == "fact.alarm" or e.signature.startswith(ALARMS)]
    works = of(events, *WORKS)
    if not complaints or not works or _failing(events, catalog):
        return []
    if of(events, "fact.gauge_zero") and of(events, "fact.gpus_busy"):
        return [_last(catalog, "derived.alarm.of_check", events, "a gauge that stands still beside one that moves")]
    reasons = of(events, "fact.check_changed", "fact.check_does_not_fit", "fact.record_old")
    if not reasons:
        return []
    return [_last(catalog, "derived.alarm.of_check", events, catalog[reasons[0].signature].title)]


def alarm_of_replaced(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A record of a machine that is another one by now, which passes its checks."""
    instances = {str(e.attrs.get("instance")) for e in of(events, "fact.instance")}
    replaced = len(instances) > 1 or of(events, "fact.machine_replaced")
    complaints = [e for e in events if e.signature == "fact.alarm" or e.signature.startswith(ALARMS)]
    if not replaced or not complaints or not of(events, "fact.test_passed"):
        return []
    if any(e.signature.startswith(("xid.", "cuda.", "nvrm.")) for e in _failing(events, catalog)):
        return []
    return [_last(catalog, "derived.alarm.of_replaced", events, "replaced")]


def _last(catalog: Catalog, signature: str, events: Sequence[Event], reason: str) -> Event:
    """An event at the place of the last one: it speaks of how things are in the end."""
    last = max(events, key=canonical)
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
        if not event.signature.startswith(("condition.", "monitor.event", "monitor.state", "k8s.node_condition")):
            continue
        codes = {m["code"] for m in _CODE.finditer(event.evidence.text[:2000])}
        if codes and codes <= over:
            return [_last(catalog, "derived.alarm.taken_back", live, "taken back")]
    return []


def machine_drill(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Signs of a machine that were injected: said in their own line, or between the begin of a drill and steps after it."""
    signs = [e for e in events if e.signature.startswith(("xid.", "nvrm."))]
    asked = of(events, "job.drill")
    if not signs or not asked:
        return []
    lines = {(e.evidence.path, e.evidence.line) for e in asked}
    own = all((s.evidence.path, s.evidence.line) in lines for s in signs)
    first = min(asked, key=canonical)
    after = all(canonical(first) <= canonical(s) for s in signs)
    if own or (after and of(events, "job.progress", "fact.works_now")):
        return [_last(catalog, "derived.machine_drill", events, "drill")]
    return []


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
    return (
        [derive(catalog, "derived.gpu.gsp_unreadable", stopped[0], explains=[e.signature for e in lost[:1]])]
        if lost
        else []
    )


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
        runs = [r for r in event.attrs.get("runs") or () if isinstance(r, list) and len(r) == 4]
        found += _follows_job(event, runs, events, catalog) or _follows_node(event, runs, catalog)
        counts = [c for c in event.attrs.get("counts") or () if isinstance(c, list) and len(c) == 3]
        found += _counted(event, counts, catalog)
    return found


def _follows_job(event: Event, runs: Sequence[list[object]], events: Sequence[Event], catalog: Catalog) -> list[Event]:
    codes = {str(r[3]) for r in runs}
    if not codes <= APPLICATION or not runs:
        return []
    hosts: dict[str, set[str]] = defaultdict(set)
    for job, machines, _, _ in runs:
        hosts[str(job)].update(map(str, machines if isinstance(machines, list) else ()))
    job, reached = max(hosts.items(), key=lambda item: len(item[1]))
    if len(hosts) != 1 or len(reached) < LEAST_HOSTS:
        return []
    attrs = {"job": job, "nodes": len(reached), "others_fine": bool(of(events, "fact.others_fine"))}
    explains = [f"xid.{code}" for code in sorted(codes)]
    return [derive(catalog, "derived.ledger.follows_job", event, attrs=attrs, explains=explains, placed=False)]


def _follows_node(event: Event, runs: Sequence[list[object]], catalog: Catalog) -> list[Event]:
    """A machine on which different jobs failed and none passed, where jobs passed on others."""
    failed: dict[str, set[str]] = defaultdict(set)
    passed: set[str] = set()
    bad = 0
    for job, machines, good, code in runs:
        names = [str(m) for m in machines] if isinstance(machines, list) else []
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
    return [derive(catalog, "derived.ledger.follows_node", event, attrs={"node": able[0]}, node=able[0])]


def _counted(event: Event, counts: Sequence[list[object]], catalog: Catalog) -> list[Event]:
    shares = {str(n): (int(str(f)), int(str(ran))) for n, ran, f in counts if int(str(ran)) > 0}
    all_failed = [n for n, (f, ran) in shares.items() if ran >= LEAST_JOBS and f >= 0.9 * ran]
    healthy = [n for n, (f, ran) in shares.items() if ran >= LEAST_JOBS and f <= 0.1 * ran]
    if len(all_failed) != 1 or len(healthy) < 2:
        return []
    return [derive(catalog, "derived.ledger.follows_node", event, attrs={"node": all_failed[0]}, node=all_failed[0])]


def pair_routes(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """One slow pair of machines, each of which is fast with another."""
    for event in of(events, "ledger.pairs")[:8]:
        pairs = [(str(p[0]), str(p[1]), float(p[2])) for p in event.attrs.get("pairs") or () if len(p) == 3][:MOST]
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
    machine_drill,
    alarm_of_replaced,
    normal_level,
    alarm_of_check,
)
"""Each: `(events, catalog) -> list[Event]`."""
