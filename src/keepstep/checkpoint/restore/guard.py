"""Rank 0's guard against rollback: the mark of a root, asked before a candidate is tried and moved when one was.

The rule is trust/rollback.py. The mark lies in the coordinator's journal and in the user's keepstep folder; of two the newer
counts, so that rank 0 may move to another host.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import msgspec

from keepstep.checkpoint.exchange import Exchange, HighWater, NoStoreError
from keepstep.checkpoint.restore.freshness import judge
from keepstep.checkpoint.restore.lineage import Listed
from keepstep.checkpoint.storage.source import Root
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.checkpoint.trust.marks import (
    WHOLE_ROOT,
    FileMarks,
    MarkStore,
    file_marks,
    look_up_mark,
    place_of,
    root_id,
)
from keepstep.checkpoint.trust.permits import Permit, read_permits
from keepstep.checkpoint.trust.policy import TrustPolicy
from keepstep.checkpoint.trust.rollback import (
    Mark,
    Ruling,
    after_commit,
    after_refusal,
    after_restore,
    check_start_at_zero,
    how_to_allow,
    is_newer,
    position_of,
)
from keepstep.records.codec import to_json
from keepstep.records.errors import ChannelError, RefuseToStartError, StorageError

PERMIT_KIND = "rollback"
UNNAMED_RUN = "local"
"""The run id of a script that nobody gave one: two of them need not be the same job."""


class JournalMarks:
    """The mark of one root and scope in the coordinator's journal."""

    def __init__(self, channel: Exchange, root: Root, scope: str) -> None:
        self._channel = channel
        # Within a run a root stays where it is, and its place is nothing that who writes to it could change.
        self._key = hashlib.sha256(f"{place_of(root)}\n{scope}".encode()).hexdigest()

    def get(self) -> Mark | None:
        """See MarkStore. Raises NoStoreError without a launcher."""
        held = self._channel.mark_get(self._key)
        return msgspec.json.decode(held.detail, type=Mark) if held is not None and held.detail else None

    def put(self, mark: Mark) -> None:
        """See MarkStore."""
        held = self._channel.mark_get(self._key)
        at = HighWater(step=mark.at.step, cycle=mark.at.cycle, digest=mark.at.digest, detail=to_json(mark).decode())
        back = held is not None and at.step < held.step
        self._channel.mark_set(self._key, at, f"the job went back to {mark.at.checkpoint}" if back else "")


class Guard:
    """The mark of a root while one process is rank 0."""

    def __init__(self, root: Root, channel: Exchange, scope: str | None, policy: TrustPolicy) -> None:
        """Reads mark and permits. Raises StorageError or ChannelError."""
        self._root = root
        self._stores: list[MarkStore] = []
        self._in_journal = False
        """Whether this very job remembers a mark, and not just this installation."""
        scope = scope or WHOLE_ROOT
        try:
            root_id(root)
        except StorageError:  # a root that takes no id can be restored from, and is never written to
            self.mark = look_up_mark(root, scope)
        else:
            self._stores = [file_marks(root, scope), JournalMarks(channel, root, scope)]
            self.mark = self._newest()
        self._permits: list[Permit] = []
        if self.mark is not None:
            self._permits, problems = read_permits(root.records(PERMIT_KIND), policy)
            for problem in problems:
                print(f"keepstep: {problem}", file=sys.stderr, flush=True)

    def _newest(self) -> Mark | None:
        found: list[Mark] = []
        for store in list(self._stores):
            try:
                mark = store.get()
            except NoStoreError:
                self._stores.remove(store)
                continue
            if mark is not None:
                found.append(mark)
                self._in_journal = self._in_journal or isinstance(store, JournalMarks)
        if len(found) == 2 and is_newer(found[1].at, found[0].at):
            return found[1]
        return found[0] if found else None

    def _keep(self, mark: Mark) -> None:
        if mark == self.mark:
            return
        self.mark = mark
        for store in self._stores:
            try:
                store.put(mark)
            except (StorageError, ChannelError) as error:
                where = "file" if isinstance(store, FileMarks) else "journal"
                print(f"keepstep: the mark of {self._root.where} is not kept in its {where}: {error}", file=sys.stderr)

    # ---- restoring

    def rule(self, entry: Listed, found: Sequence[Listed], rejected: frozenset[str]) -> Ruling:
        """What to do with candidate `entry`, of all that was `found`; `rejected` were found damaged by this restore."""
        mark = self.mark
        if mark is None or entry.manifest is None:
            return Ruling(action="restore")
        ruling = judge(entry, found, mark, self._permits, rejected)
        if ruling.action == "refuse":
            command = how_to_allow(self._root.where, position_of(entry.manifest, entry.name.text), mark)
            stop = "" if ruling.reason.endswith("?") else "."
            return msgspec.structs.replace(ruling, reason=f"{ruling.reason}{stop} To go back on purpose: {command}")
        return ruling

    def refused(self, checkpoint: str) -> None:
        """`checkpoint` was found damaged; to be called before its quarantine record is written."""
        if self.mark is not None:
            self._keep(after_refusal(self.mark, checkpoint))

    def restored(
        self, entry: Listed, *, run: str, life_started_ns: int, permit: Permit | None, left_behind: bool
    ) -> None:
        """All ranks restored `entry`."""
        assert entry.manifest is not None
        at = position_of(entry.manifest, entry.name.text)
        self._keep(
            after_restore(
                self.mark, at, run=run, life_started_ns=life_started_ns, permit=permit, left_behind=left_behind
            )
        )

    def check_start(self, run_id: str, override: str) -> None:
        """Raises RefuseToStartError when this very job has committed here before, and now there is nothing to restore.

        What only this installation remembers is said: somebody may have emptied the root to begin anew under the old name.
        """
        why = None if run_id == UNNAMED_RUN else check_start_at_zero(self.mark, run_id)
        if why is None:
            return
        if self._in_journal:
            raise RefuseToStartError(f"{self._root.where}: {why} {override}")
        print(f"keepstep: WARNING: {self._root.where}: {why} Starting at step 0", file=sys.stderr, flush=True)

    def lost_marker(self, found: Sequence[Listed]) -> Listed | None:
        """The checkpoint at the mark when its folder is there without a marker, in every copy, and nobody has said so yet."""
        copies = [item for item in found if self.mark is not None and item.name.text == self.mark.at.checkpoint]
        if not copies or any(copy.committed or copy.quarantined or copy.tombstoned for copy in copies):
            return None
        return copies[0]

    # ---- saving

    def committed(self, checkpoint: str, manifest: Manifest, restored_step: int) -> None:
        """`checkpoint` was committed by the life that began at `restored_step`."""
        self._keep(after_commit(self.mark, position_of(manifest, checkpoint), restored_step))
