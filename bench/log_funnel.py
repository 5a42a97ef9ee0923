"""What one log writer takes from the agents of a large job: sustained MB/s on file, its memory and its share of a core.

Simulated agents speak the wire format from one process, which shares the machine's cores with the writer: each keeps a window
of unacknowledged frames full, as an agent with too much to say does. Only what was acknowledged counts, and the size of the log
is checked against it. Control of the same run: the same bytes written to the same disk by one process with nothing in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from _common import Result, argument_parser, emit, say
from keepstep.launcher.output import logwire as w
from keepstep.launcher.output.logbuffer import FRAME_BYTES, WINDOW_BYTES
from keepstep.launcher.output.slimtls import SlimTls
from keepstep.launcher.trust import client_context, prove

RUN = "bench"
MEMORY_MB = 64
LINE = (
    b"step 001234 loss 2.3456 grad_norm 0.9876 tokens/s 123456 memory 67.8 GiB: a line as training scripts print them\n"
)
TEXT = LINE * (FRAME_BYTES // len(LINE))
RANKS = 8


class SimulatedAgent(asyncio.Protocol):
    """Sends frames while its window has room. `written`: frames acknowledged."""

    def __init__(self, number: int, token: bytes, ready: Callable[[], None]) -> None:
        self.written = self._sent = 0
        self.running = False
        self._number, self._token, self._ready = number, token, ready
        self._may_write = True
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self.fill()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for kind, body in w.take_frames(self._buffer, w.MAX_HELLO_BYTES):
            if kind == w.CHALLENGE:
                nonce, node = msgspec.json.decode(body, type=w.Challenge).nonce, f"node-{self._number}"
                hello = w.Hello(run_id=RUN, node=node, life="life", proof=prove(self._token, nonce, RUN, node))
                self.transport.write(w.json_frame(w.HELLO, hello))
            elif kind == w.WELCOME:
                self._ready()
            elif kind == w.ACK:
                self.written = w.SEQ.unpack(body)[0]
            else:
                sys.exit(f"the log writer refused a simulated agent: {body!r}")
        self.fill()

    def fill(self) -> None:
        """Send until the window or the socket is full."""
        while self.running and self._may_write and (self._sent - self.written) * len(TEXT) < WINDOW_BYTES:
            self._sent += 1
            rank = self._number * RANKS + self._sent % RANKS
            self.transport.write(w.data_frame(self._sent, 0, rank, w.STDOUT, TEXT))


@dataclass
class Measured:
    """One writer with a number of agents."""

    rates_mb_s: list[float] = field(default_factory=list)
    rss_mb: float = 0.0
    idle_rss_mb: float = 0.0
    core_share: float = 0.0
    connect_s: float = 0.0


def start_writer(folder: Path, token: bytes, tls: bool) -> tuple[subprocess.Popen[bytes], str]:
    """The real process; returns it and its address."""
    read_end, write_end = os.pipe()
    os.write(write_end, token)
    os.close(write_end)
    command = [sys.executable, "-m", "keepstep.launcher.output.logserver", "--run-dir", str(folder), "--run-id", RUN]
    command += ["--listen", "127.0.0.1:0", "--token-fd", str(read_end), "--memory-mb", str(MEMORY_MB)]
    process = subprocess.Popen(command + ([] if tls else ["--no-tls"]), stdout=subprocess.PIPE, pass_fds=[read_end])
    os.close(read_end)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["listening"][0]


def memory_mb(pid: int, key: str) -> float:
    """A figure of /proc/PID/status: VmRSS now, VmHWM at most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1e3
    raise ValueError(key)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def connect(count: int, address: str, token: bytes, context: ssl.SSLContext | None) -> list[SimulatedAgent]:
    """All agents, each admitted. A few at a time, as agents stagger their joins."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    gate = asyncio.Semaphore(64)

    def fail() -> None:
        sys.exit("no TLS with the log writer")

    async def one(number: int) -> SimulatedAgent:
        welcomed: asyncio.Future[None] = loop.create_future()
        async with gate:
            agent = SimulatedAgent(number, token, lambda: welcomed.set_result(None))
            protocol = agent if context is None else SlimTls(agent, context, server_side=False, on_failure=fail)
            await loop.create_connection(lambda: protocol, host, int(port))
            await welcomed
        return agent

    return await asyncio.gather(*(one(number) for number in range(count)))


async def measure(folder: Path, count: int, tls: bool, windows: int, window_s: float) -> Measured:
    """Start a writer, let `count` agents send, and count what gets on file in each window of time."""
    found = Measured()
    token = secrets.token_bytes(32).hex().encode()
    process, address = start_writer(folder, token, tls)
    try:
        begin = time.perf_counter()
        agents = await connect(count, address, token, client_context() if tls else None)
        found.connect_s = time.perf_counter() - begin
        found.idle_rss_mb = memory_mb(process.pid, "VmRSS")
        for agent in agents:
            agent.running = True
            agent.fill()
        await asyncio.sleep(0.6)  # the windows of all fill, and the writer's memory
        used_s, begin = cpu_s(process.pid), time.perf_counter()
        for _ in range(windows):
            before, at = sum(agent.written for agent in agents), time.perf_counter()
            await asyncio.sleep(window_s)
            frames = sum(agent.written for agent in agents) - before
            found.rates_mb_s.append(frames * len(TEXT) / 1e6 / (time.perf_counter() - at))
        found.core_share = (cpu_s(process.pid) - used_s) / (time.perf_counter() - begin)
        found.rss_mb = memory_mb(process.pid, "VmHWM")
        written = sum(agent.written for agent in agents)
        for agent in agents:
            agent.running = False
            agent.transport.abort()
    finally:
        process.terminate()
        process.wait(60)
    check_log(folder / "logs" / "cycle-0000.log", written)
    return found


def check_log(path: Path, frames: int) -> None:
    """Every acknowledged frame is in the file, and it holds whole lines only."""
    lines = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            lines += block.count(b"\n")
            last = block[-1:]
    if last != b"\n" or lines < frames * TEXT.count(b"\n"):
        sys.exit(f"{path}: {lines} lines, {frames} frames were acknowledged: nothing here may be believed")


def disk_mb_s(folder: Path) -> float:
    """The control: blocks of the same text, written by one process."""
    block = TEXT * 64
    path = folder / "control"
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(128):
            file.write(block)
    rate = 128 * len(block) / 1e6 / (time.perf_counter() - begin)
    path.unlink()
    return rate


def rows(name: str, count: int, found: Measured) -> list[Result]:
    """The rows of one measurement."""
    system, connected = f"keepstep {name}", f"{count} connections"
    return [
        Result(f"on file, {connected}", system, "MB/s", found.rates_mb_s, note=f"connected in {found.connect_s:.1f} s"),
        Result(
            f"writer's memory, {connected}",
            system,
            "MB",
            [found.rss_mb],
            note=f"peak RSS; {found.idle_rss_mb:.0f} before any output, {MEMORY_MB} MiB may wait for the disk",
        ),
        Result(f"writer's processor, {connected}", system, "cores", [found.core_share]),
    ]


def main() -> None:
    args = argument_parser("Sustained rate and memory of the log writer.").parse_args()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    windows, window_s = (10, 2.0) if args.full else (3, 0.8)
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        root = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-bench-")))
        root.mkdir(parents=True, exist_ok=True)
        control = [disk_mb_s(root) for _ in range(3)]
        results.append(Result("plain write of the same text", "control", "MB/s", control))
        for name, tls, counts in (("clear", False, (256, 512, 1024, 2048)), ("TLS", True, (256, 2048))):
            for count in counts:
                say(f"{count} connections, {name}")
                folder = root / f"{name}-{count}"
                found = asyncio.run(measure(folder, count, tls, windows, window_s))
                results += rows(name, count, found)
                (folder / "logs" / "cycle-0000.log").unlink()  # gigabytes; what it had to show is checked
    emit("log_funnel", results, [], output=args.output, packages=["keepstep", "msgspec"])


if __name__ == "__main__":
    main()
