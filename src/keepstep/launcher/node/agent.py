"""The agent: one `keepstep run` on one host. Starts coordinator (where it leads) and zygote, and runs cycles as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor, boot_id, boot_ns
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.diagnosing import END_WAIT_S
from keepstep.launcher.coordination.lead import (
    Child,
    coordinator_child,
    is_own,
    log_child,
    make_folder_id,
    split_endpoint,
)
from keepstep.launcher.files import RunLock
from keepstep.launcher.node import injections
from keepstep.launcher.node.guard import Guard
from keepstep.launcher.node.injections import lose_node
from keepstep.launcher.node.lastwords import leave_verdict, untold
from keepstep.launcher.node.link import Link, RefusedError, Target
from keepstep.launcher.node.localcycle import LocalCycle
from keepstep.launcher.node.memorytier import MemoryTier
from keepstep.launcher.node.nodecare import NodeCare
from keepstep.launcher.node.nodecycles import NodeCycles
from keepstep.launcher.node.ranklink import RankServer
from keepstep.launcher.node.rankrequests import RankRequests
from keepstep.launcher.node.renewal import SILENCE_SHARE, Renewal, Sample, stand_by
from keepstep.launcher.output.logs import LogThread
from keepstep.launcher.procs import become_subreaper, kill_quietly, listens, with_environment
from keepstep.launcher.ranks.environment import stop_notice_s
from keepstep.launcher.ranks.spawn import SpawnError
from keepstep.launcher.ranks.starter import RankStarter
from keepstep.launcher.trust import fence_key
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.exits import EXIT_FAILURE
from keepstep.records.frames import ENV_AGENT_SOCKET, ENV_RUN_DIR
from keepstep.records.inject import NODE_KINDS, Injection, parse_injection

COORDINATOR_LOST_S = 20.0
DRAIN_S = 5.0
"""How long a launcher waits at its end until the job's log has all of its output."""
HOLD_OPEN_S = 40.0
"""How long the leader waits for its coordinator to have told everybody how the job ended."""


