"""Claims that what stands beside them refutes: a check that passes when it is done again, a rank that was only saving, a task that
had ended before it was lost, a call that ended on all ranks, a helper that died, an exporter that shows old values.

As in outside.py all of it calms only where nothing failed by the word of the job, the kernel or a device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from keepstep.attribution.current import PROGRESS, end_of
from keepstep.attribution.order import SECOND_NS, canonical, same_text
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, OUTSIDE, before, failed_inside, number, of
from keepstep.attribution.rules.resumes import follows
from keepstep.attribution.worked import outlived
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 64
LEAST_RUNS = 2
"""Passes of a check that count: one more may flutter too."""
MOST_ABOVE = 3.0
"""Times the limit."""
RESULTS = ("monitor.still_cordoned",)
"""What follows from a check that failed."""
NEAR_S = 15 * 60.0
"""Half of the least that two zones differ by."""
AFTER_S = 30.0
"""Seconds after a claim from which on a step is no longer one that was under way."""
UNTIMED = frozenset({"none", "neighbour", "boot_relative"})
BUSY = 50.0
"""Use of a GPU, in percent, that is no rest."""
_NAME = r"[\w./-]{0,60}\d[\w./-]{0,60}"
_TASK = re.compile(
    rf"(?i)(?<![a-z])(?:task|job|run|trial|container|pod|replica)s?[ =:_#]{{1,2}}(?P<names>{_NAME}(?:, ?{_NAME}){{0,32}})"
)
MISMATCHES = ("fr.mismatch_told", "fr.trace_mismatch")
LOSSES = ("sched.lost_task", "k8s.node_not_ready", "k8s.node_condition", "slurm.node_down")
"""How a controller says that it no longer hears of a task or of the machine that ran it."""
BACK = ("k8s.node_ready", "monitor.healthy", "monitor.ok", "condition.good", "fact.node_back", "slurm.node_responding")
RANKS = re.compile(
    r"(?i)python|torchrun|pt_|train|ray::|vllm|rank|launch|worker|mpirun|orted|srun|deepspeed|accelerate"
)
"""How processes are called that take part in the steps."""


def _steps(events: Sequence[Event], claim: Event) -> Event | None:
    """Steps that were made after a claim by their times, or stand below it in the same file where no clock tells; at least two."""
    for step in of(events, PROGRESS)[:MOST]:
        if step.count >= 2 and (outlived(claim, step) or _stands_below(claim, step)):
            return step
    return None


def _stands_below(claim: Event, step: Event) -> bool:
    unknown = claim.time_ns is None or step.time_ns is None or claim.time_quality in ("none", "neighbour")
    return unknown and claim.evidence.path == step.evidence.path and claim.evidence.line < step.evidence.line


def _last(events: Sequence[Event]) -> Event:
    """The event that stands last: what is concluded takes back all before it."""
    return max(events, key=lambda e: (e.evidence.line or 0, canonical(e)))


def passed_again(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A check that measured too little once, and enough in each pass after it; no other check complains."""
    found = of(events, "check.repeated")
    if not found or failed_inside(events, catalog) or not all(_enough(e) for e in found):
        return []
    said = {(e.evidence.path, e.evidence.line) for e in found}
    others = [e for e in events if e.signature.startswith(OUTSIDE) and catalog[e.signature].role in FAILING]
    if any((e.evidence.path, e.evidence.line) not in said and e.signature not in RESULTS for e in others):
        return []
    attrs = {"runs": max(number(e.attrs.get("runs")) or 0 for e in found)}
    return [derive(catalog, "derived.alarm.passed_again", _last(events), attrs=attrs, placed=False)]


