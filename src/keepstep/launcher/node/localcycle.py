"""One cycle on one node: start its ranks, watch them, take evidence, stop them, and tell how each ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keepstep.goodput.settings import hang_floor
from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.shape import advice_source
from keepstep.launcher.node.evidence import RankEvidence, capture, culprits
from keepstep.launcher.node.watch import LEARNED_MIN_S, HangLimits, PageLook
from keepstep.launcher.procs import descendants, kill_group, kill_quietly, reap, state_of
from keepstep.launcher.ranks.environment import stop_notice_s
from keepstep.records.exits import exit_status_name
from keepstep.records.inject import Injection

COLLECTIVE_GRACE_S = 0.5
"""How long a rank blocked in a collective gets between SIGTERM and SIGKILL: it cannot react anyway."""
HURRIED_GRACE_S = 1.0
"""Grace and time for evidence once the scheduler's notice is as good as over."""
SAMPLE_S = 1.0


class LocalRank(msgspec.Struct, kw_only=True):
    """One rank of this node in this cycle."""

    rank: int
    local_rank: int
    pages: Any
    failure_path: Path
    error_path: Path
    pid: int = 0
    pidfd: int = -1
    status: int | None = None
    """Exit code, minus the signal number, or None while it runs."""
    ended_ns: int = 0
    """CLOCK_MONOTONIC ns when its end was noticed."""
    signalled: bool = False


class CycleHost(Protocol):
    """What a cycle needs from the agent."""

    config: RunConfig

    @property
    def anchor(self) -> Anchor: ...

    def say(self, text: str) -> None: ...

    def infrastructure(self) -> set[int]:
        """pids of this launcher's own helpers."""
        ...

    def send(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]: ...

    def do_injection(self, injection: Injection, cycle: LocalCycle) -> None: ...

    async def hang_evidence(self, cycle: LocalCycle, pids: dict[int, int]) -> None:
        """Take what only ranks that still hang can give, beside their stacks."""
        ...

    def learn_modules(self, cycle: LocalCycle) -> None:
        """The script has shown which modules it imports."""
        ...


