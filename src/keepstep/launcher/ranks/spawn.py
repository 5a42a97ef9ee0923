"""Starting ranks: through the zygote when it may fork, else in fresh interpreters; and the ports they meet on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.node.watch import RankPages
from keepstep.launcher.ranks.rankmain import RankSpec
from keepstep.launcher.ranks.zygote import recv_frame, send_frame
from keepstep.records.codec import to_json
from keepstep.records.errors import KeepstepError


class SpawnError(KeepstepError):
    """Raised when the ranks of a cycle could not be started."""


class ZygoteGoneError(SpawnError):
    """Raised when the zygote has ended."""


class RankFiles(msgspec.Struct, kw_only=True):
    """Descriptors handed to one rank, as numbers in the agent."""

    stdout: int
    stderr: int
    pages: Any  # RankPages; msgspec needs no schema for it

    def numbers(self) -> list[int]:
        pages: RankPages = self.pages
        return [self.stdout, self.stderr, pages.page_fd, pages.stacks_fd, pages.imports_fd]


class HostedStore(msgspec.Struct, frozen=True):
    """A process of this agent that hosts the TCPStore of one cycle."""

    pid: int
    port: int


def _ephemeral_low() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768


def free_port(rng: random.Random) -> int:
    """A TCP port that nobody listens on now, below the range that outgoing connections take theirs from."""
    high = max(_ephemeral_low() - 1, 20100)
    for _ in range(200):
        port = rng.randint(20000, high)
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise SpawnError(f"no free TCP port between 20000 and {high}; close listeners or set --master-port")


class Zygote:
    """One zygote process. Becomes ready in the background; `fork` asks it for ranks."""

    def __init__(self, env: dict[str, str], modules: list[str], trial: list[str], log: Path) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "keepstep.launcher.ranks.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        theirs.close()
        send_frame(ours, {"preload": modules, "trial": trial})
        self.ready: asyncio.Task[dict[str, Any]] = asyncio.ensure_future(self._wait_ready())
        self.ready.add_done_callback(lambda t: t.cancelled() or t.exception())
        self._one_at_a_time = asyncio.Lock()

    @property
    def pid(self) -> int:
        return self.process.pid

    async def _wait_ready(self) -> dict[str, Any]:
        try:
            answer = await asyncio.to_thread(recv_frame, self._control)
        except OSError:
            answer = None
        if answer is None:
            raise ZygoteGoneError("the zygote ended before it was ready (see zygote.log in the folder of this node)")
        return answer[0]

    async def fork(self, specs: list[RankSpec], files: list[RankFiles]) -> list[int]:
        """Fork ranks; returns their pids in order. Raises SpawnError with the zygote's reason when it refuses."""
        fds = [n for f in files for n in f.numbers()]
        answer = await self._ask({"ranks": [msgspec.to_builtins(s) for s in specs]}, fds)
        return list(answer["pids"])

    async def host_store(self, port: int) -> HostedStore:
        """Start a process that hosts a TCPStore on `port` (0: any). Raises SpawnError, with EADDRINUSE in it when taken."""
        answer = await self._ask({"store": port, "agent_pid": os.getpid()}, [])
        return HostedStore(pid=answer["pids"][0], port=answer["port"])

    async def _ask(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        await self.ready
        async with self._one_at_a_time:
            try:
                send_frame(self._control, message, fds)
                answer = await asyncio.to_thread(recv_frame, self._control)
            except OSError:
                answer = None
        if answer is None:
            raise ZygoteGoneError("the zygote is gone")
        if "refused" in answer[0]:
            raise SpawnError(answer[0]["refused"])
        return answer[0]

    async def retire(self) -> None:
        """Close, but not in the middle of an answer."""
        async with self._one_at_a_time:
            self.close()

    def close(self) -> None:
        """End the process; its ranks belong to the agent and stay."""
        self._control.close()
        self.process.kill()
        self.process.wait()


async def exec_store(port: int) -> HostedStore:
    """As Zygote.host_store, in a fresh interpreter (takes as long as importing torch does)."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "keepstep.launcher.ranks.storehost", str(port), str(os.getpid()), str(write_end)]
    process = subprocess.Popen(command, pass_fds=[write_end], stdin=subprocess.DEVNULL)
    process.returncode = 0  # reaped by the agent, as ranks are
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        line = await asyncio.to_thread(pipe.readline)
    answer: dict[str, Any] = json.loads(line) if line else {"refused": "the store's process ended"}
    if "refused" in answer:
        raise SpawnError(answer["refused"])
    return HostedStore(pid=process.pid, port=answer["port"])


def exec_rank(spec: RankSpec, files: RankFiles) -> int:
    """Start one rank in a fresh interpreter; returns its pid. Raises SpawnError."""
    with tempfile.TemporaryFile() as spec_file:
        spec_file.write(to_json(spec))
        spec_file.seek(0)
        pages: RankPages = files.pages
        numbers = [spec_file.fileno(), pages.page_fd, pages.stacks_fd, pages.imports_fd]
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "keepstep.launcher.ranks.rankmain", *map(str, numbers)],
                stdout=files.stdout,
                stderr=files.stderr,
                pass_fds=numbers,
                env=spec.env,
                cwd=spec.cwd,
            )
        except OSError as error:
            raise SpawnError(f"rank {spec.rank}: cannot start {sys.executable}: {error.strerror}") from error
    # The agent reaps it through its pidfd like a forked rank; Popen must not warn about a child it never waited for.
    process.returncode = 0
    return process.pid


def zygote_environment(base: dict[str, str]) -> dict[str, str]:
    """Environment of the zygote: that of the ranks, but OpenBLAS must not start its pool before the fork."""
    return base | {"OPENBLAS_NUM_THREADS": "1"}


def local_world_size(text: str) -> int:
    """torchrun's --nproc-per-node: a number, "cpu", "gpu", "auto". Raises SpawnError."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    gpus = len([n for n in os.listdir("/dev") if n.startswith("nvidia") and n[6:].isdigit()])
    if text == "cpu" or (text == "auto" and gpus == 0):
        return os.cpu_count() or 1
    if text in ("gpu", "auto"):
        if gpus == 0:
            raise SpawnError("--nproc-per-node gpu: no /dev/nvidiaN here; give a number or 'cpu'")
        return gpus
    raise SpawnError(f"--nproc-per-node {text!r}: not a positive number, 'cpu', 'gpu' or 'auto'")