class Agent:
    """Everything one launcher holds. `main` returns the exit code of `keepstep run`."""

    def __init__(
        self, config: RunConfig, sockets: Path, lock: RunLock | None, started_boot_ns: int, token: bytes | None
    ) -> None:
        """`lock`: held by the launcher that leads on this host. `token`: the job token, None on one host."""
        self.config = config
        self.run_id = config.run_id
        self.run_dir = Path(config.run_dir)
        self.anchor = Anchor.take()
        self._sockets = sockets
        self._leads = lock is not None
        self._token = token
        self._started_boot_ns = started_boot_ns
        self._several = config.nnodes + config.spares > 1
        """Whether other launchers take part in this job."""
        self._shared = self._leads
        """Whether the coordinator's run folder is this launcher's too."""
        self._logs = LogThread(config.node)
        self._requests = RankRequests(self)
        self.memory = MemoryTier(self, sockets, token)
        self._server = RankServer(sockets / f"agent-{os.getpid()}.sock", self._requests, self.memory.images)
        self._starter = RankStarter(config, self._server.path, self._logs, self.say)
        # The leader starts the coordinator again itself; anybody else can only wait so long for it.
        patience_s = config.join_timeout_s if config.endpoints else COORDINATOR_LOST_S
        give_up_s = None if self._leads else patience_s
        self._link = Link(self._targets, self._hello, self._on_command, give_up_s, token, self._on_nobody)
        several = len(config.endpoints) > 1
        self._renewal = Renewal(self._link, config.lease_s, several, self._sample, self._on_extended)
        self._coordinator: Child | None = None
        self._endpoint: str | None = None
        """Where the own coordinator listens for other hosts."""
        self._log_writer: Child | None = None
        self._fenced = False
        self._care = NodeCare(config, self.say, self.infrastructure)
        self._problems: list[str] = []
        self._role = ""
        self._told: set[str] = set()
        """Incidents whose verdict was said here."""
        self._guard = Guard(self._fence_word(), self._on_lease_over, self.say) if self._several else None
        self.cycles = NodeCycles(self, self._starter, self._care, self._guard)
        self._signals = 0
        self._end: asyncio.Future[Any] | None = None

    # ---- life

    async def main(self) -> int:
        """Run until the coordinator says that the job is over, or until nothing can go on."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        become_subreaper()
        self._clear_leftovers()
        await self._server.start()
        self.memory.start()
        for name in self.config.signals:
            loop.add_signal_handler(signal.Signals[name], self._on_signal, signal.Signals[name])
        if self._leads:
            make_folder_id(self.run_dir)
            endpoint = self.config.endpoints[0] if self.config.endpoints else None
            # Other launchers may live on under the coordinator of this one's former life: their attempt goes on.
            goes_on = self._several and listens(str(self._sockets / "coordinator.sock"))
            self._start_coordinator(endpoint, takes_over=goes_on)
        if self._guard is not None:
            self._guard.start()
        self._starter.start()
        self._problems = await self._care.check()
        link: asyncio.Future[Any] = asyncio.ensure_future(self._link.run())
        others: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._renewal.run())]
        standby = self._standby_endpoint()
        if standby is not None:
            patience_s = SILENCE_SHARE * self.config.lease_s * self.config.endpoints.index(standby)
            others.append(asyncio.ensure_future(self._stand_by(standby, patience_s)))
        for task in others:
            task.add_done_callback(self._on_task_end)
        try:
            done, _ = await asyncio.wait({link, self._end}, return_when=asyncio.FIRST_COMPLETED)
            if link in done:
                link.result()
            return self._report_end(self._end.result())
        except (RefusedError, SpawnError, KeepstepError) as error:
            self.say(str(error))
            if self._leads:
                leave_verdict(self.run_dir, self.run_id, self._attempt(), str(error))
            return EXIT_FAILURE
        finally:
            await self.cycles.finish(self.config.stop_grace_s + 5)
            if self._several:
                # Before the coordinator sees this launcher go: when all have gone, the log writer goes too.
                await asyncio.to_thread(self._logs.drain, DRAIN_S)
            for task in (link, *others):
                task.cancel()
            await self._shut_down()

    def _on_task_end(self, task: asyncio.Future[Any]) -> None:
        """A launcher that no longer renews its lease must not go on as if it did."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._over:
            assert self._end is not None
            self._end.set_exception(KeepstepError(f"internal error: {type(error).__name__}: {error}"))

    @property
    def _over(self) -> bool:
        return self._end is None or self._end.done()

    def _attempt(self) -> int:
        """Of this life, -1 when no coordinator ever answered."""
        return self._link.welcome.attempt if self._link.welcome is not None else -1

    async def _shut_down(self) -> None:
        self._starter.close()
        if self._guard is not None:
            self._guard.close()
        if self._coordinator is not None:
            patience_s = HOLD_OPEN_S if self._several else 3.0
            await self._coordinator.end(patience_s + (END_WAIT_S if self.config.attribution else 0.0))
            for line in untold(self.run_dir, self._told, self._attempt()):
                self.say(line)
        if not self._several:
            self._logs.drain(1.0)
        self._logs.close()
        if self._log_writer is not None:
            await self._log_writer.end(DRAIN_S, ask=True)
        await self._server.close()
        await self.memory.close()

    def _clear_leftovers(self) -> None:
        """Processes of an earlier life of this run on this host: its agent is dead, so its ranks are; daemons may be left.

        Those of another launcher of this very life (several on one machine) answer through their agent's socket.
        """
        for pid, environment in with_environment(ENV_RUN_DIR, self.config.run_dir).items():
            if pid != os.getppid() and not listens(environment.get(ENV_AGENT_SOCKET, "")):
                self.say(f"ending process {pid}, left over from an earlier life of run {self.run_id!r}")
                kill_quietly(pid, signal.SIGKILL)

    def say(self, text: str) -> None:
        """One line for the user, also in logs/launcher.log."""
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}"
        self._logs.say(line, console=2, shown=f"keepstep: {text}")
        if self._several:
            # The job's own launcher.log has one writer, who may be out of reach: this node keeps a copy.
            folder = self.run_dir / "nodes" / self.config.node
            with contextlib.suppress(OSError), (folder / "launcher.log").open("a") as log:
                log.write(line + "\n")

    def _report_end(self, end: m.End) -> int:
        if end.outcome != "succeeded":
            where = f"first failing rank: {end.first_failing_rank}" if end.first_failing_rank is not None else ""
            self.say(" · ".join(t for t in (f"{end.outcome}: {end.cause}", end.message or "", where) if t))
            if end.traceback and end.outcome == "failed":
                self._logs.say(end.traceback.rstrip(), console=2)
        return end.exit_code

    # ---- coordinator

    def _targets(self) -> list[Target]:
        """Where to look for the coordinator: the own one first, then the endpoints in their order."""
        local = [Target(str(self._sockets / "coordinator.sock"))]
        if not self.config.endpoints:
            return local
        remote = [Target(e, self.config.tls) for e in self.config.endpoints]
        if self._coordinator is None:
            return remote
        # The own coordinator listens at one of the endpoints; should it be superseded, the others have the next one.
        return local + (remote if len(remote) > 1 else [])

    def _start_coordinator(self, endpoint: str | None, takes_over: bool = False) -> None:
        self._endpoint = endpoint
        self._coordinator = coordinator_child(
            self.config,
            self._sockets,
            self._token,
            self._started_boot_ns,
            endpoint,
            self.say,
            self._on_hopeless,
            self._on_coordinator_left,
            takes_over=takes_over,
        )
        self._coordinator.start()
        if self._several:
            self._log_writer = log_child(self.config, self._sockets, self._token, endpoint, self.say)
            self._log_writer.start()

    def _on_coordinator_left(self) -> None:
        """It ended on purpose: the job is over, or another host has taken over and is where to go now."""
        if self.config.endpoints and not self._over:
            self._coordinator = None
            self._leads = False
            self._link.give_up_s = self.config.join_timeout_s

    def _on_hopeless(self, message: str) -> bool:
        """The coordinator does not stay up. Ranks train on without it: better to wait for the disk (say) than to end them."""
        if self.cycles.current is not None or self._over:
            return True
        assert self._end is not None
        self._end.set_exception(KeepstepError(message))
        return False

    def _standby_endpoint(self) -> str | None:
        """The endpoint at which this launcher may take over, None when it may not."""
        if self._leads:
            return None
        return next((e for e in self.config.endpoints[1:] if is_own(e)), None)

    async def _stand_by(self, endpoint: str, patience_s: float) -> None:
        renewal = self._renewal
        await stand_by(
            self.run_dir,
            patience_s,
            lambda: renewal.heard_s,
            lambda: self._coordinator is not None,
            lambda: self._take_over(endpoint),
        )

    def _take_over(self, endpoint: str) -> None:
        if self._coordinator is None and not self._over:
            self.say(f"no sign of the coordinator any more; taking over at {endpoint}")
            self._start_coordinator(endpoint, takes_over=True)
            self._link.drop()

    def _hello(self, epoch: int) -> m.Hello:
        networked = bool(self.config.endpoints)
        own = (
            split_endpoint(self._endpoint)[0] if self._endpoint is not None and self._coordinator is not None else None
        )
        return m.Hello(
            id=self._link.new_id(),
            cycle=self.cycles.number,
            run_id=self.run_id,
            node=self.config.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            nproc=self.config.nproc,
            next_port=self._starter.next_port,
            # The coordinator sees the address that others can reach, except that of its own host.
            next_addr=self.config.local_addr or own or ("" if networked else "127.0.0.1"),
            hosts_store=self._starter.hosts_store,
            epoch=epoch,
            levels=self.config.levels,
            node_rank=self.config.node_rank,
            boot_id=boot_id(),
            fenced=self._fenced,
            problems=self._problems,
        )

    # ---- lease

    def _fence_word(self) -> dict[str, Any]:
        """What the guardian needs to tell the coordinator that this launcher is dead and its ranks too."""
        local = str(self._sockets / "coordinator.sock")
        return {
            "node": self.config.node,
            "pid": os.getpid(),
            "boot_id": boot_id(),
            "key": fence_key(self._token, self.run_id).hex(),
            "targets": [local] if self._leads or not self.config.endpoints else self.config.endpoints,
            "tls": self.config.tls,
        }

    def _sample(self) -> Sample:
        cycle = self.cycles.current
        if cycle is None:
            return -1, None, 0
        completed, at_ns = cycle.sample or (None, 0)
        return cycle.number, completed, at_ns

    def _on_extended(self, expiry_ns: int) -> None:
        if self._guard is not None:
            self._guard.extend(expiry_ns)
            if self.cycles.current is not None:
                self.cycles.current.set_lease(self._guard.expiry_ns)

    def _on_nobody(self, tried_ns: int) -> None:
        """Nobody listened anywhere: no coordinator was up then, and one that starts counts leases from its start."""
        self._renewal.extend(tried_ns)

    def _on_lease_over(self) -> None:
        """Out of touch for too long: another node may be given these ranks, so they end before that."""
        cycle = self.cycles.current
        if cycle is None:
            return
        self.say(
            f"out of touch with the coordinator for the lease of {self._renewal.lease_s:g} s: "
            f"stopping the ranks of cycle {cycle.number}; this node comes back as a spare"
        )
        self._fenced = True
        cycle.kill("lease over")
        self._link.drop()

    def send(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]:
        """Send to the coordinator; repeated until it answers."""
        return self._link.request(make)

    def _on_command(self, command: m.FromCoordinator) -> None:
        assert self._end is not None
        match command:
            case m.Welcome():
                self._on_welcome(command)
            case m.Tell():
                self._told.add(command.incident)
                self.say(command.text)
            case m.DoInjection():
                self.inject(command.cycle, command.spec, asked_for=True)
            case m.StartCycle():
                if self.cycles.start(command):
                    self._requests.begin(command)
            case m.CopyImages():
                self.memory.copy(command)
            case m.StopCycle():
                self.cycles.stop(command.cycle, command.reason)
            case m.AskStop():
                self.cycles.ask_stop(command.cycle, command.signum)
            case m.End():
                if not self._end.done():
                    self._end.set_result(command)

    def _on_welcome(self, welcome: m.Welcome) -> None:
        self._fenced = False
        self.memory.tell_all()
        # Not the longer one that it may have had: no more than this was promised to this Hello.
        self._renewal.lease_s = welcome.lease_s
        self._renewal.extend(self._link.hello_sent_ns)
        with contextlib.suppress(OSError):
            self._shared = self._leads or (self.run_dir / "id").read_text().strip() == welcome.folder_id
        if welcome.log_addr:
            self._logs.use_funnel(welcome.log_addr, self.run_id, self.config.node, self._token, self.config.tls)
        if welcome.role != self._role:
            self._role = welcome.role
            if welcome.role == "excluded":
                self.say(f"this node is left out of the job: {welcome.reason}; it waits for the job's end")
            elif welcome.role == "spare":
                self.say("this node is a spare: it waits, warm, to take over the ranks of a node that fails")

    # ---- signals and injections

    def _on_signal(self, signum: int) -> None:
        self._signals += 1
        if self._signals == 1:
            self.say(f"{signal.Signals(signum).name}: asking the job to stop (again to stop at once)")
            self.send(lambda i: m.StopRequest(id=i, signum=signum, node=self.config.node))
            grace = stop_notice_s(self.config) + self.config.capture_s + 5
            asyncio.get_running_loop().call_later(grace, self._give_up, signum)
        elif self.cycles.current is not None:
            self.cycles.current.stop("interrupted twice")
        elif self._signals > 2:
            self._give_up(signum)

    def _give_up(self, signum: int) -> None:
        """The coordinator did not answer a stop request: end without its verdict."""
        if self._end is not None and not self._end.done():
            self._end.set_result(
                m.End(epoch=0, exit_code=128 + signum, outcome="stopped", cause="no answer from the coordinator")
            )

    def do_injection(self, injection: Injection, cycle: LocalCycle) -> None:
        """Cause a fault from outside the ranks, with a real signal."""
        elsewhere = injection.node is not None and injection.node != self.config.node
        if cycle is not self.cycles.current or elsewhere:
            return
        if injection.kind in NODE_KINDS and injection.node is None and injection.rank not in cycle.ranks:
            return
        coordinator = self._coordinator.pid if self._coordinator is not None else None
        if injection.kind == "xid":
            injections.report_xid(injection, self.say)
        elif injection.kind == "partition":
            self.say(f"injecting partition: no connection to the coordinator for {injection.seconds or 10.0:g} s")
            self._link.cut(injection.seconds or 10.0)
        elif injection.kind == "node-loss":
            # The job's own two go on: they stand for what another host would have.
            writer = self._log_writer.pid if self._log_writer is not None else None
            lose_node(cycle, self.infrastructure() - {coordinator, writer})
        else:
            injections.cause(injection, cycle, coordinator, self.say)

    def inject(self, cycle: int, spec: str, asked_for: bool = False) -> str | None:
        """Carry out an injection that only the launcher can: a rank came to its step, or a person asked for it now."""
        try:
            injection = parse_injection(spec) if asked_for else msgspec.json.decode(spec, type=Injection)
        except (msgspec.MsgspecError, ConfigError) as error:
            return f"not an injection: {error}"
        known = asked_for or injection in self.config.inject
        current = self.cycles.current
        if not known or current is None or cycle != current.number:
            return "not one of this run's injections"
        self.do_injection(injection, current)
        return None

    # ---- what its cycles need (CycleOwner)

    def refresh_anchor(self) -> None:
        """Take over the coordinator's clock: its own pair of readings on the same boot, else as measured by renewals."""
        w = self._link.welcome
        if w is not None and w.boot_id == boot_id():
            self.anchor = Anchor(w.boot_id, w.anchor_utc_ns, w.anchor_boot_ns)
        elif self._renewal.clock is not None:
            self.anchor = self._renewal.clock

    def evidence_folder(self, cycle: int) -> Path:
        """Where evidence of a cycle goes: the run folder, or this node's own when that is not shared."""
        top = self.run_dir if self._shared else self.run_dir / "nodes" / self.config.node
        return top / "evidence" / f"cycle-{cycle:04d}"

    def send_up(self, cycle: int, folder: Path) -> None:
        """Evidence of this node, complete now: to the coordinator's host, where that does not see it anyway."""
        if self._shared:
            return
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            with contextlib.suppress(OSError):
                if not self._logs.send_evidence(cycle, path.name, path.read_bytes()):
                    self.say(f"evidence {path} stays on this node: too large to be sent")

    def log_notes(self) -> dict[str, Any]:
        """For the cycle record: output of this node that is in no log."""
        counts = self._logs.counts()
        if not counts.lost_bytes and not counts.console_lost_bytes:
            return {}
        lost = {str(rank): n for rank, n in counts.lost_bytes.items()}
        return {"log": {"lost_bytes": lost, "console_lost_bytes": counts.console_lost_bytes}}

    def failed(self, error: KeepstepError) -> None:
        """This launcher cannot go on."""
        if not self._over:
            assert self._end is not None
            self._end.set_exception(error)

    def infrastructure(self) -> set[int]:
        """pids of this launcher's own helpers, which are no leftovers of ranks."""
        children = (self._coordinator, self._log_writer)
        pids = {child.pid for child in children if child is not None and child.pid is not None}
        return pids | self._starter.pids() | (self._guard.pids if self._guard is not None else set())


async def run_agent(
    config: RunConfig,
    sockets: Path,
    lock: RunLock | None,
    started_boot_ns: int | None = None,
    token: bytes | None = None,
) -> int:
    """Run one launcher to its end; returns the exit code."""
    agent = Agent(config, sockets, lock, started_boot_ns or boot_ns(), token)
    return await agent.main()
