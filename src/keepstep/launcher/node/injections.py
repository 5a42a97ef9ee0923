"""Faults that only a launcher can cause, each by doing the real thing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection

from keepstep.launcher.health.kernellog import kmsg_path
from keepstep.launcher.node.localcycle import LocalCycle
from keepstep.launcher.procs import kill_group, kill_quietly
from keepstep.records.inject import Injection


def cause(injection: Injection, cycle: LocalCycle, coordinator: int | None, say: Callable[[str], None]) -> None:
    """Send the signal that an injection stands for. `coordinator`: its pid, where it runs below this launcher."""
    if injection.kind == "coordinator-kill":
        if coordinator is not None:
            say("injecting coordinator-kill")
            kill_quietly(coordinator, signal.SIGKILL)
    elif injection.kind == "preempt":
        say("injecting preempt: SIGTERM to this launcher")
        os.kill(os.getpid(), signal.SIGTERM)
    elif injection.kind in ("kill", "stop") and injection.rank in cycle.ranks:
        rank = cycle.ranks[injection.rank]
        if rank.status is None:
            say(f"injecting {injection.kind} on rank {injection.rank}")
            kill_quietly(rank.pid, signal.SIGKILL if injection.kind == "kill" else signal.SIGSTOP)


def lose_node(cycle: LocalCycle, helpers: Collection[int | None]) -> None:
    """What the loss of a host looks like to everybody else: all that runs here is gone at once, and nobody says so."""
    for pid in helpers:
        if pid is not None:
            kill_quietly(pid, signal.SIGKILL)
    for rank in cycle.ranks.values():
        kill_group(rank.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


NO_GPU_PCI = "0000:00:00"
"""Stands in the line where the injection names no GPU."""


def report_xid(injection: Injection, say: Callable[[str], None]) -> None:
    """Write what NVIDIA's driver prints for an Xid into the kernel's log, or into what stands for it (see kmsg_path).

    The form is that of the open kernel modules (kernel_rc.c) for a process that the driver does not know.
    """
    code, pci = injection.code, injection.pci or NO_GPU_PCI
    line = f"NVRM: Xid (PCI:{pci}): {code}, pid='<unknown>', name=<unknown>, injected by keepstep"
    path = kmsg_path()
    # Not the line itself: this text is in a log that may be read for what it says.
    say(f"injecting xid {code} of {pci} into {path}")
    try:
        # A fifo that nobody reads must not stop the launcher. O_APPEND: a file that stands for the log keeps what it has.
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)
        try:
            os.write(fd, f"<3>{line}\n".encode())
        finally:
            os.close(fd)
    except OSError as error:
        say(f"xid could not be injected: {path}: {error.strerror}; only root may write there, or set KEEPSTEP_KMSG")
