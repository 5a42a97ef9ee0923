"""GPU memory between two cycles: wait until the driver has given the last cycle's memory back, and say who still holds some.

A rank that starts while its predecessor's memory is not free yet runs out of memory in its first step, which looks like the job's
own fault.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from keepstep.launcher.bounded import await_bounded
from keepstep.launcher.health.gpus import Gpu, GpuReport, read_gpus
from keepstep.launcher.procs import kill_quietly

READ_TIMEOUT_S = 20.0
"""Bound of one look at all GPUs, above the bound of each call."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds GPU memory while none should."""

    pid: int
    used_mb: float | None
    command: str
    """Its command line as far as it can be read, shortened."""
    ours: bool
    killed: bool = False


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Used memory of one GPU (or MIG instance) at the first and at the last look."""

    index: int
    uuid: str
    before_mb: float | None
    after_mb: float | None
    holders: list[Holder] = []


class Reclaim(msgspec.Struct, frozen=True, kw_only=True):
    """What waiting for GPU memory came to; for the log and the cycle record.

    `outcome`: "free", "timeout" (the restart goes on all the same), "skipped" (no NVML, or the driver does not answer) or
    "disabled".
    """

    outcome: str
    waited_s: float = 0.0
    tolerance_mb: float = 0.0
    gpus: list[GpuMemory] = []
    detail: str = ""


async def reclaim(
    is_ours: Callable[[int], bool],
    say: Callable[[str], None],
    said: set[str],
    *,
    timeout_s: float = 50.0,
    tolerance_mb: float = 512.0,
    poll_interval_s: float = 2.0,
    read: Callable[[], GpuReport] = read_gpus,
    holds_gpu: Callable[[int], bool] | None = None,
    kill: Callable[[int, int], bool] = kill_quietly,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Reclaim:
    """Wait until every GPU of the job has at most `tolerance_mb` in use. Call it on restarts only; it never raises.

    Leftovers for which `is_ours` is true are killed, nobody else. `holds_gpu` must confirm first that such a process has a GPU open
    here: in a container NVML may report process ids of another namespace. `said` remembers what needs no second line.
    """
    if timeout_s <= 0:
        return Reclaim(outcome="disabled")
    holds_gpu = holds_gpu or has_gpu_open
    begin = clock()
    first: dict[str, Gpu] = {}
    killed: set[int] = set()
    while True:
        try:
            report = await await_bounded(read, READ_TIMEOUT_S)
        except Exception as error:
            report = GpuReport(answering=False, problem=f"GPU memory cannot be read: {error}")
        waited_s = clock() - begin
        if report.problem is not None or not report.gpus:
            return _skip(report, waited_s, say, said)
        for gpu in report.gpus:
            first.setdefault(_key(gpu), gpu)
        over = [g for g in report.gpus if (g.memory_used_mb or 0.0) > tolerance_mb]
        for pid in {p.pid for g in over for p in g.processes} - killed:
            if pid != os.getpid() and is_ours(pid) and holds_gpu(pid) and kill(pid, signal.SIGKILL):
                killed.add(pid)
        outcome = "free" if not over else "timeout" if waited_s >= timeout_s else None
        if outcome is not None:
            result = Reclaim(
                outcome=outcome,
                waited_s=waited_s,
                tolerance_mb=tolerance_mb,
                gpus=[_record(first[_key(g)], g, is_ours, killed) for g in report.gpus],
                detail=f"killed leftovers {sorted(killed)}" if killed else "",
            )
            say(describe(result))
            return result
        await sleep(min(poll_interval_s, timeout_s - waited_s))


def describe(result: Reclaim) -> str:
    """One line for the log, an error when memory did not become free."""
    parts = []
    for gpu in result.gpus:
        text = f"GPU {gpu.index} {_mb(gpu.before_mb)} -> {_mb(gpu.after_mb)} MB"
        holders = ", ".join(f"pid {h.pid} ({h.command}, {_mb(h.used_mb)} MB)" for h in gpu.holders if not h.killed)
        parts.append(text + (f" held by {holders}" if holders and result.outcome == "timeout" else ""))
    line = f"GPU memory after {result.waited_s:.1f} s: {'; '.join(parts)}"
    if result.detail:
        line += f"; {result.detail}"
    if result.outcome == "timeout":
        return f"error: GPU memory did not come under {result.tolerance_mb:g} MB, restarting all the same. {line}"
    return line


def has_gpu_open(pid: int) -> bool:
    """Whether a process of this namespace has a device file of an NVIDIA GPU open."""
    try:
        links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith("/dev/nvidia") for link in links)


def command_of(pid: int) -> str:
    """Command line of a process for a log line; "?" when it cannot be read."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    return " ".join(data.decode(errors="replace").split("\0")).strip()[:120] or "?"


def _skip(report: GpuReport, waited_s: float, say: Callable[[str], None], said: set[str]) -> Reclaim:
    reason = report.problem or "no GPU is visible to this job"
    line = f"GPU memory is not waited for: {reason}"
    if line not in said:
        said.add(line)
        say(line)
    return Reclaim(outcome="skipped", waited_s=waited_s, detail=reason)


def _key(gpu: Gpu) -> str:
    return gpu.mig or gpu.uuid


def _record(before: Gpu, after: Gpu, is_ours: Callable[[int], bool], killed: set[int]) -> GpuMemory:
    return GpuMemory(
        index=after.index,
        uuid=_key(after),
        before_mb=before.memory_used_mb,
        after_mb=after.memory_used_mb,
        holders=[
            Holder(
                pid=p.pid,
                used_mb=p.used_mb,
                command=command_of(p.pid),
                ours=p.pid in killed or is_ours(p.pid),
                killed=p.pid in killed,
            )
            for p in after.processes
        ],
    )


def _mb(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"
