"""From files to a verdict: sources and attribution wired together, for `keepstep why` and for a job's coordinator.

Run as a program (`python -m keepstep.launcher.diagnosis RUN_DIR CYCLE`) it prints the verdict on one failed cycle: reading large
logs takes memory and time that the coordinator's own process has no room for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from keepstep.attribution.causes import FAILING
from keepstep.attribution.current import windowed
from keepstep.attribution.hang import find_culprits
from keepstep.attribution.history import Past, compared
from keepstep.attribution.incident import Incident as Stretch
from keepstep.attribution.incident import incidents
from keepstep.attribution.places import UNMAPPED, RankMap, map_of_cycle
from keepstep.attribution.verdict import Judgement, judge
from keepstep.catalog.load import Catalog, load, shipped, site_files
from keepstep.catalog.matcher import Matcher
from keepstep.launcher.coordination.incidents import FAILED_CYCLE, Incident
from keepstep.launcher.files import keepstep_home
from keepstep.records.codec import from_json, from_rfc3339, rfc3339, to_json
from keepstep.records.cycle import Cycle
from keepstep.records.event import Event, Evidence
from keepstep.records.hang import Hang
from keepstep.records.verdict import verdict_fields, verdict_of
from keepstep.sources.flightrecorder.files import find_dumps
from keepstep.sources.flightrecorder.reading import read_snapshot
from keepstep.sources.reading import Answered, Reading, read_paths

NICENESS = 10
"""Whatever trains on this host goes first."""
MOST_PAST = 100
"""Earlier incidents of a run that are looked at, the newest: a failure that travels shows in the last few."""
MOST_INCIDENTS = 20
"""Of the incidents in one reading, those that are told apart in an answer, the newest."""
MOST_JUDGED = 100_000
"""Events of all these together that are judged once more. Measured: 5 s."""


class Diagnosis(NamedTuple):
    """A verdict with everything it was made of. `hang`: what flight-recorder dumps among the files say, None without any.

    `events`: what was judged, without the signs of earlier incidents.
    """

    judgement: Judgement
    reading: Reading
    hang: Hang | None
    events: Sequence[Event]


def diagnose(
    paths: Sequence[str],
    ranks: RankMap = UNMAPPED,
    *,
    catalog: Catalog | None = None,
    matcher: Matcher | None = None,
    since_ns: int | None = None,
    until_ns: int | None = None,
    past: Sequence[Past] = (),
    answers: Sequence[Answered] = (),
    jobs: int = 1,
) -> Diagnosis:
    """The verdict on what files and folders tell. `ranks`: where ranks ran; `past`: incidents before, oldest first.

    `answers`: what live sources said. `jobs`: processes that read. Times: see attribution.current.windowed.
    """
    catalog = catalog or shipped()
    reading = read_paths(paths, catalog, matcher=matcher, answers=answers, jobs=jobs)
    hang = _hang(reading.dumps, ranks)
    events = windowed([*reading.events, *hang_events(hang, reading.dumps, catalog)], since_ns, until_ns)
    judgement = judge(events, catalog, ranks)
    signs = _history(judgement, past)
    if signs:
        judgement = judge([*events, *signs], catalog, ranks)
    return Diagnosis(judgement, reading, hang, events)


def _history(judgement: Judgement, past: Sequence[Past]) -> list[Event]:
    """Signs that earlier incidents add, at the time of the first cause where it has one."""
    if not past:
        return []
    cause = judgement.verdict.first_cause
    at_ns = cause.time_ns if cause is not None and cause.time_ns is not None else 0
    # They are earlier by the number of their cycle, whatever the clock says that the cause was read by.
    return compared(judgement.verdict, max(at_ns, past[-1].time_ns + 1), past)


def _hang(dumps: Sequence[str], ranks: RankMap) -> Hang | None:
    if not dumps:
        return None
    snapshot = read_snapshot(find_dumps(dumps).sources, jobs=1, expected=frozenset(ranks.node_of))
    return find_culprits(snapshot) if snapshot.ranks else None


def hang_events(hang: Hang | None, dumps: Sequence[str], catalog: Catalog) -> list[Event]:
    """One event for each rank that the dumps blame.

    A few dumps of many ranks blame nobody for being absent: those that are not here may not have been given.
    """
    if hang is None:
        # Dumps that cannot be told apart, or none.
        return [_hang_event("hang.no_fault", None, {}, dumps[0], catalog)] if dumps else []
    few = 2 * len(hang.ranks_seen) < len(hang.ranks_seen) + len(hang.ranks_missing) or len(hang.ranks_seen) == 1
    if hang.kind == "no_fault" or (few and hang.kind == "absent_rank"):
        return [_hang_event("hang.no_fault", None, {}, dumps[0], catalog)]
    return [
        _hang_event(f"hang.{hang.kind}", c.rank, {"about_rank": c.rank, "why": c.why}, dumps[0], catalog)
        for c in hang.culprits
    ]


def _hang_event(signature: str, rank: int | None, attrs: dict[str, Any], path: str, catalog: Catalog) -> Event:
    entry = catalog[signature]
    evidence = Evidence(path=path, text=str(attrs.get("why", "")))
    return Event(
        kind=entry.kind, signature=signature, severity=entry.severity, source="flight recorder", rank=rank, attrs=attrs,
        evidence=evidence,
    )  # fmt: skip


def cycle_paths(run_dir: Path, cycle: int) -> list[str]:
    """What a run folder holds about one cycle, as far as it is there."""
    name = f"cycle-{cycle:04d}"
    places = [run_dir / "cycles" / f"{name}.json", run_dir / "logs" / f"{name}.log", run_dir / "evidence" / name]
    places += sorted(run_dir.glob(f"nodes/*/errors/{name}-*.json"))
    return [str(place) for place in places if place.exists()]


def diagnose_cycle(run_dir: Path, cycle: int, catalog: Catalog | None = None) -> Diagnosis:
    """The verdict on one cycle of a run folder."""
    try:
        ranks = map_of_cycle(from_json((run_dir / "cycles" / f"cycle-{cycle:04d}.json").read_bytes(), Cycle))
    except (OSError, msgspec.MsgspecError):
        # Written beside the work: it may not be there yet.
        ranks = UNMAPPED
    return diagnose(cycle_paths(run_dir, cycle), ranks, catalog=catalog, past=earlier_incidents(run_dir, cycle))


def earlier_incidents(run_dir: Path, cycle: int) -> list[Past]:
    """The failed cycles of a run before one, as far as they have a verdict, oldest first. What cannot be read is left out.

    Nobody records a repair in a run folder: none of them counts as repaired.
    """
    found: list[Past] = []
    # Names have as many digits as they need; numbers go by the order in time.
    for path in sorted((run_dir / "incidents").glob("INC-*.json"), key=lambda p: (len(p.name), p.name), reverse=True):
        if len(found) == MOST_PAST:
            break
        try:
            record = from_json(path.read_bytes(), Incident)
            if record.kind == FAILED_CYCLE and record.cycle < cycle:
                found.append(Past(verdict_of(record.verdict), from_rfc3339(record.time)))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda p: p.time_ns)


def incident_fields(found: Diagnosis, catalog: Catalog, ranks: RankMap = UNMAPPED) -> list[dict[str, Any]]:
    """Each incident of what was read, oldest first, judged alone; empty where there are not two of them with known times.

    What came later (steps, a link that is up again) counts: the action is what is to be done now. Of very many or very large
    ones the oldest are left out.
    """
    groups = [g for g in incidents(found.events, catalog, ranks, MOST_INCIDENTS) if g.begin_ns and _failed(g, catalog)]
    if len(groups) < 2:
        return []
    facts = [e for e in found.events if e.stale is None and e.signature in catalog and not _fails(e, catalog)]
    told: list[dict[str, Any]] = []
    judged = 0
    for group in reversed(groups):
        events = _with_later(group, facts)
        judged += len(events)
        if told and judged > MOST_JUDGED:
            break
        told.append(_judged_alone(group, events, catalog, ranks))
    return told[::-1]


def _fails(event: Event, catalog: Catalog) -> bool:
    return catalog[event.signature].role in FAILING


def _failed(group: Stretch, catalog: Catalog) -> bool:
    """Whether it is more than a warning."""
    return any(e.severity in ("error", "fatal") and _fails(e, catalog) for e in group.events)


def _with_later(group: Stretch, facts: Sequence[Event]) -> list[Event]:
    end_ns, own = group.end_ns or 0, {id(e) for e in group.events}
    later = (e for e in facts if e.time_ns is not None and (e.last_ns or e.time_ns) > end_ns and id(e) not in own)
    return [*group.events, *later]


def _judged_alone(group: Stretch, events: Sequence[Event], catalog: Catalog, ranks: RankMap) -> dict[str, Any]:
    said = verdict_fields(judge(events, catalog, ranks).verdict)
    return {
        "begin": rfc3339(group.begin_ns or 0),
        "end": rfc3339(group.end_ns or 0),
        **{name: said[name] for name in ("class", "signature", "action", "entity", "summary")},
    }


def diagnosis_fields(found: Diagnosis, catalog: Catalog) -> dict[str, Any]:
    """`keepstep.verdict/1`, and what was read as what, what could not be, and by which catalog."""
    return {
        **verdict_fields(found.judgement.verdict),
        "used": [one._asdict() for one in found.reading.used],
        "unreadable": list(found.reading.unreadable),
        "catalog": catalog.describe(),
    }


def main() -> None:
    """Print the verdict on one cycle of a run folder, by this host's catalog, as JSON."""
    os.nice(NICENESS)
    run_dir, cycle = Path(sys.argv[1]), int(sys.argv[2])
    catalog = load(site_files(keepstep_home()))
    sys.stdout.buffer.write(to_json(diagnosis_fields(diagnose_cycle(run_dir, cycle, catalog), catalog)))


if __name__ == "__main__":
    main()
