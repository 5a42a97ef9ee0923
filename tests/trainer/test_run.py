"""The run object: what all ranks decide together, what a rank asks of its launcher, leases and the last save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.records import page as layout
from keepstep.records.errors import ChannelError, StorageError
from keepstep.records.frames import ENV_PREEMPT_NOTICE_S
from keepstep.trainer.channel import MemoryChannel
from keepstep.trainer.inject import OOM_ROOM_BYTES, make_memory_cgroup
from keepstep.trainer.run import NOTICE_MARGIN_S, UNMEASURED_NOTICE_S, Decision, Run

S = 1_000_000_000


class Launched(MemoryChannel):
    """A channel with a launcher behind it that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str]] = []
        self.reports: list[tuple[str, dict[str, Any]]] = []

    def request(self, what: str, reason: str) -> bool:
        self.requests.append((what, reason))
        return True

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.reports.append((kind, dict(fields)))


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    def make(channel: MemoryChannel, *, rank: int = 0, supervised: bool = False, notice_s: float | None = None) -> Run:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv(ENV_PREEMPT_NOTICE_S, raising=False)
        if notice_s is not None:
            monkeypatch.setenv(ENV_PREEMPT_NOTICE_S, str(notice_s))
        words = memoryview(bytearray(layout.PAGE_BYTES)).cast("Q")
        return Run(channel, words, supervised, ("loss",))

    return make


def train(run: Run, steps: range) -> list[int]:
    """Steps after which the run asked to stop."""
    stops = []
    for step in steps:
        with run.step(step):
            pass
        if run.stop_requested:
            stops.append(step + 1)
    return stops


class TestRequests:
    def test_stop_without_a_launcher_reaches_every_rank_at_the_next_decision(self, make_run: MakeRun) -> None:
        channel = MemoryChannel()
        first, second = make_run(channel, rank=0), make_run(channel, rank=1)
        assert train(first, range(3)) == []
        second.request_stop("converged")  # the first rank has decided steps 1 to 3 already
        assert train(second, range(3)) == []
        assert train(first, range(3, 4)) == train(second, range(3, 4)) == [4]

    def test_stop_under_a_launcher_goes_there_and_nowhere_else(self, make_run: MakeRun) -> None:
        channel = Launched()
        run = make_run(channel, supervised=True)
        run.request_stop("converged")
        assert channel.requests == [("stop", "converged")]
        assert train(run, range(2)) == []

    def test_excluding_the_node_needs_a_launcher(self, make_run: MakeRun) -> None:
        with pytest.raises(ChannelError, match="no keepstep launcher started this rank"):
            make_run(MemoryChannel()).request_exclude_node("ECC")
        channel = Launched()
        make_run(channel, supervised=True).request_exclude_node("ECC")
        assert channel.requests == [("exclude", "ECC")]


class TestRollback:
    def test_it_is_told_once(self, make_run: MakeRun) -> None:
        channel = Launched()
        for rank in (0, 1):
            run = make_run(channel, rank=rank)
            train(run, range(5))
            run.announce_rollback(2, "loss spike")
        told = [fields for kind, fields in channel.reports if kind == "rollback_announced"]
        assert [(f["to_step"], f["reason"]) for f in told] == [(2, "loss spike")]

    def test_decisions_of_the_replay_are_new_and_shared(self, make_run: MakeRun) -> None:
        channel = MemoryChannel()
        runs = [make_run(channel, rank=rank) for rank in (0, 1)]
        for run in runs:
            assert train(run, range(4)) == []
            run.announce_rollback(1, "data skipped")
        runs[1].request_stop("enough")
        assert [train(run, range(1, 3))[0] for run in runs] == [2, 2]


def test_a_heartbeat_is_a_time_on_the_page(make_run: MakeRun) -> None:
    run = make_run(MemoryChannel())
    before = time.monotonic_ns()
    run.heartbeat()
    assert before <= run._words[layout.W_HEARTBEAT_NS] <= time.monotonic_ns()


