"""Checkpoints on disk that are copied to an object store: what arrives there, what never does, and what a restore finds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.checkpoint.s3 import S3, Fault, wait_until
from tests.checkpoint.support import (
    FakeRun,
    Loader,
    RecordingChannel,
    checkpointer,
    flip_bit,
    restore_value,
    run_ranks,
)

from keepstep.checkpoint.format.layout import rank_file_name
from keepstep.checkpoint.keeping.records import read_records
from keepstep.checkpoint.restore.lineage import list_checkpoints
from keepstep.checkpoint.restore.verify import verify_checkpoint
from keepstep.checkpoint.save.uploader import checked_chunks
from keepstep.checkpoint.storage import objects
from keepstep.checkpoint.storage.source import open_deleter, open_root
from keepstep.checkpoint.storage.writer import FileFact, write_file
from keepstep.checkpoint.trust.keys import trusted_public_key
from keepstep.records.errors import ConfigError, VerificationError
from keepstep.trainer.checkpointer import Checkpointer
from keepstep.trainer.tiers import CLOSE_MARGIN_S


def url(s3: S3) -> str:
    return f"s3://{s3.bucket}/team/ckpt"


def committed(s3: S3) -> list[int]:
    """Steps of what is committed in the store and verifies there, bytes included."""
    root, found = s3.root(), []
    for entry in list_checkpoints(root, trusted_key=trusted_public_key()):
        if entry.committed:
            assert verify_checkpoint(root, entry.name.text, trusted_key=trusted_public_key()).ok
            found.append(entry.name.step)
    return sorted(found)


def train(
    root: Path,
    s3: S3,
    steps: list[int],
    channel: RecordingChannel | None = None,
    *,
    world_size: int = 1,
    cycle: int = 0,
    between: Callable[[int], None] = lambda _step: None,
    **options: Any,
) -> list[Checkpointer]:
    """Restore, save each of `steps` and close, on `world_size` ranks; `between` is called after each commit but the last."""
    channel = channel or RecordingChannel()
    options = {"upload_root": url(s3), "store": s3.options(), **options}

    def body(rank: int) -> Checkpointer:
        run = FakeRun(channel, rank=rank, world_size=world_size, cycle=cycle)
        ckpt = checkpointer(root, {"w": torch.zeros(40_000), "loader": Loader(rank)}, run, **options)
        ckpt.restore()
        for step in steps:
            ckpt.state["w"] = torch.full((40_000,), float(step))
            assert ckpt.save(step)
            ckpt.wait()
            if step != steps[-1]:
                between(step)
        ckpt.close()
        return ckpt

    results = run_ranks(world_size, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def on_disk(root: Path) -> list[str]:
    return [entry.name.text for entry in list_checkpoints(open_root(root), trusted_key=None) if entry.committed]


def test_what_was_committed_arrives_whole_and_says_so(root: Path, s3: S3) -> None:
    channel = RecordingChannel()
    train(root, s3, [1], channel, world_size=2)
    assert committed(s3) == [1]
    (folder,) = on_disk(root)
    assert s3.root().marker(folder) == open_root(root).marker(folder)
    (reached,) = channel.of_kind("tier_reached")
    assert reached["took_ns"] > 0
    assert {**reached, "took_ns": 0} == {"step": 1, "checkpoint": folder, "tier": "object", "files": 3, "took_ns": 0}
    assert (root / ".keepstep" / "tiers" / f"{folder}.object.json").is_file()
    for place, tiers in ((open_root(root), ["disk", "object"]), (s3.root(), ["object"])):
        assert [one.tier for one in read_records(place, 0).tiers[folder]] == tiers
    assert s3.of("DELETE") == []


def test_large_files_go_up_in_parts(root: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "CONDITIONAL_BYTES", 1 << 16)
    train(root, s3, [1])
    assert committed(s3) == [1]
    assert any("uploadId" in request.query for request in s3.of("PUT"))


@pytest.mark.parametrize("parts", [False, True])
def test_one_ranks_upload_fails(root: Path, s3: S3, parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No marker there, the disk keeps its checkpoint, and the next commit goes up at once, whatever the cadence."""
    if parts:
        monkeypatch.setattr(objects, "CONDITIONAL_BYTES", 1 << 16)
    bad = rank_file_name(1, 2)

    def policy(method: str, key: str, number: int) -> Fault | None:
        return "broken" if method in ("PUT", "POST") and "step-00000001" in key and key.endswith(bad) else None

    s3.policy, channel = policy, RecordingChannel()

    def between(step: int) -> None:
        wait_until(lambda: len(channel.of_kind("upload_failed")) == 1)
        assert committed(s3) == []

    options = s3.options(retry_for_s=0.1)
    ckpts = train(root, s3, [1, 2], channel, world_size=2, upload_every="1h", store=options, between=between)
    (failed,) = channel.of_kind("upload_failed")
    assert failed["step"] == 1 and failed["failed"] == 1 and bad in failed["error"] and "rank 1" in failed["error"]
    assert channel.of_kind("ckpt_failed") == [] and ckpts[0].last_committed_step == 2
    assert [fields["step"] for fields in channel.of_kind("tier_reached")] == committed(s3) == [2]
    assert len(on_disk(root)) == 2


