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
from keepstep.records.errors import ChannelError, NumericalError, StorageError
from keepstep.records.inject import Injection
from keepstep.trainer.channel import ABSENT, Channel, open_channel, open_decisions
from keepstep.trainer.inject import carry_out
from keepstep.trainer.page import StepContext, Words, lease_overdue_s, make_steps, open_page
from keepstep.trainer.ramp import Ramp, ramp_from, say_ramp_cost

if TYPE_CHECKING:
    from keepstep.trainer.checkpointer import Checkpointer

DECISION_PERIOD_S = 1.0
"""About how often ranks look at a shared decision. Each look costs one round trip over the side channel."""

_PHASES = {"init": layout.PHASE_INIT, "restore": layout.PHASE_RESTORE, "close": layout.PHASE_CLOSE}


UNMEASURED_NOTICE_S = 10.0
"""What must be left of the notice for a last save when none was measured yet. One that is cut off costs nothing but this time: an
uncommitted checkpoint is never restored."""
NOTICE_MARGIN_S = 2.0
"""What must be left of the notice after a last save of measured length, for leaving the processes."""
STOP_KEY = "stop"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do at exactly this step. `every`: the next decision is at step + every.

    `keep`: keep an image in memory, between saves.

    With `stop`, `save` says whether the last save fits into what is left of the notice; `why` says why not.
    """

    step: int
    save: bool = False
    stop: bool = False
    every: int = 1
    why: str = ""
    keep: bool = False


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
        self.propose_keep: Callable[[int], bool] | None = None
        self.checkpointers: list[Checkpointer] = []
        self._words = words
        self._guard = guard
        self._injections = _injections()
        self._stop_asked_ns = 0
        self._notice_s = _notice_s() if supervised else None
        self._ramp: Ramp | None = ramp_from(env)
        self._replays = 0
        self._decisions: Channel | None = None
        """Where shared decisions are kept; opened at the first one."""
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
            if self._ramp is not None and self.rank == 0:
                say_ramp_cost(self._ramp.ramp_s)
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
        if not words[layout.W_FIRST_DONE_NS] or self._ramps(step):
            upcoming.append(step + 1)
        return min(upcoming, default=sys.maxsize)

    def _ramps(self, step: int) -> bool:
        """Pause before `step` where power is to rise slowly; whether the next step is to be asked about too."""
        if self._ramp is None:
            return False
        key = f"ramp/{self._replays}/{step}"
        if not self._ramp.pause(self._words, lambda wanted_s: float(self.agree(key, wanted_s))):
            self._ramp = None
        return self._ramp is not None

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

    def heartbeat(self) -> None:
        """Say that this rank moves on, for scripts with a loop of their own and no `step`.

        From the first heartbeat on the rank is watched as one with steps is, with limits learned from the time between heartbeats;
        the launcher knows of no steps, so it counts no productive time. One store into shared memory: call it as often as you like.
        """
        self._words[layout.W_HEARTBEAT_NS] = monotonic_ns()

    # ---- requests to the launcher

    def request_stop(self, reason: str) -> None:
        """Ask for the end of the whole job, without a restart. Any rank may ask; one is enough.

        Under keepstep it takes effect at once: when this returns the request is durable, no later step or save of this cycle is
        committed, and the launcher is about to stop all ranks. The allocation stays: it is the launchers that end, not the
        scheduler's job, which ends when its script does. Without a launcher (torchrun, plain python) `stop_requested` becomes
        true on every rank at the next shared decision. Raises ChannelError when the launcher cannot be reached.
        """
        if self.channel.request("stop", reason):
            return
        print(f"keepstep: rank {self.rank} asks the job to stop: {reason}", file=sys.stderr, flush=True)
        self.channel.set(STOP_KEY, reason)

    def request_exclude_node(self, reason: str) -> None:
        """Ask for a restart in which this rank's node takes no part, now or later in this job.

        It takes effect as `request_stop` does: no later step or save of this cycle is committed. The allocation stays: the node
        still belongs to the scheduler's job. Raises ChannelError without a launcher (torchrun, plain python): nobody there could
        leave the node out, and going on as if somebody had would hide it.
        """
        if not self.channel.request("exclude", reason):
            raise ChannelError(
                f"request_exclude_node({reason!r}): no keepstep launcher started this rank, so nobody can leave the node out; "
                "use keepstep run, or request_stop"
            )

    def announce_rollback(self, to_step: int, reason: str) -> None:
        """Say that training goes back to `to_step` completed steps on purpose (a replayed step, a skipped stretch of data).

        The launcher then does not take the lower step for a lack of progress. Every rank calls it, after the same step: shared
        decisions begin anew at `to_step` + 1. Raises ChannelError.
        """
        self._replays += 1
        self._decision, self._next_decision = None, to_step + 1
        self._tell("rollback_announced", to_step=to_step, reason=reason, at_ns=monotonic_ns())

    def check_lease(self) -> None:
        """Raise StorageError when this node's lease has run out: then nothing may be committed from here."""
        overdue_s = lease_overdue_s(self._words)
        if overdue_s > 0:
            raise StorageError(
                f"rank {self.rank} ({socket.gethostname()}): this node's lease ran out {overdue_s:.1f} s ago; "
                "another node may go on in its place, so nothing is committed from here until the launcher renews it"
            )

    # ---- shared decisions

    def decision_at(self, step: int) -> Decision | None:
        """The decision all ranks share for exactly `step`, or None when `step` is not a decision step.

        The first rank that asks fixes it (PROTOCOLS section 4): it proposes, the others read. Raises ChannelError.
        """
        if self._decision is not None and self._decision.step == step:
            return self._decision
        if step != self._next_decision:
            return None
        key = f"decision/{step}" if not self._replays else f"decision/replay-{self._replays}/{step}"
        held = self.agree(key, msgspec.to_builtins(self._proposal(step)))
        self._decision = msgspec.convert(held, Decision)
        self._next_decision = step + self._decision.every
        self._words[layout.W_DECISIONS] += 1
        return self._decision

    def agree(self, key: str, value: Any) -> Any:
        """What the first rank that asked said under `key`: the same on every rank, and a round trip. Raises ChannelError."""
        if self._decisions is None:
            self._decisions = open_decisions(self.channel) if self.supervised else self.channel
        return self._decisions.cas(key, value)

    @property
    def stop_requested(self) -> bool:
        """True on every rank after the same step, once the job is asked to stop (preemption, drain, SIGTERM)."""
        decision = self.decision_at(self.completed_steps) if self._first_step is not None else None
        return decision is not None and decision.stop

    def _proposal(self, step: int) -> Decision:
        every = self._decision_every()
        if not self._stop_wanted():
            save = self.propose_save is not None and self.propose_save(step)
            keep = not save and self.propose_keep is not None and self.propose_keep(step)
            return Decision(step=step, save=bool(save), every=every, keep=bool(keep))
        why = self._why_no_last_save()
        return Decision(step=step, save=not why, stop=True, every=every, why=why)

    def _stop_wanted(self) -> bool:
        if self._words[layout.W_STOP_REQUEST] or self._stop_asked_ns:
            return True
        # Without a launcher a rank that asks for a stop can reach the others only here.
        return not self.supervised and self.channel.get(STOP_KEY) is not ABSENT

    def _why_no_last_save(self) -> str:
        """Why a save begun now would not be committed before the notice is over; "" when it would, or there is no notice."""
        left_s = self.notice_left_s()
        if left_s is None:
            return ""
        needs = [c.save_needs_s() for c in self.checkpointers]
        known_s = sum(n for n in needs if n is not None)
        if None in needs and left_s < UNMEASURED_NOTICE_S:
            return f"{left_s:.1f} s of the notice are left, and how long a save takes is not known yet"
        if known_s and known_s + NOTICE_MARGIN_S > left_s:
            return f"a save may take {known_s:.1f} s and {left_s:.1f} s of the notice are left"
        return ""

    def notice_left_s(self) -> float | None:
        """Seconds that are left of the notice once this rank was asked to stop; None before, and where no notice is known."""
        asked_ns = self._words[layout.W_STOP_REQUEST] or self._stop_asked_ns
        if self._notice_s is None or not asked_ns:
            return None
        return self._notice_s - (monotonic_ns() - asked_ns) / 1e9

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
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: Any) -> None:
        self._stop_asked_ns = self._stop_asked_ns or monotonic_ns()


def _notice_s() -> float | None:
    try:
        return float(os.environ[frames.ENV_PREEMPT_NOTICE_S])
    except (KeyError, ValueError):
        return None


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
