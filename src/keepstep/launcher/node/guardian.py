"""The guardian: a small process beside the agent that ends the node's ranks when the agent cannot.

It does two things. When the lease runs out it kills the ranks, also while the agent is stopped or stuck. When the agent is dead
it makes sure that no rank is left, tells the coordinator so (POST /fenced, proved by a key that is good for nothing else), and
ends; the coordinator may then give the ranks to another node at once instead of waiting for the lease.

It shares one page with the agent (layout below, aligned words as in records/page.py) and uses nothing but the standard library, so
it stays small enough to be locked into memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import mmap
import os
import select
import signal
import socket
import ssl
import sys
import time
from typing import Any

from keepstep.launcher.trust import prove_fence

PAGE_BYTES = 1 << 16
W_EXPIRY_NS = 0  # CLOCK_MONOTONIC at which the lease runs out; 0: none
W_FENCED_NS = 1  # when the guardian killed the ranks because it ran out
W_COUNT = 2  # ranks in the list
W_FIRST_PID = 4
MAX_RANKS = PAGE_BYTES // 8 - W_FIRST_PID

IDLE_S = 0.25
"""How often the page is looked at while no lease runs."""
GONE_S = 5.0
TELL_TRIES = 3
MCL_CURRENT_AND_FUTURE = 3


def main() -> None:
    """Run as `python -m keepstep.launcher.node.guardian PAGE_FD AGENT_PID CONTROL_FD`; the word to send comes on CONTROL_FD."""
    page_fd, agent_pid, control_fd = (int(a) for a in sys.argv[1:4])
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    page = memoryview(mmap.mmap(page_fd, PAGE_BYTES)).cast("Q")
    # Best effort: without the right to lock memory it works as long as its pages are there.
    ctypes.CDLL(None).mlockall(MCL_CURRENT_AND_FUTURE)
    with os.fdopen(control_fd, "rb") as control:
        word: dict[str, Any] = json.loads(control.readline())
    try:
        agent = os.pidfd_open(agent_pid)
    except ProcessLookupError:
        agent = -1
    if agent >= 0 and os.getppid() == agent_pid:
        watch(page, agent)
    end_ranks(page)
    tell(word)


def watch(page: Any, agent_pidfd: int) -> None:
    """Kill the ranks whenever the lease is over; returns when the agent is dead."""
    poller = select.poll()
    poller.register(agent_pidfd, select.POLLIN)
    while True:
        expiry = page[W_EXPIRY_NS]
        left_s = (expiry - time.monotonic_ns()) / 1e9 if expiry else IDLE_S
        if poller.poll(max(1, int(min(left_s, 3600.0) * 1000) + 1) if left_s > 0 else 0):
            return
        if expiry and page[W_EXPIRY_NS] == expiry and time.monotonic_ns() >= expiry:
            end_ranks(page)
            page[W_FENCED_NS] = time.monotonic_ns()
            page[W_EXPIRY_NS] = 0


def end_ranks(page: Any) -> None:
    """SIGKILL to every rank's process group and all that descends from it, until none is left."""
    pids = {page[W_FIRST_PID + i] for i in range(min(page[W_COUNT], MAX_RANKS))} - {0, 1}
    deadline = time.monotonic() + GONE_S
    below = _descendants(pids)
    while time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for pid in pids | below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not any(_runs(pid) for pid in pids | below):
            return
        time.sleep(0.005)


def _stat(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _runs(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def _descendants(pids: set[int]) -> set[int]:
    parents = {int(e): int(f[1]) for e in os.listdir("/proc") if e.isdigit() and (f := _stat(int(e)))}
    found: set[int] = set()
    grown = set(pids)
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown and pid not in found | pids}
        found |= grown
    return found


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=2.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(target: str, tls: bool) -> http.client.HTTPConnection:
    if target.startswith("/"):
        return _UnixConnection(target)
    host, _, port = target.rpartition(":")
    if not tls:
        return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=2.0)
    # Not pinned: the word is no secret, and whoever else gets it can only say what is true.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=2.0, context=context)


def tell(word: dict[str, Any]) -> None:
    """Tell each coordinator in turn until one took the word. `word`: node, pid, boot_id, key (hex), targets, tls."""
    proof = prove_fence(bytes.fromhex(word["key"]), word["node"], word["pid"], word["boot_id"])
    body = json.dumps({"node": word["node"], "pid": word["pid"], "boot_id": word["boot_id"], "proof": proof})
    for _ in range(TELL_TRIES):
        for target in word["targets"]:
            try:
                with contextlib.closing(_connection(target, word["tls"])) as connection:
                    connection.request("POST", "/fenced", body, {"Content-Type": "application/json"})
                    if connection.getresponse().status == http.client.OK:
                        return
            except (OSError, http.client.HTTPException):
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    main()
