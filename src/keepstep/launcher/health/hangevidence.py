"""What the ranks of a hang wait for, seen from outside: TCP sockets, torch's flight recorder, NCCL's own state report."""

from __future__ import annotations

import contextlib
import ipaddress
import mmap
import os
import re
import shutil
import stat
import time
from pathlib import Path

import msgspec

from keepstep.launcher.bounded import run_tool
from keepstep.launcher.clock import boot_ns

TCP_STATES = (
    "?", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT", "LAST_ACK",
    "LISTEN", "CLOSING", "NEW_SYN_RECV",
)  # fmt: skip
"""By number, include/net/tcp_states.h."""
MAX_SOCKETS = 5000
DUMP_LIMIT_BYTES = 64 << 20
"""Of one rank's dump; one of 2,000 entries with stacks has about 1.3 MB."""
TOTAL_LIMIT_BYTES = 1 << 30
SETTLE_S = 0.3
POLL_S = 0.02
RAS_LIMIT_BYTES = 4 << 20
RAS_SAFE_FROM = (2, 29, 2)
RAS_BAD = {(2, 29, 7)}
"""A verbose query could crash the job it asks: while communicators were being made before 2.27.3 (NVIDIA/nccl issues 1669, 1718),
by corrupting memory until 2.29.2 (issue 1762), and with a communicator half made in 2.29.7 (issue 2346, open when this was
written)."""
NCCL_VERSION = re.compile(rb"NCCL version (\d+)\.(\d+)\.(\d+)")
NCCL_LIBRARY = re.compile(r"/(libnccl\.so[.\d]*|libtorch_cuda\.so)$")


