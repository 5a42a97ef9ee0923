"""The coordinator process of a job: a WebSocket server for agents over the journal and the state in `job`.

Its process is `coordinatormain`. One task makes all changes in order: state changes in memory, the journal is fsynced, and only
then are replies and commands sent. Batches form by themselves while the disk is busy. Heartbeats and requests for the rank map
are answered by the task that reads a connection; only what changes state goes through the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor, boot_id
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.admission import Admission, RefusedConnectionError
from keepstep.launcher.coordination.closing import attributed_records
from keepstep.launcher.coordination.commands import operate, status_of
from keepstep.launcher.coordination.connection import Connection
from keepstep.launcher.coordination.cyclefiles import CycleFiles
from keepstep.launcher.coordination.diagnosing import END_WAIT_S, Attributed, Diagnosing, verdict_of
from keepstep.launcher.coordination.holdings import Holdings
from keepstep.launcher.coordination.incidents import said
from keepstep.launcher.coordination.job import Job
from keepstep.launcher.coordination.journal import Journal, read_records
from keepstep.launcher.coordination.leases import LeaseBook
from keepstep.launcher.coordination.noprogress import read_marker
from keepstep.launcher.coordination.shape import job_shape
from keepstep.launcher.coordination.state import Record
from keepstep.records.codec import from_json, to_json

ENDS_CYCLE = ("decision", "verdict")
CHANGES_CYCLE = ("cycle", "started", "stopped")
TIMED = ("node", "excluded", "decision", "workload", "stop_request")
"""Records that no mark stands beside: they carry their own time, for people."""
HOLD_OPEN_S = 30.0
"""How long the verdict is held open for nodes that have not heard it."""

_decode = msgspec.json.Decoder(m.FromAgent).decode


class Coordinator:
    """Wires the job's state to its journal and to the agents' connections."""

    def __init__(
        self,
        run_dir: Path,
        launch: str,
        started_boot_ns: int,
        admission: Admission,
        stays: bool = False,
        takes_over: bool = False,
    ) -> None:
        """`stays`: it waits for agents even when none is there (`keepstep coordinator`).

        `takes_over`: it follows one of another host, whose agents live on: their attempt goes on.
        """
        self.config = config = from_json((run_dir / "run.json").read_bytes(), RunConfig)
        self.run_dir = run_dir
        self.admission = admission
        self._stays = stays
        self._read_marker: Callable[[], int | None] = lambda: read_marker(config.checkpoint_iteration_file)
        self.job = Job(job_shape(config), self._read_marker)
        # Claimed first: from here on an older coordinator acknowledges nothing more.
        self.journal = Journal.claim(run_dir)
        records = read_records(run_dir)
        self._read = len(records)
        self._files = CycleFiles(run_dir, self.job, config.attribution)
        self._diagnosing = Diagnosing(run_dir, config, lambda found: self._queue.put_nowait(("", found)))
        opens = self._replay(records)
        same_boot = [o["anchor"] for o in opens if o["anchor"]["boot_id"] == boot_id()]
        self.anchor = msgspec.convert(same_boot[0], Anchor) if same_boot else Anchor.take()
        self._launch = launch
        new = not opens or (opens[-1]["launch"] != launch and not takes_over)
        self.attempt = _next_attempt(self.job.attempt) if new else self.job.attempt
        self.servers: list[Any] = []
        self._holdings = Holdings(config.memory_tier)
        self.leases = LeaseBook(config.lease_s, longest_s=self.job.longest_lease_s)
        self._queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._connections: dict[str, Connection] = {}
        self._just_welcomed: list[str] = []
        self._told_version = -1
        self._waiters: list[tuple[str, m.KvWait, float]] = []
        self._lost: dict[str, str] = {}
        self._last_note_ns = max((k.t_ns for k in self.job.marks), default=0)
        self._join_expired = False
        self._last_call = False
        self._heard_end: set[str] = set()
        self._done_since: float | None = None
        self._commit([self._open_record(), *self._opening_marks(new, started_boot_ns)])
        self._files.write_replayed()
        # Those that an earlier coordinator did not come to.
        self._diagnosing.want_from(self.job, 0)
        if self.job.phase == "done":
            # The one before wrote its verdict to the journal and may not have got any further.
            self._files.write_end()

    def _replay(self, records: list[Record]) -> list[Record]:
        """Apply all records. Returns the `open` ones."""
        opens: list[Record] = []
        for record in records:
            record.pop("seq", None)
            self.job.apply(record)
            if record["type"] == "open":
                opens.append(record)
            if record["type"] in ENDS_CYCLE:
                self._files.note_replayed()
        return opens

    def _open_record(self) -> Record:
        return {
            "type": "open",
            "epoch": self.journal.epoch,
            "attempt": self.attempt,
            "launch": self._launch,
            "read": self._read,
            "pid": os.getpid(),
            "anchor": msgspec.to_builtins(self.anchor),
            "marker": self._read_marker(),
        }

    def _opening_marks(self, new: bool, started_boot_ns: int) -> list[Record]:
        if new:
            mark = self.job.mark("run_started", self.anchor.utc(started_boot_ns))
        else:
            mark = self.job.mark("gap", self.anchor.now(), begin_ns=self._last_note_ns, end_ns=self.anchor.now())
        mark["mark"]["attempt"] = self.attempt
        return [mark]

    def _commit(self, records: list[Record]) -> None:
        """Journal, then apply (used where nobody waits)."""
        self.journal.append(records)
        for record in records:
            self.job.apply(record)

    # ---- connections

    async def serve_agent(self, socket: WebSocket, network: bool) -> None:
        """One agent's connection. `network`: it must prove the job token first."""
        node = ""
        connection: Connection | None = None
        try:
            hello, peer = await self.admission.admit(socket, network, self.journal.epoch)
            if not hello.next_addr:
                hello = msgspec.structs.replace(hello, next_addr=peer)
            # Looked at now for a clear answer; the task that changes state asks again.
            _, refused = self.job.join(hello, hello.node in self._connections, self.anchor.now())
            if refused is not None:
                self.admission.count("refused_join")
                if refused.result and self.job.shape.movable and self.leases.expired([hello.node]):
                    # All may be silent, so that the watcher gives up none; of this one somebody has to know.
                    self._lost[hello.node] = "its lease is over, and its host is another or was started again"
                    self._queue.put_nowait(("", None))
                await self.admission.refuse(socket, refused)
                return
            node = hello.node
            before = self._connections.get(node)
            if before is not None:
                before.close()
            connection = self._connections[node] = Connection(socket, hello)
            self.leases.heard(node)
            self._queue.put_nowait((node, hello))
            while True:
                message = _decode(await socket.receive_text())
                self.leases.heard(node)
                if isinstance(message, m.Beat):
                    await connection.answer(self._beat(node, message))
                elif isinstance(message, m.KeepNote | m.GetKept | m.Locate):
                    await connection.answer(self._answer_held(node, message))
                elif isinstance(message, m.GetCycle):
                    # Changes nothing and is long: made when there is room for it, not for all nodes at once.
                    await connection.answer(to_json(self.job.handle(node, message, 0)[1]).decode())
                else:
                    self._queue.put_nowait((node, message))
        except RefusedConnectionError as error:
            await self.admission.refuse(socket, m.Reply(epoch=self.journal.epoch, id=-1, ok=False, error=str(error)))
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            self.admission.count("malformed")
            print(f"coordinator: node {node or '?'}: malformed message: {error}", file=sys.stderr, flush=True)
            why = f"malformed message: {error}"
            await self.admission.refuse(socket, m.Reply(epoch=self.journal.epoch, id=-1, ok=False, error=why))
        except WebSocketDisconnect as gone:
            self.admission.closed(gone.code)
        except (RuntimeError, asyncio.CancelledError):
            # Cancelled: its node was given up, or came back on another connection.
            pass
        finally:
            if connection is not None:
                connection.close()
            if node and self._connections.get(node) is connection:
                del self._connections[node]
                # The task that changes state looks whether anybody is left to serve.
                self._queue.put_nowait((node, None))

    async def serve_operator(self, socket: WebSocket, network: bool) -> None:
        """One command of a person: answered, then closed."""
        try:
            message = await self.admission.admit_operator(socket, network, self.journal.epoch)
        except RefusedConnectionError as error:
            await self.admission.refuse(socket, m.Reply(epoch=self.journal.epoch, id=-1, ok=False, error=str(error)))
            return
        except WebSocketDisconnect as gone:
            self.admission.closed(gone.code)
            return
        except RuntimeError:
            return
        answer: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(("", (message, answer)))
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await socket.send_text(to_json(await answer).decode())
            await socket.close()

    def fenced(self, node: str, pid: int, boot: str) -> bool:
        """A guardian's word that its agent is dead and no rank of the node is left. False when it is about another life."""
        known = self.job.nodes.get(node)
        if known is None or (known.pid, known.boot_id) != (pid, boot):
            return False
        self._lost[node] = "its launcher died and its ranks with it"
        self._queue.put_nowait(("", None))
        return True

    def _beat(self, node: str, message: m.Beat) -> str:
        """Renew a lease. Answered by who reads: nothing of it is journaled, and thousands come every second."""
        lease_s = self.leases.renew(node, message.rtt_s)
        self.job.beat(node, message)
        reply = m.Reply(
            epoch=self.journal.epoch, id=message.id, result={"lease_s": lease_s, "now_ns": self.anchor.now()}
        )
        return to_json(reply).decode()

    def _answer_held(self, node: str, message: m.KeepNote | m.GetKept | m.Locate) -> str:
        """Nothing of what memories hold is journaled; that a checkpoint is in two of them all over the job is a mark."""
        report = self._queue.put_nowait
        return self._holdings.answer(
            self.job, node, message, self.anchor.now(), self._send, lambda n, note: report((n, note))
        )

    # ---- the one task that changes state

    async def serve(self) -> None:
        """Handle messages until the job is over and every agent knows."""
        self.leases.begin()
        tasks = (self._watch(), self._files.keep_written(), self._diagnosing.serve())
        beside = [asyncio.create_task(task) for task in tasks]
        for task in beside:
            task.add_done_callback(_end_if_failed)
        try:
            while not self._finished():
                batch = [await self._queue.get()]
                while not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                await self._handle_batch(batch)
        finally:
            for task in beside:
                task.cancel()
            self.admission.report()
            for server in self.servers:
                server.should_exit = True

    def _finished(self) -> bool:
        """The job is over, nobody is connected, and nobody is left that could still ask how it ended."""
        if self.job.phase != "done":
            return False
        now = asyncio.get_running_loop().time()
        if self._done_since is None:
            self._done_since = now
        assert self.job.verdict is not None
        awaited = set(self.job.nodes) - self._heard_end
        held = now - self._done_since
        # Also a node that stands still with its connection open is waited for no longer than that.
        if (self._connections or awaited) and held < HOLD_OPEN_S:
            return False
        if self._diagnosing.open and held < END_WAIT_S:
            return False
        # Nodes that were lost for good must not hold up a job that ended well.
        back = bool(self.job.away) and self.job.verdict.outcome in ("no_restart", "failed")
        return not back or held >= 2 * self.leases.base_s

    async def _handle_batch(self, batch: list[tuple[str, Any]]) -> None:
        records: list[Record] = []
        replies: list[tuple[str, m.FromCoordinator]] = []
        answers: list[tuple[asyncio.Future[m.Reply], m.Reply]] = []

        def take(new: list[Record]) -> None:
            for record in new:
                incidents = len(self.job.incidents)
                if record["type"] in TIMED:
                    record.setdefault("t_ns", self.anchor.now())
                self.job.apply(record)
                if record["type"] in ENDS_CYCLE:
                    self._files.note_ended()
                elif record["type"] in CHANGES_CYCLE or len(self.job.incidents) > incidents:
                    self._files.note_changed()
                self._diagnosing.want_from(self.job, incidents)
            records.extend(new)

        # Only this task writes the journal: the watcher says who is gone, here it becomes a record.
        lost, self._lost = self._lost, {}
        for node, why in lost.items():
            take(self.job.lose(node, self.anchor.now(), self._seen_ns(node), why))
            self.leases.forget(node)
            self._holdings.forget(node)
            if node in self._connections and node not in self.job.nodes:
                self._connections.pop(node).close()
        attributed = [message for _, message in batch if isinstance(message, Attributed)]
        for found in attributed:
            verdict = verdict_of(found)
            node = next((n for n in self.job.cycle.nodes if n in self._connections), "") if self.job.cycle else ""
            text = f"{found.name}: {said(verdict)}"
            self._send(node, m.Tell(epoch=self.journal.epoch, incident=found.name, text=text))
            take(attributed_records(self.job, found.name, found.fault, verdict))
        for node, message in batch:
            if isinstance(message, Attributed):
                continue
            if isinstance(message, tuple):
                operator, answer = message
                status = status_of(self.job, self._connections, self.leases, self.admission)
                new, result = operate(self.job, operator, self.anchor.now(), self._tell_all, status)
                take(new)
                answers.append((answer, result))
            elif message is not None:
                replies.append((node, self._handle(node, message, take)))
        take(self.job.step_mark(self.anchor.now()))
        if self.leases.wanted_s > self.leases.longest_s:
            take([{"type": "lease", "longest_s": self.leases.wanted_s}])
        if self._join_expired and self.job.phase == "forming":
            take(self.job.give_up_joining(self.anchor.now(), self.config.join_timeout_s))
        self._join_expired = False
        while due := self.job.advance(self.anchor.now(), self._connections.__contains__, self._last_call):
            take(due)
        await self._make_durable(records)
        if attributed:
            await self._files.note_attributed()
        self.leases.longest_s = max(self.leases.longest_s, self.job.longest_lease_s)
        for node, reply in replies:
            if not (isinstance(reply, m.Reply) and reply.id < 0):
                self._send(node, reply)
        for answer, result in answers:
            if not answer.done():
                answer.set_result(result)
        self._answer_waiters()
        self._command_all()

    async def _make_durable(self, records: list[Record]) -> None:
        if records:
            await asyncio.to_thread(self.journal.append, records)
            self._leave_if_superseded()
        if any(r["type"] == "verdict" for r in records):
            await self._files.end()

    def _seen_ns(self, node: str) -> int:
        """When a node was last heard of, in UTC."""
        return self.anchor.now() - int(self.leases.silence_s(node) * 1e9)

    def _handle(self, node: str, message: m.FromAgent, take: Any) -> m.FromCoordinator:
        job, epoch = self.job, self.journal.epoch
        if isinstance(message, m.Hello):
            connection = self._connections.get(node)
            if connection is None or connection.hello is not message:
                # Of two that connected under one name the later one counts; the other is told when it tries again.
                return m.Reply(epoch=epoch, id=-1)
            # Asked again: since the connection began, another node may have taken the name.
            records, refused = job.join(message, False, self.anchor.now())
            if refused is not None:
                return refused
            take(records)
            connection.welcomed = True
            self._just_welcomed.append(node)
            return m.Welcome(
                epoch=epoch,
                attempt=job.attempt,
                boot_id=self.anchor.boot_id,
                anchor_utc_ns=self.anchor.utc_ns,
                anchor_boot_ns=self.anchor.boot_ns,
                lease_s=self.leases.base_s,
                log_addr=self.admission.log_addr,
                folder_id=self.admission.folder_id,
                role=job.role_of(node),
                reason=job.excluded.get(node, ""),
            )
        if isinstance(message, m.KvWait):
            limit = asyncio.get_running_loop().time() + message.timeout_s
            self._waiters.append((node, message, limit))
            asyncio.get_running_loop().call_at(limit, self._queue.put_nowait, (node, None))
            return m.Reply(epoch=epoch, id=-1)
        records, reply = job.handle(node, message, self.anchor.now())
        if not reply.ok and not records:
            self.admission.count("old_cycle")
        take(records)
        return reply

    def _answer_waiters(self) -> None:
        if not self._waiters:
            return
        now = asyncio.get_running_loop().time()
        waiting, self._waiters = self._waiters, []
        for node, message, limit in waiting:
            kv = self.job.cycle.kv if self.job.cycle is not None else {}
            missing = [k for k in message.keys if k not in kv]
            fenced = self.job.fenced(message)
            if fenced is None and missing and now < limit:
                self._waiters.append((node, message, limit))
                continue
            error = fenced or ("timeout" if missing else None)
            result: dict[str, Any] = {"missing": missing} if missing else {"values": {k: kv[k] for k in message.keys}}
            self._send(
                node, m.Reply(epoch=self.journal.epoch, id=message.id, ok=error is None, error=error, result=result)
            )

    def _command_all(self) -> None:
        """Tell nodes what follows from the state: all of them when it changed for all, else those that just came."""
        nodes = self._just_welcomed if self._told_version == self.job.version else list(self._connections)
        self._told_version, self._just_welcomed = self.job.version, []
        encoded: dict[type[m.FromCoordinator], str] = {}
        for node in nodes:
            connection = self._connections.get(node)
            if connection is None or not connection.welcomed:
                continue
            command = self.job.command_for(node)
            if command is None:
                continue
            # Every node is told the same, but for StartCycle: encoded once.
            text = encoded.get(type(command))
            if text is None or isinstance(command, m.StartCycle):
                text = encoded[type(command)] = to_json(command).decode()
            if connection.last_command != text:
                connection.last_command = text
                connection.send(text)
            if isinstance(command, m.End):
                self._heard_end.add(node)

    def _send(self, node: str, message: m.FromCoordinator) -> None:
        connection = self._connections.get(node)
        if connection is not None:
            connection.send(to_json(message).decode())

    def _tell_all(self, message: m.FromCoordinator) -> None:
        for node in self._connections:
            self._send(node, message)

    def _leave_if_superseded(self) -> None:
        """Before anything is acknowledged: another coordinator that took over may not have read it."""
        if self.journal.superseded():
            print("coordinator: a newer epoch exists; leaving", file=sys.stderr, flush=True)
            os._exit(0)

    # ---- nodes that go away, and time that passes

    async def _watch(self) -> None:
        """Notice leases that ran out, nodes that never come, and that nobody is left to serve."""
        loop = asyncio.get_running_loop()
        tick_s = min(1.0, self.leases.base_s / 5)
        since = dict.fromkeys(("incomplete", "enough", "empty"), loop.time())
        last = loop.time()
        while True:
            await asyncio.sleep(tick_s)
            now = loop.time()
            if now - last > tick_s + 1.0:
                # This process was not running itself: that nothing was heard says nothing about the nodes.
                self.leases.forgive(now - last)
            last = now
            self._leave_if_superseded()
            if len(self.config.endpoints) > 1:
                await asyncio.to_thread(self.show_life)
            job = self.job
            usable = job.usable()
            forming = job.phase == "forming"
            if not forming:
                since["incomplete"] = now
            if not forming or usable < job.shape.min_nodes:
                since["enough"] = now
            if forming and now - since["incomplete"] > self.config.join_timeout_s:
                self._join_expired = True
            self._last_call = now - since["enough"] > self.config.last_call_s
            if job.phase != "done":
                late = self.leases.expired(n for n in job.nodes if job.shape.movable)
                # When nobody at all is heard it is this host that is cut off, and there is nobody to give ranks to.
                if late and self.leases.hears(job.nodes):
                    self._lost.update(dict.fromkeys(late, f"not heard of for its lease of {self.leases.base_s:g} s"))
            if self._connections:
                since["empty"] = now
            elif not self._stays and now - since["empty"] > 2 * self.leases.base_s and job.phase != "done":
                print("coordinator: no agent left; leaving", file=sys.stderr, flush=True)
                os._exit(0)
            self._queue.put_nowait(("", None))

    def show_life(self) -> None:
        """For launchers that stand by: a coordinator whose file stands still is dead (renewal.stand_by)."""
        with contextlib.suppress(OSError):
            (self.run_dir / "journal" / "alive").write_text(f"{self.journal.epoch} {time.monotonic_ns()}\n")


def _end_if_failed(task: asyncio.Task[None]) -> None:
    """A coordinator that no longer watches must not look as if it did: another takes its place at once."""
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def _next_attempt(last: int) -> int:
    """Slurm's restart count when it is ahead of the journal, else the next number."""
    slurm = os.environ.get("SLURM_RESTART_COUNT", "")
    return max(last + 1, int(slurm) if slurm.isdigit() else 0)
