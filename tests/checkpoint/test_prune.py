"""Pruning real roots: what stays can be restored, whatever happens on the way."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.s3 import S3
from tests.checkpoint.support import (
    FakeRun,
    Loader,
    RecordingChannel,
    checkpointer,
    flip_bit,
    forget_marks,
    report_of,
    restore_value,
    save_steps,
)
from tests.checkpoint.test_object_root import committed
from tests.disks import small_tmpfs

from keepstep.checkpoint.format.blocks import (
    BLOCK_BYTES,
    BLOCKS_NAME,
    DigestAlgorithm,
    blocks_count,
    digest_blocks,
)
from keepstep.checkpoint.format.layout import INDEX_NAME, MARKER_SIGNED, FolderName, rank_file_name
from keepstep.checkpoint.keeping.policy import parse_policy
from keepstep.checkpoint.keeping.prune import BusyError, Pruned, Task, decide_now, prune, prune_after_commit
from keepstep.checkpoint.keeping.records import TOMBSTONES, new_suspicion, note_verified, release, write_suspicion
from keepstep.checkpoint.keeping.retention import Line, current
from keepstep.checkpoint.keeping.survey import is_whole, survey
from keepstep.checkpoint.restore.lineage import Listed
from keepstep.checkpoint.restore.quarantine import QuarantineRecord, write_quarantine
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import open_deleter
from keepstep.checkpoint.trust.keys import trusted_public_key
from keepstep.checkpoint.trust.policy import TrustPolicy
from keepstep.records.codec import rfc3339
from keepstep.records.errors import ConfigError, StorageError

DAY_NS = 86400 * 10**9


def trust() -> TrustPolicy:
    """The local key is trusted."""
    return TrustPolicy(keys=(trusted_public_key(),))


def task(root: Path, policy: str = "last:1", **fields: Any) -> Task:
    """Prune `root` for real."""
    place = PosixRoot(root)
    return Task(
        root=place,
        policy=parse_policy(policy),
        trust=trust(),
        **{"deleter": place, **fields},
    )


def steps(root: Path) -> list[int]:
    """Steps of all folders, committed or not."""
    return sorted(int(name.split("-step-")[1][:8]) for name in PosixRoot(root).folders())


def current_step(root: Path) -> int | None:
    newest = current(survey(PosixRoot(root), trust(), now_ns=time.time_ns()).entries)
    return None if newest is None else newest.name.step


def test_what_no_rule_keeps_is_gone_and_the_rest_restores(root: Path) -> None:
    paths = save_steps(root, [100, 200, 300, 400])
    assert PosixRoot(root).record_names("tiers") == {path.name for path in paths}
    wanted = prune(task(root, "last:2, every-steps:200", deleter=None))
    assert wanted.dry_run and wanted.deleted == [] and steps(root) == [100, 200, 300, 400]
    assert [line.step for line in wanted.lines if not line.keep] == [100]
    assert [line.reasons for line in wanted.lines if line.step == 200] == [["every-steps:200: first from step 200 on"]]
    size = sum(path.stat().st_size for path in paths[0].iterdir() if path.name != MARKER_SIGNED)
    done = prune(task(root, "last:2, every-steps:200"))
    assert (done.deleted, done.freed_bytes, done.failed) == ([paths[0].name], size, {})
    assert steps(root) == [200, 300, 400]
    assert PosixRoot(root).record_names("tiers") == {path.name for path in paths[1:]}
    assert PosixRoot(root).record_names(TOMBSTONES) == frozenset()
    assert restore_value(root) == [(400, 400.0)]


def test_a_root_that_is_not_there_has_nothing_to_prune(root: Path) -> None:
    """A rank whose disk lacks the folder must not fall over it."""
    assert prune(task(root)).lines == []


def test_a_tombstoned_checkpoint_is_never_restored(root: Path) -> None:
    newest = save_steps(root, [100, 200])[1]
    PosixRoot(root).put_record(TOMBSTONES, newest.name, b"")
    forget_marks()
    assert current_step(root) == 100
    assert restore_value(root) == [(100, 100.0)]


def test_a_tombstone_without_its_folder_is_cleared_away(root: Path) -> None:
    """Its name may be used by a later save, which it would hide."""
    oldest = save_steps(root, [100, 200])[0]
    PosixRoot(root).put_record(TOMBSTONES, oldest.name, b"")
    shutil.rmtree(oldest)
    prune(task(root))
    assert PosixRoot(root).record_names(TOMBSTONES) == frozenset()


@pytest.mark.slow
def test_killed_before_every_call_nothing_half_deleted_is_a_candidate(root: Path, tmp_path: Path) -> None:
    save_steps(root, [100, 200, 300], world_size=2)
    program = Path(__file__).with_name("prune_kill_loop.py")
    done = subprocess.run(
        [sys.executable, program, root, tmp_path / "work", "last:1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 40


def test_a_pin_that_comes_meanwhile_is_honoured(root: Path) -> None:
    paths = save_steps(root, [100, 200, 300])

    def pin_the_next(line: Line) -> None:
        if line.step == 100:
            PosixRoot(root).put_record("pins", paths[1].name, b'{"checkpoint": "%s"}' % paths[1].name.encode())

    done = prune(task(root), said=pin_the_next)
    assert done.deleted == [paths[0].name]
    assert done.failed == {paths[1].name: "it was pinned meanwhile, and stays"}
    assert steps(root) == [200, 300]


def test_two_prunes_do_not_run_at_once(root: Path) -> None:
    save_steps(root, [100, 200])
    with (root / ".keepstep" / "prune.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another process is pruning it"):
            prune(task(root))
        assert len(decide_now(task(root), time.time_ns())) == 2, "deciding alone needs no lock"
    assert len(prune(task(root)).deleted) == 1


def test_in_the_background_at_the_lowest_priority(root: Path) -> None:
    save_steps(root, [100, 200, 300])
    seen: list[Pruned | str] = []
    priority: list[int] = []

    def done(result: Pruned | str) -> None:
        seen.append(result)
        priority.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    prune_after_commit(task(root), done=done).join(30)
    (result,) = seen
    assert isinstance(result, Pruned) and len(result.deleted) == 2
    assert priority == [19] and os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


def test_in_the_background_errors_do_not_reach_the_training(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root.parent.mkdir(exist_ok=True)
    root.write_text("not a folder")
    seen: list[Pruned | str] = []
    prune_after_commit(task(root), done=seen.append).join(30)
    assert "pruning" in capfd.readouterr().err and isinstance(seen[0], str)


def test_what_was_abandoned_stays_so(root: Path) -> None:
    """Cycle 1 went back before 300, which is pinned; later lives began after 300 and tell nothing of it."""
    paths = save_steps(root, [200, 300])
    record = QuarantineRecord(checkpoint=paths[1].name, step=300, reason="?", file=None, by_rank=0, time=rfc3339(1))
    write_quarantine(PosixRoot(root), record)
    forget_marks()
    save_steps(root, [210, 400], cycle=1)
    PosixRoot(root).put_record("pins", paths[1].name, b"{}")
    for cycle, step in ((2, 500), (3, 600), (4, 700)):
        save_steps(root, [step], cycle=cycle)
    done = prune(task(root))
    lines = {line.step: line for line in done.lines}
    assert [step for step, line in lines.items() if line.keep] == [700, 600, 400, 300]
    assert lines[400].reasons == [f"its manifest alone tells that {paths[1].name} was abandoned"]
    assert lines[600].reasons == ["newest that is known to be whole: run job7 cycle 4 restored from it"]
    PosixRoot(root).delete_record("quarantine", paths[1].name)
    states = {e.name.step: e.state for e in survey(PosixRoot(root), trust(), now_ns=0).entries}
    assert states[300] == "abandoned"


def test_released_quarantine_goes_with_its_record(root: Path) -> None:
    paths = save_steps(root, [100, 200])
    place = PosixRoot(root)
    record = QuarantineRecord(
        checkpoint=paths[0].name, step=100, reason="bit", file=None, by_rank=0, time=rfc3339(time.time_ns())
    )
    write_quarantine(place, record)
    assert prune(task(root)).deleted == []
    release(place, paths[0].name, "seen", time.time_ns())
    assert prune(task(root)).deleted == [paths[0].name]
    assert place.record_names("quarantine") == place.record_names("released") == frozenset()


def test_suspicions_and_proofs_are_read_from_the_root(root: Path) -> None:
    paths = save_steps(root, [100, 200, 300, 400])
    place = PosixRoot(root)
    digest = report_of(paths[2]).digest
    assert digest is not None
    note_verified(place, paths[2].name, digest)
    write_suspicion(place, "spike", new_suspicion(100, "loss spike", time.time_ns()))
    assert prune(task(root)).deleted == [paths[1].name]
    release(place, "spike", "a bad batch", time.time_ns())
    assert prune(task(root)).deleted == [paths[0].name]
    assert steps(root) == [300, 400]


def test_a_stranger_inside_stops_the_deletion(root: Path) -> None:
    oldest = save_steps(root, [100, 200])[0]
    (oldest / "notes").mkdir()
    assert prune(task(root)).deleted == []
    (oldest / "notes").rmdir()
    assert prune(task(root)).deleted == [oldest.name]


def test_another_key_s_checkpoints_are_not_ours_to_delete(root: Path, keepstep_home: Path) -> None:
    save_steps(root, [100, 200, 300])
    shutil.rmtree(keepstep_home)
    done = prune(task(root))
    assert done.deleted == [] and all("signed by key" in line.reasons[0] for line in done.lines)


def test_the_best_by_a_metric_that_was_saved_with_it(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A loss may be a tensor, or NaN: such a checkpoint is committed like any, and is nobody's best."""
    ckpt = checkpointer(root, {"w": torch.zeros(1000), "loader": Loader(0)}, FakeRun(RecordingChannel()))
    ckpt.restore()
    for step, loss in enumerate((2.0, torch.tensor(0.5), float("nan"), 0.25, float("-inf"), 3.0), 1):
        ckpt.save(step, metrics={"loss": loss})  # type: ignore[dict-item]
        ckpt.wait()
        assert ckpt.last_committed_step == step
    with pytest.raises(ConfigError, match="metric 'loss' is a str and no number"):
        ckpt.save(9, metrics={"loss": "low"})  # type: ignore[dict-item]
    ckpt.close()
    prune(task(root, "best:loss:2:min"))
    assert steps(root) == [2, 4, 6]