def test_a_lease_that_has_run_out_is_named(make_run: MakeRun) -> None:
    run = make_run(MemoryChannel())
    run.check_lease()
    run._words[layout.W_LEASE_EXPIRY_NS] = time.monotonic_ns() + 3600 * S
    run.check_lease()
    run._words[layout.W_LEASE_EXPIRY_NS] = time.monotonic_ns() - 2 * S
    with pytest.raises(StorageError, match=r"rank 0 .*this node's lease ran out 2\.\d s ago"):
        run.check_lease()


class TestLastSave:
    @pytest.mark.parametrize(
        ("notice_s", "gone_s", "needs_s", "saves"),
        [
            (None, 500, [None], True),
            (60, 0, [], True),
            (60, 0, [10.0], True),
            (60, 55, [10.0], False),
            (60, 0, [40.0, 30.0], False),
            (60, 0, [25.0, 30.0], True),
            (60, 60 - 10 - NOTICE_MARGIN_S + 0.5, [10.0], False),
            (UNMEASURED_NOTICE_S + 5, 0, [None], True),
            (UNMEASURED_NOTICE_S - 1, 0, [None], False),
            (UNMEASURED_NOTICE_S + 5, 0, [None, 20.0], False),
        ],
    )
    def test_it_is_made_when_it_fits_into_the_notice(
        self, notice_s: float | None, gone_s: float, needs_s: list[float | None], saves: bool, make_run: MakeRun
    ) -> None:
        run = make_run(Launched(), supervised=True, notice_s=notice_s)
        run.checkpointers = [SimpleNamespace(save_needs_s=lambda n=n: n) for n in needs_s]  # type: ignore[misc]
        with run.step(0):
            pass
        run._words[layout.W_STOP_REQUEST] = time.monotonic_ns() - int(gone_s * S)
        decision = run.decision_at(1)
        assert decision is not None and decision.stop
        assert (decision.save, decision.why == "") == (saves, saves)

    def test_the_first_rank_decides_for_all(self, make_run: MakeRun) -> None:
        channel = Launched()
        runs = [make_run(channel, rank=rank, supervised=True, notice_s=60) for rank in (0, 1)]
        for run, needs_s in zip(runs, (100.0, 1.0), strict=True):
            run.checkpointers = [SimpleNamespace(save_needs_s=lambda n=needs_s: n)]  # type: ignore[list-item]
            run._words[layout.W_STOP_REQUEST] = time.monotonic_ns()
            with run.step(0):
                pass
        first, second = runs[0].decision_at(1), runs[1].decision_at(1)
        assert isinstance(first, Decision) and first == second and not first.save
        assert "a save may take 100.0 s" in first.why


OOM = "from keepstep.trainer.inject import exhaust_memory\nexhaust_memory()\n"


class TestOutOfMemory:
    def test_the_kernel_kills_the_rank_where_a_memory_cgroup_can_be_made(self) -> None:
        folder = make_memory_cgroup()
        if folder is None:
            pytest.skip("no memory cgroup can be made here (needs root and a writable cgroup file system)")
        folder.rmdir()
        child = subprocess.Popen([sys.executable, "-c", OOM], stderr=subprocess.PIPE, text=True)
        _, said = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL
        place = folder.with_name(f"keepstep-oom-{child.pid}")
        assert str(place) in said
        deadline = time.monotonic() + 20
        while place.exists():
            assert time.monotonic() < deadline, "its cgroup was left behind"
            os.sched_yield()

    def test_otherwise_the_allocation_fails(self) -> None:
        script = f"import keepstep.trainer.inject as i\ni.make_memory_cgroup = lambda: None\n{OOM}"
        child = subprocess.run(
            [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        assert child.returncode == 1
        assert child.stderr.rstrip().endswith("MemoryError")
        assert OOM_ROOM_BYTES >= 32 << 20
