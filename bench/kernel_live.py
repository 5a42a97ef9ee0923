"""How long it takes from a line in the kernel's log to its event, through `keepstep scan --follow` as a process of its own.

Lines go into a FIFO and, where this host lets us write it, into /dev/kmsg (harmless marks, found by a catalog file of our own). One
line at a time, with pauses; then a burst, of which the last event counts. The control is a bare reader of the same source: what the
kernel and the pipe take by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _common import Result, Target, argument_parser, emit

KMSG = Path("/dev/kmsg")
ENTRY = """
[[signature]]
id = "bench.mark"
kind = "bench.mark"
title = "a mark of a benchmark"
severity = "info"
role = "context"
scope = "node"
depth = 9
pattern = ['{token} (?P<number>\\d+)']
examples = ["{token} 1"]
source = "bench/kernel_live.py"
reason = "its own lines"
"""
BARE = """
import os, select, sys
fd = os.open(sys.argv[1], (os.O_RDWR if sys.argv[1] != "/dev/kmsg" else os.O_RDONLY) | os.O_NONBLOCK)
if sys.argv[1] == "/dev/kmsg":
    os.lseek(fd, 0, os.SEEK_END)
sys.stdout.write("ready\\n"); sys.stdout.flush()
while True:
    select.select([fd], [], [])
    data = os.read(fd, 1 << 18)
    sys.stdout.buffer.write(data if data.endswith(b"\\n") else data + b"\\n"); sys.stdout.flush()
"""


@contextmanager
def reader(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output is read as it comes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Output:
    """Lines of a process, with a limit for waiting."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.fd = process.stdout.fileno()
        self.rest = b""

    def until(self, words: bytes, limit_s: float = 60.0) -> float:
        """The time when `words` were there."""
        end = time.monotonic() + limit_s
        while words not in self.rest:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                sys.exit(f"kernel_live.py: {words!r} did not come within {limit_s:.0f} s")
            self.rest = self.rest[-(1 << 20) :] + os.read(self.fd, 1 << 20)
        return time.monotonic()


def write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)


def latencies_ms(path: Path, output: Output, token: str, count: int, found: str, rng: random.Random) -> list[float]:
    """From the write of each of `count` lines to the sight of its event."""
    times = []
    for number in range(count):
        time.sleep(rng.uniform(0.005, 0.03))
        begin = time.monotonic()
        write(path, f"<6>{token} {number}\n")
        times.append(1000 * (output.until(found.format(number).encode()) - begin))
    return times


def burst_ms(path: Path, output: Output, token: str, lines: int, found: str) -> float:
    """From the write of many lines to the sight of the last event."""
    text = "".join(f"<6>{token} {1_000_000 + n}\n" for n in range(lines))
    begin = time.monotonic()
    write(path, text)
    return 1000 * (output.until(found.format(1_000_000 + lines - 1).encode()) - begin)


def measure(source: Path, options: argparse.Namespace, folder: Path) -> list[Result]:
    """All rows of one source."""
    token = f"keepstep-bench-{uuid.uuid4().hex[:10]}"
    entries = folder / "bench.toml"
    entries.write_text(ENTRY.format(token=token))
    count = 400 if options.full else 100
    rng = random.Random(options.seed)
    results = []
    scan = [sys.executable, "-m", "keepstep.cli.main", "scan", "--follow", str(source), "--catalog", str(entries)]
    with reader([*scan, "--signature", "bench.mark"]) as process:
        output = Output(process)
        write(source, f"<6>{token} 999999\n")
        output.until(b'"number":"999999"')
        found = '"number":"{}"'
        results.append(
            Result(f"{source.name}: one line", "keepstep", "ms", latencies_ms(source, output, token, count, found, rng))
        )
        if source != KMSG:  # the kernel limits how fast lines may be written there
            results.append(
                Result(
                    f"{source.name}: last of 2000 lines",
                    "keepstep",
                    "ms",
                    [burst_ms(source, output, token, 2000, found)],
                )
            )
    with reader([sys.executable, "-c", BARE, str(source)]) as process:
        output = Output(process)
        output.until(b"ready")
        times = latencies_ms(source, output, token, count, f"{token} {{}}\n", rng)
        results.append(Result(f"{source.name}: one line", "bare reader", "ms", times))
    return results


def main() -> None:
    options = argument_parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fifo = Path(folder) / "fifo"
        os.mkfifo(fifo)
        results = measure(fifo, options, Path(folder))
        note = None
        if os.access(KMSG, os.W_OK):
            results += measure(KMSG, options, Path(folder))
        else:
            note = "/dev/kmsg cannot be written here: measured through a FIFO"
    ours = [r for r in results if r.system == "keepstep" and r.name.endswith("one line")]
    worst = max(max(r.values) for r in ours)
    targets = [Target("event_latency_ms", worst, "ms", "<=", 100, note)]
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        rows = [r.as_dict() for r in results]
        (options.keep / "kernel_live.json").write_text(json.dumps(rows, indent=1))
    emit("kernel_live", results, targets, output=options.output, packages=["keepstep", "google-re2"])


if __name__ == "__main__":
    main()
