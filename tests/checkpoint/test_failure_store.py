"""Saves to an object store that throttles, fails, dies, or outlives its writer: through the Checkpointer, over real HTTP."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.checkpoint.s3 import S3, Fault, MotoServer, first, set_credentials
from tests.checkpoint.support import FakeRun, Loader, RecordingChannel, run_ranks

from keepstep.checkpoint.storage import objectclient
from keepstep.checkpoint.storage.targets import Fault as StorageFault
from keepstep.trainer.channel import MemoryChannel
from keepstep.trainer.checkpointer import Checkpointer


def rank_of(s3: S3, channel: MemoryChannel, rank: int = 0, world_size: int = 1, **options: Any) -> Checkpointer:
    """A Checkpointer whose root is in the bucket."""
    store = s3.options(**{"retry_for_s": 20.0, **options})
    run = FakeRun(channel, rank=rank, world_size=world_size, cycle=options.pop("cycle", 0))
    state = {"w": torch.full((40_000,), -1.0), "loader": Loader(rank)}
    return Checkpointer(f"s3://{s3.bucket}/ckpt", state, run=run, store=store, timeout_s=30.0, writer="thread")


def committed(s3: S3) -> list[int]:
    """Steps of the checkpoints whose marker is in the bucket."""
    keys = s3.keys()
    return sorted(int(key.split("-step-")[1][:8]) for key in keys if "/commits/" in key)


def restored(s3: S3) -> tuple[int, float]:
    """Step and content that a new rank restores."""
    ckpt = rank_of(s3, MemoryChannel())
    step = ckpt.restore()
    ckpt.close()
    assert len(set(ckpt.state["w"].tolist())) == 1
    return step, float(ckpt.state["w"][0])


def test_row_25_two_ranks_save_and_restore_while_the_store_throttles(s3: S3) -> None:
    s3.policy = first(6, "slow", "PUT", "GET")
    channel, again = RecordingChannel(), MemoryChannel()

    def save(rank: int) -> int | None:
        ckpt = rank_of(s3, channel, rank, 2)
        assert ckpt.restore() == 0
        ckpt.state["w"] = torch.full((40_000,), 1.0)
        ckpt.save(1)
        ckpt.close()
        return ckpt.last_committed_step

    def restore(rank: int) -> tuple[int, float, int]:
        ckpt = rank_of(s3, again, rank, 2)
        step = ckpt.restore()
        ckpt.close()
        return step, float(ckpt.state["w"].sum()), ckpt.state["loader"].rank

    assert run_ranks(2, save) == [1, 1]
    assert [request.status for request in s3.of("PUT")].count(503) == 6
    assert {request.method for request in s3.requests} <= {"PUT", "GET", "HEAD"}
    assert channel.of_kind("ckpt_failed") == []
    assert run_ranks(2, restore) == [(1, 40_000.0, 0), (1, 40_000.0, 1)]


def test_row_25_throttled_for_too_long_the_save_fails_and_the_next_one_works(
    s3: S3, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = RecordingChannel()
    ckpt = rank_of(s3, channel, retry_for_s=0.3)
    ckpt.restore()
    s3.policy = lambda method, key, number: "slow" if method == "PUT" and "rank-00000" in key else None
    assert ckpt.save(1)
    ckpt.wait()
    (failed,) = channel.of_kind("ckpt_failed")
    assert "rank-00000-of-00001.safetensors" in failed["error"] and "SlowDown" in failed["error"]
    assert committed(s3) == []
    s3.policy = lambda method, key, number: None
    ckpt.state["w"] = torch.full((40_000,), 2.0)
    assert ckpt.save(2)
    ckpt.close()
    assert restored(s3) == (2, 2.0)
    capfd.readouterr()


def test_row_10_a_buffer_that_is_reused_during_an_upload_fails_the_save(
    s3: S3, capfd: pytest.CaptureFixture[str]
) -> None:
    ckpt = rank_of(s3, MemoryChannel())
    ckpt.restore()

    def reuse(method: str, key: str, number: int) -> None:
        if method == "PUT" and "rank-00000" in key:
            memory = ckpt._staging.slots.all[0].memory
            assert memory is not None
            memory[100_000] ^= 1

    s3.policy = reuse
    assert ckpt.save(1)
    ckpt.close()
    assert "the staging buffer changed while it was written" in (ckpt._saver.last_error or "")
    assert committed(s3) == []
    capfd.readouterr()


def test_injected_faults_meet_uploads_too(s3: S3, capfd: pytest.CaptureFixture[str]) -> None:
    ckpt = rank_of(s3, MemoryChannel())
    ckpt.restore()
    ckpt.inject_fault(StorageFault(kind="storage-error"))
    assert ckpt.save(1)
    ckpt.wait()
    assert "cannot write s3://" in (ckpt._saver.last_error or "") and "(EIO)" in (ckpt._saver.last_error or "")
    ckpt.inject_fault(StorageFault(kind="storage-stall", seconds=0.05))
    assert ckpt.save(2)
    ckpt.close()
    assert committed(s3) == [2]
    capfd.readouterr()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A bucket on a server that may be killed."""
    set_credentials(monkeypatch)
    monkeypatch.setattr(objectclient, "BACKOFF_S", (0.01, 0.1))
    servers = [MotoServer()]
    bucket = S3(servers[0])
    yield bucket
    bucket.close()
    for server in {*servers, bucket.server}:
        server.close()


