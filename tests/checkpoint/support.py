"""Ranks as threads over one channel, a small training, and ways to damage files for real."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from keepstep.checkpoint.restore.verify import VerifyReport, verify_checkpoint
from keepstep.checkpoint.storage.source import open_root
from keepstep.checkpoint.trust.keys import trusted_public_key
from keepstep.checkpoint.trust.marks import marks_folder
from keepstep.records.errors import StorageError
from keepstep.trainer.channel import Channel, MemoryChannel
from keepstep.trainer.checkpointer import Checkpointer


class Decision(msgspec.Struct, frozen=True):
    """A shared decision as the run object gives it."""

    step: int
    save: bool = False
    stop: bool = False
    why: str = ""
    keep: bool = False


class RecordingChannel(MemoryChannel):
    """Keeps what ranks report, and answers grants as told."""

    def __init__(self, *, grants: bool = True) -> None:
        super().__init__()
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self.grants = grants

    def report(self, kind: str, fields: Any) -> None:
        super().report(kind, fields)
        self.reports.append((kind, dict(fields)))

    def grant(self, checkpoint: str, step: int) -> bool:
        return self.grants

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Fields of all reports of `kind`."""
        return [fields for name, fields in self.reports if name == kind]


class FakeRun:
    """The run object of one rank; decisions are given by the test."""

    def __init__(
        self, channel: Channel, *, rank: int = 0, world_size: int = 1, cycle: int = 0, attempt: int = 1
    ) -> None:
        self.run_id = "job7"
        self.attempt = attempt
        self.cycle = cycle
        self.rank = rank
        self.world_size = world_size
        self.channel = channel
        self.propose_save: Callable[[int], bool] | None = None
        self.propose_keep: Callable[[int], bool] | None = None
        self.checkpointers: list[Any] = []
        self.decisions: dict[int, Decision] = {}
        self.restored: int | None = None
        self.sections: list[str] = []
        self.lease_error: str | None = None

    def decision_at(self, step: int) -> Decision | None:
        return self.decisions.get(step)

    def agree(self, key: str, value: Any) -> Any:
        return self.channel.cas(key, value)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        self.sections.append(name)
        return contextlib.nullcontext()

    def check_lease(self) -> None:
        if self.lease_error is not None:
            raise StorageError(self.lease_error)

    def notice_left_s(self) -> float | None:
        return None

    def note_restored(self, step: int) -> None:
        self.restored = step


class Loader:
    """A data loader's resume state: different on every rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0
        self.seen = torch.zeros(3, dtype=torch.int64)

    def next(self) -> torch.Tensor:
        self.position += 1
        self.seen[self.position % 3] += self.rank + 1
        return torch.randn(8, 6)

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "position": self.position, "seen": self.seen, "shards": {0: "a", 7: ("b", 1)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank
        assert state["shards"] == {0: "a", 7: ("b", 1)}
        self.position = state["position"]
        self.seen.copy_(state["seen"])


class Training:
    """Model with dropout and batch norm, AdamW, cosine schedule, loader: everything a resume can get wrong."""

    def __init__(self, rank: int = 0, width: int = 12) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1)
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, 50)
        self.loader = Loader(rank)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim, "sched": self.sched, "loader": self.loader}

    def step(self) -> float:
        self.optim.zero_grad()
        loss = self.model(self.loader.next()).square().mean()
        loss.backward()
        self.optim.step()
        self.sched.step()
        return float(loss.item())


def run_ranks(world_size: int, body: Callable[[int], Any], *, limit_s: float = 60.0) -> list[Any]:
    """Run `body(rank)` on a thread each; results or exceptions (as values) by rank. A rank that hangs fails the test."""
    results: list[Any] = [None] * world_size

    def work(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), "a rank hangs"
    return results


def checkpointer(root: Path, state: dict[str, Any], run: FakeRun, **options: Any) -> Checkpointer:
    """A Checkpointer with short time limits."""
    return Checkpointer(root, state, run=run, **{"timeout_s": 20.0, "writer": "thread", **options})


def save_steps(root: Path, steps: list[int], *, world_size: int = 1, cycle: int = 0, **options: Any) -> list[Path]:
    """Restore, then commit a checkpoint at each of `steps`, on `world_size` ranks; the folders, in that order."""
    channel = MemoryChannel()

    def body(rank: int) -> list[Path]:
        run = FakeRun(channel, rank=rank, world_size=world_size, cycle=cycle)
        ckpt = checkpointer(root, {"w": torch.zeros(40_000), "loader": Loader(rank)}, run, **options)
        ckpt.restore()
        paths = []
        for step in steps:
            ckpt.state["w"] = torch.full((40_000,), float(step))
            assert ckpt.save(step)
            ckpt.wait()
            assert ckpt.last_committed_step == step
            path = ckpt.newest_committed_path()
            assert path is not None
            paths.append(path)
        ckpt.close()
        return paths

    results = run_ranks(world_size, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    paths: list[Path] = results[0]
    return paths


def restore_value(root: Path, *, world_size: int = 1, cycle: int = 1, **options: Any) -> list[Any]:
    """Restore on `world_size` ranks; by rank (step, first element of w), or the exception."""
    channel = options.pop("channel", None) or MemoryChannel()

    def body(rank: int) -> tuple[int, float]:
        run = FakeRun(channel, rank=rank, world_size=world_size, cycle=cycle)
        ckpt = checkpointer(root, {"w": torch.full((40_000,), -1.0), "loader": Loader(rank)}, run, **options)
        step = ckpt.restore()
        ckpt.close()
        assert run.restored == step
        assert len(set(ckpt.state["w"].tolist())) == 1
        return step, float(ckpt.state["w"][0])

    return run_ranks(world_size, body)


def forget_marks() -> None:
    """Make this installation forget which checkpoint of which root is the newest, as a new one would."""
    shutil.rmtree(marks_folder(), ignore_errors=True)


def report_of(folder: Path, **options: Any) -> VerifyReport:
    """Verification of `folder` against the local key."""
    return verify_checkpoint(open_root(folder.parent), folder.name, trusted_key=trusted_public_key(), **options)


def flip_bit(path: Path, offset: int) -> None:
    """Flip one bit of the byte at `offset` (negative: from the end)."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
