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

from keepstep.attribution.current import windowed
from keepstep.attribution.hang import find_culprits
from keepstep.attribution.places import UNMAPPED, RankMap, map_of_cycle
from keepstep.attribution.verdict import Judgement, judge
from keepstep.catalog.load import Catalog, shipped
from keepstep.catalog.matcher import Matcher
from keepstep.records.codec import from_json, to_json
from keepstep.records.cycle import Cycle
from keepstep.records.event import Event, Evidence
from keepstep.records.hang import Hang
from keepstep.records.verdict import verdict_fields
from keepstep.sources.flightrecorder.files import find_dumps
from keepstep.sources.flightrecorder.reading import read_snapshot
from keepstep.sources.reading import Reading, read_paths

NICENESS = 10
"""Whatever trains on this host goes first."""


class Diagnosis(NamedTuple):
    """A verdict with everything it was made of. `hang`: what flight-recorder dumps among the files say, None without any."""

    judgement: Judgement
    reading: Reading
    hang: Hang | None


def diagnose(
    paths: Sequence[str],
    ranks: RankMap = UNMAPPED,
    *,
    catalog: Catalog | None = None,
    matcher: Matcher | None = None,
    since_ns: int | None = None,
    until_ns: int | None = None,
) -> Diagnosis:
    """The verdict on what files and folders tell. `ranks`: where ranks ran. Times: see attribution.current.windowed."""
    catalog = catalog or shipped()
    reading = read_paths(paths, catalog, matcher=matcher)
    hang = _hang(reading.dumps, ranks)
    events = [*reading.events, *hang_events(hang, reading.dumps, catalog)]
    return Diagnosis(judge(windowed(events, since_ns, until_ns), catalog, ranks), reading, hang)


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


def diagnose_cycle(run_dir: Path, cycle: int) -> Diagnosis:
    """The verdict on one cycle of a run folder."""
    try:
        ranks = map_of_cycle(from_json((run_dir / "cycles" / f"cycle-{cycle:04d}.json").read_bytes(), Cycle))
    except (OSError, msgspec.MsgspecError):
        # Written beside the work: it may not be there yet.
        ranks = UNMAPPED
    return diagnose(cycle_paths(run_dir, cycle), ranks)


def diagnosis_fields(found: Diagnosis, catalog: Catalog) -> dict[str, Any]:
    """`keepstep.verdict/1`, and what was read as what, what could not be, and by which catalog."""
    return {
        **verdict_fields(found.judgement.verdict),
        "used": [one._asdict() for one in found.reading.used],
        "unreadable": list(found.reading.unreadable),
        "catalog": catalog.describe(),
    }


def main() -> None:
    """Print the verdict on one cycle of a run folder as JSON."""
    os.nice(NICENESS)
    run_dir, cycle = Path(sys.argv[1]), int(sys.argv[2])
    sys.stdout.buffer.write(to_json(diagnosis_fields(diagnose_cycle(run_dir, cycle), shipped())))


if __name__ == "__main__":
    main()
