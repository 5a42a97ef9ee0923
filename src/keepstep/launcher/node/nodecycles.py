"""The cycles of a job on one node, one after the other: start as told, watch, stop, report, and what lies between two of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor
from keepstep.launcher.config import RunConfig
from keepstep.launcher.node.guard import Guard
from keepstep.launcher.node.localcycle import LocalCycle
from keepstep.launcher.node.nodecare import NodeCare
from keepstep.launcher.ranks.environment import uses_trainer
from keepstep.launcher.ranks.spawn import SpawnError
from keepstep.launcher.ranks.starter import PortTakenError, RankStarter
from keepstep.records.errors import KeepstepError
from keepstep.records.inject import Injection

LEARN_AFTER_S = 5.0
GANG_LIMIT_S = 300.0
Send = Callable[[Callable[[int], m.AgentMessage]], asyncio.Future[Any]]


class CycleOwner(Protocol):
    """What this needs from the launcher."""

    config: RunConfig
    anchor: Anchor

    def say(self, text: str) -> None: ...

    def send(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]: ...

    def refresh_anchor(self) -> None:
        """Take over the coordinator's clock as far as it is known by now."""
        ...

    def infrastructure(self) -> set[int]: ...

    def do_injection(self, injection: Injection, cycle: LocalCycle) -> None: ...

    def evidence_folder(self, cycle: int) -> Path: ...

    def send_up(self, cycle: int, folder: Path) -> None:
        """The evidence in `folder` is complete."""
        ...

    def log_notes(self) -> dict[str, Any]: ...

    def failed(self, error: KeepstepError) -> None:
        """The launcher cannot go on."""
        ...


