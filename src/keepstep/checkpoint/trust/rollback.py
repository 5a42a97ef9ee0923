"""Protection against rollback: which checkpoint may be restored, given the newest one that is known.

A signature does not prove that a checkpoint is the newest: whoever can delete the newer ones, or put an old copy of the
root in its place, makes a job go back without a trace. So the newest committed checkpoint is remembered as a *mark*,
outside the root (trust/marks.py). A restore may go on from the mark or from something newer. Something older needs a
reason that somebody answers for:

- the checkpoint at the mark is still there but damaged: this restore found that, or an earlier one did and the mark says
  so (a quarantine record alone is no proof, anybody who can write to the root can write one);
- it was left behind by a later life of the job, whose signed manifest says so;
- a signed permit (trust/permits.py) names this mark and that older checkpoint.

A checkpoint that has disappeared is none of these: the restore is refused.

Going back moves the mark, and leaves a *turn* (at once by a permit, else with the first commit after it): everything beyond
the step gone back to, written before, is dead and is passed over from then on, so that what was rolled back from does not
return by itself. Functions here are pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

import msgspec

from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.checkpoint.trust.permits import Permit
from keepstep.records.errors import VerificationError


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint: folder name, SHA-256 of its marker, and the facts of its manifest that order it."""

    checkpoint: str
    digest: str
    run: str
    step: int
    cycle: int
    attempt: int
    life_started_ns: int
    created_ns: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A life of `run` that began at `life_started_ns` (UTC ns) went back to `restored_step`."""

    run: str
    life_started_ns: int
    restored_step: int


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.mark/1`: the newest known checkpoint of a root, for one run or for the whole root.

    `refused` are folders found damaged since the mark was set; `used` the nonces of permits that were used up. `behind`: the
    restore that set the mark left something behind, which is dead as soon as its life commits.
    """

    schema: str = "keepstep.mark/1"
    at: Position
    behind: bool = False
    turns: tuple[Turn, ...] = ()
    refused: tuple[str, ...] = ()
    used: tuple[str, ...] = ()


MarkedState = Literal["absent", "tombstoned", "replaced", "distrusted", "quarantined", "damaged", "abandoned", "intact"]
"""What became of the checkpoint at the mark. `quarantined`: by a record that the mark knows nothing of; `replaced`: another
valid marker is in its folder; `distrusted`: its marker is the one that was committed, but nobody who is trusted now signed it;
`abandoned`: a later life went back before it. `damaged` covers what this restore or the mark knows to be damaged."""

_WHY: dict[MarkedState, str] = {
    "absent": "has disappeared: was it deleted, or is this an older copy of the checkpoint root?",
    "tombstoned": "has a tombstone: its deletion was begun",
    "replaced": "has another marker than the one that was committed",
    "distrusted": "is signed by nobody who is trusted here; was its key forgotten in --trust-key?",
    "quarantined": "is quarantined by a record that this job did not write; if the record is wrong, delete it",
    "intact": "is intact and newer",
}


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a candidate: restore it, pass it over, or refuse to start. `permit` is the one that allowed it."""

    action: Literal["restore", "skip", "refuse"]
    reason: str = ""
    permit: Permit | None = None


def position_of(manifest: Manifest, checkpoint: str) -> Position:
    """The position of a verified checkpoint. Raises VerificationError without keepstep's facts."""
    facts = manifest.facts
    if facts is None:
        raise VerificationError(f"{checkpoint}: its manifest has no keepstep facts")
    return Position(
        checkpoint=checkpoint,
        digest=manifest.digest,
        run=facts.run,
        step=facts.step,
        cycle=facts.cycle,
        attempt=facts.attempt,
        life_started_ns=facts.life_started_ns,
        created_ns=facts.created_ns,
    )


def is_newer(one: Position, other: Position) -> bool:
    """Whether `one` was committed after `other`.

    Within a run lives follow one another (each starts later than all it found), and steps within a life. Runs that share
    a root have only their clocks in common.
    """
    if one.run == other.run:
        return (one.life_started_ns, one.step) > (other.life_started_ns, other.step)
    return one.created_ns > other.created_ns


def is_dead(position: Position, turns: Sequence[Turn]) -> bool:
    """Whether a later life went back before `position`: it was there then and is beyond the step gone back to."""
    return any(
        position.step > turn.restored_step
        and (
            position.created_ns < turn.life_started_ns
            or (position.run == turn.run and position.life_started_ns < turn.life_started_ns)
        )
        for turn in turns
    )


def marked_state(
    mark: Mark,
    *,
    committed: bool,
    digest: str | None,
    verified: bool,
    tombstoned: bool = False,
    quarantined: bool = False,
    rejected: bool = False,
    distrusted: bool = False,
    abandoned: bool = False,
) -> MarkedState:
    """What became of the checkpoint at the mark, from what is seen of its folder now; without a folder it is absent.

    `digest` is that of its marker, None when that cannot be read; `verified`, `distrusted`: the marker does, or only for the
    policy does not, verify. `rejected`: this restore found the checkpoint damaged.
    """
    if tombstoned:
        return "tombstoned"
    # A marker that is gone is damage: whoever can take it away could as well have changed it.
    if not committed or rejected or (quarantined and mark.at.checkpoint in mark.refused):
        return "damaged"
    if digest != mark.at.digest:
        # Another marker that verifies is somebody's doing; one that does not is a forgery, or simply broken.
        return "replaced" if verified else "damaged"
    if distrusted:
        return "distrusted"
    if quarantined:
        return "quarantined"
    return "abandoned" if abandoned else "intact"


