"""Damage, forgery and disagreement at restore: the next older checkpoint is loaded, or the start is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tests.checkpoint.support import (
    FakeRun,
    Loader,
    RecordingChannel,
    checkpointer,
    flip_bit,
    forget_marks,
    report_of,
    restore_value,
    run_ranks,
    save_steps,
)

from keepstep.checkpoint.format.layout import LATEST_NAME, MARKER_SIGNED, MARKER_UNSIGNED
from keepstep.checkpoint.restore.quarantine import QuarantineRecord
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.torch.read import Want, read_checkpoint
from keepstep.checkpoint.torch.rng import set_rng_state
from keepstep.checkpoint.trust.keys import key_path, signing_key
from keepstep.checkpoint.trust.manifest import sign_statement
from keepstep.records.errors import ChannelError, RefuseToStartError, StorageError, VerificationError
from keepstep.trainer.channel import MemoryChannel

SHARD = "rank-00000-of-00001.safetensors"


class Canary:
    """Unpickling it would leave a trace."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (os.environ["KEEPSTEP_HOME"] + "/canary",)


def _zero(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50_000:90_000] = bytes(40_000)
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _same_size_other_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:8] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(data)


def _forge(folder: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    bundle = json.loads((folder / MARKER_SIGNED).read_bytes())
    statement = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    (folder / MARKER_SIGNED).write_bytes(sign_statement(statement, ec.generate_private_key(ec.SECP256R1())))


def _resign(folder: Path, change: Callable[[Path], None]) -> None:
    """Change a file and sign the folder again with the right key: what a bug in a writer would leave."""
    change(folder)
    forget_marks()
    bundle = json.loads((folder / MARKER_SIGNED).read_bytes())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    raw = b""
    for resource in statement["predicate"]["resources"]:
        data = (folder / resource["name"]).read_bytes()
        resource["digest"], resource["size"] = hashlib.sha256(data).hexdigest(), len(data)
        raw += hashlib.sha256(data).digest()
    statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(raw).hexdigest()
    (folder / MARKER_SIGNED).write_bytes(sign_statement(json.dumps(statement).encode(), signing_key()))


def _edit_index(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_bytes())
        change(index)
        (folder / "index.json").write_text(json.dumps(index))

    return lambda folder: _resign(folder, apply)


def _bigger(index: dict[str, object]) -> None:
    index["tensors"] = {"w": {"dtype": "F32", "shape": [1 << 40]}}


def _swap_for_link(folder: Path) -> None:
    target = folder.parent / "copy"
    (folder / SHARD).rename(target)
    (folder / SHARD).symlink_to(target)


def _plant_pickle(folder: Path) -> None:
    (folder / SHARD).write_bytes(pickle.dumps([Canary(), bytes(1_000_000)]))


def _pipe(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flip in data": (lambda f: flip_bit(f / SHARD, -1), SHARD),
    "bit flip in header": (lambda f: flip_bit(f / SHARD, 40), SHARD),
    "zeroed range": (lambda f: _zero(f / SHARD), SHARD),
    "truncated": (lambda f: _truncate(f / SHARD), SHARD),
    "emptied": (lambda f: os.truncate(f / SHARD, 0), SHARD),
    "header length of 4 EiB": (lambda f: _same_size_other_header(f / SHARD), SHARD),
    "missing shard": (lambda f: (f / SHARD).unlink(), SHARD),
    "shard is a link": (_swap_for_link, SHARD),
    "shard is a pipe": (_pipe, SHARD),
    "shard is a pickle": (_plant_pickle, SHARD),
    "signed pickle": (lambda f: _resign(f, _plant_pickle), SHARD),
    "index changed": (lambda f: flip_bit(f / "index.json", 30), "index.json"),
    "extra file": (lambda f: (f / "extra.pt").write_bytes(pickle.dumps(Canary())), "extra.pt"),
    "hidden extra file": (lambda f: (f / ".nfs0001").write_bytes(b""), ".nfs0001"),
    "extra folder": (lambda f: (f / "more").mkdir(), "more"),
    "statement bit flip": (lambda f: flip_bit(f / MARKER_SIGNED, 200), MARKER_SIGNED),
    "manifest emptied": (lambda f: os.truncate(f / MARKER_SIGNED, 0), MARKER_SIGNED),
    "signed by another key": (_forge, MARKER_SIGNED),
    "signed index of pickles": (
        _edit_index(lambda i: i.update(values={"w": {"$": "pickle", "v": "gASVBQ=="}})),
        "index.json: a value refers to pickle",
    ),
    "signed index with a huge tensor": (_edit_index(_bigger), "index.json"),
    "signed index without the tensor": (_edit_index(lambda i: i.update(tensors={})), "index.json"),
    "signed index of another world": (_edit_index(lambda i: i.update(world=2)), "index.json"),
    "signed index, unknown schema": (_edit_index(lambda i: i.update(schema="keepstep.index/9")), "index.json"),
    "signed index, alias to nowhere": (_edit_index(lambda i: i.update(aliases={"x": "y"})), "index.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_quarantined_and_the_older_one_loaded(
    root: Path, keepstep_home: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _older, newest = save_steps(root, [10, 20])
    damage, where = DAMAGE[name]
    damage(newest)
    # A folder whose content makes no sense but is signed is found out only by reading it.
    assert name.startswith("signed i") or not report_of(newest).ok
    channel = RecordingChannel()
    assert restore_value(root, channel=channel) == [(10, 10.0)]
    assert not (keepstep_home / "canary").exists()
    record = msgspec.json.decode(
        (root / ".keepstep" / "quarantine" / f"{newest.name}.json").read_bytes(), type=QuarantineRecord
    )
    assert (record.checkpoint, record.step, record.by_rank) == (newest.name, 20, 0)
    assert where in record.reason
    assert newest.is_dir(), "quarantine deletes nothing"
    (mark,) = channel.of_kind("quarantined")
    assert (mark["checkpoint"], mark["step"], mark["reason"]) == (newest.name, 20, record.reason)
    assert f"{newest.name} is refused by rank 0: " in capfd.readouterr().err
    # The next restore does not look at it again.
    again = RecordingChannel()
    assert restore_value(root, channel=again) == [(10, 10.0)]
    assert again.of_kind("quarantined") == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_that_sees_damage_outvotes_the_others(root: Path, world_size: int) -> None:
    _older, newest = save_steps(root, [10, 20], world_size=world_size)
    # Every rank reads from a folder of its own, as with replicated storage; only the last rank's copy is bad.
    roots = []
    for rank in range(world_size):
        copy = root.parent / f"view{rank}"
        shutil.copytree(root, copy)
        roots.append(copy)
    flip_bit(roots[-1] / newest.name / f"rank-00000-of-{world_size:05d}.safetensors", 9000)
    channel = RecordingChannel()

    def body(rank: int) -> tuple[int, float]:
        run = FakeRun(channel, rank=rank, world_size=world_size, cycle=1)
        ckpt = checkpointer(roots[rank], {"w": torch.full((40_000,), -1.0), "loader": Loader(rank)}, run)
        return ckpt.restore(), float(ckpt.state["w"][0])

    assert run_ranks(world_size, body) == [(10, 10.0)] * world_size
    record = json.loads((roots[0] / ".keepstep" / "quarantine" / f"{newest.name}.json").read_text())
    assert record["by_rank"] == world_size - 1
    assert record["file"] == f"rank-00000-of-{world_size:05d}.safetensors"


def test_rank_that_cannot_see_the_root_blames_nobody_else(root: Path) -> None:
    save_steps(root, [10], world_size=2)
    channel = RecordingChannel()

    def body(rank: int) -> int:
        place = root if rank == 0 else root.parent / "not-mounted"
        state = {"w": torch.zeros(40_000), "loader": Loader(rank)}
        return checkpointer(place, state, FakeRun(channel, rank=rank, world_size=2, cycle=1)).restore()

    results = run_ranks(2, body)
    assert all(isinstance(result, StorageError) for result in results), results
    assert "rank 1 cannot see" in str(results[0]) and "mounted" in str(results[1])
    assert not (root / ".keepstep" / "quarantine").exists()


def test_a_rank_that_never_votes_is_named(root: Path) -> None:
    save_steps(root, [10], world_size=2)
    run = FakeRun(MemoryChannel(), rank=0, world_size=2, cycle=1)
    ckpt = checkpointer(root, {"w": torch.zeros(40_000), "loader": Loader(0)}, run, timeout_s=0.2)
    with pytest.raises(ChannelError, match="restore/0/vote/1"):
        ckpt.restore()


def test_nothing_valid_refuses_to_start(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in save_steps(root, [10, 20], world_size=2):
        flip_bit(folder / "rank-00001-of-00002.safetensors", -1)
    results = restore_value(root, world_size=2)
    for result in results:
        assert isinstance(result, RefuseToStartError) and result.code == 42
        assert "keepstep run --fresh-start" in str(result)
        assert "holds 2 committed checkpoints, but none can be restored" in str(result)
    # Also the second time, when all of them are in quarantine already.
    (result, _) = restore_value(root, world_size=2)
    assert isinstance(result, RefuseToStartError) and "quarantined, see " in str(result)
    assert restore_value(root, world_size=2, cycle=2) != [(0, -1.0)] * 2
    capfd.readouterr()


def test_fresh_start_overrides_by_argument_and_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = save_steps(root, [10])
    ckpt = checkpointer(root, {"w": torch.zeros(4)}, FakeRun(MemoryChannel(), cycle=1, attempt=2))
    assert ckpt.restore(fresh_start=True) == 0
    monkeypatch.setenv("KEEPSTEP_FRESH_START", "1")
    assert restore_value(root, cycle=0) == [(0, -1.0)]
    os.truncate(folder / MARKER_SIGNED, 0)
    assert restore_value(root, cycle=2) == [(0, -1.0)]


def test_empty_and_absent_roots_start_at_zero(root: Path) -> None:
    assert restore_value(root, world_size=2) == [(0, -1.0)] * 2
    root.mkdir(exist_ok=True)
    (root / "notes.txt").write_text("not a checkpoint")
    assert restore_value(root) == [(0, -1.0)]


def test_unfinished_saves_are_passed_over(root: Path) -> None:
    _kept, torn = save_steps(root, [10, 20])
    (torn / MARKER_SIGNED).unlink()
    forget_marks()
    assert restore_value(root) == [(10, 10.0)]
    assert not (root / ".keepstep" / "quarantine").exists()


def test_own_unfinished_first_save_starts_at_zero_but_a_lost_marker_does_not(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (torn,) = save_steps(root, [10])
    (torn / MARKER_SIGNED).unlink()
    forget_marks()
    # Something was committed here once: the marker is lost, not missing.
    (result,) = restore_value(root)
    assert isinstance(result, RefuseToStartError) and "without a manifest" in str(result)
    (root / LATEST_NAME).unlink()
    assert restore_value(root) == [(0, -1.0)]
    # Another run's folder: a copy that lost its marker.
    torn.rename(root / torn.name.replace("job7", "job6"))
    (result,) = restore_value(root)
    assert isinstance(result, RefuseToStartError)
    capfd.readouterr()


def test_other_number_of_ranks_is_refused_not_dropped(root: Path) -> None:
    save_steps(root, [10], world_size=2)
    for world_size in (1, 3):
        for result in restore_value(root, world_size=world_size):
            assert isinstance(result, RefuseToStartError) and result.code == 42
            assert f"written by 2 ranks, this job has {world_size}" in str(result)
    assert not (root / ".keepstep" / "quarantine").exists()
    assert restore_value(root, world_size=2) == [(10, 10.0)] * 2


def test_missing_random_state_is_refused(root: Path) -> None:
    for bad in (None, {}, {"torch": torch.get_rng_state()}):
        with pytest.raises(RefuseToStartError, match="no random state"):
            set_rng_state(bad, "x")
    with pytest.raises(RefuseToStartError, match="does not fit"):
        set_rng_state({"torch": torch.zeros(3, dtype=torch.uint8), "python": (3, (1,), None)}, "x")


def test_lost_key_does_not_condemn_good_checkpoints(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_steps(root, [10, 20])
    saved = key_path().read_bytes()
    key_path().unlink()
    (result,) = restore_value(root)
    assert isinstance(result, RefuseToStartError)
    assert "2 are signed by somebody who is not trusted here" in str(result)
    key_path().write_bytes(saved)
    assert restore_value(root) == [(20, 20.0)]
    capfd.readouterr()


def test_unsigned_mode_says_so_and_signed_mode_never_takes_it(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_steps(root, [10])
    (folder,) = save_steps(root, [20], cycle=1, unsigned=True)
    assert (folder / MARKER_UNSIGNED).is_file()
    assert "NOT SIGNED" in capfd.readouterr().err
    (result,) = restore_value(root, cycle=2)
    assert isinstance(result, RefuseToStartError) and "is signed by nobody who is trusted here" in str(result)
    assert "not signed" in capfd.readouterr().err
    assert restore_value(root, cycle=2, unsigned=True) == [(20, 20.0)]
    flip_bit(folder / SHARD, -1)
    assert restore_value(root, cycle=3, unsigned=True) == [(10, 10.0)]
    capfd.readouterr()


def test_other_hosts_need_no_key(root: Path) -> None:
    """Only rank 0's key decides; another host takes the manifest's digest from rank 0."""
    (folder,) = save_steps(root, [10], world_size=2)
    digest = report_of(folder).digest
    key_path().unlink()
    want = Want(state={"w": torch.zeros(1), "loader": Loader(1)}, per_rank=frozenset({"loader"}), rank=1, world_size=2)
    read_checkpoint(PosixRoot(root), folder.name, digest, want)
    assert not key_path().exists(), "reading needs no key"
    with pytest.raises(VerificationError, match=MARKER_SIGNED):
        read_checkpoint(PosixRoot(root), folder.name, "00" * 32, want)
