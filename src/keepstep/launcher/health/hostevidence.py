"""What a host knows about a failed cycle: kernel log, GPUs, network ports, out-of-memory kills, core files; on a hang also what
ranks wait for.

Nothing here may delay or spoil a restart: every part has a bound in time and size, runs beside the others, and a part that fails
is an entry that says so.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.bounded import await_bounded, call_bounded
from keepstep.launcher.clock import boot_ns
from keepstep.launcher.health import hangevidence, kernellog
from keepstep.launcher.health.gpus import GpuReport, read_gpus
from keepstep.records.codec import rfc3339, to_pretty_json

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
MAX_CORE_NAMES = 10_000
RING_FOLDER = Path("/var/lib/systemd/coredump")
INFINIBAND = Path("/sys/class/infiniband")
PORTS_S = 1.0
"""For all ports before a cycle starts: a device in trouble answers after its firmware's own time-outs, a minute or more."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the evidence.

    `status`: "got", "empty" (asked for, nothing came), "unavailable" (this host does not have it), "denied" (no permission),
    "timed_out", "failed".
    """

    name: str
    status: str
    files: list[str] = []
    """Relative to the evidence folder."""
    detail: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a cycle's evidence is compared with; taken when the cycle starts."""

    boot_ns: int
    kmsg_sequence: int | None
    memory: dict[str, int]
    ports: dict[str, Any] | None = None
    """InfiniBand and RoCE ports as `ibsysfs.fields_of` writes them; None where there are none, or they did not answer."""


class HostEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was collected; also written to host.json in the folder. Empty lists mean "none seen", see the item for "not seen"."""

    schema: str = "keepstep.host_evidence/1"
    since_boot_ns: int
    until_boot_ns: int
    hang: bool
    items: list[Item] = []
    xids: list[str] = []
    ooms: list[str] = []
    memory_events: dict[str, int] = {}
    """Growth of the job's cgroup counters since the cycle began."""
    core_files: list[str] = []
    gpus: GpuReport | None = None
    dumps: list[hangevidence.Dump] = []

    def item(self, name: str) -> Item | None:
        """The entry of one part."""
        return next((i for i in self.items if i.name == name), None)


class Finding(msgspec.Struct, kw_only=True):
    """What one part brings: its entry and fields of HostEvidence."""

    item: Item
    fields: dict[str, object] = {}


def snapshot() -> Snapshot:
    """Take it before the ranks of a cycle start. Reads local files only (about 10 ms for a full kernel log)."""
    try:
        ports = call_bounded(read_ports, PORTS_S)
    except (OSError, TimeoutError):
        ports = None
    return Snapshot(boot_ns=boot_ns(), kmsg_sequence=kernellog.last_sequence(), memory=memory_counters(), ports=ports)


async def collect(
    folder: Path,
    since_boot_ns: int,
    pids: dict[int, int],
    hang: bool,
    limit_s: float,
    *,
    before: Snapshot | None = None,
    recorder: hangevidence.Recorder | None = None,
    cwd: Path | None = None,
    gpus: Callable[[], GpuReport] = read_gpus,
    gpus_before: GpuReport | None = None,
) -> HostEvidence:
    """Collect into `folder` within `limit_s`. Never raises.

    `gpus_before`: what `gpus` told when the cycle began. `pids`: rank -> pid of ranks that are not reaped. On a hang call it
    before ranks are stopped, after the stacks were taken: the NCCL query, which comes last of all, has been known to end the
    process that it asks.
    """
    try:
        await await_bounded(lambda: folder.mkdir(parents=True, exist_ok=True, mode=0o700), limit_s)
    except (OSError, TimeoutError) as error:
        item = Item(name="folder", status="failed", detail=str(error))
        return HostEvidence(since_boot_ns=since_boot_ns, until_boot_ns=boot_ns(), hang=hang, items=[item])
    deadline = time.monotonic() + limit_s
    parts: dict[str, Callable[[], Finding]] = {
        "kernel_log": lambda: _kernel_log(folder, since_boot_ns, before, limit_s),
        "gpus": lambda: _gpus(folder, gpus, gpus_before),
        "ports": lambda: _ports(folder, before),
        "memory_events": lambda: _memory(folder, before),
        "core_files": lambda: _cores(since_boot_ns, cwd or Path.cwd()),
    }
    if hang:
        parts["sockets"] = lambda: _sockets(folder, pids)
        parts["flight_recorder"] = lambda: _recorder(folder, pids, recorder, since_boot_ns, limit_s * 0.6)
    findings = list(await asyncio.gather(*(_guarded(n, c, deadline - time.monotonic()) for n, c in parts.items())))
    if hang:
        findings.append(
            await _guarded("nccl_ras", lambda: _ras(folder, pids, limit_s * 0.3), deadline - time.monotonic())
        )
    fields: dict[str, object] = {k: v for f in findings for k, v in f.fields.items()}
    evidence = HostEvidence(
        since_boot_ns=since_boot_ns,
        until_boot_ns=boot_ns(),
        hang=hang,
        items=[f.item for f in findings],
        **fields,  # type: ignore[arg-type]
    )
    await _guarded("manifest", lambda: _write_manifest(folder, evidence), 1.0)
    return evidence


