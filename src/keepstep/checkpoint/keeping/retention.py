"""Which checkpoints of a root stay and which may go: a pure decision over what a listing knows.

The rules of a policy choose among checkpoints that a restore could take: committed, with a manifest that verifies, not
quarantined, not abandoned by a later life. What is none of that never counts, so a torn save cannot take the place of a
good one. Around the rules stand limits that no policy can lift:

- the newest restorable checkpoint of each lineage stays, and the newest whose bytes were verified in whole;
- where nothing is restorable, nothing committed is deleted: it may be all that is left;
- pins, checkpoints a rollback permit names, and everything up to the step of an open suspicion stay;
- a marker that does not verify is kept and reported: another key's checkpoint is not ours to delete;
- a folder without a marker may belong to a save in flight. It goes only when its cycle can no longer commit, after a grace
  period, and never when all its files are there: a copy that lost its marker looks just so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from keepstep.checkpoint.format.layout import FolderName
from keepstep.checkpoint.keeping.policy import Policy, kept_by

DEFAULT_GRACE_S = 86400
"""How old an unfinished or abandoned checkpoint is at least before it is deleted."""
DEFAULT_QUARANTINE_S = 30 * 86400
"""How long a quarantined checkpoint is kept for those who look into it, unless it is released."""

LifeKey = tuple[str, int, int, int]
"""One life of a job: run, cycle, attempt, when it started (UTC nanoseconds)."""
State = Literal["committed", "damaged", "quarantined", "abandoned", "unfinished", "tombstoned"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint folder as retention sees it. Times are UTC nanoseconds."""

    name: FolderName
    committed: bool
    """Its marker is there."""
    created_ns: int
    """When it was committed; of one without a manifest that verifies, when it last changed."""
    size_bytes: int | None = None
    scope: str | None = None
    """Run id when the lives of this lineage looked at one run only; None: at the whole root."""
    metrics: dict[str, float] = {}
    problem: str | None = None
    """Why its manifest does not verify."""
    quarantined_ns: int | None = None
    released: bool = False
    """A person said that it need not be kept for its quarantine."""
    abandoned_by: str | None = None
    life: LifeKey | None = None
    """The life of the job that wrote it."""
    abandoning: frozenset[LifeKey] = frozenset()
    """Lives whose manifests tell that they went back before it."""
    proven: str | None = None
    """How it is known that all its bytes were as the manifest says."""
    pins: tuple[str, ...] = ()
    permits: tuple[str, ...] = ()
    tombstoned: bool = False
    """Its deletion was begun."""
    complete: bool = False
    """All files are there although the marker is not."""
    foreign: tuple[str, ...] = ()
    """Names inside that no save wrote."""

    @property
    def state(self) -> State:
        """The one word for it."""
        if self.tombstoned:
            return "tombstoned"
        if not self.committed:
            return "unfinished"
        if self.quarantined_ns is not None:
            return "quarantined"
        if self.problem is not None:
            return "damaged"
        return "abandoned" if self.abandoned_by is not None else "committed"


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.suspicion/1`: weights may be corrupt since `since_step`. `run` None: of every run in the root."""

    schema: str = "keepstep.suspicion/1"
    since_step: int
    reason: str
    time: str
    by: str
    run: str | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the decision rests on besides the folders themselves. `now_ns`: UTC nanoseconds."""

    now_ns: int
    suspicions: tuple[Suspicion, ...] = ()
    """The open ones."""
    ended_runs: frozenset[str] = frozenset()
    """Run ids of which it is known that no process saves any more."""
    grace_s: float = DEFAULT_GRACE_S
    quarantine_s: float = DEFAULT_QUARANTINE_S


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.retention/1`: what happens to one checkpoint, and every reason for it. `size_bytes` None: not known."""

    schema: str = "keepstep.retention/1"
    checkpoint: str
    step: int
    keep: bool
    reasons: list[str]
    size_bytes: int | None
    state: State


def decide(entries: Iterable[Entry], policy: Policy, limits: Limits) -> list[Line]:
    """A line for each of `entries`, newest first. Deleting what the lines do not keep breaks none of the limits above."""
    now_ns = limits.now_ns
    newest_first = sorted(entries, key=lambda entry: entry.name, reverse=True)
    restorable = [entry for entry in newest_first if entry.state == "committed"]
    chosen = _chosen(restorable, policy, now_ns)
    # A tombstone takes a checkpoint out of the lineage, but whoever may write records could bury a good one with it:
    # while its marker is there, it goes only if the rules would let it go without the tombstone too.
    buried = [entry for entry in newest_first if entry.tombstoned and _sound(entry)]
    unburied = _chosen([e for e in newest_first if e.state == "committed" or e in buried], policy, now_ns)
    scopes = {entry.scope for entry in restorable}
    fences = _fences(newest_first)
    verdicts: dict[FolderName, tuple[bool, list[str]]] = {}
    for entry in newest_first:
        held = _held(entry, limits)
        if entry.tombstoned:
            verdicts[entry.name] = _of_tombstoned(entry, held, unburied.get(entry.name, []))
        elif not entry.committed:
            verdicts[entry.name] = _of_unfinished(entry, held, fences, limits)
        else:
            verdicts[entry.name] = _of_committed(entry, held, chosen, scopes, limits)
    _keep_witnesses(newest_first, verdicts)
    return [
        Line(
            checkpoint=entry.name.text,
            step=entry.name.step,
            keep=verdicts[entry.name][0],
            reasons=verdicts[entry.name][1],
            size_bytes=entry.size_bytes,
            state=entry.state,
        )
        for entry in newest_first
    ]


def deletion_order(entries: Iterable[Entry], lines: Iterable[Line]) -> list[Line]:
    """Lines of what is to be deleted, in an order that may be broken off anywhere.

    Abandoned ones go first, oldest first, while the manifest that tells of their abandonment is still there.
    """
    gone = {line.checkpoint: line for line in lines if not line.keep}
    doomed = [entry for entry in entries if entry.name.text in gone]
    doomed.sort(key=lambda entry: (not entry.abandoning, entry.life[3] if entry.life else 0, entry.name))
    return [gone[entry.name.text] for entry in doomed]


def current(entries: Iterable[Entry]) -> Entry | None:
    """The one a restore of the whole root would take if its bytes verify; None when there is none."""
    restorable = [entry for entry in entries if entry.state == "committed"]
    return max(restorable, key=lambda entry: entry.name, default=None)


def _sound(entry: Entry) -> bool:
    return entry.committed and entry.problem is None and entry.quarantined_ns is None and entry.abandoned_by is None


def _chosen(newest_first: Sequence[Entry], policy: Policy, now_ns: int) -> dict[FolderName, list[str]]:
    """What stays of restorable checkpoints, each with all its reasons: a lineage at a time, since a run that looks only at
    its own checkpoints gains nothing from those of another.
    """
    reasons: dict[FolderName, list[str]] = {}
    for scope in {entry.scope for entry in newest_first}:
        lineage = [entry for entry in newest_first if entry.scope == scope]
        reasons.setdefault(lineage[0].name, []).append("newest: the one a restore would take")
        proven = next((entry for entry in lineage if entry.proven is not None), None)
        if proven is not None and proven is not lineage[0]:
            reasons.setdefault(proven.name, []).append(f"newest that is known to be whole: {proven.proven}")
        for rule in policy.rules:
            for name, reason in kept_by(rule, lineage, now_ns).items():
                reasons.setdefault(name, []).append(reason)
    return reasons


def _keep_witnesses(newest_first: Sequence[Entry], verdicts: dict[FolderName, tuple[bool, list[str]]]) -> None:
    """That a checkpoint was abandoned is written only in the manifests of the life that went back. While it stays, so does
    one of these: without it a dead lineage would come to life again.
    """
    todo = [entry for entry in newest_first if entry.committed and verdicts[entry.name][0] and entry.abandoning]
    while todo:
        entry = todo.pop()
        witnesses = [other for other in newest_first if other.life in entry.abandoning]
        if not witnesses or any(verdicts[other.name][0] for other in witnesses):
            continue
        witness = min(witnesses, key=lambda other: (other.tombstoned, other is not witnesses[0]))
        verdicts[witness.name] = (True, [f"its manifest alone tells that {entry.name.text} was abandoned"])
        todo.append(witness)


def _held(entry: Entry, limits: Limits) -> list[str]:
    """Reasons to keep `entry` that stand whatever the rules say."""
    held = [f"pinned: {pin}" for pin in entry.pins]
    held += [f"a rollback permit names it: {permit}" for permit in entry.permits]
    if entry.committed:
        held += [
            f"from before the suspicion since step {suspicion.since_step} ({suspicion.reason}), which is open"
            for suspicion in limits.suspicions
            if entry.name.step <= suspicion.since_step and suspicion.run in (None, entry.name.run_id)
        ]
    if entry.foreign:
        held.append(f"holds {', '.join(entry.foreign[:3])}, which no save wrote: look at it and delete it by hand")
    return held


def _of_tombstoned(entry: Entry, held: list[str], unburied: list[str]) -> tuple[bool, list[str]]:
    if not entry.committed:
        # Only who may delete can take a marker away.
        return False, ["its deletion was begun: the marker is gone already"]
    reasons = held + unburied
    if entry.problem is not None:
        reasons.append(f"its manifest does not verify: {entry.problem}")
    if reasons:
        return True, ["tombstoned, yet it would be kept", *reasons]
    return False, ["its deletion was begun"]


def _of_committed(
    entry: Entry,
    held: list[str],
    chosen: dict[FolderName, list[str]],
    scopes: set[str | None],
    limits: Limits,
) -> tuple[bool, list[str]]:
    reasons = held + chosen.get(entry.name, [])
    age_s = (limits.now_ns - entry.created_ns) / 1e9
    why = "no rule keeps it"
    if entry.problem is not None:
        # Its scope is not known either.
        reasons.append(f"its manifest does not verify: {entry.problem}")
    elif entry.scope not in scopes:
        reasons.append("none of this lineage can be restored: nothing of it is deleted")
    elif entry.quarantined_ns is not None:
        since_s = (limits.now_ns - entry.quarantined_ns) / 1e9
        why = "quarantined, and released" if entry.released else f"quarantined for {_days(since_s)}"
        if not entry.released and since_s < limits.quarantine_s:
            reasons.append(f"{why}: kept until it is released, or for {_days(limits.quarantine_s)}")
    elif entry.abandoned_by is not None:
        why = f"abandoned by {entry.abandoned_by}"
        if age_s < limits.grace_s:
            reasons.append(f"{why}, but {_hours(age_s)} old: kept for {_hours(limits.grace_s)}")
    return (True, reasons) if reasons else (False, [why])


def _of_unfinished(
    entry: Entry, held: list[str], fences: dict[str, tuple[int, int]], limits: Limits
) -> tuple[bool, list[str]]:
    reasons = list(held)
    if entry.complete:
        reasons.append("all files are there, only the marker is not: a copy without it? Never deleted by itself")
    if entry.quarantined_ns is not None and not entry.released:
        reasons.append("quarantined: kept until it is released")
    mine = (entry.name.cycle, entry.name.attempt)
    ended = entry.name.run_id in limits.ended_runs
    if not ended and fences.get(entry.name.run_id, mine) <= mine:
        reasons.append("unfinished: its cycle may still commit it")
    age_s = (limits.now_ns - entry.created_ns) / 1e9
    if age_s < limits.grace_s:
        reasons.append(f"unfinished, last changed {_hours(age_s)} ago: kept for {_hours(limits.grace_s)}")
    if reasons:
        return True, reasons
    return False, ["unfinished, and its run is over" if ended else "unfinished, and a later cycle has committed"]


def _fences(entries: Iterable[Entry]) -> dict[str, tuple[int, int]]:
    """By run, the latest (cycle, attempt) with a commit whose manifest verifies."""
    fences: dict[str, tuple[int, int]] = {}
    for entry in entries:
        if entry.committed and entry.problem is None:
            at = (entry.name.cycle, entry.name.attempt)
            fences[entry.name.run_id] = max(fences.get(entry.name.run_id, at), at)
    return fences


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h"
