"""Carrying out injections inside a rank: each causes the real thing (a signal, an exception, a changed file, a NaN gradient)."""

from __future__ import annotations

import math
import os
import signal
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
        case "coordinator-kill" | "preempt":
            if not isinstance(run.channel, AgentChannel):
                raise ChannelError(f"--inject {injection.kind}: this rank has no keepstep launcher")
            run.channel.inject(to_json(injection).decode())


def hang_forever() -> NoReturn:
    """A rank that does nothing any more, in Python code, as a stuck data source would."""
    while True:
        time.sleep(3600)


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


def corrupt_newest(run: Run) -> None:
    """Flip one bit in the middle of this rank's file of the newest committed checkpoint, on disk.

    Waits for the save in flight first, so that "newest" is not overtaken by a save that was already staged.
    """
    for checkpointer in run.checkpointers:
        checkpointer.wait()
        folder = checkpointer.newest_committed_path()
        if folder is None:
            print("keepstep: inject corrupt-checkpoint: no committed checkpoint yet, nothing changed", file=sys.stderr)
            continue
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
