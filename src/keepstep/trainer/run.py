"""The process-wide run object: where this rank is, its steps, and the decisions it shares with all other ranks."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.records import frames
from keepstep.records import page as layout
from keepstep.records.errors import NumericalError
from keepstep.records.inject import Injection
from keepstep.trainer.channel import Channel, open_channel
from keepstep.trainer.inject import carry_out
from keepstep.trainer.page import StepContext, Words, make_steps, open_page

if TYPE_CHECKING:
    from keepstep.trainer.checkpointer import Checkpointer

DECISION_PERIOD_S = 1.0
"""About how often ranks look at a shared decision. Each look costs one round trip over the side channel."""

_PHASES = {"init": layout.PHASE_INIT, "restore": layout.PHASE_RESTORE, "close": layout.PHASE_CLOSE}


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do at exactly this step. `every`: the next decision is at step + every."""

    step: int
    save: bool = False
    stop: bool = False
    every: int = 1


class Run:
    """This rank's part in the run. Made by `init()`; one a process."""

    def __init__(self, channel: Channel, words: Words, supervised: bool, guard: tuple[str, ...]) -> None:
        env = os.environ
        self.run_id = env.get(frames.ENV_RUN_ID) or env.get("TORCHELASTIC_RUN_ID") or "local"
        self.attempt = int(env.get(frames.ENV_ATTEMPT, "0"))
        self.cycle = int(env.get(frames.ENV_CYCLE) or env.get("TORCHELASTIC_RESTART_COUNT") or "0")
        self.rank = int(env.get("RANK", "0"))
        self.local_rank = int(env.get("LOCAL_RANK", "0"))
        self.world_size = int(env.get("WORLD_SIZE", "1"))
        self.channel = channel
        self.supervised = supervised
        self.propose_save: Callable[[int], bool] | None = None
        self.checkpointers: list[Checkpointer] = []
        self._words = words
        self._guard = guard
        self._injections = _injections()
        self._stop_signal = threading.Event()
        self._decision: Decision | None = None
        self._next_decision: int | None = None
        self._first_step: int | None = None
        self._drained = False
        self._lock = threading.Lock()
        self.step, self.section = make_steps(words, self._attend, self._observe)

    # ---- steps

    def _attend(self, step: int) -> int:
        """Rare work at the entry of `step`; returns the next step number that needs any."""
        words = self._words
        if self._first_step is None:
            self._first_step = step
            words[layout.W_FIRST_STEP] = step
            words[layout.W_PHASE_NS] = monotonic_ns()
            words[layout.W_PHASE] = layout.PHASE_TRAIN
            if self._next_decision is None:
                self._next_decision = step + 1
        elif not words[layout.W_FIRST_DONE_NS] and (words[layout.W_STEP] >> 8) > self._first_step:
            words[layout.W_FIRST_DONE_NS] = words[layout.W_COMPLETED_NS]
            self._tell("first_step", step=words[layout.W_STEP] >> 8, at_ns=words[layout.W_COMPLETED_NS])
        due = [i for i in self._injections if _is_due(i, step)]
        self._injections = [i for i in self._injections if i not in due or (i.kind == "slow" and step + 1 < _end(i))]
        for injection in due:
            carry_out(injection, self)
        upcoming = [max(step + 1, i.step or 0) for i in self._injections]
        if not words[layout.W_FIRST_DONE_NS]:
            upcoming.append(step + 1)
        return min(upcoming, default=sys.maxsize)

    def _observe(self, **scalars: Any) -> None:
        """Report scalars of this step (numbers or one-element tensors).

        Raises NumericalError (exit 43) when a guarded one (by default `loss` and `grad_norm`) is not finite.
        """
        for name in self._guard:
            value = scalars.get(name)
            if value is None:
                continue
            if hasattr(value, "detach"):
                value = value.detach()
            if not math.isfinite(value):
                step = self._words[layout.W_STEP] >> 8
                raise NumericalError(
                    f"rank {self.rank} ({socket.gethostname()}): {name} is {float(value)} at step {step}; "
                    "the newest checkpoint is from before this step; look at the data and learning rate before going on"
                )

    @property
    def completed_steps(self) -> int:
        """Steps completed so far as the script counts them (number of the last completed step + 1)."""
        return int(self._words[layout.W_STEP] >> 8)

    # ---- shared decisions

    def decision_at(self, step: int) -> Decision | None:
        """The decision all ranks share for exactly `step`, or None when `step` is not a decision step.

        The first rank that asks fixes it (PROTOCOLS section 4): it proposes, the others read. Raises ChannelError.
        """
        if self._decision is not None and self._decision.step == step:
            return self._decision
        if step != self._next_decision:
            return None
        proposal = {
            "save": bool(self.propose_save is not None and self.propose_save(step)),
            "stop": self._stop_wanted(),
            "every": self._decision_every(),
        }
        held = self.channel.cas(f"decision/{step}", proposal)
        self._decision = Decision(step=step, save=held["save"], stop=held["stop"], every=held["every"])
        self._next_decision = step + self._decision.every
        self._words[layout.W_DECISIONS] += 1
        return self._decision

    @property
    def stop_requested(self) -> bool:
        """True on every rank after the same step, once the job is asked to stop (preemption, drain, SIGTERM)."""
        decision = self.decision_at(self.completed_steps) if self._first_step is not None else None
        return decision is not None and decision.stop

    def _stop_wanted(self) -> bool:
        return bool(self._words[layout.W_STOP_REQUEST]) or self._stop_signal.is_set()

    def _decision_every(self) -> int:
        """Steps until the next decision: about DECISION_PERIOD_S, growing slowly so that a slow first step misleads nobody."""
        last = self._decision.every if self._decision is not None else 1
        words = self._words
        steps = (words[layout.W_STEP] >> 8) - words[layout.W_FIRST_STEP] - 1
        if not words[layout.W_FIRST_DONE_NS] or steps < 1:
            return 1
        mean_ns = (words[layout.W_COMPLETED_NS] - words[layout.W_FIRST_DONE_NS]) / steps
        wanted = round(DECISION_PERIOD_S * 1e9 / max(mean_ns, 1.0))
        return int(max(1, min(wanted, 2 * last, 1000)))

    # ---- phases

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the progress page while the rank is in `name` ("init", "restore", "close"), outside its steps."""
        before = self._words[layout.W_PHASE]
        if name == "close":
            self._drain()
        self._set_phase(_PHASES[name])
        try:
            yield
        finally:
            self._set_phase(before)

    def _set_phase(self, phase: int) -> None:
        self._words[layout.W_PHASE_NS] = monotonic_ns()
        self._words[layout.W_PHASE] = phase

    def note_restored(self, step: int) -> None:
        """Called by the Checkpointer: training goes on from `step`; the first shared decision is after one step."""
        self._next_decision = step + 1

    def finish(self) -> None:
        """Say that training ended on purpose. Call it last; a rank that exits 0 without it is fine too."""
        self._drain()
        self._words[layout.W_FLAGS] |= layout.FLAG_FINISHED

    def _drain(self) -> None:
        with self._lock:
            if self._drained:
                return
            self._drained = True
        self._tell("drain", completed_step=self.completed_steps, at_ns=monotonic_ns())

    def _tell(self, kind: str, **fields: Any) -> None:
        """A mark of the timeline that one rank reports for all."""
        if self.rank == 0:
            self.channel.report(kind, fields)

    def attach(self) -> None:
        """Tell the agent that this rank runs the trainer library, and take SIGTERM as a request where nobody else does."""
        self._words[layout.W_ATTACHED_NS] = monotonic_ns()
        self._set_phase(layout.PHASE_INIT)
        self.channel.report("attached", {"at_ns": monotonic_ns()})
        main = threading.current_thread() is threading.main_thread()
        if not self.supervised and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: self._stop_signal.set())


def _injections() -> list[Injection]:
    text = os.environ.get(frames.ENV_INJECT)
    return msgspec.json.decode(text, type=list[Injection]) if text else []


def _end(injection: Injection) -> int:
    return (injection.step or 0) + injection.steps


def _is_due(injection: Injection, step: int) -> bool:
    if injection.step is None:
        return False
    return injection.step <= step < _end(injection) if injection.kind == "slow" else injection.step == step


_current: Run | None = None


def init(*, guard: tuple[str, ...] = ("loss", "grad_norm")) -> Run:
    """Attach to the launcher and return the run; the same object every time in one process.

    Works the same, without supervision, under torchrun or plain python.
    `guard`: names given to `observe` that must stay finite (with a GradScaler leave out "grad_norm": it is infinite at times).
    Raises ChannelError when the launcher refuses this process (an old cycle).
    """
    global _current
    if _current is None:
        words, supervised = open_page()
        _current = Run(open_channel(), words, supervised, guard)
        _current.attach()
    return _current


def current() -> Run:
    """The run made by `init()`; makes it when there is none yet."""
    return init()


__all__ = ["Decision", "Run", "StepContext", "current", "init"]
