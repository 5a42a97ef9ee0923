"""What the tests of the failure table share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint.restore.lineage import list_checkpoints
from keepstep.checkpoint.save.writerclient import WriterClient
from keepstep.checkpoint.storage.source import open_root
from keepstep.checkpoint.storage.targets import Fault, PosixTarget
from keepstep.trainer.checkpointer import Checkpointer

SHARD = "rank-00000-of-00001.safetensors"
EIO = Fault(kind="storage-error", at_byte=5000)
STALL = Fault(kind="storage-stall", seconds=100)


def committed(root: Path) -> list[str]:
    """Names of the committed checkpoints, newest first."""
    return [entry.name.text for entry in list_checkpoints(open_root(root), trusted_key=None) if entry.committed]


def writer_pid(ckpt: Checkpointer) -> int:
    """The process that writes for `ckpt`."""
    assert isinstance(ckpt._writer, WriterClient)
    assert ckpt._writer.pid is not None
    return ckpt._writer.pid


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """`hold(text)` makes writes of files whose path holds `text` wait (in this process) until the event it returns is set."""
    real = PosixTarget.write
    held: dict[str, threading.Event] = {}

    def write(target: PosixTarget, view: memoryview, offset: int) -> None:
        for text, event in held.items():
            if text in str(target.path):
                assert event.wait(60), "held for ever"
        real(target, view, offset)

    monkeypatch.setattr(PosixTarget, "write", write)
    yield lambda text: held.setdefault(text, threading.Event())
    for event in held.values():
        event.set()
