"""Processes: exits through pidfds, descendants, process groups, states. No polling loop lives here."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from keepstep.launcher.ranks.rankmain import libc_prctl

PR_SET_CHILD_SUBREAPER = 36
STATUS_LOST = 255


def become_subreaper() -> None:
    """Orphans among this process's descendants are re-parented to it (prctl PR_SET_CHILD_SUBREAPER).

    A parent that ignores SIGCHLD hands that down through exec, and the kernel would throw every status away.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc_prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap(pid: int) -> int | None:
    """Collect a child's status without blocking: exit code, or minus the signal number; None while it runs.

    STATUS_LOST when there is no such child: a status that nobody could read is no success.
    """
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return STATUS_LOST
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def parents() -> dict[int, int]:
    """pid -> parent pid of all processes that can be seen. Processes may vanish while looking."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_bytes()
        except OSError:
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] != b"Z":
            found[int(entry)] = int(fields[1])
    return found


def descendants(root: int, exclude: set[int]) -> set[int]:
    """Living descendants of `root`, without the subtrees that start at a pid of `exclude`."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    pending = [c for c in children.get(root, []) if c not in exclude]
    while pending:
        pid = pending.pop()
        found.add(pid)
        pending.extend(c for c in children.get(pid, []) if c not in exclude)
    return found


def environment_of(pid: int) -> dict[str, str]:
    """Initial environment of a process of this user; empty when it is gone or not ours."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def with_environment(name: str, value: str) -> dict[int, dict[str, str]]:
    """Other processes of this user whose initial environment holds NAME=value, with that environment."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            environment = environment_of(int(entry))
            if environment.get(name) == value:
                found[int(entry)] = environment
    return found


def kill_quietly(pid: int, signum: int) -> bool:
    """Send a signal; False when the process is gone."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_group(pgid: int, signum: int) -> bool:
    """Send a signal to a process group; False when it has no member any more. Group 0 would be our own: never."""
    if pgid <= 1:
        return False
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def state_of(pid: int) -> str:
    """Kernel's one-letter state (R, S, D, T, Z, ...), or "" when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return chr(stat[stat.rindex(b")") + 2])


def catches(pid: int, signum: int) -> bool:
    """True when the process has a handler for `signum` (SigCgt in /proc/PID/status)."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigCgt:")), 0)
    return bool(mask >> (signum - 1) & 1)


def kernel_stack(pid: int) -> str:
    """/proc/PID/stack where readable (root), else the wait channel, else ""."""
    for name in ("stack", "wchan"):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
        except OSError:
            continue
        if text and text != "0":
            return text
    return ""


def listens(path: str) -> bool:
    """Whether somebody accepts connections at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def make_memfd(name: str, size_bytes: int) -> int:
    """A fully allocated memfd (a later write cannot fail with SIGBUS). Raises OSError (no memory)."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd
