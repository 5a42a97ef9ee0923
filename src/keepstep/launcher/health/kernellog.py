"""The kernel's log since a cycle began, and what in it concerns GPUs: NVML and DCGM tell only the last Xid, and some never."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections import deque
from pathlib import Path

import msgspec

from keepstep.launcher.bounded import run_tool
from keepstep.launcher.clock import boot_ns
from keepstep.records.codec import rfc3339
from keepstep.sources.kernel.records import parse_kmsg, read_records

LIMIT_BYTES = 2 << 20
XID_LIMIT = 1000
RECORD_BYTES = 8192
"""A record of /dev/kmsg with its continuation never exceeds this (CONSOLE_EXT_LOG_MAX)."""
ENV_KMSG = "KEEPSTEP_KMSG"
"""A fifo or file that stands for /dev/kmsg: in containers, and to try things out."""
XID = re.compile(r"NVRM: Xid|nvidia-nvswitch\d*: SXid")
OOM = re.compile(r"oom-kill:|Out of memory: Killed process|Memory cgroup out of memory|invoked oom-killer")
STAMPED = re.compile(r"^(?:<\d+>)?\[\s*(\d+)\.(\d{1,9})\]\s?(.*)$")
"""A line of `dmesg` or `journalctl -o short-monotonic`: seconds since boot, then the text."""
SLACK_S = 2.0
DRIFT = 100e-6
"""The log's clock is not disciplined: over weeks it drifts from the other clocks. Rather a line too many than one too few."""


class KernelLog(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of the kernel's log, each "[seconds since boot] text"."""

    source: str
    """"kmsg", "dmesg", "journalctl", or "none"."""
    lines: list[str] = []
    xids: list[str] = []
    """Those of `lines` with an Xid or SXid, also where `lines` had to be cut."""
    ooms: list[str] = []
    dropped_lines: int = 0
    """Oldest lines left out to keep the bound."""
    problem: str | None = None
    """Why there is nothing, or why another source had to do."""


def kmsg_path() -> Path:
    """The kernel's log of this host."""
    return Path(os.environ.get(ENV_KMSG) or "/dev/kmsg")


def last_sequence(path: Path | None = None) -> int | None:
    """Sequence number of the newest record, None when the log cannot be read. Take it when a cycle starts."""
    last = None
    path = path or kmsg_path()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        for record in read_records(fd, time.monotonic() + 1.0):
            parsed = parse_kmsg(record)
            last = last if parsed is None else parsed.seq
    finally:
        os.close(fd)
    return last


def read_log(
    since_boot_ns: int, after_sequence: int | None = None, limit_s: float = 5.0, path: Path | None = None
) -> KernelLog:
    """The log since `since_boot_ns` (CLOCK_BOOTTIME), or exactly after `after_sequence` where that is known. Never raises."""
    path = path or kmsg_path()
    since_s = log_time_s(since_boot_ns)
    deadline = time.monotonic() + limit_s
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return _from_tools(since_s, deadline, f"{path}: {error.strerror}")
    try:
        records = read_records(fd, deadline)
    finally:
        os.close(fd)
    found = []
    for record in records:
        parsed = parse_kmsg(record)
        if parsed is None:
            continue
        seconds = parsed.boot_ns / 1e9
        if (parsed.seq > after_sequence) if after_sequence is not None else (seconds >= since_s):
            found.append(f"[{seconds:.6f}] {parsed.text}")
    return make_log("kmsg", found)


def log_time_s(at_boot_ns: int) -> float:
    """The earliest time that the kernel's log may give to a moment of CLOCK_BOOTTIME: its clock stops in suspend, and drifts."""
    suspended_ns = boot_ns() - time.monotonic_ns()
    seconds = (at_boot_ns - suspended_ns) / 1e9
    return max(0.0, seconds - SLACK_S - seconds * DRIFT)


def make_log(source: str, lines: list[str], problem: str | None = None, limit_bytes: int = LIMIT_BYTES) -> KernelLog:
    """Bound the lines, newest kept, and pick out those about GPUs and the out-of-memory killer."""
    kept: deque[str] = deque()
    size = 0
    for line in reversed(lines):
        size += len(line.encode(errors="replace")) + 1
        if size > limit_bytes:
            break
        kept.appendleft(line)
    return KernelLog(
        source=source,
        lines=list(kept),
        # The first ones: a fault comes before its consequences.
        xids=[line for line in lines if XID.search(line)][:XID_LIMIT],
        ooms=[line for line in lines if OOM.search(line)][:XID_LIMIT],
        dropped_lines=len(lines) - len(kept),
        problem=problem,
    )


def _from_tools(since_s: float, deadline: float, problem: str) -> KernelLog:
    """By `dmesg`, then `journalctl`: they may be allowed what we are not."""
    for command in (["dmesg"], ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-n", "20000"]):
        program = shutil.which(command[0])
        if program is None:
            problem += f"; {command[0]}: not installed"
            continue
        try:
            done = run_tool([program, *command[1:]], max(0.1, deadline - time.monotonic()))
        except (OSError, TimeoutError) as error:
            problem += f"; {command[0]}: {error}"
            continue
        text = done.stdout.decode(errors="replace")
        stamped = [match for match in map(STAMPED.match, text.splitlines()) if match is not None]
        if done.returncode == 0 and stamped:
            return make_log(command[0], [m[0] for m in stamped if float(f"{m[1]}.{m[2]}") >= since_s], problem)
        problem += f"; {command[0]}: exit {done.returncode}: {text.strip()[:200]}"
    return KernelLog(source="none", problem=problem)


def write_log(log: KernelLog, folder: Path) -> None:
    """kernel.log and, where there are any, kernel-xid.log. A log that could not be read is a file that says so. Raises OSError."""
    # Its own clock, which stops in suspend as CLOCK_MONOTONIC does: with it the lines have times.
    began_ns = time.time_ns() - time.monotonic_ns()
    began = f"# boot at {rfc3339(began_ns)}\n"
    head = f"# source: {log.source}\n{began}"
    if log.problem:
        head += f"# {log.problem}\n"
    if log.dropped_lines:
        head += f"# the oldest {log.dropped_lines} lines were left out\n"
    (folder / "kernel.log").write_text(head + "".join(f"{line}\n" for line in log.lines), errors="replace")
    with contextlib.suppress(FileNotFoundError):
        (folder / "kernel-xid.log").unlink()
    if log.xids:
        (folder / "kernel-xid.log").write_text(began + "".join(f"{line}\n" for line in log.xids), errors="replace")
