"""Making and committing a checkpoint folder. The marker is written last, and its presence is the commit."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.checkpoint.format.layout import LATEST_NAME, MARKER_SIGNED, MARKER_UNSIGNED, FolderName
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.writer import FileFact, replace_file
from keepstep.checkpoint.trust.manifest import Facts, Manifest, Writer, build_statement, parse_manifest, sign_statement
from keepstep.records.codec import rfc3339
from keepstep.records.errors import StorageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def make_folder(root: Path, name: FolderName) -> Path:
    """Create a new, durable folder for `name` under `root`, numbered when an older try exists. Raises StorageError."""
    return root / PosixRoot(root).make_folder(name)


def writer_facts(
    name: FolderName,
    *,
    world: int,
    parent: str | None,
    restored_step: int,
    restored_from: str | None,
    scope: str | None,
    life_started_ns: int,
) -> Facts:
    """Facts of a checkpoint that this process commits now."""
    now_ns = time.time_ns()
    return Facts(
        run=name.run_id,
        step=name.step,
        cycle=name.cycle,
        attempt=name.attempt,
        world=world,
        parent=parent,
        writer=Writer(host=socket.gethostname(), pid=os.getpid()),
        created_at=rfc3339(now_ns),
        created_ns=now_ns,
        restored_step=restored_step,
        restored_from=restored_from,
        scope=scope,
        life_started_ns=life_started_ns,
    )


def commit(
    folder: Path,
    files: list[FileFact],
    facts: Facts,
    key: EllipticCurvePrivateKey | None,
    *,
    may_publish: Callable[[], None] = lambda: None,
) -> Manifest:
    """Publish `folder`: sign (unless `key` is None) and put the marker in place, durably.

    All `files` must be written and fsynced already. `may_publish` is asked last and raises StorageError when it must not
    be. Raises StorageError; then nothing is published.
    """
    marker = MARKER_UNSIGNED if key is None else MARKER_SIGNED
    statement = build_statement(folder.name, files, facts, marker=marker)
    data = statement if key is None else sign_statement(statement, key)
    PosixRoot(folder.parent).publish(folder.name, marker, data, may_publish=may_publish)
    return parse_manifest(
        data, marker, trusted_key=None if key is None else key.public_key(), allow_unsigned=key is None
    )


def write_latest(root: Path, step: int) -> None:
    """Write the pointer file other tools look for. It is never read back as truth, so a failure is only said."""
    try:
        replace_file(root / LATEST_NAME, f"{step}\n".encode())
    except StorageError as error:
        print(f"keepstep: {error} (the checkpoint itself is committed)", file=sys.stderr, flush=True)
