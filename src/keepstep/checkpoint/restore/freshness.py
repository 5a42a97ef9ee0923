"""The rules of trust/rollback.py over a listing: may this candidate be restored, given everything that is seen?"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from keepstep.checkpoint.restore.lineage import Listed
from keepstep.checkpoint.trust.permits import Permit
from keepstep.checkpoint.trust.rollback import (
    Mark,
    MarkedState,
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

    `found` is everything that was listed where checkpoints last (not in memory), maybe in several places; `rejected` are
    folders that this very restore found damaged, not those it only distrusts. Candidates have to come newest first. Raises
    VerificationError without keepstep's facts.
    """
    assert entry.manifest is not None
    candidate = position_of(entry.manifest, entry.name.text)
    state: MarkedState = "absent" if mark is None else _state(found, mark, rejected)
    return check_rollback(candidate, mark, state, permits)


def _state(found: Sequence[Listed], mark: Mark, rejected: Collection[str]) -> MarkedState:
    """What became of the checkpoint at the mark. Of several copies the one that speaks most against going back counts."""
    name = mark.at.checkpoint
    copies = [entry for entry in found if entry.name.text == name]
    # An unfinished copy beside a whole one is no loss.
    copies = [entry for entry in copies if entry.committed] or copies[:1]
    states = [
        marked_state(
            mark,
            committed=copy.committed,
            tombstoned=copy.tombstoned,
            digest=copy.marker_sha256,
            verified=copy.manifest is not None,
            quarantined=copy.quarantined,
            rejected=name in rejected,
            distrusted=copy.distrust is not None,
            abandoned=copy.abandoned_by is not None,
        )
        for copy in copies
    ]
    return next((state for state in states if state != "damaged"), "damaged") if states else "absent"


def leaves_behind(chosen: Listed, found: Sequence[Listed], mark: Mark | None) -> bool:
    """Whether going on from `chosen` leaves something committed behind that is not known as dead already."""
    turns = mark.turns if mark is not None else ()
    return any(
        entry.committed
        and entry.name.step > chosen.name.step
        and (entry.manifest is None or not is_dead(position_of(entry.manifest, entry.name.text), turns))
        for entry in found
    )
