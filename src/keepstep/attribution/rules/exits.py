"""Processes that crash when all work was done and saved: the interpreter's end, helpers, threads."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.current import PROGRESS, end_of
from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, before, number, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

FINISHED = ("job.finished_rank", "job.train_ended", "job.ended_well")
CRASHES = (
    "exit.sigsegv",
    "exit.sigabrt",
    "exit.sigbus",
    "python.fatal_error",
    "python.terminate_called",
    "nvrx.checkpoint_worker_failed",
    "elastic.rank_failed",
    "slurm.step_exit",
    "slurm.task_exit",
)
"""How a process ends that fails in its destructors: no exception of the program, no word of a device."""
SAVES = ("ckpt.committed", "ckpt.tracker", "job.saving")
RESTARTS = ("job.started", "elastic.restarting", "elastic.membership_changed")
MOST = 64
_SAVED = re.compile(r"(?i)\b(?:saved|committed|finali[sz]ed|durable|uploaded)\b")
_NUMBER = re.compile(r"\d{1,12}")


def crash_at_exit(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Crashes that stand after the end of the work, where the last step was saved before them and nothing else failed."""
    finished, steps = of(events, *FINISHED)[:MOST], of(events, PROGRESS)[:MOST]
    crashes = of(events, *CRASHES)
    roots = [e for e in crashes if catalog[e.signature].role == "root"]
    if not finished or not steps or not roots or of(events, *RESTARTS):
        return []
    failing = [e for e in events if catalog[e.signature].role in FAILING and e.severity != "info"]
    if any(e.signature not in CRASHES for e in failing):
        return []
    end = min(finished, key=canonical)
    last = max((end_of(s) for s in steps), key=lambda s: (_last_step(s), canonical(s)))
    if _unfinished(last) or not all(before(end, c) for c in crashes) or not all(before(end_of(s), end) for s in steps):
        return []
    if not any(_saves(s, _last_step(last)) and before(last, s) for s in of(events, *SAVES)[-MOST:]):
        return []
    attrs = {"after": end.evidence.text[:200]}
    explains = sorted({c.signature for c in crashes})
    first = min(crashes, key=canonical)
    return [derive(catalog, "derived.teardown_error", first, attrs=attrs, explains=explains, placed=False)]


def _last_step(step: Event) -> int:
    found = number(step.attrs.get("last_step"))
    return -1 if found is None else found


def _unfinished(step: Event) -> bool:
    """Whether the count of steps says that some are missing."""
    total = number(step.attrs.get("of"))
    return total is not None and _last_step(step) < total


def _saves(event: Event, step: int) -> bool:
    """Whether a line says that this very step was saved, and is done with it."""
    text = event.evidence.text
    return bool(_SAVED.search(text)) and step in {int(n) for n in _NUMBER.findall(text)}


EXIT_RULES = (crash_at_exit,)
"""Each: `(events, catalog) -> list[Event]`."""
