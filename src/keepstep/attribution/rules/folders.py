"""What folders of checkpoints show beside what the job says: temporary names, a tracker that points nowhere, failed clean-up."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.order import canonical
from keepstep.attribution.rules.checkpoints import step_of
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import PROGRESS, of
from keepstep.catalog.ckptnames import is_staging
from keepstep.catalog.exceptions import whose
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 300
"""Facts of one kind that are looked at."""
MOST_FOLDERS = 16
NO_ROOM = ("fs.no_space", "fs.quota", "fs.full")
DURABLE = ("ckpt.listed", "ckpt.committed", "ckpt.tracker")
RAISED = ("python.user_exception", "python.user_runtime_error", "python.library_exception", "python.exception")

_CLEARING = re.compile(
    r"(?i)(?:purge|prune|rotate|retention|clean_?up|remove_?(?:old|stale|previous|extra)|delete_?(?:old|stale|previous|extra)|keep_?(?:last|top|latest))"
)
_DEFECTS = frozenset({"AttributeError", "ValueError", "IndexError", "KeyError", "TypeError", "AssertionError"})
"""What code raises that meets a name it did not expect; not what storage raises."""
_LIBRARIES = re.compile(
    r"/(?:torchtitan|torchtune|megatron|nemo|verl|lightning|lightning_fabric|pytorch_lightning|accelerate|trl|axolotl"
    r"|llamafactory|nanotron|composer|fairscale|openrlhf|slime|maxtext|levanter)/"
)
"""Packages that train, which are often installed from a checkout of their own."""


def staging_left(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Incomplete checkpoints that are temporary folders without exception, beside whole ones, while the job makes steps."""
    incomplete = of(events, "ckpt.no_metadata")
    if not incomplete or not of(events, PROGRESS) or not of(events, *DURABLE):
        return []
    # Beyond some number different folders are one event, which names but one of them.
    if len(incomplete) > MOST_FOLDERS or not all(_staged(e) for e in incomplete):
        return []
    if _fails(events, catalog, "ckpt.no_metadata"):
        return []
    last = max((*incomplete, *of(events, PROGRESS)), key=canonical)
    return [derive(catalog, "derived.ckpt.staging_left", last, placed=False)]


def _staged(event: Event) -> bool:
    """Whether the folder that is called incomplete is named, and has a temporary name."""
    return is_staging(str(event.attrs.get("folder") or ""))


def _fails(events: Sequence[Event], catalog: Catalog, *but: str) -> bool:
    entries = (catalog[e.signature] for e in events if e.signature not in but)
    return any(e.role in ("root", "symptom", "cascade") and e.severity in ("error", "fatal") for e in entries)


def fresh_again(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Several starts from nothing where the folder holds nothing but a save that was cut off."""
    starts = of(events, "ckpt.fresh_start")
    cut_off = of(events, "ckpt.listed_staging")
    # One start may be the first of all, and the save in the making its own.
    if sum(e.count for e in starts) < 2 or not cut_off or of(events, *DURABLE):
        return []
    attrs = {"left": str(cut_off[0].attrs.get("name"))[:120]}
    return [derive(catalog, "derived.ckpt.fresh_again", starts[0], attrs=attrs, placed=False)]


def tracker_dangles(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A tracker of a step that its folder does not hold, after a save for which there was no room."""
    trackers, listed = of(events, "ckpt.tracker")[:MOST], of(events, "ckpt.listed", "ckpt.listed_staging")[:MOST]
    full = of(events, *NO_ROOM)
    there = {s for e in listed if (s := step_of(e)) is not None}
    tracked = {s for e in trackers if (s := step_of(e)) is not None}
    if len(tracked) != 1 or not there or not full or tracked & there or min(there) <= max(tracked):
        return []
    attrs = {"tracked": max(tracked), "there": min(there)}
    explains = sorted({e.signature for e in full} | {"torch.write_failed", "ckpt.save_failed"})
    return [derive(catalog, "derived.ckpt.tracker_dangles", full[0], attrs=attrs, explains=explains, placed=False)]


def retention_failed(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A defect raised in a library's own code that clears up old checkpoints."""
    for event in of(events, *RAISED)[:MOST]:
        path, _, rest = str(event.attrs.get("innermost") or "").rpartition(":")
        name = rest.partition(" ")[2]
        own = whose(path) == "user" and _LIBRARIES.search(path) is None
        if own or str(event.attrs.get("type")) not in _DEFECTS or not _CLEARING.search(name):
            continue
        attrs = {"type": event.attrs.get("type"), "frame": f"{path.rpartition('/')[2]} {name}"}
        return [derive(catalog, "derived.ckpt.retention_failed", event, attrs=attrs, explains=[event.signature])]
    return []


FOLDER_RULES = (staging_left, fresh_again, tracker_dangles, retention_failed)
"""Each: `(events, catalog) -> list[Event]`."""
