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

from keepstep.attribution.places import UNMAPPED, RankMap, map_of_cycle
from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import Catalog, shipped
from keepstep.records.codec import from_json, to_json
from keepstep.records.cycle import Cycle
from keepstep.records.verdict import Verdict, verdict_fields
from keepstep.sources.reading import Reading, read_paths

NICENESS = 10
"""Whatever trains on this host goes first."""


class Diagnosis(NamedTuple):
    """A verdict and what it was made of."""

    verdict: Verdict
    reading: Reading


def diagnose(paths: Sequence[str], ranks: RankMap = UNMAPPED, catalog: Catalog | None = None) -> Diagnosis:
    """The verdict on what files and folders tell. `ranks`: where ranks ran."""
    catalog = catalog or shipped()
    reading = read_paths(paths, catalog)
    return Diagnosis(attribute(reading.events, catalog, ranks), reading)


def diagnose_cycle(run_dir: Path, cycle: int) -> Diagnosis:
    """The verdict on one cycle of a run folder."""
    try:
        ranks = map_of_cycle(from_json((run_dir / "cycles" / f"cycle-{cycle:04d}.json").read_bytes(), Cycle))
    except (OSError, msgspec.MsgspecError):
        # Written beside the work: it may not be there yet.
        ranks = UNMAPPED
    return diagnose(cycle_paths(run_dir, cycle), ranks)


def cycle_paths(run_dir: Path, cycle: int) -> list[str]:
    """What a run folder holds about one cycle, as far as it is there."""
    name = f"cycle-{cycle:04d}"
    places = [run_dir / "cycles" / f"{name}.json", run_dir / "logs" / f"{name}.log", run_dir / "evidence" / name]
    places += sorted(run_dir.glob(f"nodes/*/errors/{name}-*.json"))
    return [str(place) for place in places if place.exists()]


def diagnosis_fields(found: Diagnosis) -> dict[str, Any]:
    """`keepstep.verdict/1`, and what was read and could not be."""
    return {
        **verdict_fields(found.verdict),
        "used": [one._asdict() for one in found.reading.used],
        "unreadable": found.reading.unreadable,
    }


def main() -> None:
    """Print the verdict on one cycle of a run folder as JSON."""
    os.nice(NICENESS)
    run_dir, cycle = Path(sys.argv[1]), int(sys.argv[2])
    sys.stdout.buffer.write(to_json(diagnosis_fields(diagnose_cycle(run_dir, cycle))))


if __name__ == "__main__":
    main()
