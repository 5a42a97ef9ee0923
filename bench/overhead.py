"""What `run.step()` with two sections costs the training loop, on a real progress page.

Controls of the same run: the loop with nothing in it (subtracted), six bare clock reads, and one heartbeat over a Unix
socket to another process, which is how a rank without a shared page would say that it is alive.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import keepstep.trainer as ks
from _common import Result, Target, argument_parser, emit, say
from keepstep.records import page as layout
from keepstep.records.frames import ENV_AGENT_SOCKET, ENV_PAGE_FD

RANKS = 8
WARM_UP = 1000


def make_page(rank: int) -> int:
    """A progress page as the agent makes one; returns its descriptor."""
    fd = os.memfd_create(f"keepstep-page-{rank}", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, layout.PAGE_BYTES)
    words = memoryview(mmap.mmap(fd, layout.PAGE_BYTES)).cast("Q")
    words[layout.W_RANK] = rank
    words[layout.W_MAGIC] = layout.MAGIC
    return fd


def bare_loop(count: int) -> None:
    for _step in range(count):
        pass


def clock_loop(count: int) -> None:
    clock = time.monotonic_ns
    for _step in range(count):
        clock()
        clock()
        clock()
        clock()
        clock()
        clock()


def step_loop(run: ks.Run) -> Callable[[int], None]:
    """The loop of CONTRACT section 6 without the training. Step numbers go on from one repeat to the next."""
    first = 0

    def loop(count: int) -> None:
        nonlocal first
        for step in range(first, first + count):
            with run.step(step) as s:
                with s.section("data"):
                    pass
                with s.section("compute"):
                    pass
        first += count

    return loop


class Heartbeat:
    """Heartbeats to a peer process over a Unix socket: length-prefixed, answered or not."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.message = b'{"rank":0,"step":1234567,"state":"training"}'
        self.child = os.fork()
        if self.child == 0:
            self.sock.close()
            try:
                _answer(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def one_way(self, count: int) -> None:
        """Send only. The peer reads all the while; every beat costs this side one system call."""
        send, frame = self.sock.sendall, struct.pack(">IB", len(self.message), 0) + self.message
        for _step in range(count):
            send(frame)

    def round_trip(self, count: int) -> None:
        """Send and wait for the answer."""
        send, receive, frame = (
            self.sock.sendall,
            self.sock.recv,
            struct.pack(">IB", len(self.message), 1) + self.message,
        )
        for _step in range(count):
            send(frame)
            receive(1)

    def close(self) -> None:
        self.sock.close()
        os.waitpid(self.child, 0)


def _answer(sock: socket.socket) -> None:
    reader = sock.makefile("rb")
    while header := reader.read(5):
        length, wants_answer = struct.unpack(">IB", header)
        reader.read(length)
        if wants_answer:
            sock.sendall(b"\1")


def timed_us(loop: Callable[[int], None], count: int) -> float:
    """Microseconds an iteration."""
    begin_ns = time.perf_counter_ns()
    loop(count)
    return (time.perf_counter_ns() - begin_ns) / count / 1e3


def measure(loops: dict[str, tuple[Callable[[int], None], int]], repeats: int, seed: int) -> dict[str, list[float]]:
    """Run every loop `repeats` times, each time in a new random order: a slow moment of the machine hits all."""
    values: dict[str, list[float]] = {name: [] for name in loops}
    order = list(loops)
    chance = random.Random(seed)
    for name in order:  # once for warm caches and for everything that happens only at a first step
        loops[name][0](WARM_UP)
    for repeat in range(repeats):
        say(f"repeat {repeat + 1}/{repeats}")
        chance.shuffle(order)
        for name in order:
            loop, count = loops[name]
            values[name].append(timed_us(loop, count))
    return values


def pages_memory_bytes() -> int:
    """Memory the kernel holds for the pages of RANKS ranks."""
    held = 0
    for rank in range(RANKS):
        fd = make_page(rank)
        held += os.fstat(fd).st_blocks * 512
        os.close(fd)
    return held


def completed_by_page(fd: int) -> int:
    """Steps completed, read from the page as the agent would: proof that the measured path wrote it."""
    with mmap.mmap(fd, layout.PAGE_BYTES, prot=mmap.PROT_READ) as page:
        words = memoryview(page).cast("Q")
        completed = int(words[layout.W_STEP] >> 8)
        words.release()
    return completed


def results_of(values: dict[str, list[float]], count: int) -> dict[str, Result]:
    """Rows by name, with the bare loop's median subtracted from every other loop, and ratios within a repeat."""
    bare = statistics.median(values["bare loop"])
    rows = {"bare loop": Result("bare loop", "control", "us", values["bare loop"], note=f"{count} iterations a repeat")}
    systems = {"step with two sections": "keepstep", "six clock reads": "control"}
    for name, found in values.items():
        if name != "bare loop":
            net = [value - bare for value in found]
            rows[name] = Result(name, systems.get(name, "unix socket"), "us", net, note="bare loop subtracted")
    step, clocks = rows["step with two sections"].values, rows["six clock reads"].values
    beats = rows["heartbeat answered"].values
    ratios = {
        "step / six clock reads": [s / c for s, c in zip(step, clocks, strict=True)],
        "heartbeat answered / step": [b / s for b, s in zip(beats, step, strict=True)],
    }
    for name, found in ratios.items():
        rows[name] = Result(name, "keepstep", "ratio", found, note="of the same repeat")
    name = f"progress pages of {RANKS} ranks"
    rows[name] = Result(name, "keepstep", "bytes", [pages_memory_bytes()], note="st_blocks of the memfds")
    return rows


def main() -> None:
    args = argument_parser("Cost of run.step() with two sections.").parse_args()
    repeats, count = 41 if args.full else 11, 200_000
    page_fd = make_page(0)
    os.environ[ENV_PAGE_FD] = str(page_fd)
    os.environ.pop(ENV_AGENT_SOCKET, None)
    heartbeat = Heartbeat()
    run = ks.init()
    loops = {
        "bare loop": (bare_loop, count),
        "six clock reads": (clock_loop, count),
        "step with two sections": (step_loop(run), count),
        "heartbeat one way": (heartbeat.one_way, count // 10),
        "heartbeat answered": (heartbeat.round_trip, count // 40),
    }
    values = measure(loops, repeats, args.seed)
    heartbeat.close()
    completed = completed_by_page(page_fd)
    if not run.supervised or completed != WARM_UP + repeats * count:
        sys.exit(f"the page says {completed} steps: something else than the supervised path was measured")
    rows = results_of(values, count)
    targets = [
        Target("step_two_sections_us", rows["step with two sections"].median, "us", "<=", 4.0),
        Target("step_vs_six_clock_reads", rows["step / six clock reads"].median, "ratio", "<=", 6.0),
    ]
    if args.keep:
        keep(args.keep, values)
    emit("overhead", list(rows.values()), targets, output=args.output, packages=["keepstep"])


def keep(folder: Path, values: dict[str, list[float]]) -> None:
    """Every raw figure, before the bare loop is subtracted."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}\t{value!r}" for name, found in values.items() for value in found]
    (folder / "overhead-us.tsv").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