def test_who_prunes_again_and_again_reads_each_marker_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(root, [100, 200, 300])
    read: list[str] = []
    real = PosixRoot.marker

    def marker(self: PosixRoot, folder: str) -> tuple[str, bytes] | None:
        read.append(folder[5:18])
        return real(self, folder)

    monkeypatch.setattr(PosixRoot, "marker", marker)
    known: dict[str, Listed] = {}
    first = prune(task(root, "last:3", known=known))
    assert sorted(read) == ["step-00000100", "step-00000200", "step-00000300"]
    again = prune(task(root, "last:3", known=known))
    assert len(read) == 3 and again.lines == first.lines
    assert all(item.manifest is not None and item.manifest.files == () for item in known.values())
    save_steps(root, [400], cycle=1)
    read.clear()
    # The new one, and once more before anything goes; folders are asked before their files are deleted.
    assert len(prune(task(root, "last:1", known=known)).deleted) == 2
    assert read.count("step-00000400") == 2 and read.count("step-00000300") == 0


def test_nothing_goes_when_the_newest_lost_its_marker_since_it_was_read(root: Path) -> None:
    paths = save_steps(root, [100, 200])
    known: dict[str, Listed] = {}
    prune(task(root, "last:2", known=known))
    (paths[1] / MARKER_SIGNED).unlink()
    with pytest.raises(
        StorageError, match=r"step-00000200.*is not the one that was verified before; nothing is deleted"
    ):
        prune(task(root, "last:1", known=known))
    assert prune(task(root, "last:1", known=known)).deleted == [] and current_step(root) == 100


