"""Is this host fit to train? Checks in three levels; only a definite failure speaks against the node.

Level 1 takes seconds and touches nothing but a small file; level 2 adds short probes of memory, disk and GPU (nodeprobe.py); level
3 adds NVIDIA's own diagnostic. What cannot be checked is said to be unknown: a time-out is no proof of health and none of a fault.
The one exception is a GPU driver that does not answer, because no training can run on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.launcher.bounded import Pending
from keepstep.launcher.health.gpus import Gpu, GpuReport, read_gpus
from keepstep.records.hostmemory import available_memory_bytes

GB = 1 << 30
MB = 1 << 20
STA_UNSYNC = 0x0040
IFF_UP = 0x1
WRITE_BYTES = 4096


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check. `ok` is None when it could not be made; units are part of `value` and `limit`."""

    name: str
    ok: bool | None
    value: str = ""
    limit: str = ""
    detail: str = ""
    next_step: str = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a node needs at least. Set so that a node that misses one cannot train, not to what would be good to have."""

    run_dir_free_bytes: int = 1 * GB
    tmp_free_bytes: int = 256 * MB
    shm_free_bytes: int = 32 * MB
    """A container's default is 64 MB in all."""
    free_inodes: int = 1000
    memory_bytes: int = 1 * GB
    clock_skew_s: float = 1.0
    open_files: int = 1024
    memory_copy_mb_per_s: float = 500.0
    disk_write_mb_per_s: float = 10.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to check and against what."""

    level: int = 1
    run_dir: Path | None = None
    checkpoint_root: Path | None = None
    expected_gpus: int | None = None
    """Fewer visible GPUs than this is a failure; None: any number will do."""
    reference: tuple[int, int] | None = None
    """A pair (UTC ns by the coordinator's clock, CLOCK_BOOTTIME ns here when it was right)."""
    limits: Limits = Limits()
    sys_root: Path = Path("/sys")
    timeout_s: float = 15.0
    """All of level 1; the probes of the higher levels have bounds of their own."""


Check = Callable[[Request], list[CheckResult]]


def run_checks(
    level: int = 1, request: Request | None = None, gpus: Callable[[], GpuReport] = read_gpus
) -> list[CheckResult]:
    """Run the checks up to `level`, side by side, within the request's time-out. Never raises; blocks (call it in a thread)."""
    request = msgspec.structs.replace(request or Request(), level=level)
    from keepstep.launcher.health import nodeprobe

    deadline = time.monotonic() + request.timeout_s
    checks: list[tuple[str, Check]] = [("gpu", lambda r: check_gpus(gpus(), r.expected_gpus)), *LEVEL_1]
    pending = [(name, Pending(lambda check=check: check(request))) for name, check in checks]  # type: ignore[misc]
    found: list[CheckResult] = []
    for name, call in pending:
        found += _outcome(name, call, deadline - time.monotonic())
    # One after the other: probes of bandwidth must not compete.
    for probe in nodeprobe.probes(level):
        found += _outcome(probe.name, Pending(lambda p=probe: p.run(request)), probe.limit_s)  # type: ignore[misc]
    return found


def failures(results: list[CheckResult]) -> list[str]:
    """Definite failures, one line each: reasons to leave the node out."""
    return [f"{r.name}: {r.detail or r.value}" for r in results if r.ok is False]


def _outcome(name: str, call: Pending[list[CheckResult]], timeout_s: float) -> list[CheckResult]:
    try:
        return call.result(max(0.0, timeout_s))
    except TimeoutError:
        ok = False if name == "gpu" else None
        return [
            CheckResult(name=name, ok=ok, detail=f"no answer within {timeout_s:.0f} s", next_step=NEXT.get(name, ""))
        ]
    except Exception as error:
        return [CheckResult(name=name, ok=None, detail=f"could not be checked: {type(error).__name__}: {error}")]


NEXT = {
    "gpu": "look for NVRM lines in the kernel log; reset the GPU or reboot the node",
    "checkpoint": "look at the mount of the checkpoint root on this node",
}


# ---- GPUs


def check_gpus(report: GpuReport, expected: int | None) -> list[CheckResult]:
    """Present and answering, no row that waits for a reset, no uncorrectable error, no action asked for by the driver."""
    if not report.answering:
        detail = report.problem or "the GPU driver does not answer"
        return [CheckResult(name="gpu", ok=False, detail=detail, next_step=NEXT["gpu"])] + [
            r for g in report.gpus if g.answering for r in _gpu_health(g)
        ]
    if not report.available:
        ok = None if not expected else False
        return [
            CheckResult(name="gpu", ok=ok, detail=report.problem or "", limit=f"{expected} GPUs" if expected else "")
        ]
    count = len(report.gpus)
    few = expected is not None and count < expected
    detail = f"CUDA ignores CUDA_VISIBLE_DEVICES from {report.ignored!r} on" if report.ignored is not None else ""
    present = CheckResult(
        name="gpu",
        ok=not few,
        value=f"{count} GPUs",
        limit="" if expected is None else f"{expected} GPUs",
        detail=f"{count} of {expected} GPUs are visible. {detail}".strip() if few else detail,
        next_step="look for Xid 79 (fallen off the bus) in the kernel log" if few else "",
    )
    return [present] + [r for g in report.gpus for r in _gpu_health(g)]


def _gpu_health(gpu: Gpu) -> list[CheckResult]:
    where = f"GPU {gpu.index} ({gpu.pci or gpu.uuid})"
    reset = "drain the node and reset this GPU; if it comes back, return the GPU"

    def judged(name: str, known: bool, bad: bool, value: str, detail: str) -> CheckResult:
        if not known:
            return CheckResult(name=f"gpu.{gpu.index}.{name}", ok=None, detail="this GPU or driver does not tell")
        return CheckResult(
            name=f"gpu.{gpu.index}.{name}",
            ok=not bad,
            value=value,
            detail=f"{where} {detail}" if bad else "",
            next_step=reset if bad else "",
        )

    remap = "failed" if gpu.remap_failed else "pending" if gpu.remap_pending else "none"
    action = gpu.recovery_action
    return [
        judged(
            "row_remap",
            gpu.remap_pending is not None,
            remap != "none",
            remap,
            "could not remap a bad row" if gpu.remap_failed else "waits for a reset to remap a row",
        ),
        judged(
            "ecc",
            gpu.ecc_volatile is not None,
            bool(gpu.ecc_volatile),
            f"{gpu.ecc_volatile} uncorrectable since reset, {gpu.ecc_aggregate} in its life",
            f"had {gpu.ecc_volatile} uncorrectable memory errors since its last reset",
        ),
        judged(
            "recovery_action", action is not None, action != "none", action or "", f"needs {action}, says the driver"
        ),
    ]


# ---- links


def check_links(request: Request) -> list[CheckResult]:
    """InfiniBand ports and network devices. A port that was never up is unknown: nobody says that it has a cable."""
    return check_infiniband(request.sys_root) + check_network(request.sys_root)


def check_infiniband(sys_root: Path) -> list[CheckResult]:
    """Ports under /sys/class/infiniband.

    Not ACTIVE is a failure where NCCL_IB_HCA names the port, where the link was lost before (link_downed), and where it is
    physically up but the subnet manager has not made it ACTIVE. Otherwise the port may just not be cabled.
    """
    found = []
    for port in sorted((sys_root / "class/infiniband").glob("*/ports/*")):
        name = f"{port.parent.parent.name}:{port.name}"
        chosen = _chosen(name, os.environ.get("NCCL_IB_HCA", ""))
        if chosen is False:
            continue
        state, physical = _word(port / "state"), _word(port / "phys_state")
        if state == "":
            found.append(CheckResult(name=f"link.{name}", ok=None, detail="its state cannot be read"))
            continue
        # Only of a port in trouble: on some virtual functions every read of a counter is an error in the kernel's log.
        lost = "" if state == "ACTIVE" else _word(port / "counters/link_downed")
        definite = chosen or physical == "LinkUp" or (lost.isdigit() and int(lost) > 0)
        ok = True if state == "ACTIVE" else False if definite else None
        detail = "" if ok else f"{state}, physically {physical or '?'}, lost {lost or '?'} times"
        step = "look at cable, transceiver and switch port; `ibstat` on the node" if ok is False else ""
        found.append(
            CheckResult(name=f"link.{name}", ok=ok, value=state, limit="ACTIVE", detail=detail, next_step=step)
        )
    return found


def check_network(sys_root: Path) -> list[CheckResult]:
    """Carrier of physical network devices that are switched on; a lost one is a failure where NCCL_SOCKET_IFNAME names it."""
    found = []
    for device in sorted((sys_root / "class/net").glob("*")):
        flags = _word(device / "flags")
        if not (device / "device").exists() or not flags.startswith("0x") or not int(flags, 16) & IFF_UP:
            continue
        carrier = _word(device / "carrier")
        named = _chosen(device.name, os.environ.get("NCCL_SOCKET_IFNAME", ""))
        if named is False:
            continue
        ok = True if carrier == "1" else False if carrier == "0" and named else None
        detail = "" if ok else "no carrier" if carrier == "0" else "its carrier cannot be read"
        found.append(CheckResult(name=f"link.{device.name}", ok=ok, value=f"carrier {carrier or '?'}", detail=detail))
    return found


def _chosen(name: str, setting: str) -> bool | None:
    """Whether NCCL's list of devices ("^" excludes, "=" means whole names, else beginnings) chooses `name`; None: no list."""
    exclude = setting.startswith("^")
    setting = setting.removeprefix("^")
    exact = setting.startswith("=")
    entries = [e.strip() for e in setting.removeprefix("=").split(",") if e.strip()]
    if not entries:
        return None
    device = name.partition(":")[0]
    hit = any(e in (device, name) if exact else device.startswith(e) or name == e for e in entries)
    if exclude:
        # What is left after an exclusion is not thereby said to have a cable.
        return False if hit else None
    return hit


def _word(path: Path) -> str:
    """Value of a sysfs file; of "4: ACTIVE" the word."""
    try:
        return path.read_text().strip().rpartition(": ")[2]
    except OSError:
        return ""


# ---- room and time


def check_room(request: Request) -> list[CheckResult]:
    """Free bytes and inodes where a run writes, free memory, open files."""
    limits = request.limits
    places = [("disk.tmp", Path(tempfile.gettempdir()), limits.tmp_free_bytes)]
    places.append(("disk.shm", Path("/dev/shm"), limits.shm_free_bytes))
    if request.run_dir is not None:
        places.insert(0, ("disk.run_dir", _existing(request.run_dir), limits.run_dir_free_bytes))
    found = [_free(name, path, needed, limits.free_inodes) for name, path, needed in places]
    room = available_memory_bytes()
    found.append(
        CheckResult(
            name="memory",
            ok=room >= limits.memory_bytes,
            value=f"{room // MB} MB available",
            limit=f"{limits.memory_bytes // MB} MB",
            next_step="" if room >= limits.memory_bytes else "look for leftovers of earlier jobs: ps aux --sort=-rss",
        )
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= limits.open_files
    found.append(
        CheckResult(
            name="open_files",
            ok=enough,
            value=str(soft),
            limit=str(limits.open_files),
            next_step="" if enough else f"ulimit -n {hard}",
        )
    )
    return found


def _free(name: str, path: Path, needed_bytes: int, needed_inodes: int) -> CheckResult:
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return CheckResult(name=name, ok=None, detail=f"{path}: {error.strerror}")
    free = stat.f_bavail * stat.f_frsize
    # File systems without a fixed table of inodes report none at all.
    no_inodes = stat.f_files > 0 and stat.f_favail < needed_inodes
    detail = f"{path} has {stat.f_favail} inodes left" if no_inodes else ""
    ok = free >= needed_bytes and not no_inodes
    return CheckResult(
        name=name,
        ok=ok,
        value=f"{free // MB} MB free",
        limit=f"{needed_bytes // MB} MB",
        detail=detail or ("" if ok else f"{path} has {free // MB} MB left"),
        next_step="" if ok else f"make room: du -xh {path} | sort -h | tail",
    )


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), as far as it is read; the rest is room."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


def check_clock(request: Request) -> list[CheckResult]:
    """Skew against the coordinator's clock where a reading of it was given, else whether the kernel calls its own synchronised."""
    timex = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    known = libc.adjtimex(ctypes.byref(timex)) >= 0
    synchronised = known and not timex.status & STA_UNSYNC
    text = (
        "" if not known else f"at most {timex.maxerror} us off" if synchronised else "not synchronised, says the kernel"
    )
    if request.reference is None:
        ok = True if synchronised else None
        step = "" if synchronised else "chronyc tracking, or timedatectl"
        return [CheckResult(name="clock", ok=ok, value=text or "unknown", next_step=step)]
    utc_ns, at_boot_ns = request.reference
    now_there_ns = utc_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME) - at_boot_ns
    skew_s = (time.time_ns() - now_there_ns) / 1e9
    ok = abs(skew_s) <= request.limits.clock_skew_s
    return [
        CheckResult(
            name="clock",
            ok=ok,
            value=f"{skew_s:+.3f} s against the coordinator",
            limit=f"{request.limits.clock_skew_s:g} s",
            detail=text if ok else f"{skew_s:+.3f} s against the coordinator; {text}",
            next_step="" if ok else "chronyc tracking, or timedatectl",
        )
    ]


