"""The coordinator process of a job: a WebSocket server for agents over the journal and the state in `job`.

Start: `python -m keepstep.launcher.coordinator --run-dir DIR --socket PATH --started-ns N --launch ID`. One task handles all
messages in order: state changes in memory, the journal is fsynced, and only then are replies and commands sent. Batches form
by themselves while the disk is busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor, boot_id
from keepstep.launcher.config import RunConfig
from keepstep.launcher.files import write_durable
from keepstep.launcher.job import Job, Record
from keepstep.launcher.journal import Journal, read_records
from keepstep.launcher.runfolder import cycle_record, has_ended, write_cycle, write_summary
from keepstep.records.codec import from_json, to_json, to_pretty_json
from keepstep.records.cycle import Cycle
from keepstep.records.errors import KeepstepError

CHANGES_VIEW = ("cycle", "started", "stopped", "decision", "verdict")

_decode = msgspec.json.Decoder(m.FromAgent).decode


class Coordinator:
    """Wires the job's state to its journal and to the agents' connections."""

    def __init__(self, run_dir: Path, launch: str, started_boot_ns: int) -> None:
        config = from_json((run_dir / "run.json").read_bytes(), RunConfig)
        self.run_dir = run_dir
        self.lease_s = config.lease_s
        self.join_timeout_s = config.join_timeout_s
        self.job = Job(config.run_id, config.nnodes, config.max_restarts, (config.master_addr, config.master_port))
        # Claimed first: from here on an older coordinator acknowledges nothing more.
        self.journal = Journal.claim(run_dir)
        records = read_records(run_dir)
        self._read = len(records)
        opens, views = self._replay(records)
        same_boot = [o["anchor"] for o in opens if o["anchor"]["boot_id"] == boot_id()]
        self.anchor = msgspec.convert(same_boot[0], Anchor) if same_boot else Anchor.take()
        self._launch = launch
        new = not opens or opens[-1]["launch"] != launch
        self.attempt = _next_attempt(self.job.attempt) if new else self.job.attempt
        self.server: uvicorn.Server | None = None
        self._queue: asyncio.Queue[tuple[str, m.FromAgent | None]] = asyncio.Queue()
        self._sockets: dict[str, WebSocket] = {}
        self._told: dict[str, bytes] = {}
        self._waiters: list[tuple[str, m.KvWait, float]] = []
        self._last_seen: dict[str, float] = {}
        self._lost: list[str] = []
        self._last_note_ns = max((k.t_ns for k in self.job.marks), default=0)
        self._join_expired = False
        self._commit([self._open_record(), *self._opening_marks(new, started_boot_ns)])
        self._write_cycles(views)
        if self.job.phase == "done":
            # The one before wrote its verdict to the journal and may not have got any further.
            self._write_end({})

    def _replay(self, records: list[Record]) -> tuple[list[Record], dict[int, Cycle]]:
        """Apply all records. Returns the `open` ones, and records of ended cycles whose file was not brought up to date."""
        opens: list[Record] = []
        views: dict[int, Cycle] = {}
        for record in records:
            record.pop("seq", None)
            self.job.apply(record)
            if record["type"] == "open":
                opens.append(record)
            cycle = self.job.cycle if record["type"] in ("decision", "verdict") else None
            if cycle is not None and not has_ended(self.run_dir, cycle.number):
                views[cycle.number] = cycle_record(self.job, ended=True)
        return opens, views

    def _open_record(self) -> Record:
        return {
            "type": "open",
            "epoch": self.journal.epoch,
            "attempt": self.attempt,
            "launch": self._launch,
            "read": self._read,
            "pid": os.getpid(),
            "anchor": msgspec.to_builtins(self.anchor),
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

    async def endpoint(self, socket: WebSocket) -> None:
        """One agent's connection: its first message must be a Hello of this run."""
        await socket.accept()
        node = ""
        try:
            hello = _decode(await socket.receive_text())
            if not isinstance(hello, m.Hello):
                await self._refuse(socket, hello.id, "the first message must be hello")
                return
            _, refused = self.job.join(hello, set(self._sockets), self.anchor.now())
            if refused is not None:
                await self._refuse(socket, hello.id, refused)
                return
            node = hello.node
            self._sockets[node] = socket
            self._told.pop(node, None)
            await self._queue.put((node, hello))
            while True:
                message = _decode(await socket.receive_text())
                self._last_seen[node] = asyncio.get_running_loop().time()
                await self._queue.put((node, message))
        except msgspec.MsgspecError as error:
            print(f"coordinator: node {node or '?'}: malformed message: {error}", file=sys.stderr, flush=True)
            await self._refuse(socket, -1, f"malformed message: {error}")
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            if node and self._sockets.get(node) is socket:
                del self._sockets[node]
                self._last_seen[node] = asyncio.get_running_loop().time()
                # The task that changes state looks whether anybody is left to serve.
                self._queue.put_nowait((node, None))

    async def _refuse(self, socket: WebSocket, message_id: int, why: str) -> None:
        reply = m.Reply(epoch=self.journal.epoch, id=message_id, ok=False, error=why)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await socket.send_text(to_json(reply).decode())
            await socket.close(code=1008)

    # ---- the one task that changes state

    async def serve(self) -> None:
        """Handle messages until the job is over and every agent knows."""
        watcher = asyncio.create_task(self._watch_nodes())
        try:
            while not (self.job.phase == "done" and not self._sockets):
                batch = [await self._queue.get()]
                while not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                await self._handle_batch(batch)
        finally:
            watcher.cancel()
            if self.server is not None:
                self.server.should_exit = True

    async def _handle_batch(self, batch: list[tuple[str, m.FromAgent | None]]) -> None:
        records: list[Record] = []
        replies: list[tuple[str, m.FromCoordinator]] = []
        views: dict[int, Cycle] = {}

        def take(new: list[Record]) -> None:
            for record in new:
                self.job.apply(record)
                if record["type"] in CHANGES_VIEW and self.job.cycle is not None:
                    # Taken now: the next record of this batch may already open the next cycle.
                    ended = record["type"] in ("decision", "verdict")
                    views[self.job.cycle.number] = cycle_record(self.job, ended)
            records.extend(new)

        # Only this task writes the journal: the watcher says who is late, here it becomes a record.
        lost, self._lost = self._lost, []
        for node in lost:
            if node in self.job.nodes and node not in self._sockets:
                take([{"type": "node_lost", "node": node, "t_ns": self.anchor.now()}])
        for node, message in batch:
            if message is not None:
                replies.append((node, self._handle(node, message, take)))
        if self._join_expired and self.job.phase == "forming" and len(self.job.nodes) < self.job.nnodes:
            take(self.job.give_up_joining(self.anchor.now(), self.join_timeout_s))
        while due := self.job.advance(self.anchor.now(), set(self._sockets)):
            take(due)
        if records:
            await asyncio.to_thread(self.journal.append, records)
            self._leave_if_superseded()
        if any(r["type"] == "verdict" for r in records):
            await asyncio.to_thread(self._write_end, views)
        for node, reply in replies:
            if not (isinstance(reply, m.Reply) and reply.id < 0):
                await self._send(node, reply)
        await self._answer_waiters()
        await self._command_all()
        if views and self.job.phase != "done":
            # After the commands: a restart does not wait for files that the journal can make again.
            await asyncio.to_thread(self._write_cycles, views)

    def _handle(self, node: str, message: m.FromAgent, take: Any) -> m.FromCoordinator:
        job, epoch = self.job, self.journal.epoch
        if isinstance(message, m.Hello):
            # Asked again: since the connection began, another node may have taken the last place.
            records, refused = job.join(message, set(), self.anchor.now())
            if refused is not None:
                return m.Reply(epoch=epoch, id=message.id, ok=False, error=refused)
            take(records)
            return m.Welcome(
                epoch=epoch,
                attempt=job.attempt,
                boot_id=self.anchor.boot_id,
                anchor_utc_ns=self.anchor.utc_ns,
                anchor_boot_ns=self.anchor.boot_ns,
            )
        if isinstance(message, m.KvWait):
            limit = asyncio.get_running_loop().time() + message.timeout_s
            self._waiters.append((node, message, limit))
            asyncio.get_running_loop().call_at(limit, self._queue.put_nowait, (node, None))
            return m.Reply(epoch=epoch, id=-1)
        records, reply = job.handle(node, message)
        take(records)
        return reply

    async def _answer_waiters(self) -> None:
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
            reply = m.Reply(epoch=self.journal.epoch, id=message.id, ok=error is None, error=error, result=result)
            await self._send(node, reply)

    async def _command_all(self) -> None:
        for node in list(self._sockets):
            command = self.job.command_for(node)
            if command is None:
                continue
            encoded = to_json(command)
            if self._told.get(node) != encoded:
                self._told[node] = encoded
                await self._send(node, command)

    async def _send(self, node: str, message: m.FromCoordinator) -> None:
        socket = self._sockets.get(node)
        if socket is not None:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await socket.send_text(to_json(message).decode())

    def _leave_if_superseded(self) -> None:
        """Before anything is acknowledged: another coordinator that took over may not have read it."""
        if self.journal.superseded():
            print("coordinator: a newer epoch exists; leaving", file=sys.stderr, flush=True)
            os._exit(0)

    # ---- nodes that go away

    async def _watch_nodes(self) -> None:
        """Count a node as lost when its connection stayed away for the lease; end when nobody is left to serve."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        incomplete_since = started
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            self._leave_if_superseded()
            if self.job.phase != "forming" or len(self.job.nodes) == self.job.nnodes:
                incomplete_since = loop.time()
            elif loop.time() - incomplete_since > self.join_timeout_s:
                self._join_expired = True
                self._queue.put_nowait(("", None))
            absent = [n for n in self.job.nodes if n not in self._sockets]
            late = [n for n in absent if loop.time() - max(self._last_seen.get(n, started), started) > self.lease_s]
            if late and self.job.phase != "done" and len(late) < len(self.job.nodes):
                self._lost = late
                self._queue.put_nowait(("", None))
            if not self._sockets and loop.time() - max([*self._last_seen.values(), started]) > 2 * self.lease_s:
                print("coordinator: no agent left; leaving", file=sys.stderr, flush=True)
                os._exit(0)

    # ---- views: files that people and tools read, all made again from the journal

    def _write_cycles(self, views: dict[int, Cycle]) -> None:
        for record in views.values():
            write_cycle(self.run_dir, record)

    def _write_end(self, views: dict[int, Cycle]) -> None:
        """Before anybody is told to exit: the verdict is durable first."""
        assert self.job.verdict is not None
        write_durable(self.run_dir / "verdict.json", to_pretty_json(self.job.verdict))
        self._write_cycles(views)
        write_summary(self.run_dir, self.job)


def _next_attempt(last: int) -> int:
    """Slurm's restart count when it is ahead of the journal, else the next number."""
    slurm = os.environ.get("SLURM_RESTART_COUNT", "")
    return max(last + 1, int(slurm) if slurm.isdigit() else 0)


async def _main(args: argparse.Namespace) -> None:
    coordinator = Coordinator(Path(args.run_dir), args.launch, args.started_ns)
    app = Starlette(routes=[WebSocketRoute("/agent", coordinator.endpoint)])
    config = uvicorn.Config(
        app,
        uds=args.socket,
        ws="websockets-sansio",
        ws_max_size=m.MAX_MESSAGE_BYTES,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    server = coordinator.server = uvicorn.Server(config)
    Path(args.socket).unlink(missing_ok=True)
    await asyncio.gather(server.serve(), coordinator.serve())


def main() -> None:
    """Entry point of the coordinator process."""
    parser = argparse.ArgumentParser(prog="keepstep-coordinator")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--started-ns", type=int, required=True, help="CLOCK_BOOTTIME when the launcher started")
    parser.add_argument(
        "--launch", required=True, help="id of the launcher's life; the same one goes on with its attempt"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    try:
        asyncio.run(_main(args))
    except KeepstepError as error:
        print(f"coordinator: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
