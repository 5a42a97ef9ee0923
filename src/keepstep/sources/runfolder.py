"""A run folder of keepstep: which rank ran where, so that what a rank says is said about its node and its GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from keepstep.records.cycle import Cycle, RankPlace
from keepstep.records.event import Event, Gpu
from keepstep.sources.folders import is_run_folder
from keepstep.sources.names import Hints

RECORD_LIMIT = 64 << 20
"""Bytes of a cycle record that is read: 16,384 ranks take about 4 MB."""
_CYCLE = re.compile(r"(?:^|/)cycle-(?P<cycle>\d{4,9})(?:\.log|/|\.json|$)")
_EVIDENCE = re.compile(r"(?:^|/)evidence/cycle-\d+/(?P<node>[^/]+)/[^/]+$")


class RunFolder(NamedTuple):
    """Places of ranks by cycle."""

    top: Path
    places: dict[int, dict[int, RankPlace]]
    run_id: str | None = None


def folder_of(path: Path) -> Path | None:
    """The run folder that a path is, or is in; None for other paths."""
    whole = path.resolve()
    return next((p for p in (whole, *list(whole.parents)[:3]) if is_run_folder(p)), None)


def read_run_folder(top: Path) -> RunFolder:
    """What the cycle records of a run folder tell. One that cannot be read is passed over: its log is read all the same."""
    places: dict[int, dict[int, RankPlace]] = {}
    run_id = None
    for path in sorted((top / "cycles").glob("cycle-*.json")):
        try:
            if path.stat().st_size > RECORD_LIMIT:
                continue
            record = msgspec.json.decode(path.read_bytes(), type=Cycle)
        except (OSError, msgspec.DecodeError):
            continue
        run_id = record.run_id
        places[record.cycle] = {place.rank: place for place in record.ranks}
    return RunFolder(top, places, run_id)


def cycle_of(below: str) -> int | None:
    """The cycle that a file of a run folder is of, by its name or its folder's."""
    match = _CYCLE.search(below)
    return int(match["cycle"]) if match is not None else None


def hints_of(below: str, outer: Hints) -> Hints:
    """What the place of a file in a run folder tells: evidence/cycle-NNNN/<node>/ is of that node."""
    match = _EVIDENCE.search(below)
    return outer._replace(node=match["node"]) if match is not None else outer


def place(event: Event, run: RunFolder, below: str) -> Event:
    """The event with the node and the GPU of its rank, where it names none itself."""
    cycle = cycle_of(below) if event.cycle is None else event.cycle
    where = run.places.get(cycle, {}).get(event.rank) if cycle is not None and event.rank is not None else None
    event = msgspec.structs.replace(event, cycle=cycle, job=event.job or run.run_id)
    if where is None:
        return event
    gpu = event.gpu
    if gpu is None and (where.gpu_uuid or where.pci):
        gpu = Gpu(uuid=where.gpu_uuid, pci=where.pci, index=where.local_rank)
    return msgspec.structs.replace(event, node=event.node or where.node, gpu=gpu)