def _guarded(name: str, part: Callable[[], Finding], limit_s: float) -> Awaitable[Finding]:
    async def guarded() -> Finding:
        if limit_s <= 0:
            return Finding(item=Item(name=name, status="timed_out", detail="no time was left"))
        try:
            return await await_bounded(part, limit_s)
        except TimeoutError as error:
            return Finding(item=Item(name=name, status="timed_out", detail=str(error)))
        except PermissionError as error:
            return Finding(item=Item(name=name, status="denied", detail=str(error)))
        except Exception as error:
            return Finding(item=Item(name=name, status="failed", detail=f"{type(error).__name__}: {error}"))

    return guarded()


def _write_manifest(folder: Path, evidence: HostEvidence) -> Finding:
    (folder / "host.json").write_bytes(to_pretty_json(evidence))
    return Finding(item=Item(name="manifest", status="got"))


def _kernel_log(folder: Path, since_boot_ns: int, before: Snapshot | None, limit_s: float) -> Finding:
    log = kernellog.read_log(since_boot_ns, before.kmsg_sequence if before else None, limit_s * 0.8)
    kernellog.write_log(log, folder)
    files = ["kernel.log", *(["kernel-xid.log"] if log.xids else [])]
    status = "denied" if log.source == "none" else "got" if log.lines else "empty"
    detail = log.problem or f"{len(log.lines)} lines from {log.source}, {len(log.xids)} about Xids"
    return Finding(
        item=Item(name="kernel_log", status=status, files=files, detail=detail),
        fields={"xids": log.xids, "ooms": log.ooms},
    )


def _gpus(folder: Path, read: Callable[[], GpuReport], before: GpuReport | None) -> Finding:
    report = read()
    status = "unavailable" if not report.available else "got" if report.answering else "timed_out"
    files = []
    if report.gpus:
        begin = None if before is None else before.gpus
        told = msgspec.to_builtins(report) | msgspec.to_builtins({"taken_at": rfc3339(time.time_ns()), "begin": begin})
        (folder / "gpus.json").write_bytes(to_pretty_json(told))
        files = ["gpus.json"]
    return Finding(
        item=Item(name="gpus", status=status, files=files, detail=report.problem or f"{len(report.gpus)} GPUs"),
        fields={"gpus": report},
    )


# ---- network ports


def read_ports(earlier: Mapping[str, Any] | None = None, root: Path | None = None) -> dict[str, Any] | None:
    """States and error counters of InfiniBand and RoCE ports; None without any. May take as long as a device's firmware does.

    `earlier`: an earlier reading; ports that gave no counters then are not asked for them again (see ibsysfs).
    """
    root = root or INFINIBAND
    if not root.is_dir():
        return None
    # Not loaded on hosts without such devices: a launcher stays small.
    from keepstep.sources.live import ibsysfs

    silent = tuple(ibsysfs.key_of(name) for name, told in (earlier or {}).items() if not told["counters"])
    return ibsysfs.fields_of(ibsysfs.read(root, silent)) or None


def _ports(folder: Path, before: Snapshot | None) -> Finding:
    earlier = before.ports if before is not None else None
    now = read_ports(earlier)
    if now is None:
        return Finding(item=Item(name="ports", status="unavailable", detail="no InfiniBand or RoCE device"))
    elapsed_s = (boot_ns() - before.boot_ns) / 1e9 if before is not None else 0.0
    told = {"taken_at": rfc3339(time.time_ns()), "elapsed_s": elapsed_s, "begin": earlier, "end": now}
    (folder / "ports.json").write_bytes(to_pretty_json(told))
    detail = f"{len(now)} ports" + ("" if earlier is not None else "; no earlier reading to compare with")
    return Finding(item=Item(name="ports", status="got", files=["ports.json"], detail=detail))


# ---- memory of the job's cgroup