class Socket(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP socket of a rank. `tx_bytes`: sent and not acknowledged; `rx_bytes`: received and not read."""

    local: str
    peer: str
    state: str
    tx_bytes: int
    rx_bytes: int
    retransmits: int


class Recorder(msgspec.Struct, frozen=True, kw_only=True):
    """Where ranks were told to put flight-recorder dumps. Rank R's dump is `dump_prefix`R, its trigger `pipe_prefix`R.pipe."""

    dump_prefix: str
    pipe_prefix: str


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's flight-recorder dump.

    `status`: "got", "empty" (a file without content: typical of a rank that could not finish writing), "missing", "too_large".
    Neither of the last three is lack of evidence: it sets the rank apart from those that answered.
    """

    rank: int
    status: str
    asked: bool
    """The rank had its pipe open. False: no NCCL process group, or it was not that far."""
    size_bytes: int = 0
    file: str | None = None
    """Name in the evidence folder."""


# ---- sockets


def sockets_of(pid: int, proc: Path = Path("/proc")) -> list[Socket]:
    """TCP sockets that a process has open, at most MAX_SOCKETS; [] when it is gone or not ours."""
    inodes = set()
    with contextlib.suppress(OSError):
        for fd in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                link = str(fd.readlink())
                if link.startswith("socket:["):
                    inodes.add(link[8:-1])
    found: list[Socket] = []
    for name in ("tcp", "tcp6"):
        # The table of its own network namespace.
        with contextlib.suppress(OSError), open(proc / str(pid) / "net" / name) as table:
            next(table, None)
            for line in table:
                socket = parse_socket(line, inodes)
                if socket is not None and len(found) < MAX_SOCKETS:
                    found.append(socket)
    return found


def parse_socket(line: str, inodes: set[str]) -> Socket | None:
    """A line of /proc/PID/net/tcp or tcp6 (proc_net_tcp in the kernel's documentation) when its inode is one of `inodes`."""
    fields = line.split()
    if len(fields) < 10 or fields[9] not in inodes:
        return None
    tx, _, rx = fields[4].partition(":")
    state = int(fields[3], 16)
    return Socket(
        local=_address(fields[1]),
        peer=_address(fields[2]),
        state=TCP_STATES[state] if state < len(TCP_STATES) else f"state {state}",
        tx_bytes=int(tx, 16),
        rx_bytes=int(rx, 16),
        retransmits=int(fields[6], 16),
    )


def _address(text: str) -> str:
    """ "0100007F:1F90" -> "127.0.0.1:8080": 32-bit words in the host's byte order (all hosts that train are little endian)."""
    hexadecimal, _, port = text.partition(":")
    data = bytes.fromhex(hexadecimal)
    data = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
    address: ipaddress.IPv4Address | ipaddress.IPv6Address = (
        ipaddress.IPv4Address(data) if len(data) == 4 else ipaddress.IPv6Address(data)
    )
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{int(port, 16)}"


# ---- flight recorder


def trigger(pipe: Path) -> bool:
    """Ask the rank behind a pipe for a dump; False when nobody has it open. torch writes such a dump without stacks: taking stacks
    could need the interpreter lock that a hung rank holds."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A file of that name that is no pipe must not be written into.
        return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1\n") == 2
    except OSError:
        return False
    finally:
        os.close(fd)


def collect_dumps(recorder: Recorder, ranks: list[int], folder: Path, since_boot_ns: int, limit_s: float) -> list[Dump]:
    """Trigger a dump on every rank, wait until the files are there and have stopped growing, copy them into `folder`.

    Dumps that a rank's own watchdog wrote since the cycle began count too. Raises OSError only when `folder` cannot be written.
    """
    deadline = time.monotonic() + limit_s
    begin_s = time.time() - (boot_ns() - since_boot_ns) / 1e9
    before = {rank: _stamp(Path(f"{recorder.dump_prefix}{rank}")) for rank in ranks}
    asked = {rank: trigger(Path(f"{recorder.pipe_prefix}{rank}.pipe")) for rank in ranks}
    _wait_for_dumps(recorder, {r: before[r] for r in ranks if asked[r]}, deadline)
    found, total = [], 0
    for rank in ranks:
        source = Path(f"{recorder.dump_prefix}{rank}")
        mtime_ns, size = _stamp(source)
        status = "got"
        if mtime_ns == 0 or mtime_ns / 1e9 < begin_s:
            status, size = "missing", 0
        elif size == 0:
            status = "empty"
        elif size > DUMP_LIMIT_BYTES or total + size > TOTAL_LIMIT_BYTES:
            status = "too_large"
        name = None
        if status == "got":
            name = f"nccl-trace-rank-{rank:05d}"
            with open(source, "rb") as reader, open(folder / name, "wb") as writer:
                # It may grow while it is read: no more than was decided on.
                writer.write(reader.read(size))
            total += size
        found.append(Dump(rank=rank, status=status, asked=asked[rank], size_bytes=size, file=name))
    return found


def _wait_for_dumps(recorder: Recorder, before: dict[int, tuple[int, int]], deadline: float) -> None:
    """Until every file of `before` is newer and none has changed for SETTLE_S: torch gives no sign that a dump is whole."""
    seen = dict(before)
    changed = time.monotonic()
    while before and time.monotonic() < deadline:
        now = {rank: _stamp(Path(f"{recorder.dump_prefix}{rank}")) for rank in before}
        if now != seen:
            seen, changed = now, time.monotonic()
        if all(now[r] != before[r] and now[r][1] > 0 for r in before) and time.monotonic() - changed >= SETTLE_S:
            return
        time.sleep(POLL_S)


def _stamp(path: Path) -> tuple[int, int]:
    """(mtime ns, size) of a regular file, (0, 0) without one."""
    try:
        info = path.lstat()
    except OSError:
        return 0, 0
    return (info.st_mtime_ns, info.st_size) if stat.S_ISREG(info.st_mode) else (0, 0)


# ---- NCCL's RAS


def nccl_version_of(pid: int, proc: Path = Path("/proc")) -> tuple[int, int, int] | None:
    """Version of the NCCL that a process has loaded, None without one: by its wheel, else by the library's version string."""
    paths = []
    with contextlib.suppress(OSError), open(proc / str(pid) / "maps") as maps:
        for line in maps:
            path = line.rstrip("\n").rpartition(" ")[2]
            if NCCL_LIBRARY.search(path) and path not in paths:
                paths.append(path)
    # A library of its own goes before one that is linked into torch.
    for path in sorted(paths, key=lambda p: "libtorch" in p):
        version = _wheel_version(Path(path)) or _string_version(Path(path))
        if version is not None:
            return version
    return None


def _wheel_version(library: Path) -> tuple[int, int, int] | None:
    """.../site-packages/nvidia/nccl/lib/libnccl.so.2 has nvidia_nccl_cu12-2.27.5.dist-info beside "nvidia"."""
    if len(library.parents) < 4:
        return None
    for info in library.parents[3].glob("nvidia_nccl*.dist-info"):
        match = re.search(r"-(\d+)\.(\d+)\.(\d+)", info.name)
        if match:
            return int(match[1]), int(match[2]), int(match[3])
    return None


def _string_version(library: Path) -> tuple[int, int, int] | None:
    with (
        contextlib.suppress(OSError, ValueError),
        open(library, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        match = NCCL_VERSION.search(data)
        if match:
            return int(match[1]), int(match[2]), int(match[3])
    return None


def ras_refusal(version: tuple[int, int, int] | None) -> str | None:
    """Why NCCL is not asked, None when it may be. An unknown version is not asked: the question must not do harm."""
    if version is None:
        return "no rank has a NCCL loaded whose version is known"
    text = ".".join(map(str, version))
    if version < RAS_SAFE_FROM or version in RAS_BAD:
        least = ".".join(map(str, RAS_SAFE_FROM))
        return f"NCCL {text} is not asked: a query can crash it (from {least} on it is safe, 2.29.7 excepted)"
    return None


def query_ras(limit_s: float) -> tuple[str, str | None]:
    """Output of `ncclras -v` (NCCL's client, from PATH), and what went wrong. It asks the RAS thread of a rank on this host."""
    program = shutil.which("ncclras")
    if program is None:
        return "", "ncclras is not on PATH"
    try:
        # Its own time-out is for the answers of other hosts: a report of those that answered comes before ours.
        done = run_tool([program, "-v", "-t", str(max(1, int(limit_s * 0.7)))], limit_s)
    except (OSError, TimeoutError) as error:
        return "", str(error)
    text = done.stdout[:RAS_LIMIT_BYTES].decode(errors="replace")
    return text, None if done.returncode == 0 else f"exit {done.returncode}"