def test_a_damaged_file_is_not_uploaded(root: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk rots between the commit and the read for the upload, in the very last byte of a file sent in parts."""
    monkeypatch.setattr(objects, "CONDITIONAL_BYTES", 1 << 16)
    channel = RecordingChannel()
    claimed = threading.Event()

    def damage(method: str, key: str, number: int) -> None:
        if "claims" in key and method == "PUT" and not claimed.is_set():
            claimed.set()
            flip_bit(next(root.glob("*/rank-*")), -1)

    s3.policy = damage
    train(root, s3, [1], channel)
    assert claimed.is_set() and committed(s3) == []
    assert ".safetensors" not in " ".join(s3.keys())
    (failed,) = channel.of_kind("upload_failed")
    assert "damaged, so it is not uploaded" in failed["error"]


def test_the_last_bytes_wait_for_the_digest(tmp_path: Path) -> None:
    folder = "job7-step-00000001-c0000-a0001"
    (tmp_path / folder).mkdir()
    fact = write_file(tmp_path / folder / "f.bin", [b"x" * 1000])
    source = open_root(tmp_path)
    assert b"".join(checked_chunks(source, folder, fact, 300)) == b"x" * 1000
    flip_bit(tmp_path / folder / "f.bin", 0)
    chunks = checked_chunks(source, folder, fact, 300)
    assert [len(next(chunks)) for _ in range(3)] == [300] * 3
    with pytest.raises(VerificationError, match="are not those that were saved"):
        next(chunks)
    longer: FileFact = msgspec.structs.replace(fact, size_bytes=1001)
    with pytest.raises(VerificationError, match="has 1000 bytes"):
        next(checked_chunks(source, folder, longer, 300))


def test_only_what_is_due_goes_up_and_the_newest_takes_the_place_of_what_waits(root: Path, s3: S3) -> None:
    channel, go_on = RecordingChannel(), threading.Event()

    def hold(method: str, key: str, number: int) -> None:
        if "claims" in key and method == "PUT":
            go_on.wait(20)

    s3.policy = hold

    def body(rank: int) -> None:
        run = FakeRun(channel, rank=rank, world_size=2)
        ckpt = checkpointer(root, {"w": torch.zeros(100)}, run, upload_root=url(s3), store=s3.options())
        ckpt.restore()
        for step in (1, 2, 3):
            assert ckpt.save(step)
            ckpt.wait()
        assert ckpt.last_committed_step == 3  # uploads hold up no save
        if rank == 0:
            go_on.set()
        ckpt.close()

    assert run_ranks(2, body) == [None, None]
    assert [fields["step"] for fields in channel.of_kind("tier_reached")] == [1, 3]
    assert committed(s3) == [1, 3]


def test_a_root_that_is_gone_is_restored_from_the_store(root: Path, s3: S3, capfd: pytest.CaptureFixture[str]) -> None:
    train(root, s3, [1, 2], world_size=2)
    train(root, s3, [3], world_size=2, upload_every="1h", cycle=1)
    options: dict[str, Any] = {"upload_root": url(s3), "store": s3.options()}
    # Disk and store both hold it: the disk is nearer.
    restored = RecordingChannel()
    assert restore_value(root, world_size=2, channel=restored, **options) == [(3, 3.0), (3, 3.0)]
    assert restored.of_kind("restored")[0]["source"] == "disk"
    # The store does not answer: the disk is enough.
    s3.policy = lambda method, key, number: "broken"
    assert restore_value(root, upload_root=url(s3), store=s3.options(retry_for_s=0.05), world_size=2) == [(3, 3.0)] * 2
    s3.policy = lambda method, key, number: None
    assert "not looked at for checkpoints" in capfd.readouterr().err
    shutil.rmtree(root)
    restored = RecordingChannel()
    assert restore_value(root, world_size=2, channel=restored, **options) == [(3, 3.0), (3, 3.0)]
    assert restored.of_kind("restored")[0]["source"] == "object"
    assert "training goes on from what s3://" in capfd.readouterr().err


def test_going_on_behind_the_mark_of_a_lost_root_but_not_of_a_thinned_one(
    root: Path, s3: S3, capfd: pytest.CaptureFixture[str]
) -> None:
    """Step 2 was never uploaded. With the disk gone training goes on from 1; with step 2 alone gone from the disk it does not."""
    train(root, s3, [1, 2], upload_every="1h")
    assert committed(s3) == [1]
    options: dict[str, Any] = {"upload_root": url(s3), "store": s3.options()}
    (newest,) = root.glob("*step-00000002*")
    shutil.move(newest, root.parent / "aside")
    (refused,) = restore_value(root, **options)
    assert "is older than" in str(refused) and "has disappeared" in str(refused)
    shutil.rmtree(root)
    assert restore_value(root, **options) == [(1, 1.0)]
    # What is taken away in the store is missed too: it has a mark of its own.
    train(root, s3, [3], cycle=2)
    assert committed(s3) == [1, 3]
    s3.may_delete = True
    deleter = open_deleter(url(s3), s3.options())
    (folder,) = [entry.name.text for entry in list_checkpoints(s3.root(), trusted_key=None) if entry.name.step == 3]
    deleter.delete_marker(folder)
    shutil.rmtree(root)
    capfd.readouterr()
    assert restore_value(root, **options) == [(1, 1.0)]
    assert f"{folder} is refused by rank 0: {folder}: was committed, and its manifest is gone" in capfd.readouterr().err


def test_a_damaged_disk_copy_is_replaced_by_the_uploaded_one(root: Path, s3: S3) -> None:
    train(root, s3, [1, 2])
    (newest,) = root.glob("*step-00000002*")
    flip_bit(newest / rank_file_name(0, 1), 6000)
    channel = RecordingChannel()
    assert restore_value(root, channel=channel, upload_root=url(s3), store=s3.options()) == [(2, 2.0)]
    assert channel.of_kind("restored")[0]["source"] == "object"
    assert [fields["tier"] for fields in channel.of_kind("quarantined")] == ["disk"]


KILLED = """
import sys, torch
from keepstep.checkpoint.storage.source import StoreOptions
from tests.checkpoint.support import FakeRun, RecordingChannel, checkpointer
root, url, endpoint = sys.argv[1:]
store = StoreOptions(endpoint=endpoint, region="us-east-1", allow_http=True)
ckpt = checkpointer(root, {"w": torch.zeros(40_000)}, FakeRun(RecordingChannel()), upload_root=url, store=store)
ckpt.restore()
ckpt.save(1)
ckpt.wait()
print("committed", flush=True)
ckpt.close()
"""


@pytest.mark.slow
def test_a_process_that_is_killed_in_the_upload_leaves_no_marker(root: Path, s3: S3) -> None:
    there = threading.Event()

    def hold(method: str, key: str, number: int) -> Fault | None:
        if method == "PUT" and key.endswith(".safetensors"):
            there.set()
            return "stall"
        return None

    s3.policy = hold
    command = [sys.executable, "-c", KILLED, str(root), url(s3), s3.endpoint]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None and process.stdout.readline() == "committed\n"
    assert there.wait(20)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(on_disk(root)) == 1 and committed(s3) == []
    assert "commits/" not in " ".join(s3.keys())


@pytest.mark.parametrize("by", ["argument", "notice"])
def test_close_waits_no_longer_than_it_may(
    root: Path, s3: S3, by: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own limit, or what is left of a scheduler's notice but for a margin."""
    s3.policy = lambda method, key, number: "stall" if "claims" in key and method == "PUT" else None
    if by == "notice":
        monkeypatch.setattr(FakeRun, "notice_left_s", lambda _run: CLOSE_MARGIN_S + 0.1)
    train(root, s3, [1], upload_close_s=0.1 if by == "argument" else 60.0)
    assert "was not complete after 0.1 s and is given up" in capfd.readouterr().err


def test_a_run_with_another_root_uploads_nothing(root: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """`keepstep doctor resume` trains copies of a job for a comparison: they are nothing for the store."""
    monkeypatch.setenv("KEEPSTEP_CKPT_ROOT", str(root / "compared"))
    train(root, s3, [1])
    assert len(on_disk(root / "compared")) == 1 and s3.requests == []


def test_bad_settings(root: Path, s3: S3, tmp_path: Path) -> None:
    run = FakeRun(RecordingChannel())
    for options, message in (
        ({"upload_root": str(tmp_path / "other")}, "uploads go from a folder to an object store"),
        ({"upload_root": url(s3), "upload_every": "soon"}, "is not a time such as"),
        ({"upload_root": url(s3), "upload_every": -1.0}, "upload_every=-1.0 is not a time"),
        ({"upload_root": url(s3), "upload_close_s": -1.0}, "upload_close_s=-1.0"),
        ({"stagger_s": 20.0}, "must be at least 0 and below timeout_s=20"),
        ({"on_busy": "drop"}, "on_busy='drop' is not one of wait, skip"),
    ):
        with pytest.raises(ConfigError, match=message):
            checkpointer(root, {"w": torch.zeros(3)}, run, **{"store": s3.options(), **options})