def _enough(check: Event) -> bool:
    low, high, limit = (_float(check.attrs.get(name)) for name in ("low", "high", "limit"))
    runs, failed = number(check.attrs.get("runs")) or 0, number(check.attrs.get("failed")) or 0
    if runs < LEAST_RUNS or failed or limit is None:
        return False
    # Far above the limit: another unit, or another thing.
    return low is None or high is None or limit <= low <= high <= MOST_ABOVE * limit


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def phase_limit(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ranks whose heartbeats are late for a step but not for the phase that they are in, and steps after that phase."""
    late = of(events, "monitor.beat_late")
    if not late or failed_inside(events, catalog) or not all(_within(e) for e in late):
        return []
    phases = of(
        events, "job.saving", "ckpt.announced", "ckpt.committed", "job.evaluating", "job.loading", "job.compiling"
    )
    for step in of(events, PROGRESS)[:MOST]:
        at = step.attrs.get("before_last_order")
        begun = [p for p in phases if same_text(p, step)]
        over = begun and isinstance(at, int) and all(end_of(p).order < at for p in begun)
        if step.count >= 2 and (over or all(outlived(e, step) for e in late)):
            attrs = {"phase": late[0].attrs.get("phase")}
            return [derive(catalog, "derived.alarm.phase_limit", end_of(step), attrs=attrs, placed=False)]
    return []


def _within(beat: Event) -> bool:
    age, limit = _float(beat.attrs.get("age")), _float(beat.attrs.get("phase_limit"))
    return age is not None and limit is not None and age < limit


def ended_before_lost(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Tasks that a controller lost, each of which had ended with status 0 before: by its name, or as all of the job."""
    lost = of(events, *LOSSES)[:MOST]
    ended = of(events, "task.ended_zero", "job.ended_well", "job.train_ended")[:MOST]
    if (
        not lost
        or not ended
        or failed_inside(events, catalog, *LOSSES)
        or of(events, "job.started", "elastic.restarting")
    ):
        return []
    # An event stands for all that say the same: the others may be of other tasks.
    if any(e.count > 1 for e in lost if e.signature == "sched.lost_task") or not of(events, "sched.lost_task"):
        return []
    if not all(_over_before(claim, ended, events) for claim in lost):
        return []
    return [derive(catalog, "derived.sched.ended_before_lost", _last(events), placed=False)]


def _over_before(claim: Event, ended: Sequence[Event], events: Sequence[Event]) -> bool:
    earlier = [e for e in ended if before(e, claim)]
    if claim.signature != "sched.lost_task":
        # The machine itself has to be back; of a list of machines more than one.
        back = [e for e in of(events, *BACK)[:MOST] if before(claim, e) or _stands_below(claim, e)]
        stem, listed, _ = (claim.node or "").partition("[")
        near = {e.node or e.evidence.line for e in back if _of_machine(e.node, claim.node, stem if listed else "")}
        return bool(earlier) and len(near) >= (2 if listed else 1)
    names = {name for e in earlier for name in _names(e)}
    if _names(claim) and _names(claim) <= names:
        return True
    whole = [e for e in earlier if e.signature != "task.ended_zero"]
    steps = [end_of(s) for s in of(events, PROGRESS)[:MOST]]
    # Of a job that is not named there is one, and it makes no step any more.
    return bool(whole) and not names and len(_names(claim)) <= 1 and all(before(s, whole[-1]) for s in steps)


def _of_machine(node: str | None, claimed: str | None, stem: str) -> bool:
    """Whether a machine may be the one that was claimed, or one of a list `stem[...]`."""
    return node is None or claimed is None or node == claimed or (bool(stem) and node.startswith(stem))


def _names(event: Event) -> set[str]:
    """Names with a number that a line gives tasks: "task 88/3", "container_0002", "jobs a-1, a-2". A worker's name is none."""
    found: set[str] = set()
    for match in _TASK.finditer(event.evidence.text[:1000]):
        found.update(name.rstrip(".,:") for name in re.split(r", ?", match["names"]) if re.search(r"\d", name))
    return found


def completed_everywhere(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A reader of flight records that calls a mismatch what has ended on all ranks."""
    told, done = of(events, *MISMATCHES), of(events, "fr.completed_everywhere")
    if (
        not told
        or not done
        or of(events, "fr.state_open")
        or failed_inside(events, catalog, *MISMATCHES, "fr.trace_missing")
    ):
        return []
    # Each claim has a line of its own that says how the call ended.
    if sum(e.count for e in told) > sum(e.count for e in done):
        return []
    steps = [_steps(events, claim) for claim in told]
    made = [s for s in steps if s is not None]
    if len(made) < len(steps):
        return []
    return [derive(catalog, "derived.fr.completed", end_of(max(made, key=_line)), placed=False)]


def side_process(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Processes that have ended beside a job, none of which makes steps, and steps afterwards."""
    gone = of(events, "process.defunct", "fact.sidecar_gone")[:MOST]
    names = {str(e.attrs.get("program") or "") for e in gone}
    if not gone or any(not n or RANKS.search(n) for n in names):
        return []
    killed = of(events, "k8s.oom_killed")
    own = all(any(f"{n} OOMKilled" in e.evidence.text for n in names) and e.count == 1 for e in killed)
    lines = {(e.evidence.path, e.evidence.line) for e in gone}
    own = own and all((e.evidence.path, e.evidence.line) in lines for e in of(events, "systemd.unit_ended"))
    if not own or failed_inside(events, catalog, "k8s.oom_killed", "systemd.unit_ended"):
        return []
    steps = [_steps(events, e) for e in gone]
    made = [s for s in steps if s is not None]
    if len(made) < len(steps):
        return []
    attrs: dict[str, Any] = {"program": ", ".join(sorted(names))[:80]}
    return [derive(catalog, "derived.side_process", end_of(max(made, key=_line)), attrs=attrs, placed=False)]


def old_values(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An alarm for idle GPUs, a direct look that finds all of them busy, and steps after the alarm."""
    alarms = of(events, "fact.idle_alarm")
    if not alarms or failed_inside(events, catalog):
        return []
    uses = [use for e in of(events, "gpu.sample")[:MOST] if "--query-gpu" in e.source for use in _uses(e)]
    busy = all(use >= BUSY for use in uses) if uses else bool(of(events, "fact.use_seen"))
    last = max(alarms, key=_line)
    steps = [s for s in map(end_of, of(events, PROGRESS)[:MOST]) if follows(last, s)]
    if not busy or not steps:
        return []
    return [derive(catalog, "derived.alarm.old_values", max(steps, key=_line), placed=False)]


def _uses(sample: Event) -> list[float]:
    """How busy GPUs are by a look at them: by the line where it holds all of them, else by what was read of it."""
    row = re.fullmatch(r"\s*((?:\d{1,3} ?%[\s,]*){2,})", sample.evidence.text)
    if row is not None:
        return [float(n) for n in re.findall(r"\d{1,3}", row[1])]
    levels = sample.attrs.get("levels")
    value = _float(levels.get("utilisation")) if isinstance(levels, dict) else None
    return [] if value is None else [value]


def _line(event: Event) -> int:
    return event.evidence.line or 0


def stepped_on(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A hang that was said, and steps of a log without a zone that began within minutes of it and went on after it."""
    said = of(events, "monitor.hang_declared", "monitor.beat_late")[:MOST]
    if not said or failed_inside(events, catalog) or of(events, "job.started", "elastic.restarting"):
        return []
    for step in of(events, PROGRESS)[:MOST]:
        if step.count >= 2 and all(_beside(end_of(claim), step) for claim in said):
            return [derive(catalog, "derived.alarm.stepped_on", end_of(step), placed=False)]
    return []


def _beside(claim: Event, step: Event) -> bool:
    """Whether the steps lie around a claim by clocks of which one shows no zone: within minutes, so that there is none between."""
    end = end_of(step)
    if claim.time_ns is None or step.time_ns is None or end.time_ns is None:
        return False
    if {claim.time_quality, step.time_quality, end.time_quality} & UNTIMED:
        return False
    near_s = min(abs(t - claim.time_ns) for t in (step.time_ns, end.time_ns)) / SECOND_NS
    return near_s <= NEAR_S and (end.time_ns - claim.time_ns) / SECOND_NS > AFTER_S


REFUTED_RULES = (
    passed_again,
    phase_limit,
    ended_before_lost,
    completed_everywhere,
    side_process,
    old_values,
    stepped_on,
)
"""Each: `(events, catalog) -> list[Event]`. Last of all but what machines have in common."""
