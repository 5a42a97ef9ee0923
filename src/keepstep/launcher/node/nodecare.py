"""What a launcher does for its node around the life of its ranks: checks, GPU memory, evidence of the host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.bounded import await_bounded
from keepstep.launcher.clock import Anchor, boot_ns
from keepstep.launcher.config import RunConfig
from keepstep.launcher.health import gpumem, hangevidence, hostevidence
from keepstep.launcher.health.gpus import GpuReport, read_gpus
from keepstep.launcher.health.nodecheck import Request, failures, run_checks
from keepstep.launcher.procs import environment_of
from keepstep.launcher.ranks.environment import recorder_prefix
from keepstep.records.frames import ENV_RUN_DIR

CHECK_S = 15.0
EVIDENCE_S = 5.0


class NodeCare:
    """Keeps what one cycle's end is compared with, and what has been said once already."""

    def __init__(self, config: RunConfig, say: Callable[[str], None], helpers: Callable[[], set[int]]) -> None:
        """`helpers`: pids of the launcher's own processes."""
        self._config = config
        self._say = say
        self._helpers = helpers
        self._said: set[str] = set()
        self._no_gpus = False
        self._before: hostevidence.Snapshot | None = None
        self._gpus_before: GpuReport | None = None
        self._asking: asyncio.Future[None] | None = None
        self._background: set[asyncio.Future[Any]] = set()

    async def check(self, anchor: Anchor | None = None) -> list[str]:
        """Reasons why this node must not take part, by the configured level of checks. `anchor`: the coordinator's clock."""
        if not self._config.node_check:
            return []
        reference = None
        if anchor is not None:
            here = boot_ns()
            reference = (anchor.utc(here), here)
        request = Request(run_dir=Path(self._config.run_dir), reference=reference, timeout_s=CHECK_S)
        found = failures(await asyncio.to_thread(run_checks, self._config.node_check, request))
        for line in found:
            self._say(f"check of this node failed: {line}")
        return found

    async def begin(self) -> None:
        """A cycle is about to start here."""
        self._before = await asyncio.to_thread(hostevidence.snapshot)
        self._gpus_before = None
        if self._asking is not None:
            self._asking.cancel()
        self._asking = asyncio.ensure_future(self._ask_gpus())

    async def _ask_gpus(self) -> None:
        """State of the GPUs as the cycle begins. Nobody waits for it: a sick driver answers late or never."""
        with contextlib.suppress(TimeoutError):
            self._gpus_before = await await_bounded(read_gpus, CHECK_S)

    async def reclaim(self) -> dict[str, Any]:
        """Before ranks start again: wait until the GPUs' memory is free. Returns what goes into the cycle record."""
        c = self._config
        if self._no_gpus:
            return {}
        result = await gpumem.reclaim(
            self._is_ours,
            self._say,
            self._said,
            timeout_s=c.gpu_memory_reclaim_timeout_s,
            tolerance_mb=c.gpu_memory_tolerance_mb,
            poll_interval_s=c.gpu_memory_poll_interval_s,
        )
        self._no_gpus = result.outcome in ("skipped", "disabled")
        return {} if self._no_gpus else {"gpu_memory": msgspec.to_builtins(result)}

    def _is_ours(self, pid: int) -> bool:
        """Whether a process was left behind by ranks of this run on this node."""
        return pid not in self._helpers() and environment_of(pid).get(ENV_RUN_DIR) == self._config.run_dir

    async def hang_evidence(self, folder: Path, cycle: int, pids: dict[int, int], limit_s: float) -> None:
        """While ranks still hang: sockets, flight recorder, NCCL's own view, and everything of `failure_evidence`."""
        prefix = recorder_prefix(self._config, cycle)
        recorder = hangevidence.Recorder(dump_prefix=prefix, pipe_prefix=prefix)
        await self._collect(folder, pids, True, limit_s, recorder)

    def failure_evidence(self, folder: Path, then: Callable[[], None]) -> None:
        """After a failed cycle, beside the restart: kernel log, GPU state, memory counters, core files; `then` when it is there."""

        async def collect() -> None:
            await self._collect(folder, {}, False, EVIDENCE_S, None)
            then()

        task = asyncio.ensure_future(collect())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _collect(
        self, folder: Path, pids: dict[int, int], hang: bool, limit_s: float, recorder: hangevidence.Recorder | None
    ) -> None:
        before = self._before
        since = before.boot_ns if before is not None else boot_ns()
        evidence = await hostevidence.collect(
            folder, since, pids, hang, limit_s, before=before, recorder=recorder, gpus_before=self._gpus_before
        )
        for line in evidence.xids[:5]:
            self._say(f"kernel log since the cycle began: {line}")

    async def finish(self) -> None:
        """Wait for evidence that is still being written."""
        if self._background:
            await asyncio.wait(self._background, timeout=EVIDENCE_S)
