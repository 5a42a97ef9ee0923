"""The agent: one `keepstep run` on one host. Starts coordinator (where it leads) and zygote, and runs cycles as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor, boot_ns
from keepstep.launcher.config import RunConfig
from keepstep.launcher.environment import uses_trainer
from keepstep.launcher.files import RunLock, write_durable
from keepstep.launcher.link import Link, RefusedError
from keepstep.launcher.localcycle import LocalCycle
from keepstep.launcher.logs import LogThread
from keepstep.launcher.procs import become_subreaper, kill_quietly, with_environment
from keepstep.launcher.ranklink import RankServer
from keepstep.launcher.spawn import SpawnError
from keepstep.launcher.starter import PortTakenError, RankStarter
from keepstep.records.codec import to_pretty_json
from keepstep.records.cycle import VerdictFile
from keepstep.records.errors import KeepstepError, StorageError
from keepstep.records.exits import EXIT_FAILURE
from keepstep.records.frames import ENV_AGENT_SOCKET, ENV_RUN_DIR
from keepstep.records.inject import Injection

MAX_COORDINATOR_DEATHS = 5
DEATH_WINDOW_S = 20.0
COORDINATOR_RETRY_S = 5.0
COORDINATOR_LOST_S = 20.0
LEARN_AFTER_S = 5.0


class Agent:
    """Everything one launcher holds. `main` returns the exit code of `keepstep run`."""

    def __init__(self, config: RunConfig, sockets: Path, lock: RunLock | None, started_boot_ns: int) -> None:
        self.config = config
        self.run_id = config.run_id
        self.run_dir = Path(config.run_dir)
        self.anchor = Anchor.take()
        self._sockets = sockets
        self._lock = lock
        self._started_boot_ns = started_boot_ns
        self._logs = LogThread()
        self._server = RankServer(sockets / f"agent-{os.getpid()}.sock", self)
        self._starter = RankStarter(config, self._server.path, self._logs, self.say)
        # The leader starts the coordinator again itself; anybody else can only wait so long for it.
        give_up_s = COORDINATOR_LOST_S if lock is None else None
        self._link = Link(sockets / "coordinator.sock", self._hello, self._on_command, give_up_s)
        self._launch_id = secrets.token_hex(8)
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._coordinator_deaths: list[float] = []
        self._cycle: LocalCycle | None = None
        self._cycle_number = -1
        self._cycle_task: asyncio.Task[None] | None = None
        self._expect_steps = uses_trainer(config)
        self._learned_hangs = 0
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
        for name in self.config.signals:
            loop.add_signal_handler(signal.Signals[name], self._on_signal, signal.Signals[name])
        if self._lock is not None:
            self._start_coordinator()
        self._starter.start()
        link: asyncio.Future[Any] = asyncio.ensure_future(self._link.run())
        try:
            done, _ = await asyncio.wait({link, self._end}, return_when=asyncio.FIRST_COMPLETED)
            if link in done:
                link.result()
            return self._report_end(self._end.result())
        except (RefusedError, SpawnError, KeepstepError) as error:
            self.say(str(error))
            self._leave_verdict(str(error))
            return EXIT_FAILURE
        finally:
            link.cancel()
            await self._shut_down()

    def _leave_verdict(self, message: str) -> None:
        """The launcher itself failed: say so where the coordinator could not."""
        path = self.run_dir / "verdict.json"
        if self._lock is None or path.exists():
            return
        verdict = VerdictFile(
            run_id=self.run_id,
            attempt=self._link.welcome.attempt if self._link.welcome is not None else -1,
            outcome="failed",
            exit_code=EXIT_FAILURE,
            cause="launcher_error",
            message=message,
        )
        with contextlib.suppress(StorageError):
            write_durable(path, to_pretty_json(verdict))

    async def _shut_down(self) -> None:
        if self._cycle is not None and self._cycle_task is not None:
            self._cycle.stop("the launcher ends")
            await asyncio.wait({self._cycle_task}, timeout=self.config.stop_grace_s + 5)
        self._starter.close()
        if self._coordinator is not None:
            await asyncio.to_thread(self._end_coordinator)
        self._logs.drain(1.0)
        self._logs.close()
        await self._server.close()

    def _end_coordinator(self) -> None:
        """It leaves by itself once every agent has gone; a coordinator that does not is ended."""
        assert self._coordinator is not None
        try:
            self._coordinator.wait(3)
        except subprocess.TimeoutExpired:
            self._coordinator.kill()
            self._coordinator.wait()

    def _clear_leftovers(self) -> None:
        """Processes of an earlier life of this run on this host: its agent is dead, so its ranks are; daemons may be left.

        Those of another launcher of this very life (several on one machine) answer through their agent's socket.
        """
        if self._lock is None:
            return
        for pid, environment in with_environment(ENV_RUN_DIR, self.config.run_dir).items():
            if pid != os.getppid() and not _listens(environment.get(ENV_AGENT_SOCKET, "")):
                self.say(f"ending process {pid}, left over from an earlier life of run {self.run_id!r}")
                kill_quietly(pid, signal.SIGKILL)

    def say(self, text: str) -> None:
        """One line for the user, also in logs/launcher.log."""
        print(f"keepstep: {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), (self.run_dir / "logs" / "launcher.log").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} [{self.config.node}] {text}\n")

    def _report_end(self, end: m.End) -> int:
        if end.outcome != "succeeded":
            where = f"first failing rank: {end.first_failing_rank}" if end.first_failing_rank is not None else ""
            self.say(" · ".join(t for t in (f"{end.outcome}: {end.cause}", end.message or "", where) if t))
            if end.traceback and end.outcome == "failed":
                print(end.traceback.rstrip(), file=sys.stderr, flush=True)
        return end.exit_code

    # ---- coordinator

    def _start_coordinator(self) -> None:
        command = [sys.executable, "-m", "keepstep.launcher.coordinator"]
        command += ["--run-dir", str(self.run_dir), "--socket", str(self._sockets / "coordinator.sock")]
        command += ["--started-ns", str(self._started_boot_ns), "--launch", self._launch_id]
        with (self.run_dir / "logs" / "launcher.log").open("ab") as log:
            self._coordinator = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        fd = os.pidfd_open(self._coordinator.pid)
        asyncio.get_running_loop().add_reader(fd, self._on_coordinator_exit, fd)

    def _on_coordinator_exit(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        assert self._coordinator is not None and self._end is not None
        status = self._coordinator.wait()
        if self._end.done():
            return
        now = time.monotonic()
        self._coordinator_deaths = [t for t in self._coordinator_deaths if now - t < DEATH_WINDOW_S] + [now]
        log = self.run_dir / "logs" / "launcher.log"
        if len(self._coordinator_deaths) > MAX_COORDINATOR_DEATHS and self._cycle is not None:
            # Ranks train on without it: better to wait for the disk (say) than to end them.
            self.say(
                f"the coordinator does not stay up (see {log}); ranks go on, next try in {COORDINATOR_RETRY_S:g} s"
            )
            asyncio.get_running_loop().call_later(COORDINATOR_RETRY_S, self._start_coordinator)
            return
        if len(self._coordinator_deaths) > MAX_COORDINATOR_DEATHS:
            self._end.set_exception(
                KeepstepError(
                    f"the coordinator ended {len(self._coordinator_deaths)} times in {DEATH_WINDOW_S:g} s; see {log}"
                )
            )
            return
        self.say(f"the coordinator ended (status {status}); starting it again, ranks go on")
        self._start_coordinator()

    def _hello(self, epoch: int) -> m.Hello:
        return m.Hello(
            id=self._link.new_id(),
            cycle=self._cycle_number,
            run_id=self.run_id,
            node=self.config.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            nproc=self.config.nproc,
            next_port=self._starter.next_port,
            next_addr="127.0.0.1",
            hosts_store=self._starter.hosts_store,
            epoch=epoch,
        )

    def send(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]:
        """Send to the coordinator; repeated until it answers."""
        return self._link.request(make)

    def _on_command(self, command: m.FromCoordinator) -> None:
        assert self._end is not None
        match command:
            case m.Welcome():
                pass
            case m.StartCycle():
                if command.cycle > self._cycle_number:
                    self._cycle_number = command.cycle
                    self._cycle_task = asyncio.ensure_future(self._run_cycle(command, self._cycle_task))
            case m.StopCycle():
                self._stop_cycle(command.cycle, command.reason)
            case m.AskStop():
                if self._cycle is not None and self._cycle.number == command.cycle:
                    self._cycle.ask_stop(command.signum)
                elif command.cycle > self._cycle_number:
                    self._stop_cycle(command.cycle, "stop requested before it began")
            case m.End():
                if not self._end.done():
                    self._end.set_result(command)

    def _stop_cycle(self, number: int, reason: str) -> None:
        if self._cycle is not None and self._cycle.number == number:
            self._cycle.stop(reason)
        elif number > self._cycle_number:
            # Told to stop before it was told to start: nothing of it exists here.
            self._cycle_number = number
            now = self.anchor.now()
            empty: dict[str, Any] = {"statuses": {}, "failures": [], "completed": {}, "completed_ns": 0}
            self.send(
                lambda i: m.Stopped(
                    id=i, cycle=number, captured_ns=now, stopped_ns=now, next_port=self._starter.next_port, **empty
                )
            )

    # ---- signals and injections

    def _on_signal(self, signum: int) -> None:
        self._signals += 1
        if self._signals == 1:
            self.say(f"{signal.Signals(signum).name}: asking the job to stop (again to stop at once)")
            self.send(lambda i: m.StopRequest(id=i, signum=signum, node=self.config.node))
            grace = self.config.stop_grace_s + self.config.capture_s + 5
            asyncio.get_running_loop().call_later(grace, self._give_up, signum)
        elif self._cycle is not None:
            self._cycle.stop("interrupted twice")
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
        if cycle is not self._cycle or (injection.node is not None and injection.node != self.config.node):
            return
        if injection.kind == "coordinator-kill":
            if self._coordinator is not None:
                self.say("injecting coordinator-kill")
                kill_quietly(self._coordinator.pid, signal.SIGKILL)
        elif injection.kind == "preempt":
            self.say("injecting preempt: SIGTERM to this launcher")
            os.kill(os.getpid(), signal.SIGTERM)
        elif injection.rank in cycle.ranks and cycle.ranks[injection.rank].status is None:
            self.say(f"injecting {injection.kind} on rank {injection.rank}")
            kill_quietly(
                cycle.ranks[injection.rank].pid, signal.SIGKILL if injection.kind == "kill" else signal.SIGSTOP
            )

    # ---- what ranks ask for (RankHost)

    def current_cycle(self) -> int:
        """Number of the cycle whose ranks may talk to this agent."""
        return self._cycle_number

    async def share(self, op: str, cycle: int, request: dict[str, Any]) -> dict[str, Any]:
        """Forward a side-channel request of a rank to the coordinator. Raises ChannelError."""
        match op:
            case "set" | "cas":
                key, value, absent = str(request["key"]), request["value"], op == "cas"
                result = await self.send(
                    lambda i: m.KvSet(id=i, cycle=cycle, key=key, value=value, only_if_absent=absent)
                )
            case "get":
                result = await self.send(lambda i: m.KvGet(id=i, cycle=cycle, key=str(request["key"])))
            case "wait":
                keys, limit = [str(k) for k in request["keys"]], float(request["timeout_s"])
                result = await self.send(lambda i: m.KvWait(id=i, cycle=cycle, keys=keys, timeout_s=limit))
            case _:
                name, step = str(request["checkpoint"]), int(request["step"])
                result = await self.send(lambda i: m.Grant(id=i, cycle=cycle, checkpoint=name, step=step))
        return dict(result or {})

    def report(self, cycle: int, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """Take a mark of a rank; its CLOCK_MONOTONIC times become UTC. The rank does not wait for the disk."""
        times: dict[str, int] = {
            k: self.anchor.from_monotonic(int(fields[k])) for k in ("at_ns", "begin_ns", "end_ns") if k in fields
        }
        attrs: dict[str, Any] = {**fields, **times}
        at_ns = attrs.pop("at_ns", None) or attrs.get("end_ns") or self.anchor.now()
        if kind == "attached":
            self._expect_steps = True
            if self._cycle is not None:
                self._cycle.attached()
        if kind == "quarantined":
            self.say(f"checkpoint {attrs.get('checkpoint')} refused and quarantined: {attrs.get('reason')}")
        self.send(lambda i: m.Note(id=i, cycle=cycle, kind=kind, rank=rank, t_ns=at_ns, attrs=attrs))

    def inject(self, cycle: int, spec: str) -> str | None:
        """A rank came to the step of an injection that only the launcher can carry out."""
        try:
            injection = msgspec.json.decode(spec, type=Injection)
        except msgspec.MsgspecError as error:
            return f"not an injection: {error}"
        if injection not in self.config.inject or self._cycle is None or cycle != self._cycle.number:
            return "not one of this run's injections"
        self.do_injection(injection, self._cycle)
        return None

    def infrastructure(self) -> set[int]:
        """pids of this launcher's own helpers, which are no leftovers of ranks."""
        pids = {self._coordinator.pid} if self._coordinator is not None else set()
        return pids | self._starter.pids()

    # ---- cycles

    async def _run_cycle(self, command: m.StartCycle, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None and not before.done() and self._cycle is not None:
                # This node was given up and comes back: its old ranks end before new ones start beside them.
                self._cycle.stop(f"cycle {command.cycle} begins")
            if before is not None:
                await before
            await self._run_cycle_to_end(command)
        except Exception as error:
            # Nobody awaits this task: without this an error here would leave a launcher that does nothing.
            assert self._end is not None
            if not self._end.done():
                self._end.set_exception(KeepstepError(f"cycle {command.cycle}: {type(error).__name__}: {error}"))

    async def _run_cycle_to_end(self, command: m.StartCycle) -> None:
        assigned_ns = self.anchor.now()
        if self._link.welcome is not None:
            w = self._link.welcome
            self.anchor = Anchor(w.boot_id, w.anchor_utc_ns, w.anchor_boot_ns)
        try:
            if command.agent_store and command.node_index == 0:
                await self._starter.have_store(command.master_port)
            local, specs, files = self._starter.prepare(command)
            cycle = self._cycle = LocalCycle(self, command, local, self._expect_steps, self._learned_hangs)
            pids, path = await self._starter.spawn(specs, files)
        except PortTakenError as error:
            self._starter.new_port()
            self.say(f"cycle {command.cycle}: port {command.master_port} is in use; another one is taken")
            self._give_back(command.cycle, str(error))
            return
        except (SpawnError, OSError) as error:
            assert self._end is not None
            self._end.set_exception(KeepstepError(f"cycle {command.cycle}: cannot start ranks: {error}"))
            return
        cycle.adopt(pids)
        ranks = [{"rank": r.rank, "local_rank": r.local_rank, "pid": r.pid} for r in cycle.ranks.values()]
        now = self.anchor.now()
        started = m.Started(
            id=0,
            cycle=command.cycle,
            ranks=ranks,
            assigned_ns=assigned_ns,
            started_ns=now,
            path=path,
            expect_steps=self._expect_steps,
        )
        self.send(lambda i: msgspec.structs.replace(started, id=i))
        learn = asyncio.get_running_loop().call_later(LEARN_AFTER_S, self.learn_modules, cycle)
        if command.agent_store:
            # Awaited, so that it is known before anything of this cycle is swept away; exits are noticed meanwhile.
            await self._starter.prepare_store()
        make = await cycle.run(self.run_dir / "evidence" / f"cycle-{command.cycle:04d}")
        learn.cancel()
        self._starter.take_next_store()
        self._cycle = None
        stopped = make(0)
        self._say_stopped(stopped, cycle)
        self.learn_modules(cycle)
        self.send(lambda i: msgspec.structs.replace(stopped, id=i, next_port=self._starter.next_port))

    def _give_back(self, number: int, why: str) -> None:
        """Report a cycle that could not be started here."""
        now = self.anchor.now()
        failure = m.Failure(rank=0, status=1, time_ns=now, error_type="DistNetworkError", message=why)
        self.send(
            lambda i: m.Fault(id=i, cycle=number, kind="spawn", rank=0, occurred_ns=now, detected_ns=now, detail=why)
        )
        self.send(
            lambda i: m.Stopped(
                id=i,
                cycle=number,
                statuses={},
                failures=[failure],
                completed={},
                completed_ns=0,
                captured_ns=now,
                stopped_ns=now,
                next_port=self._starter.next_port,
            )
        )

    def _say_stopped(self, stopped: m.Stopped, cycle: LocalCycle) -> None:
        fault = cycle.fault
        if fault is not None:
            self._learned_hangs += fault.kind == "hang" and self.config.monitor_hang == "auto"
            blame = f"; the others wait for rank {', '.join(map(str, stopped.culprits))}" if stopped.culprits else ""
            self.say(f"cycle {stopped.cycle}: {fault.detail}{blame}")

    def learn_modules(self, cycle: LocalCycle) -> None:
        """The script has shown which modules it imports."""
        self._starter.learn(cycle.imported_names())


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


async def run_agent(config: RunConfig, sockets: Path, lock: RunLock | None, started_boot_ns: int | None = None) -> int:
    """Run one launcher to its end; returns the exit code."""
    agent = Agent(config, sockets, lock, started_boot_ns or boot_ns())
    return await agent.main()
