"""Checkpoints in memory within one process: which tier a restore names, which buffer it spares, and what counts on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tests.checkpoint.support import FakeRun, RecordingChannel, checkpointer, forget_marks, restore_value

from keepstep.checkpoint.exchange import Fetched
from keepstep.checkpoint.storage.memory import MemorySource
from keepstep.records.errors import ConfigError, RefuseToStartError


class NextChannel(RecordingChannel):
    """The channel of the next life on the same node; files of these endings come from a peer."""

    def __init__(self, before: RecordingChannel, *from_peer: str) -> None:
        super().__init__()
        self._memory = before._memory
        self._from_peer = from_peer

    def fetch(self, checkpoint: str, file: str) -> Fetched:
        found = super().fetch(checkpoint, file)
        return msgspec.structs.replace(found, tier="peer") if file.endswith(self._from_peer) else found


def live(root: Path, channel: RecordingChannel, cycle: int, steps: list[int]) -> int:
    """One life that keeps an image of each of `steps` in memory; the step it went on from."""
    ckpt = checkpointer(
        root, {"w": torch.zeros(1 << 18)}, FakeRun(channel, cycle=cycle), memory=True, memory_every_steps=1
    )
    step = ckpt.restore()
    for number in steps:
        ckpt.maybe_save(number)
        ckpt.wait()
    ckpt.close()
    return step


@pytest.mark.parametrize(
    ("from_peer", "tier"), [((), "shm"), ((".json", ".prints"), "shm"), ((".safetensors",), "peer")]
)
def test_the_tier_is_that_of_the_images(from_peer: tuple[str, ...], tier: str, root: Path) -> None:
    first = RecordingChannel()
    live(root, first, 0, [1])
    second = NextChannel(first, *from_peer)
    assert live(root, second, 1, []) == 1
    (restored,) = second.of_kind("restored")
    assert (restored["step"], restored["source"]) == (1, tier)


def test_the_image_that_was_restored_is_not_staged_over(root: Path) -> None:
    """Nor does anything stay of the image in the other buffer that is."""
    first = RecordingChannel()
    live(root, first, 0, [1, 2, 3])  # in the first buffer, the second, the first
    second = NextChannel(first)
    assert live(root, second, 1, [4]) == 3
    assert [kept.checkpoint for kept in second.kept()] == [
        "job7-step-00000004-c0001-a0001",
        "job7-step-00000003-c0000-a0001",
    ]
    third = NextChannel(second)
    ckpt = checkpointer(root, {"w": torch.zeros(1 << 18)}, FakeRun(third, cycle=2), memory=True)
    assert ckpt.restore() == 4
    ckpt.state["bad"] = object()
    with pytest.raises(ConfigError):  # in the middle of staging
        ckpt.save(5)
    ckpt.close()
    assert [kept.checkpoint for kept in third.kept()] == ["job7-step-00000004-c0001-a0001"]


def test_the_manifest_of_images_in_memory_counts_nowhere_else(root: Path) -> None:
    channel = RecordingChannel()
    run = FakeRun(channel)
    ckpt = checkpointer(root, {"w": torch.zeros(1 << 18)}, run, memory=True)
    ckpt.restore()
    ckpt.save(1)
    ckpt.wait()
    folder = ckpt.newest_committed_path()
    assert folder is not None
    found = MemorySource(channel).marker(folder.name)
    assert found is not None
    ckpt.close()
    assert (folder / found[0]).read_bytes() != found[1]
    (folder / found[0]).write_bytes(found[1])
    forget_marks()
    (refused,) = restore_value(root)
    assert isinstance(refused, RefuseToStartError)
    assert "its manifest speaks of images in memory" in str(refused)