def memory_counters(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Counters of this process's memory cgroup, shared by ranks: v2's memory.events, v1's oom_kill and failcnt; {} without one."""
    found: dict[str, int] = {}
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        path = path.lstrip("/")
        if number == "0":
            for mount in (root, root / "unified"):
                found |= _numbers(mount / path / "memory.events")
        elif "memory" in controllers.split(","):
            # In a container without a cgroup namespace the host's path does not exist inside: the mount is the group itself.
            inside = root / "memory" / path
            inside = inside if inside.is_dir() else root / "memory"
            control = _numbers(inside / "memory.oom_control")
            found |= {k: v for k, v in control.items() if k in ("oom_kill", "under_oom")}
            found |= {f"failcnt{k}": v for k, v in _numbers(inside / "memory.failcnt").items()}
    return found


def _numbers(path: Path) -> dict[str, int]:
    """Lines "name value", or one bare number under the name ""."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {(w[0] if len(w) > 1 else ""): int(w[-1]) for w in words if w and w[-1].isdigit()}


def _memory(folder: Path, before: Snapshot | None) -> Finding:
    now = memory_counters()
    if not now:
        return Finding(item=Item(name="memory_events", status="unavailable", detail="no memory cgroup can be read"))
    grown = {k: v - before.memory.get(k, 0) for k, v in now.items()} if before else {}
    grown = {k: v for k, v in grown.items() if v}
    (folder / "memory-events.json").write_bytes(to_pretty_json({"now": now, "since_cycle_began": grown}))
    detail = "no earlier reading to compare with" if before is None else ""
    item = Item(name="memory_events", status="got", files=["memory-events.json"], detail=detail)
    return Finding(item=item, fields={"memory_events": grown})


# ---- core files


def core_folder(pattern: str, cwd: Path) -> tuple[Path | None, str]:
    """Where core files go by /proc/sys/kernel/core_pattern (core(5)), and a note when that is not certain."""
    pattern = pattern.strip()
    if pattern.startswith("|"):
        if "systemd-coredump" in pattern:
            return RING_FOLDER, "by systemd-coredump: coredumpctl list"
        return None, f"piped to {pattern[1:].split()[0] if pattern[1:].split() else '?'}"
    if pattern.startswith("/"):
        return Path(pattern.partition("%")[0].rpartition("/")[0] or "/"), ""
    return cwd, "in the working directory of the rank"


def _cores(since_boot_ns: int, cwd: Path, pattern_file: Path = CORE_PATTERN) -> Finding:
    pattern = pattern_file.read_text()
    folder, note = core_folder(pattern, cwd)
    detail = f"core_pattern {pattern.strip()!r}; {note}".rstrip("; ")
    if folder is None or not folder.is_dir():
        return Finding(item=Item(name="core_files", status="unavailable", detail=detail))
    begin_s = time.time() - (boot_ns() - since_boot_ns) / 1e9
    stem = Path(pattern.strip()).name.partition("%")[0] if not pattern.startswith("|") else "core"
    files = young_files(folder, stem or "core", begin_s)
    status = "got" if files else "empty"
    return Finding(item=Item(name="core_files", status=status, detail=detail), fields={"core_files": files})


def young_files(folder: Path, stem: str, since_s: float) -> list[str]:
    """Regular files of a folder whose name begins with `stem`, written since a UTC time; looks at MAX_CORE_NAMES names at most."""
    found = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_CORE_NAMES:
                break
            if not entry.name.startswith(stem):
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode) and info.st_mtime >= since_s:
                found.append(entry.path)
    return sorted(found)


# ---- hangs


def _sockets(folder: Path, pids: dict[int, int]) -> Finding:
    sockets = {str(rank): hangevidence.sockets_of(pid) for rank, pid in sorted(pids.items())}
    (folder / "sockets.json").write_bytes(to_pretty_json(sockets))
    count = sum(len(s) for s in sockets.values())
    status = "got" if count else "empty"
    return Finding(item=Item(name="sockets", status=status, files=["sockets.json"], detail=f"{count} TCP sockets"))


def _recorder(
    folder: Path, pids: dict[int, int], recorder: hangevidence.Recorder | None, since_boot_ns: int, limit_s: float
) -> Finding:
    if recorder is None:
        detail = "no dump path was given to the ranks"
        return Finding(item=Item(name="flight_recorder", status="unavailable", detail=detail))
    dumps = hangevidence.collect_dumps(recorder, sorted(pids), folder, since_boot_ns, limit_s)
    good = [d for d in dumps if d.status == "got"]
    rest = ", ".join(f"rank {d.rank} {d.status}" for d in dumps if d.status != "got")
    item = Item(
        name="flight_recorder",
        status="got" if good else "empty",
        files=[d.file for d in dumps if d.file is not None],
        detail=f"{len(good)} of {len(dumps)} dumps" + (f"; {rest}" if rest else ""),
    )
    return Finding(item=item, fields={"dumps": dumps})


def _ras(folder: Path, pids: dict[int, int], limit_s: float) -> Finding:
    version = next((v for v in (hangevidence.nccl_version_of(pid) for pid in pids.values()) if v is not None), None)
    reason = hangevidence.ras_refusal(version)
    if reason is not None:
        return Finding(item=Item(name="nccl_ras", status="unavailable", detail=reason))
    text, problem = hangevidence.query_ras(limit_s)
    if text:
        (folder / "nccl-ras.txt").write_text(text, errors="replace")
    status = "got" if text and not problem else "timed_out" if problem and "answer" in problem else "failed"
    return Finding(
        item=Item(name="nccl_ras", status=status, files=["nccl-ras.txt"] if text else [], detail=problem or "")
    )