class LocalCycle:
    """State of the cycle on this node. `run` returns the message that ends it."""

    def __init__(
        self, host: CycleHost, command: m.StartCycle, ranks: list[LocalRank], expect_steps: bool, learned_hangs: int = 0
    ) -> None:
        """`learned_hangs`: how often a learned limit has ended a cycle already; each time it is given twice the room."""
        self.number = command.cycle
        self.ranks = {r.rank: r for r in ranks}
        self.expect_steps = expect_steps
        self._host = host
        self._config = host.config
        c = host.config
        advice = advice_source(c)
        self._limits = HangLimits(
            c.monitor_hang,
            c.start_hang_s,
            c.section_timeouts_s,
            start_given=c.start_hang_given,
            out_of_section_s=c.out_of_section_s,
            patience=2.0**learned_hangs,
            floor_s=LEARNED_MIN_S if advice is None else hang_floor(advice, command.history, command.nnodes).value,
        )
        self._over = asyncio.Event()
        self._changed = asyncio.Event()
        self.fault: m.Fault | None = None
        self.sample: tuple[int, int] | None = None
        """Steps completed by all local ranks and when (UTC ns), for the next renewal."""
        self._stop_reason: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._looks: dict[int, PageLook] = {}
        self._imported: set[str] | None = None
        self._asked_early: int | None = None
        self._stop_deadline: asyncio.TimerHandle | None = None
        self._grace_s = c.stop_grace_s
        self._capture_s = c.capture_s

    def imported_names(self) -> set[str]:
        """Modules that ranks imported themselves, not finding them in the zygote."""
        if self._imported is not None:
            return self._imported
        return {n for r in self.ranks.values() for n in r.pages.imported_names()}

    # ---- what happens to it

    def adopt(self, pids: dict[int, int]) -> None:
        """Take over the started processes: their exits are seen through pidfds."""
        loop = asyncio.get_running_loop()
        for number, pid in pids.items():
            rank = self.ranks[number]
            rank.pid = pid
            rank.pidfd = os.pidfd_open(pid)
            loop.add_reader(rank.pidfd, self._on_exit, rank)
        self._tasks = [asyncio.ensure_future(self._watch_hang()), asyncio.ensure_future(self._sample())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        for injection in self._config.inject:
            if injection.cycle == self.number and (after_s := injection.timed_s) is not None:
                loop.call_later(after_s, self._host.do_injection, injection, self)
        if self._limits.fixed_s is not None and not self.expect_steps:
            loop.call_later(self._limits.fixed_s, self._warn_blind)
        if self._asked_early is not None:
            self.ask_stop(self._asked_early)

    def attached(self) -> None:
        """A rank called ks.init(): from now on all ranks are expected to report steps."""
        self.expect_steps = True
        self._changed.set()

    def stop(self, reason: str) -> None:
        """Stop the ranks: a fault on another node, or the end of the job."""
        self._stop_reason = self._stop_reason or reason
        self._over.set()

    def kill(self, reason: str) -> None:
        """End the ranks at once, without evidence or grace: they have no right to run any more."""
        self._stop_reason = self._stop_reason or reason
        for rank in self._living():
            rank.signalled = True
            kill_group(rank.pid, signal.SIGKILL)
        self._over.set()

    def set_lease(self, expiry_ns: int) -> None:
        """Until when these ranks may run (CLOCK_MONOTONIC ns), for their own checks."""
        for rank in self._living():
            rank.pages.set_lease(expiry_ns)

    def ask_stop(self, signum: int) -> None:
        """Ask ranks to stop at their next shared decision; those that have none get SIGTERM. After the grace they are stopped."""
        if self._stop_deadline is not None:
            return
        if any(r.pid == 0 for r in self.ranks.values()):
            # Not started yet: they are asked as soon as they are.
            self._asked_early = signum
            return
        for rank in self.ranks.values():
            rank.pages.request_stop()
            if rank.status is None and not rank.pages.look().attached_ns:
                rank.signalled = True
                kill_group(rank.pid, signal.SIGTERM)
        name = signal.Signals(signum).name
        notice_s = stop_notice_s(self._config)
        self._stop_deadline = asyncio.get_running_loop().call_later(
            notice_s, self._notice_over, f"{name}: the grace of {notice_s:g} s ran out"
        )

    def _notice_over(self, reason: str) -> None:
        if self._config.preempt_notice_s is not None:
            # The scheduler kills everything soon: what is left of its notice is for the records.
            self._grace_s = min(self._grace_s, HURRIED_GRACE_S)
            self._capture_s = min(self._capture_s, HURRIED_GRACE_S)
        self.stop(reason)

    def _on_exit(self, rank: LocalRank) -> None:
        status = reap(rank.pid)
        if status is None:
            return
        now = time.monotonic_ns()
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        os.close(rank.pidfd)
        rank.pidfd, rank.status, rank.ended_ns = -1, status, now
        self._changed.set()
        if status != 0 and self.fault is None and self._stop_reason is None:
            self._raise_fault("exit", rank, now, now, f"rank {rank.rank}: {exit_status_name(status)}")
        if all(r.status is not None for r in self.ranks.values()):
            self._over.set()

    def _raise_fault(self, kind: str, rank: LocalRank, occurred_ns: int, detected_ns: int, detail: str) -> None:
        """Record and report the first fault. Times in CLOCK_MONOTONIC ns."""
        detected_utc_ns = self._host.anchor.from_monotonic(detected_ns)
        # Each mapping reads two clocks, some hundred nanoseconds apart: nothing is found before it happened.
        occurred_utc_ns = min(self._host.anchor.from_monotonic(occurred_ns), detected_utc_ns)

        def make(message_id: int) -> m.Fault:
            self.fault = m.Fault(
                id=message_id,
                cycle=self.number,
                kind=kind,
                rank=rank.rank,
                occurred_ns=occurred_utc_ns,
                detected_ns=detected_utc_ns,
                detail=detail,
            )
            return self.fault

        self._host.send(make)
        self._over.set()

    def _warn_blind(self) -> None:
        if not self.expect_steps and not self._over.is_set():
            self._host.say(
                "the script does not use keepstep.trainer, so --hang-timeout has nothing to watch; "
                "`import keepstep.trainer as ks` and `with ks.init().step(n):` give it steps"
            )

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A watcher that failed must not mean that nobody watches any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.say(f"cycle {self.number}: internal error, stopping it: {type(error).__name__}: {error}")
            self.stop("internal error")

    # ---- watching

    def _living(self) -> list[LocalRank]:
        return [r for r in self.ranks.values() if r.status is None]

    async def _watch_hang(self) -> None:
        """Sleep until the earliest deadline of any rank. Progress only moves deadlines back, so nothing is polled."""
        while not self._over.is_set():
            self._changed.clear()
            now = time.monotonic_ns()
            earliest = float("inf")
            for rank in self._living() if self.expect_steps else []:
                look = rank.pages.look()
                deadline, why = self._limits.deadline_ns(look)
                if deadline <= now:
                    self._raise_fault("hang", rank, look.progress_ns, now, f"rank {rank.rank}: {why}, {_where(look)}")
                    return
                earliest = min(earliest, deadline)
            # A section that opens (or is left) later cannot be overdue before its own limit has passed.
            given = [*self._config.section_timeouts_s.values(), self._config.out_of_section_s]
            earliest = min([earliest, *(now + s * 1e9 for s in given if s is not None)])
            timeout = None if earliest == float("inf") else max(0.0, (earliest - time.monotonic_ns()) / 1e9)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)

    async def _sample(self) -> None:
        """About once a second: learn how long progress takes, and note how far all local ranks are."""
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), SAMPLE_S)
            if self._over.is_set():
                return
            looks = [r.pages.look() for r in self.ranks.values()]
            for look in looks:
                if look.rank in self._looks:
                    self._limits.learn_from(self._looks[look.rank], look)
                self._looks[look.rank] = look
            self._changed.set()
            if looks and all(look.has_steps for look in looks):
                if self.sample is None:
                    self._host.learn_modules(self)
                completed, at_ns = _slowest(looks)
                self.sample = (completed, self._host.anchor.from_monotonic(at_ns))

    # ---- to its end

    async def over(self) -> None:
        """Wait until something ends the cycle here; its ranks may still run."""
        await self._over.wait()

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than by its ranks leaving on their own with status 0."""
        return self.fault is not None or self._stop_reason is not None

    async def run(self, evidence_dir: Path) -> Callable[[int], m.Stopped]:
        """Wait until the cycle is over on this node, stop what is left, and return the message that says how it ended."""
        await self._over.wait()
        for task in self._tasks:
            task.cancel()
        if self._stop_deadline is not None:
            self._stop_deadline.cancel()
        found: list[RankEvidence] = []
        if self._living() and (self.fault is not None or self._stop_reason is not None):
            living = {r.rank: (r.pid, r.pages) for r in self._living()}
            found = await capture(living, evidence_dir, self._capture_s)
        captured_ns = time.monotonic_ns()
        ended = {r.rank for r in self.ranks.values() if r.status not in (None, 0)}
        blamed = culprits(found, ended) if self.fault is not None and self.fault.kind == "hang" else []
        await self._teardown({e.rank for e in found if e.in_collective})
        leftovers = await self._kill_leftovers()
        stopped_ns = time.monotonic_ns()
        message = self._stopped_message(captured_ns, stopped_ns, blamed, leftovers)
        self._imported = self.imported_names()
        for rank in self.ranks.values():
            rank.pages.close()
        return message

    async def _teardown(self, in_collective: set[int]) -> None:
        """SIGTERM, a grace, SIGKILL, for whole process groups."""
        for rank in self._living():
            stuck = state_of(rank.pid) in ("T", "t")
            rank.signalled = True
            kill_group(rank.pid, signal.SIGKILL if stuck else signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        if in_collective:
            await self._wait_gone(min(time.monotonic() + COLLECTIVE_GRACE_S, deadline))
            for rank in self._living():
                if rank.rank in in_collective:
                    kill_group(rank.pid, signal.SIGKILL)
        await self._wait_gone(deadline)
        for rank in self.ranks.values():
            kill_group(rank.pid, signal.SIGKILL)
        await self._wait_gone(float("inf"))

    async def _wait_gone(self, until: float) -> None:
        """Until every rank is reaped, or the monotonic time `until`."""
        while self._living():
            self._changed.clear()
            left = until - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if left == float("inf") else left)

    async def _kill_leftovers(self) -> int:
        """End what the ranks left behind: workers in their groups and daemons that were re-parented to this agent."""
        count = 0
        for _ in range(20):
            left = descendants(os.getpid(), self._host.infrastructure())
            if not left:
                break
            count = max(count, len(left))
            for pid in left:
                kill_quietly(pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
        reap_orphans(self._host.infrastructure())
        return count

    def _stopped_message(
        self, captured_ns: int, stopped_ns: int, blamed: list[int], leftovers: int
    ) -> Callable[[int], m.Stopped]:
        anchor = self._host.anchor
        looks = {r.rank: r.pages.look() for r in self.ranks.values()}
        with_steps = [look for look in looks.values() if look.has_steps]
        failures = [f for f in (self._failure(r) for r in self.ranks.values()) if f is not None]
        completed_ns = _slowest(with_steps)[1] if with_steps else 0
        first_ns = [look.first_done_ns or look.completed_ns for look in with_steps]
        fields = {
            "cycle": self.number,
            "statuses": {str(r.rank): r.status or 0 for r in self.ranks.values()},
            "failures": failures,
            "completed": {str(look.rank): look.completed for look in with_steps},
            "completed_ns": anchor.from_monotonic(completed_ns) if completed_ns else 0,
            "first_step": min((look.first_step + 1 for look in with_steps), default=None),
            "first_step_ns": anchor.from_monotonic(max(first_ns)) if first_ns else 0,
            "captured_ns": anchor.from_monotonic(captured_ns),
            "stopped_ns": anchor.from_monotonic(stopped_ns),
            "culprits": blamed,
            "leftovers": leftovers,
        }
        if any(look.heartbeat_ns for look in looks.values()):
            fields["notes"] = {"heartbeats": True}
        return lambda i: m.Stopped(id=i, next_port=0, **fields)  # type: ignore[arg-type]

    def _failure(self, rank: LocalRank) -> m.Failure | None:
        """How a rank failed; None when it ended well."""
        if not rank.status:
            return None
        record: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(rank.failure_path.read_text())
        if not record:
            record = _elastic_error(rank.error_path)
        anchor = self._host.anchor
        injected = any(
            i.cycle == self.number
            and i.rank == rank.rank
            and (
                (i.kind == "exit" and i.code == rank.status)
                or (i.kind == "oom" and record.get("error_type") == "MemoryError")
            )
            for i in self._config.inject
        )
        status = rank.status
        if rank.signalled and status < 0 and record.get("error_type"):
            # It had already failed and was on its way out when the others were stopped.
            status = 1
        return m.Failure(
            rank=rank.rank,
            status=status,
            time_ns=anchor.from_monotonic(record.get("time_mono_ns") or rank.ended_ns),
            error_type=record.get("error_type"),
            message=record.get("message"),
            frame=record.get("frame"),
            traceback=record.get("traceback"),
            cascade=bool(record.get("cascade")),
            injected=injected or bool(record.get("injected")),
            stopped_by_us=rank.signalled and not record and rank.status in (-signal.SIGTERM, -signal.SIGKILL),
        )


def _elastic_error(path: Path) -> dict[str, Any]:
    """What `@record` wrote for a program that is not run by our own main (--no-python)."""
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            return {"message": message}
        stack = message["extraInfo"]["py_callstack"]
        return {"message": message["message"], "traceback": stack, "error_type": message["message"].split(":")[0]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def reap_orphans(known: set[int]) -> None:
    """Collect zombies that were re-parented to this process, except those whose pidfd is watched."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        pids = [int(p) for p in children.read_text().split()]
    except OSError:
        return
    for pid in pids:
        if pid not in known and state_of(pid) == "Z":
            reap(pid)


def _slowest(looks: list[PageLook]) -> tuple[int, int]:
    completed = min(look.completed for look in looks)
    return completed, max(look.completed_ns for look in looks if look.completed == completed)


def _where(look: PageLook) -> str:
    if not look.attached_ns:
        return "before ks.init()"
    if look.has_steps:
        inside = f"in step {look.step}" if look.in_step else f"after step {look.step}"
    elif look.trains:
        inside = "after its last heartbeat"
    else:
        inside = f"in phase {look.phase!r} before its first step was complete"
    return inside + (f", section {look.sections[-1][0]!r}" if look.sections else "")
