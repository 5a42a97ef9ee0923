"""Carrying out injections inside a rank: each causes the real thing (a signal, an exception, a changed file, a NaN gradient)."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from keepstep.records import page as layout
from keepstep.records.codec import to_json
from keepstep.records.errors import ChannelError
from keepstep.records.inject import Injection
from keepstep.trainer.channel import AgentChannel

if TYPE_CHECKING:
    from keepstep.trainer.run import Run


OOM_ROOM_BYTES = 64 << 20
STALL_S = 10.0
"""How long a `storage-stall` lasts that does not say."""


class InjectedError(Exception):
    """Raised in a rank by `--inject raise@...`."""


def carry_out(injection: Injection, run: Run) -> None:
    """Cause the fault now, in this rank, at the entry of its step. The launcher is told first, so that its records say so."""
    print(
        f"keepstep: injecting {injection.kind} on rank {run.rank} at step {injection.step}", file=sys.stderr, flush=True
    )
    match injection.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            hang_forever()
        case "raise":
            raise InjectedError(f"injected by --inject raise at step {injection.step}")
        case "exit":
            sys.exit(injection.code)
        case "slow":
            time.sleep(injection.seconds if injection.seconds is not None else slow_by(injection.factor, run))
        case "nan":
            poison_next_gradient()
        case "corrupt-checkpoint":
            corrupt_newest(run)
        case "oom":
            exhaust_memory()
        case "storage-error" | "storage-stall":
            break_storage(injection, run)
        case "coordinator-kill" | "preempt" | "node-loss" | "partition" | "xid":
            if not isinstance(run.channel, AgentChannel):
                raise ChannelError(f"--inject {injection.kind}: this rank has no keepstep launcher")
            run.channel.inject(to_json(injection).decode())


def hang_forever() -> NoReturn:
    """A rank that does nothing any more, in Python code, as a stuck data source would."""
    while True:
        time.sleep(3600)


def exhaust_memory() -> NoReturn:
    """Use memory until there is none: the kernel kills this process, or an allocation fails.

    With the right to do so (root, writable cgroups v1 or v2) this process first moves itself into a memory cgroup of its own with
    OOM_ROOM_BYTES for what it allocates from now on, and the kernel's OOM killer ends it with SIGKILL, as for a real leak; nothing
    else on the host is in danger. Otherwise its address space is limited (RLIMIT_AS) and the allocation raises MemoryError.
    """
    folder = make_memory_cgroup()
    if folder is not None:
        remove_cgroup_at_exit(folder)
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        print(f"keepstep: inject oom: allocating in memory cgroup {folder}", file=sys.stderr, flush=True)
    else:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = in_use + OOM_ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        print(
            "keepstep: inject oom: no memory cgroup can be made, allocating under RLIMIT_AS",
            file=sys.stderr,
            flush=True,
        )
    held = []
    while True:
        held.append(b"\1" * (4 << 20))  # written, so that the pages are really there


def make_memory_cgroup() -> Path | None:
    """A new memory cgroup below this process's own, limited to OOM_ROOM_BYTES without swap; None where that is not possible."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            files, root = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), Path("/sys/fs/cgroup/memory")
        elif not controllers:
            files, root = ("memory.max", "memory.swap.max"), Path("/sys/fs/cgroup")
        else:
            continue
        # A v2 group that holds processes may have no limited children: then the one above it is the place.
        for parent in (root / own.lstrip("/"), (root / own.lstrip("/")).parent):
            folder = parent / f"keepstep-oom-{os.getpid()}"
            with contextlib.suppress(OSError):
                folder.mkdir()
                try:
                    (folder / files[0]).write_text(str(OOM_ROOM_BYTES))
                    with contextlib.suppress(OSError):  # no swap accounting: then there is rarely swap
                        (folder / files[1]).write_text(str(OOM_ROOM_BYTES if "memsw" in files[1] else 0))
                    return folder
                except OSError:
                    folder.rmdir()
    return None


def remove_cgroup_at_exit(folder: Path) -> None:
    """Start a small process that removes `folder` when this one has ended: an empty cgroup stays until somebody does."""
    code = (
        "import os, select, sys\n"
        "fd = os.pidfd_open(int(sys.argv[1]))\n"
        "print(flush=True)\n"
        "select.select([fd], [], [])\n"
        "os.rmdir(sys.argv[2])\n"
    )
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, str(os.getpid()), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert helper.stdout is not None
    helper.stdout.readline()


def slow_by(factor: float, run: Run) -> float:
    """Seconds to add so that a step takes `factor` times its mean so far."""
    words = run._words
    steps = (words[layout.W_STEP] >> 8) - words[layout.W_FIRST_STEP] - 1
    if steps < 1:
        return 0.0
    return float(
        max(0.0, (factor - 1.0) * (words[layout.W_COMPLETED_NS] - words[layout.W_FIRST_DONE_NS]) / steps / 1e9)
    )


def poison_next_gradient() -> None:
    """Make one gradient of the next backward pass NaN, through a hook on a real parameter."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def at_forward(module: Any, _args: Any) -> None:
        parameter = next((p for p in module.parameters() if p.requires_grad), None)
        if parameter is None or not torch.is_grad_enabled():
            return
        handle.remove()
        hooks.append(parameter.register_hook(at_gradient))

    def at_gradient(gradient: Any) -> Any:
        hooks.pop().remove()
        return torch.full_like(gradient, math.nan)

    hooks: list[Any] = []
    handle = register_module_forward_pre_hook(at_forward)


def break_storage(injection: Injection, run: Run) -> None:
    """The next save of each Checkpointer of this rank meets the fault. A save that has begun already does not."""
    from keepstep.checkpoint.storage.targets import Fault

    if injection.kind == "storage-error":
        fault = Fault(kind="storage-error", at_byte=injection.at_byte)
    else:
        seconds = STALL_S if injection.seconds is None else injection.seconds
        fault = Fault(kind="storage-stall", seconds=seconds)
    for checkpointer in run.checkpointers:
        checkpointer.inject_fault(fault)


def corrupt_newest(run: Run) -> None:
    """Flip one bit in the middle of this rank's file of the newest committed checkpoint, on disk, and of its images in memory.

    Waits for the save in flight first, so that "newest" is not overtaken by a save that was already staged.
    """
    for checkpointer in run.checkpointers:
        checkpointer.wait()
        folder = checkpointer.newest_committed_path()
        if folder is None:
            print("keepstep: inject corrupt-checkpoint: no committed checkpoint yet, nothing changed", file=sys.stderr)
            continue
        checkpointer.damage_images()
        files = sorted(Path(folder).glob("rank-*.safetensors"))
        target = files[min(run.rank, len(files) - 1)]
        with target.open("r+b", buffering=0) as file:
            offset = target.stat().st_size * 3 // 4
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
            os.fsync(file.fileno())
        print(f"keepstep: injected one flipped bit at byte {offset} of {target}", file=sys.stderr, flush=True)