def check_checkpoint_root(request: Request) -> list[CheckResult]:
    """Write, sync and remove a small file in the checkpoint root, or in its nearest existing parent while it does not exist."""
    if request.checkpoint_root is None:
        return []
    root = _existing(request.checkpoint_root)
    begin = time.monotonic()
    try:
        write_probe(root)
    except OSError as error:
        return [
            CheckResult(
                name="checkpoint",
                ok=False,
                detail=f"{root}: cannot write: {error.strerror or error}",
                next_step=NEXT["checkpoint"],
            )
        ]
    return [CheckResult(name="checkpoint", ok=True, value=f"written and synced in {time.monotonic() - begin:.3f} s")]


def write_probe(folder: Path) -> None:
    """Write, fsync, read back and unlink WRITE_BYTES in `folder`. Raises OSError."""
    data = os.urandom(WRITE_BYTES)
    fd, name = tempfile.mkstemp(prefix=".keepstep-check-", dir=folder)
    try:
        os.write(fd, data)
        os.fsync(fd)
        if os.pread(fd, WRITE_BYTES, 0) != data:
            raise OSError(0, "what was written reads back differently")
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()


def _existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return next((p for p in (path, *path.parents) if p.exists()), Path("/"))


LEVEL_1: list[tuple[str, Check]] = [
    ("link", check_links),
    ("room", check_room),
    ("clock", check_clock),
    ("checkpoint", check_checkpoint_root),
]
