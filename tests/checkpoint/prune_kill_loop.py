"""Run as a process: prunes copies of a root, killed before each system call that changes or syncs something, in turn.

Usage: prune_kill_loop.py TEMPLATE WORK POLICY. After each kill: no folder with a marker lacks anything unless it is
tombstoned, and the next prune leaves exactly what the policy keeps. Prints the number of places it was killed at.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.checkpoint.keeping.policy import parse_policy
from keepstep.checkpoint.keeping.prune import Task, prune
from keepstep.checkpoint.keeping.survey import survey
from keepstep.checkpoint.restore.lineage import list_checkpoints
from keepstep.checkpoint.restore.verify import verify_checkpoint
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.trust.keys import trusted_public_key
from keepstep.checkpoint.trust.policy import TrustPolicy


def trust() -> TrustPolicy:
    """The local key is trusted."""
    return TrustPolicy(keys=(trusted_public_key(),))


def task_of(root: PosixRoot, policy: str) -> Task:
    """Prune by `policy`, and do it."""
    return Task(root=root, policy=parse_policy(policy), deleter=root, trust=trust())


def kill_before(number: int) -> None:
    """SIGKILL this process before its `number`-th call that changes or syncs the file system."""
    left = [number]

    def counted(real: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if counts(*args):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("unlink", "rmdir", "replace", "fsync", "mkdir", "write"):
        setattr(os, name, counted(getattr(os, name), lambda *_: True))
    os.open = counted(os.open, lambda _path, flags, *_: bool(flags & os.O_CREAT))


def check_after_kill(root: PosixRoot) -> None:
    """Every checkpoint that a restore could take is whole."""
    for item in list_checkpoints(root, policy=trust()):
        if item.candidate:
            report = verify_checkpoint(root, item.name.text, policy=trust(), jobs=1)
            assert report.ok, report.errors


def main() -> int:
    """Returns 0 when every place passed."""
    template, work, policy = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    shutil.copytree(template, work)
    prune(task_of(PosixRoot(work), policy))
    wanted = sorted(PosixRoot(work).folders())
    number = 0
    while True:
        number += 1
        shutil.rmtree(work)
        shutil.copytree(template, work)
        root = PosixRoot(work)
        pid = os.fork()
        if pid == 0:
            kill_before(number)
            prune(task_of(root, policy))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            print(number - 1)
            return 0
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        check_after_kill(root)
        prune(task_of(root, policy))
        check_after_kill(root)
        left = sorted(root.folders())
        # Killed between the tombstone's end and the folder's: an empty folder, which is an unfinished save to anybody.
        assert [name for name in left if root.files(name) or root.marker(name)] == wanted, (number, left)
        assert root.record_names("tombstones") == frozenset(), number
        assert root.record_names("tiers") <= set(left), number
        assert len(survey(root, trust(), now_ns=0).entries) == len(left)


if __name__ == "__main__":
    sys.exit(main())
