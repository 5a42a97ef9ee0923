"""Deletion of old checkpoints beside the training: after each commit, in the background, at the lowest priority."""

from __future__ import annotations

import sys
import threading

from keepstep.checkpoint.keeping.policy import parse_policy
from keepstep.checkpoint.keeping.prune import Pruned, Task, prune_after_commit
from keepstep.checkpoint.restore.lineage import Listed
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import Root
from keepstep.checkpoint.trust.policy import TrustPolicy
from keepstep.records.errors import ConfigError


class Keeper:
    """Rank 0's retention. One prune at a time; a commit that comes meanwhile leaves it to the next."""

    def __init__(self, root: Root, keep: str) -> None:
        """Raises ConfigError for a bad policy, or a root the trainer's identity must not delete from."""
        self._keep = parse_policy(keep, "Checkpointer(keep=)")
        if not isinstance(root, PosixRoot):
            raise ConfigError(
                f"Checkpointer(keep={keep!r}): {root.where} is an object store, where the trainer has no right to delete; "
                "run `keepstep ckpt prune` there with an identity that has"
            )
        self._root = root
        self._known: dict[str, Listed] = {}
        self._thread: threading.Thread | None = None

    def after_commit(self, trust: TrustPolicy) -> None:
        """A checkpoint was committed: delete what the policy does not keep any more."""
        if self._thread is not None and self._thread.is_alive():
            return
        task = Task(root=self._root, policy=self._keep, deleter=self._root, trust=trust, known=self._known)
        self._thread = prune_after_commit(task, done=_say)

    def wait(self, timeout_s: float) -> None:
        """Give a prune that runs the time to end; what is not deleted then is deleted by the next one."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def _say(result: Pruned | str) -> None:
    if isinstance(result, str):
        print(f"keepstep: old checkpoints were not deleted: {result}", file=sys.stderr, flush=True)
        return
    for checkpoint, why in result.failed.items():
        print(f"keepstep: {checkpoint} was not deleted: {why}", file=sys.stderr, flush=True)
