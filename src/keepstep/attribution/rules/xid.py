"""Xids together: what each means beside the others of its GPU, of other GPUs, and of earlier times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keepstep.attribution.current import begin_after, end_of
from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING
from keepstep.catalog.load import Catalog
from keepstep.catalog.xid import NVLINK5_CODES
from keepstep.records.event import Event
from keepstep.records.verdict import NODE_ACTIONS

APPLICATION = frozenset({13, 31, 32, 43, 68, 69})
"""Codes that programs cause."""
TEARDOWN = frozenset({43, 45})
"""What is left when a program ends: channels are reset and removed."""
UNCORRECTED = frozenset({48, 94, 95, 140, 171, 172})
GSP = frozenset({119, 120})
OTHER_TIME_S = 600.0
"""Two of one code this far apart are two faults, not one that is printed again."""
SUSPECT_PROGRAMS = 3
"""Different processes that one GPU stopped with the same code, from which on it is a suspect. Two may be one job that came
again."""

GSP_BRANCHES = {515: 9999, 520: 9999, 525: 147, 530: 9999, 535: 129, 545: 9999, 550: 90}
"""Driver branches whose GSP firmware is known to stop answering on healthy GPUs, with the first minor release without the
best-known of these faults (9999: none). Reports: open-gpu-kernel-modules #446, #739; release notes of 525.147, 535.129, 550.90."""

_WANTS = ("reset", "reboot", "drain_p2p", "drain_and_reset")


class Xid(NamedTuple):
    """An Xid event. `gpu`: one name for the GPU, with its node."""

    code: int
    gpu: tuple[str | None, str]
    event: Event


def read(events: Iterable[Event]) -> list[Xid]:
    """All Xids, in the order of their events, which is canonical."""
    found = []
    for event in events:
        code = str(event.attrs.get("xid", ""))
        if event.kind == "gpu.xid" and code.isdigit() and len(code) < 6:
            gpu = event.gpu
            name = "" if gpu is None else gpu.pci or gpu.uuid or str(gpu.index)
            found.append(Xid(int(code), (event.node, name), event))
    return found