class NodeCycles:
    """At most one cycle at a time. Commands may come in any order, twice, or too late; each is obeyed once or ignored."""

    def __init__(self, owner: CycleOwner, starter: RankStarter, care: NodeCare, guard: Guard | None) -> None:
        self.config = owner.config
        self.current: LocalCycle | None = None
        self.number = -1
        """Of the newest cycle this node was told of."""
        self.expect_steps = uses_trainer(owner.config)
        self._owner = owner
        self._starter = starter
        self._care = care
        self._guard = guard
        self._task: asyncio.Task[None] | None = None
        self._early: list[Callable[[], None]] = []
        """What to do about a cycle that is being started, once there is something to do it to."""
        self._learned_hangs = 0
        self._ran_before = False

    # ---- commands

    def start(self, command: m.StartCycle) -> bool:
        """Begin a cycle; False when it is not newer than what is known."""
        if command.cycle <= self.number:
            return False
        self.number = command.cycle
        self._early = []
        self._task = asyncio.ensure_future(self._run(command, self._task))
        return True

    def stop(self, number: int, reason: str) -> None:
        """Stop a cycle, also one that was not begun here yet."""
        if self._starting(number):
            self._early.append(lambda: self.stop(number, reason))
        elif self.current is not None and self.current.number == number:
            self.current.stop(reason)
        elif number > self.number:
            # Told to stop before it was told to start: nothing of it exists here.
            self.number = number
            self._report_nothing(number)

    def ask_stop(self, number: int, signum: int) -> None:
        """Ask the ranks of a cycle to stop at their next shared decision."""
        if self._starting(number):
            self._early.append(lambda: self.ask_stop(number, signum))
        elif self.current is not None and self.current.number == number:
            self.current.ask_stop(signum)
        elif number > self.number:
            self.stop(number, "stop requested before it began")

    def _starting(self, number: int) -> bool:
        """Whether this cycle was begun here but has nothing yet that could be stopped."""
        begun = number == self.number and self._task is not None and not self._task.done()
        return begun and (self.current is None or self.current.number != number)

    async def finish(self, limit_s: float) -> None:
        """The launcher ends: stop what runs and wait for it."""
        if self.current is not None and self._task is not None:
            self.current.stop("the launcher ends")
            await asyncio.wait({self._task}, timeout=limit_s)
        await self._care.finish()

    # ---- one cycle

    async def _run(self, command: m.StartCycle, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None and not before.done() and self.current is not None:
                # This node was given up and comes back: its old ranks end before new ones start beside them.
                self.current.stop(f"cycle {command.cycle} begins")
            if before is not None:
                await before
            self._owner.refresh_anchor()
            assigned_ns = self._owner.anchor.now()
            started = await self._start(command)
            if started is not None:
                await self._to_end(command, *started, assigned_ns)
        except Exception as error:
            # Nobody awaits this task: without this an error here would leave a launcher that does nothing.
            self._owner.failed(KeepstepError(f"cycle {command.cycle}: {type(error).__name__}: {error}"))

    async def _start(self, command: m.StartCycle) -> tuple[LocalCycle, str, dict[str, Any]] | None:
        """Start the ranks; None when that failed and was reported. Returns the cycle, "fork" or "exec", and notes."""
        notes = await self._care.reclaim() if self._ran_before else {}
        await self._care.begin()
        self._ran_before = True
        try:
            if command.agent_store and command.node_index == 0:
                await self._starter.have_store(command.master_port)
            if command.cycle != self.number:
                # Told of a newer one meanwhile: the job has gone on without this one, and nobody would stop its ranks.
                return None
            local, specs, files = self._starter.prepare(command)
            expect_steps = self.expect_steps and not command.probe
            cycle = self.current = LocalCycle(self, command, local, expect_steps, self._learned_hangs)
            if self._guard is not None:
                cycle.set_lease(self._guard.expiry_ns)
            early, self._early = self._early, []
            for act in early:
                act()
            pids, path = await self._starter.spawn(specs, files)
        except PortTakenError as error:
            self._starter.new_port()
            self.say(f"cycle {command.cycle}: port {command.master_port} is in use; another one is taken")
            self._report_nothing(command.cycle, str(error))
            return None
        except (SpawnError, OSError) as error:
            self.current = None
            if command.nnodes + self.config.spares == 1:
                self._owner.failed(KeepstepError(f"cycle {command.cycle}: cannot start ranks: {error}"))
            else:
                # Another node may be able to.
                self.say(f"cycle {command.cycle}: cannot start ranks: {error}")
                self._report_nothing(command.cycle, str(error), [f"cannot start ranks: {error}"])
            return None
        if self._guard is not None:
            self._guard.ranks_started(pids.values())
        cycle.adopt(pids)
        return cycle, path, notes

    async def _to_end(
        self, command: m.StartCycle, cycle: LocalCycle, path: str, notes: dict[str, Any], assigned_ns: int
    ) -> None:
        started = m.Started(
            id=0,
            cycle=command.cycle,
            ranks=[{"rank": r.rank, "local_rank": r.local_rank, "pid": r.pid} for r in cycle.ranks.values()],
            assigned_ns=assigned_ns,
            started_ns=self._owner.anchor.now(),
            path=path,
            expect_steps=cycle.expect_steps,
            notes=notes,
        )
        self.send(lambda i: msgspec.structs.replace(started, id=i))
        learn = asyncio.get_running_loop().call_later(LEARN_AFTER_S, self.learn_modules, cycle)
        if not command.node_spans:
            fetch = asyncio.ensure_future(self._fetch_rank_map(command))
            fetch.add_done_callback(lambda t: t.cancelled() or t.exception())
        if command.agent_store:
            # Awaited, so that it is known before anything of this cycle is swept away; exits are noticed meanwhile.
            await self._starter.prepare_store()
        if command.probe:
            self.say(f"cycle {command.cycle} tests the bandwidth between the nodes")
            asyncio.get_running_loop().call_later(GANG_LIMIT_S, cycle.stop, "the gang check took too long")
        running = asyncio.ensure_future(cycle.run(self._owner.evidence_folder(command.cycle)))
        await cycle.over()
        # Beside evidence and teardown: a node that is unfit is known before the next cycle is put together.
        check = asyncio.ensure_future(self._care.check(self._owner.anchor)) if cycle.failed else None
        make = await running
        learn.cancel()
        if self._guard is not None:
            self._guard.ranks_gone()
        self._starter.take_next_store()
        self.current = None
        stopped = msgspec.structs.replace(make(0), next_port=self._starter.next_port)
        if check is not None:
            stopped = msgspec.structs.replace(stopped, problems=await check)
            folder = self._owner.evidence_folder(command.cycle)
            self._care.failure_evidence(folder / self.config.node, lambda: self._owner.send_up(command.cycle, folder))
        stopped = msgspec.structs.replace(stopped, notes={**stopped.notes, **self._owner.log_notes()})
        if command.probe and command.node_index == 0:
            stopped = self._with_gang_result(stopped)
        self._say_stopped(stopped, cycle)
        self.learn_modules(cycle)
        self.send(lambda i: msgspec.structs.replace(stopped, id=i))

    def _with_gang_result(self, stopped: m.Stopped) -> m.Stopped:
        try:
            result = json.loads(self._starter.gang_result(stopped.cycle).read_bytes())
        except (OSError, ValueError) as error:
            self.say(f"the gang check left no result ({error}); going on without it")
            return stopped
        slow = f"; slow: {', '.join(result['suspects'])}" if result.get("suspects") else ""
        baseline = result.get("baseline_gb_per_s")
        wanted = f"baseline {baseline:.3g}" if baseline is not None else "no baseline stored (`keepstep check gang`)"
        self.say(f"gang check: {result['bandwidth_gb_per_s']:.3g} GB/s, {wanted}{slow}")
        return msgspec.structs.replace(stopped, notes={**stopped.notes, "gang": result})

    async def _fetch_rank_map(self, command: m.StartCycle) -> None:
        """In a large job the rank map comes when the ranks already run."""
        spans = dict(await self.send(lambda i: m.GetCycle(id=i, cycle=command.cycle)))["node_spans"]
        self._starter.write_cycle_info(msgspec.structs.replace(command, node_spans=spans))

    def _report_nothing(self, number: int, why: str | None = None, problems: list[str] | None = None) -> None:
        """Report a cycle of which nothing runs here: told to stop first, or (`why`) it could not be started."""
        now = self._owner.anchor.now()
        failures = []
        if why is not None:
            failures = [m.Failure(rank=0, status=1, time_ns=now, error_type="DistNetworkError", message=why)]
            at = {"occurred_ns": now, "detected_ns": now}
            self.send(lambda i: m.Fault(id=i, cycle=number, kind="spawn", rank=0, detail=why, **at))
        stopped = m.Stopped(
            id=0,
            cycle=number,
            statuses={},
            failures=failures,
            completed={},
            completed_ns=0,
            captured_ns=now,
            stopped_ns=now,
            next_port=self._starter.next_port,
            problems=problems or [],
        )
        self.send(lambda i: msgspec.structs.replace(stopped, id=i))

    def _say_stopped(self, stopped: m.Stopped, cycle: LocalCycle) -> None:
        fault = cycle.fault
        if fault is not None:
            self._learned_hangs += fault.kind == "hang" and self.config.monitor_hang == "auto"
            blame = f"; the others wait for rank {', '.join(map(str, stopped.culprits))}" if stopped.culprits else ""
            self.say(f"cycle {stopped.cycle}: {fault.detail}{blame}")

    # ---- what a cycle needs (CycleHost)

    @property
    def anchor(self) -> Anchor:
        return self._owner.anchor

    def say(self, text: str) -> None:
        self._owner.say(text)

    def infrastructure(self) -> set[int]:
        return self._owner.infrastructure()

    def send(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]:
        return self._owner.send(make)

    def do_injection(self, injection: Injection, cycle: LocalCycle) -> None:
        self._owner.do_injection(injection, cycle)

    async def hang_evidence(self, cycle: LocalCycle, pids: dict[int, int]) -> None:
        """Take what only ranks that still hang can give, beside their stacks."""
        folder = self._owner.evidence_folder(cycle.number) / self.config.node
        await self._care.hang_evidence(folder, cycle.number, pids, self.config.capture_s)

    def learn_modules(self, cycle: LocalCycle) -> None:
        """The script has shown which modules it imports."""
        self._starter.learn(cycle.imported_names())