def open_permit(mark: Mark, permits: Sequence[Permit]) -> Permit | None:
    """The newest permit that names this mark and was not used up; None when there is none."""
    fitting = [p for p in permits if p.from_digest == mark.at.digest and p.nonce not in mark.used]
    return max(fitting, key=lambda permit: (permit.created_ns, permit.nonce), default=None)


def check_rollback(candidate: Position, mark: Mark | None, marked: MarkedState, permits: Sequence[Permit]) -> Ruling:
    """What to do with `candidate`, the newest checkpoint that was not tried or passed over yet.

    `marked` is the state of the checkpoint at the mark; it does not matter without a mark. An open permit is also the
    wish to go there: what lies beyond its target is passed over.
    """
    if mark is None:
        return Ruling(action="restore")
    permit = open_permit(mark, permits)
    if permit is not None:
        if candidate.digest == permit.to_digest:
            return Ruling(action="restore", permit=permit)
        if candidate.step >= permit.to_step:
            return Ruling(action="skip", reason=f"rolled back to step {permit.to_step}: {permit.reason}")
    if candidate.digest == mark.at.digest:
        return Ruling(action="restore")
    if is_dead(candidate, mark.turns):
        return Ruling(action="skip", reason="a later life of the job went back before it")
    # As new as the mark is the same save in another place: a set in memory has a marker of its own.
    if not is_newer(mark.at, candidate) or marked in ("damaged", "abandoned"):
        return Ruling(action="restore")
    if marked == "intact" and candidate.run != mark.at.run and candidate.step >= mark.at.step:
        return Ruling(action="restore")  # nothing is lost: another run under the same root is further
    wrong = f", and the permit is for step {permit.to_step} only" if permit is not None else ""
    return Ruling(
        action="refuse",
        reason=f"{candidate.checkpoint} is older than {mark.at.checkpoint}, the newest known checkpoint (step "
        f"{mark.at.step}, cycle {mark.at.cycle}), which {_WHY[marked]}{wrong}",
    )


def check_start_at_zero(mark: Mark | None, run_id: str) -> str | None:
    """Why `run_id` may not begin at step 0 on a root with nothing to restore; None when it may.

    Another run may: a root that was emptied on purpose is a new beginning.
    """
    if mark is None or mark.at.run != run_id:
        return None
    return (
        f"run {run_id} committed {mark.at.checkpoint} (step {mark.at.step}) here, and now there is nothing to restore: "
        "is the checkpoint root mounted?"
    )


def how_to_allow(root: str, candidate: Position, mark: Mark) -> str:
    """The command that allows the restore of `candidate`."""
    return (
        f"keepstep ckpt pin {shlex.quote(root)} --allow-rollback {candidate.checkpoint} "
        f"--from {mark.at.checkpoint}:{mark.at.digest} --reason TEXT"
    )


# ---- how the mark moves


def after_commit(mark: Mark | None, at: Position, restored_step: int) -> Mark:
    """The mark after `at` was committed by a life that began at `restored_step`."""
    if mark is not None and (mark.at.run, mark.at.life_started_ns) == (at.run, at.life_started_ns):
        return Mark(at=at, turns=mark.turns, used=mark.used)
    turns, used = (mark.turns, mark.used) if mark is not None else ((), ())
    # A lower step is a fresh start: nothing was restored that moved the mark.
    if mark is None or mark.behind or restored_step < mark.at.step:
        turns = _with_turn(turns, Turn(run=at.run, life_started_ns=at.life_started_ns, restored_step=restored_step))
    return Mark(at=at, turns=turns, used=used)


def after_refusal(mark: Mark, checkpoint: str) -> Mark:
    """The mark once `checkpoint` was found damaged. Stored before the quarantine record is written: a restore that is cut
    short in between then still knows the record for its own."""
    if checkpoint in mark.refused:
        return mark
    return msgspec.structs.replace(mark, refused=(*mark.refused, checkpoint))


def after_restore(
    mark: Mark | None, at: Position, *, run: str, life_started_ns: int, permit: Permit | None, left_behind: bool
) -> Mark:
    """The mark after all ranks restored `at` from a place that lasts, in the life of `run` that begins at `life_started_ns`.

    A restore from memory leaves the mark alone: what memory holds may be gone the next time.
    `permit` allowed it and is used up; what lies beyond is dead at once. `left_behind`: the listing holds something committed
    beyond `at`. Without a permit that is dead once this life has committed: until then it may come back, if it was passed over
    for a key that was forgotten.
    """
    turns, used = (mark.turns, mark.used) if mark is not None else ((), ())
    if permit is not None:
        turns = tuple(turn for turn in turns if not is_dead(at, [turn]))  # back to what was left behind before
        turns = _with_turn(turns, Turn(run=run, life_started_ns=life_started_ns, restored_step=at.step))
        used = (*used, permit.nonce)
    behind = left_behind or (mark is not None and (at.step < mark.at.step or (mark.behind and at == mark.at)))
    return Mark(at=at, behind=behind, turns=turns, used=used)


def _with_turn(turns: tuple[Turn, ...], new: Turn) -> tuple[Turn, ...]:
    """Add `new`; earlier turns of the run at or beyond its step say nothing any more that it does not say."""
    kept = (
        turn
        for turn in turns
        if not (
            turn.run == new.run
            and turn.restored_step >= new.restored_step
            and turn.life_started_ns <= new.life_started_ns
        )
    )
    return (*kept, new)