@pytest.mark.slow
def test_an_object_store_is_pruned_by_who_may_delete(s3: S3) -> None:
    root, url = s3.root(), f"s3://{s3.bucket}/team/ckpt"
    older, newer = (committed(root, FolderName(step, 0, 1, 0, "job7")) for step in (100, 200))
    torn = root.make_folder(FolderName(300, 0, 1, 0, "job7"))
    root.put_file(torn, rank_file_name(0, 2), [b"half"])
    job = Task(
        root=root,
        policy=parse_policy("last:1"),
        deleter=open_deleter(url, s3.options()),
        trust=trust(),
        ended_runs=frozenset({"job7"}),
    )
    refused = prune(job)
    assert refused.deleted == [] and list(refused.failed) == [older], "the torn one was claimed a moment ago"
    assert "AccessDenied" in refused.failed[older]
    # The trainer's identity could only hide it: it is still whole, and pruning goes on with the right to delete.
    s3.may_delete = True
    assert sorted(prune(job, time.time_ns() + 2 * DAY_NS).deleted) == [older, torn]
    assert root.folders() == [newer]
    assert set(root.files(newer) or {}) == {INDEX_NAME, rank_file_name(0, 2), rank_file_name(1, 2)}
    assert not [key for key in s3.keys() if older in key or torn in key]  # noqa: SIM118 - not a dict