def xids(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What the Xids of an incident say together."""
    found = read(events)
    if not found:
        return old_gauges(events, catalog)
    named = _named_causes(found, catalog)
    return [
        *named,
        *_teardown(found, events, catalog),
        *_recovered(found, catalog),
        *_nonfatal_links(found, catalog),
        *_link_victim(found, catalog),
        *_applications(found, catalog),
        *_gsp(found, events, catalog),
        *_no_rows(found, events, catalog),
        *_reset_due(found, events, catalog),
        *_driver_wants(found, catalog),
    ]


def old_gauges(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Gauges of a last Xid beside a diagnostic that passed, where no Xid itself is in the text: they kept an old value."""
    if any(e.kind == "gpu.xid" for e in events) or not any(e.signature == "dcgm.diag_passed" for e in events):
        return []
    return [derive(catalog, "derived.xid.old_gauge", e) for e in events if e.signature == "gpu.xid_gauge"][:1]


def _named_causes(found: Sequence[Xid], catalog: Catalog) -> list[Event]:
    """The Xid that a 45 names as its cause, where that one itself is nowhere in the text: the driver has said that it was there."""
    seen = {x.code for x in found}
    named: dict[tuple[int, tuple[str | None, str]], Event] = {}
    for one in found:
        cause = str(one.event.attrs.get("cause_xid", ""))
        if one.code == 45 and cause.isdigit() and int(cause) not in seen and f"xid.{cause}" in catalog:
            event = derive(catalog, f"xid.{cause}", one.event, attrs={"xid": cause, "named_by": "45"})
            named.setdefault((int(cause), one.gpu), event)
    return list(named.values())


def _teardown(found: Sequence[Xid], events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Only channels that were removed, and nothing else that failed: programs ended, the GPUs are well."""
    if not {x.code for x in found} <= TEARDOWN or any(x.event.attrs.get("cause_xid") for x in found):
        return []
    own = {id(x.event) for x in found}
    failing = [e for e in events if id(e) not in own and catalog[e.signature].role in FAILING]
    if failing:
        return []
    return [derive(catalog, "derived.xid.teardown", event) for event in _last_of_each(found)]


def _last_of_each(found: Sequence[Xid]) -> list[Event]:
    last: dict[tuple[str | None, str], Event] = {}
    for one in found:
        last[one.gpu] = one.event
    return list(last.values())


def _recovered(found: Sequence[Xid], catalog: Catalog) -> list[Event]:
    """GPUs for which the driver's newest word is that nothing is needed any more."""
    recovered = []
    for said in by_gpu(x for x in found if x.code == 154).values():
        # Lines that say the same are one event; the newest word is the one that was said last.
        own = sorted(said, key=lambda x: canonical(end_of(x.event)))
        words = [str(x.event.attrs.get("recovery_action", "")) for x in own]
        if words[-1] == "none" and any(w in _WANTS for w in words[:-1]):
            recovered.append(derive(catalog, "derived.xid.recovered", own[-1].event))
        elif len(set(words)) > 1 and words[-1] in _WANTS:
            # Only the newest word counts: the earlier ones are taken back.
            outdated = [f"xid.154.{w}" for w in set(words[:-1]) - {words[-1]} if w in _WANTS]
            recovered += (
                [derive(catalog, "derived.xid.superseded", own[-1].event, explains=outdated)] if outdated else []
            )
    return recovered


def _driver_wants(found: Sequence[Xid], catalog: Catalog) -> list[Event]:
    """What the driver wants for a GPU, where nothing else in the text says why."""
    explained = {x.gpu for x in found if x.code != 154 and x.code not in TEARDOWN}
    wanted = []
    for gpu, own in by_gpu(x for x in found if x.code == 154).items():
        word = str(own[-1].event.attrs.get("recovery_action", ""))
        if gpu not in explained and word in _WANTS:
            said = [x.event.signature for x in own]
            wanted.append(derive(catalog, f"derived.xid.wants_{word}", own[0].event, explains=sorted(set(said))))
    return wanted


def _reset_due(found: Sequence[Xid], events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A row that waits for a reset on a GPU that works: steps were made after it, whatever the error had ended before."""
    waiting = [x for x in found if x.code == 63]
    steps = [e for e in events if e.kind == "job.progress"]
    broken = {x.gpu for x in found if x.code not in (63, 94, 92) and x.code not in TEARDOWN and x.code != 154}
    explains = ["xid.63", "xid.94", "xid.94.reset", "gpu.remap_pending"]
    return [
        derive(catalog, "derived.xid.reset_due", x.event, explains=explains)
        for x in waiting[:1]
        if x.gpu not in broken and any(begin_after(x.event, step) for step in steps)
    ]


def _nonfatal_links(found: Sequence[Xid], catalog: Catalog) -> list[Event]:
    """Link errors that the driver itself calls non-fatal, whatever a monitor made of them."""
    links = [x for x in found if x.code in NVLINK5_CODES]
    said = [x for x in links if "fatal" in x.event.attrs]
    others = [x for x in found if x.code not in NVLINK5_CODES and x.code not in TEARDOWN and not _wants_nothing(x)]
    if not said or others or any(x.event.attrs["fatal"] != "no" for x in said):
        return []
    if any(catalog[x.event.signature].action in NODE_ACTIONS for x in said):
        return []  # the registers say more than the word
    return [derive(catalog, "derived.xid.nonfatal", event) for event in _last_of_each(said)]


def _wants_nothing(one: Xid) -> bool:
    return one.code == 154 and one.event.attrs.get("recovery_action") == "none"


def _link_victim(found: Sequence[Xid], catalog: Catalog) -> list[Event]:
    """The GPU whose link failed, where its peers report it too: fatal there, and the driver wants something for that one."""
    fatal = [x for x in found if x.code in NVLINK5_CODES and x.event.attrs.get("fatal") == "yes"]
    wanted = {x.gpu: str(x.event.attrs.get("recovery_action", "")) for x in found if x.code == 154}
    hit = [x for x in fatal if wanted.get(x.gpu) in _WANTS] or fatal[:1]
    gpus = {x.gpu for x in hit}
    others = {x.gpu for x in found if x.code in NVLINK5_CODES or x.code == 45} - gpus
    if len(gpus) != 1 or not others:
        return []
    victim = hit[0]
    effects = sorted(
        {x.event.signature for x in found if x.gpu in others} - {x.event.signature for x in fatal if x.gpu in gpus}
    )
    reboot = wanted.get(victim.gpu) == "reboot"
    signature = "derived.xid.link_victim_reboot" if reboot else "derived.xid.link_victim"
    return [derive(catalog, signature, victim.event, explains=[*effects, "xid.45"], attrs={"peers": len(others)})]


def _applications(found: Sequence[Xid], catalog: Catalog) -> list[Event]:
    """Codes of programs: on several GPUs it is the program; always on one GPU, under different programs, the GPU is a suspect."""
    concluded = []
    own = [x for x in found if x.code in APPLICATION]
    others = [x for x in found if x.code not in APPLICATION and x.code != 45 and not _wants_nothing(x)]
    for code in sorted({x.code for x in own} - TEARDOWN):
        gpus = by_gpu(x for x in own if x.code == code)
        count = distinct_gpus(x.event for x in own if x.code == code)
        if count > 1:
            first = next(iter(gpus.values()))[0].event
            attrs = {"xid": str(code), "gpus": count}
            concluded.append(derive(catalog, "derived.xid.workload", first, attrs=attrs, placed=False))
            continue
        members = max(gpus.values(), key=len)
        if not others and suspicious(code, members) and distinct_gpus(x.event for x in own) <= 1:
            attrs = {"xid": str(code), "programs": len(programs(members))}
            event = derive(
                catalog, "derived.xid.suspect", members[0].event, attrs=attrs, explains=[f"xid.{code}", "xid.43"]
            )
            concluded.append(event)
    return concluded


def distinct_gpus(events: Iterable[Event]) -> int:
    """How many GPUs events are of, for certain: a PCI address and an index may be two names of one."""
    names: dict[str, set[object]] = {"pci": set(), "uuid": set(), "index": set()}
    for event in events:
        if event.gpu is not None:
            for kind, known in names.items():
                value = getattr(event.gpu, kind)
                if value is not None:
                    known.add(value)
    return max(len(found) for found in names.values())


def suspicious(code: int, members: Sequence[Xid]) -> bool:
    """Whether one GPU stopped different programs with the same code; for 13 in the same corner of the chip."""
    if code == 13:
        units = {(x.event.attrs["gpc"], x.event.attrs.get("tpc")) for x in members if "gpc" in x.event.attrs}
        if len(units) > 1:
            return False
    names = {str(x.event.attrs["name"]) for x in members if x.event.attrs.get("name")}
    count = len(programs(members))
    return count >= SUSPECT_PROGRAMS or (count >= 2 and len(names) >= 2)


def programs(members: Sequence[Xid]) -> set[str]:
    """The processes that were stopped; where none is named, the times that lie far enough apart."""
    pids = {str(x.event.attrs["pid"]) for x in members if x.event.attrs.get("pid")}
    if pids:
        return pids
    times = sorted(x.event.time_ns for x in members if x.event.time_ns is not None)
    apart = [t for i, t in enumerate(times) if not i or t - times[i - 1] > OTHER_TIME_S * 1e9]
    return {str(t) for t in apart}


def _gsp(found: Sequence[Xid], events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A GPU's system processor that does not answer, under a driver that is known for it, with nothing else wrong with the GPU."""
    stopped = [x for x in found if x.code in GSP]
    broken = {x.gpu for x in found if x.code in UNCORRECTED or x.code in (74, 79, 62)}
    versions = [str(e.attrs.get("version", "")) for e in events if e.signature == "driver.version"]
    known = next((v for v in versions if known_gsp_bug(v)), None)
    if known is None:
        return []
    own = [x for x in stopped if x.gpu not in broken]
    return [derive(catalog, "derived.xid.gsp_driver", x.event, attrs={"version": known}) for x in own[:1]]


def _no_rows(found: Sequence[Xid], events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A memory error whose row could not be set aside: that decides, whatever error came first."""
    errors = [x for x in found if x.code in UNCORRECTED]
    failed = [x for x in found if x.code == 64]
    state = [e for e in events if e.signature == "gpu.remap_failed"]
    own = [x for x in errors if any(f.gpu == x.gpu for f in failed) or state]
    explains = ["xid.48", "xid.63", "xid.64", "xid.94", "xid.95", "xid.171", "gpu.remap_pending"]
    return [derive(catalog, "derived.xid.no_rows", x.event, explains=explains) for x in own[:1]]


def known_gsp_bug(version: str) -> bool:
    """Whether a driver version is of a series known for GSP time-outs."""
    parts = version.split(".")
    if len(parts) < 2 or not all(p.isdigit() and len(p) < 5 for p in parts[:2]):
        return False
    return int(parts[1]) < GSP_BRANCHES.get(int(parts[0]), 0)


def degrading(events: Sequence[Event], past: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Memory of a GPU that failed again after it was repaired, or again and again: setting rows aside does not keep up."""
    now = by_gpu(x for x in read(events) if x.code in UNCORRECTED and x.code != 94)
    before = by_gpu(
        x
        for x in read(past)
        if x.code in UNCORRECTED | {63} and x.event.stale in ("previous_boot", "before_repair", "cleared")
    )
    found = []
    for gpu, own in now.items():
        earlier = before.get(gpu, [])
        again = sorted({x.event.time_ns or 0 for x in own if x.code == 48 and x.event.time_ns is not None})
        apart = len(again) > 1 and again[-1] - again[0] > OTHER_TIME_S * 1e9
        if earlier or apart:
            attrs = {"times": len(own) + len(earlier), "after_repair": bool(earlier)}
            explains = ["gpu.remap_pending", "xid.63", "xid.94"]
            found.append(derive(catalog, "derived.xid.degrading", own[0].event, attrs=attrs, explains=explains))
    return found


def by_gpu(found: Iterable[Xid]) -> dict[tuple[str | None, str], list[Xid]]:
    """Xids by GPU, each in canonical order."""
    groups: dict[tuple[str | None, str], list[Xid]] = defaultdict(list)
    for one in sorted(found, key=lambda x: canonical(x.event)):
        groups[one.gpu].append(one)
    return groups
