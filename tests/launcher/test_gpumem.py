"""Waiting for GPU memory before a restart: injected clock and NVML stand-in, real processes where something is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from keepstep.launcher.health.gpumem import Reclaim, has_gpu_open, reclaim
from keepstep.launcher.health.gpus import GpuReport, read_gpus
from tests.launcher.fake_nvml import FakeGpu, FakeNvml


class World:
    """Time that passes only in sleeps, and what the caller of reclaim sees."""

    def __init__(self, *gpus: FakeGpu, visible: str = "0,1") -> None:
        self.nvml = FakeNvml(*gpus)
        self.visible = visible
        self.now = 100.0
        self.lines: list[str] = []
        self.said: set[str] = set()
        self.killed: list[int] = []
        self.at: dict[float, Callable[[], None]] = {}

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [m for m in self.at if m <= self.now - 100.0]:
            self.at.pop(moment)()

    def kill(self, pid: int, signum: int) -> bool:
        assert signum == signal.SIGKILL
        self.killed.append(pid)
        for gpu in self.nvml.gpus:
            gpu.used_mb -= gpu.processes.pop(pid, 0.0)
        return True

    def reclaim(
        self, ours: AbstractSet[int] = frozenset(), on_gpu: AbstractSet[int] | None = None, timeout_s: float = 50.0
    ) -> Reclaim:
        return asyncio.run(
            reclaim(
                ours.__contains__,
                self.lines.append,
                self.said,
                timeout_s=timeout_s,
                read=lambda: read_gpus(self.nvml, self.visible),
                holds_gpu=(ours if on_gpu is None else on_gpu).__contains__,
                kill=self.kill,
                clock=lambda: self.now,
                sleep=self.sleep,
            )
        )


def test_free_memory_costs_no_time() -> None:
    world = World(FakeGpu("GPU-a", used_mb=512), FakeGpu("GPU-b"))
    result = world.reclaim()
    assert (result.outcome, result.waited_s) == ("free", 0)
    assert [(g.index, g.before_mb, g.after_mb) for g in result.gpus] == [(0, 512, 512), (1, 0, 0)]
    assert world.lines == ["GPU memory after 0.0 s: GPU 0 512 -> 512 MB; GPU 1 0 -> 0 MB"]


def test_waits_in_the_poll_interval_until_it_is_free() -> None:
    gpu = FakeGpu("GPU-b", used_mb=70_000, processes={77: 70_000})
    world = World(FakeGpu("GPU-a"), gpu)
    world.at[5.0] = lambda: setattr(gpu, "used_mb", 500)
    result = world.reclaim()
    assert (result.outcome, result.waited_s) == ("free", 6.0)
    assert (result.gpus[1].before_mb, result.gpus[1].after_mb) == (70_000, 500)
    assert world.killed == []


def test_at_the_timeout_the_holder_is_named_and_the_restart_goes_on() -> None:
    world = World(FakeGpu("GPU-a", used_mb=600, processes={1: 600}), FakeGpu("GPU-b"))
    result = world.reclaim(timeout_s=7.0)
    assert (result.outcome, result.waited_s) == ("timeout", 7.0)
    (holder,) = result.gpus[0].holders
    assert (holder.pid, holder.used_mb, holder.ours, holder.killed) == (1, 600, False, False)
    assert holder.command == Path("/proc/1/cmdline").read_bytes().decode().replace("\0", " ").strip()[:120]
    (line,) = world.lines
    assert line.startswith("error: ")
    assert f"GPU 0 600 -> 600 MB held by pid 1 ({holder.command}, 600 MB)" in line


def test_only_leftovers_of_this_job_are_killed() -> None:
    world = World(FakeGpu("GPU-a", used_mb=900, processes={501: 500, 502: 400}), FakeGpu("GPU-b"))
    result = world.reclaim(ours={501, 503})
    assert world.killed == [501]
    assert (result.outcome, result.detail) == ("free", "killed leftovers [501]")
    assert [(h.pid, h.ours) for h in result.gpus[0].holders] == [(502, False)]


def test_a_pid_that_has_no_gpu_open_here_is_another_namespaces_and_is_left_alone() -> None:
    world = World(FakeGpu("GPU-a", used_mb=900, processes={501: 900}))
    assert world.reclaim(ours={501}, on_gpu=set(), timeout_s=4.0).outcome == "timeout"
    assert world.killed == []


def test_gpus_of_others_do_not_matter() -> None:
    world = World(FakeGpu("GPU-a", used_mb=70_000), FakeGpu("GPU-b"), visible="1")
    assert world.reclaim().outcome == "free"


def test_zero_switches_it_off() -> None:
    world = World(FakeGpu("GPU-a", used_mb=70_000))
    assert world.reclaim(timeout_s=0).outcome == "disabled"
    assert world.nvml.calls == []


def test_without_nvml_it_is_skipped_and_says_so_once() -> None:
    world = World()
    world.nvml.init_error = "Driver Not Loaded"
    assert [world.reclaim().outcome for _ in range(3)] == ["skipped"] * 3
    (line,) = world.lines
    assert "Driver Not Loaded" in line


def test_a_read_that_raises_is_no_reason_to_fail_a_restart() -> None:
    def broken() -> GpuReport:
        raise RuntimeError("odd driver")

    lines: list[str] = []
    result = asyncio.run(reclaim(lambda _pid: False, lines.append, set(), read=broken))
    assert result.outcome == "skipped"
    assert "odd driver" in lines[0]


def test_whether_a_process_has_a_gpu_open_is_read_from_its_descriptors(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not has_gpu_open(process.pid)
        process.communicate(b"\n")
    assert not has_gpu_open(process.pid)


@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here")
def test_a_process_with_a_gpu_open_is_seen() -> None:
    code = "import os; os.open('/dev/nvidiactl', os.O_RDONLY); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert has_gpu_open(process.pid)
        process.communicate(b"\n")