# ---- rows of the failure table


def _killed_while_saving(root: Path) -> None:
    """A process commits step 100, then dies by SIGKILL when all of step 200 is written but its marker is not."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.checkpoint.support import save_steps\n"
        "from keepstep.checkpoint.save import saver\n"
        "root = Path(sys.argv[1]); real = saver.commit\n"
        "def commit(place, folder, *a, **k):\n"
        "    if 'step-00000200' in folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(place, folder, *a, **k)\n"
        "saver.commit = commit\n"
        "save_steps(root, [100, 200])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    done = subprocess.run([sys.executable, "-c", program, root], env=env, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_row_16_killed_between_dispatch_and_commit_the_old_one_survives(root: Path) -> None:
    _killed_while_saving(root)
    assert steps(root) == [100, 200]
    done = prune(task(root, ended_runs=frozenset({"job7"})), time.time_ns() + 2 * DAY_NS)
    assert done.deleted == []
    assert restore_value(root) == [(100, 100.0)]
    save_steps(root, [300], cycle=2)
    assert len(prune(task(root)).lines) == 3 and current_step(root) == 300


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_tmpfs(tmp_path / "small", "size=1m") as place:
        yield place


def test_row_17_a_full_disk_with_one_to_keep_leaves_that_one(small_disk: Path) -> None:
    root, channel = small_disk / "root", RecordingChannel()
    ckpt = checkpointer(root, {"w": torch.full((100_000,), 1.0), "loader": Loader(0)}, FakeRun(channel))
    ckpt.restore()
    ckpt.save(1)
    ckpt.wait()
    ckpt.state["w"] = torch.full((200_000,), 2.0)  # does not fit beside the first one
    ckpt.save(2)
    ckpt.close()
    assert "ENOSPC" in channel.of_kind("ckpt_failed")[0]["error"]
    assert prune(task(root)).deleted == []
    assert steps(root) == [1, 2] and current_step(root) == 1
    assert report_of(next(root.glob("*step-00000001*"))).ok


def test_a_full_disk_can_be_pruned(small_disk: Path) -> None:
    """Not one byte of a tombstone has room: an empty one does the same."""
    root = small_disk / "root"
    save_steps(root, [1, 2, 3])
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while filler.write(bytes(4096)):
            pass
    with pytest.raises(StorageError, match="ENOSPC"):
        PosixRoot(root).put_record("pins", "x", b"y")
    done = prune(task(root))
    assert len(done.deleted) == 2 and done.failed == {} and steps(root) == [3]


def test_row_18_torn_folders_are_not_among_the_last(root: Path) -> None:
    save_steps(root, [100, 200])
    for step in (300, 400):
        torn = root / f"job7-step-{step:08d}-c0000-a0001"
        torn.mkdir()
        (torn / "rank-00000-of-00001.safetensors").write_bytes(b"half")
    assert prune(task(root, "last:2")).deleted == []
    later = time.time_ns() + 2 * DAY_NS
    assert prune(task(root, "last:2"), later).deleted == [], "cycle 0 may still commit them"
    save_steps(root, [250], cycle=1)
    assert len(prune(task(root, "last:2"), later).deleted) == 3
    assert steps(root) == [200, 250]
    assert restore_value(root, cycle=2) == [(250, 250.0)]


def test_row_19_a_copy_that_lost_its_marker_is_reported_and_kept(root: Path, tmp_path: Path) -> None:
    save_steps(root, [100, 200], world_size=2)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns(MARKER_SIGNED))
    later, over = time.time_ns() + 90 * DAY_NS, frozenset({"job7"})
    done = prune(task(copy, ended_runs=over), later)
    assert done.deleted == []
    assert all("a copy without it?" in line.reasons[0] for line in done.lines)
    (whole,) = (name for name in PosixRoot(copy).folders() if "00000200" in name)
    assert is_whole(PosixRoot(copy), whole)
    # One that lacks the end of a file is a torn save like any other.
    torn = next(copy.glob("*step-00000100*"))
    os.truncate(torn / "rank-00001-of-00002.safetensors", 5000)
    assert not is_whole(PosixRoot(copy), torn.name)
    assert prune(task(copy, ended_runs=over), later).deleted == [torn.name]


def with_block_digests(path: Path, algorithm: DigestAlgorithm) -> None:
    """A shard of two blocks that ends in their digests."""
    size = BLOCK_BYTES + 5000
    count = blocks_count(size + 64)
    table = {
        "w": {"dtype": "U8", "shape": [size - 4096], "data_offsets": [0, size - 4096]},
        BLOCKS_NAME: {"dtype": "U8", "shape": [32 * count], "data_offsets": [size - 4096, size - 4096 + 32 * count]},
    }
    body = struct.pack("<Q", 4088) + json.dumps(table).encode().ljust(4088) + os.urandom(size - 4096)
    path.write_bytes(body + digest_blocks(memoryview(body), algorithm))


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_a_copy_without_its_marker_is_whole_only_when_its_blocks_are(root: Path, algorithm: DigestAlgorithm) -> None:
    folder = root / "job7-step-00000300-c0000-a0001"
    folder.mkdir(parents=True)
    (folder / INDEX_NAME).write_text('{"world": 1}')
    shard = folder / rank_file_name(0, 1)
    with_block_digests(shard, algorithm)
    assert is_whole(PosixRoot(root), folder.name)
    flip_bit(shard, BLOCK_BYTES + 700)
    assert not is_whole(PosixRoot(root), folder.name)


def test_row_20_a_save_that_failed_later_is_not_the_latest(root: Path) -> None:
    run = FakeRun(RecordingChannel())
    ckpt = checkpointer(root, {"w": torch.zeros(1000), "loader": Loader(0)}, run)
    ckpt.restore()
    ckpt.save(100)
    ckpt.wait()
    run.lease_error = "the lease ran out"
    ckpt.save(200)
    ckpt.wait()
    assert current_step(root) == 100
    run.lease_error = None
    assert ckpt.save(150), "a lower step than the failed one is saved as any"
    ckpt.close()
    assert current_step(root) == 150
    prune(task(root))
    assert steps(root) == [150, 200]


def test_a_save_in_flight_is_left_alone(root: Path) -> None:
    """The launcher's grant is slow: files of step 200 are there, its marker is not, and a prune runs."""

    class SlowChannel(RecordingChannel):
        asked, answer = threading.Event(), threading.Event()

        def grant(self, checkpoint: str, step: int) -> bool:
            if step == 200:
                self.asked.set()
                assert self.answer.wait(30)
            return True

    channel = SlowChannel()
    ckpt = checkpointer(root, {"w": torch.zeros(1000), "loader": Loader(0)}, FakeRun(channel))
    ckpt.restore()
    for step in (100, 200):
        ckpt.wait()
        ckpt.save(step)
    assert channel.asked.wait(30)
    assert prune(task(root)).deleted == []
    channel.answer.set()
    ckpt.close()
    assert ckpt.last_committed_step == 200
    assert [name[:18] for name in prune(task(root)).deleted] == ["job7-step-00000100"]