@pytest.mark.slow
def test_row_25_server_killed_in_the_middle_of_an_upload(own: S3, capfd: pytest.CaptureFixture[str]) -> None:
    channel = RecordingChannel()
    ckpt = rank_of(own, channel, retry_for_s=0.5)
    ckpt.restore()
    own.policy = lambda method, key, number: "kill" if method == "PUT" and "rank-00000" in key else None
    assert ckpt.save(1)
    ckpt.wait()
    assert own.server.process.returncode == -signal.SIGKILL
    assert ckpt.last_committed_step is None
    (failed,) = channel.of_kind("ckpt_failed")
    assert "rank-00000-of-00001.safetensors" in failed["error"]
    # The server is back, with an empty bucket: this one keeps objects in memory.
    own.policy = lambda method, key, number: None
    own.server = MotoServer()
    connection = http.client.HTTPConnection(own.server.address, timeout=20)
    with contextlib.closing(connection):
        connection.request("PUT", f"/{own.bucket}")
        assert connection.getresponse().status == 200
    ckpt.state["w"] = torch.full((40_000,), 2.0)
    assert ckpt.save(2)
    ckpt.close()
    assert restored(own) == (2, 2.0)
    capfd.readouterr()


class Rank:
    """The process of store_rank.py."""

    def __init__(self, s3: S3) -> None:
        top = str(Path(__file__).parents[2])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([top, *(p for p in sys.path if p)])}
        script = str(Path(__file__).with_name("store_rank.py"))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", script, f"s3://{s3.bucket}/walk", s3.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )

    def tell(self, text: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def hear(self) -> list[str]:
        """The words of the next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def close(self) -> None:
        """Let it end."""
        self.process.communicate(timeout=30)


class KillAt:
    """Policy of the front: kills the rank at its write number `at`.

    "cut": before the store sees that write; "lost": the store did as asked, and the rank dies when it asks again.
    """

    def __init__(self, pid: int, at: int, way: Literal["cut", "lost"]) -> None:
        self.pid, self.at, self.way = pid, at, way
        self.done: list[str] = []
        """Keys that were written."""
        self._seen = 0

    def __call__(self, method: str, key: str, _number: int) -> Fault | None:
        if method != "PUT":
            return None
        self._seen += 1
        if self._seen > self.at or (self._seen == self.at and self.way == "cut"):
            os.kill(self.pid, signal.SIGKILL)
            return "cut"
        self.done.append(key)
        return "lost" if self._seen == self.at else None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cut", "lost"])
def test_a_rank_killed_at_every_write_of_a_save_leaves_the_old_step_or_the_new_one(
    s3: S3, way: Literal["cut", "lost"]
) -> None:
    rank, expected = Rank(s3), 0
    for at in range(1, 50):
        rank.tell(str(at))
        pid, step = map(int, rank.hear())
        assert step == expected, f"after a kill at write {at - 1}"
        s3.policy = policy = KillAt(pid, at, way)
        rank.tell("save")
        _, status = rank.hear()
        s3.policy = first(0, "cut")
        expected = step + any("/commits/" in key for key in policy.done)
        if status == "0":
            break
        assert int(status) == -signal.SIGKILL
    assert 4 < at < 49, "a save makes several writes, and one more than them is none"
    assert expected >= 2, "killed after the commit, and not killed: both are there"
    rank.close()
