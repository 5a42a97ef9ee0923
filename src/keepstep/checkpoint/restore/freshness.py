"""The rules of trust/rollback.py over a listing: may this candidate be restored, given everything that is seen?"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from keepstep.checkpoint.restore.lineage import Listed
from keepstep.checkpoint.trust.permits import Permit
from keepstep.checkpoint.trust.rollback import (
    Mark,
    Position,
    Ruling,
    check_rollback,
    is_dead,
    marked_state,
    position_of,
)


def judge(
    entry: Listed, found: Sequence[Listed], mark: Mark | None, permits: Sequence[Permit], rejected: Collection[str]
) -> Ruling:
    """What to do with candidate `entry`, whose manifest is verified.

    `found` is the whole listing it is from; `rejected` are folders that this very restore found damaged (not those it only
    distrusts). Candidates have to come newest first. Raises VerificationError without keepstep's facts.
    """
    assert entry.manifest is not None
    candidate = position_of(entry.manifest, entry.name.text)
    if mark is None:
        return check_rollback(candidate, None, "absent", permits)
    marked = next((other for other in found if other.name.text == mark.at.checkpoint), None)
    state = marked_state(
        mark,
        present=marked is not None,
        committed=marked is not None and marked.committed,
        digest=marked.manifest.digest if marked is not None and marked.manifest is not None else None,
        quarantined=marked is not None and marked.quarantined,
        rejected=mark.at.checkpoint in rejected,
        distrusted=marked is not None and marked.distrust is not None,
        abandoned=marked is not None and marked.abandoned_by is not None,
    )
    return check_rollback(candidate, mark, state, permits)


def leaves_behind(at: Position, found: Sequence[Listed], mark: Mark | None) -> bool:
    """Whether going on from `at` leaves something committed behind that is not known as dead already."""
    turns = mark.turns if mark is not None else ()
    return any(
        entry.committed
        and entry.name.step > at.step
        and (entry.manifest is None or not is_dead(position_of(entry.manifest, entry.name.text), turns))
        for entry in found
    )
