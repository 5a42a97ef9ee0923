"""Connections of the log writer's agents, and the batches that their output is put into; see logserver.py for the process."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import Counter, deque
from typing import Any, cast

from keepstep.launcher.output import logwire as w
from keepstep.launcher.output.logstore import LAUNCHER_LOG, Batch, LogStore
from keepstep.launcher.trust import proven

HELLO_S = 10.0
RETRY_S = 1.0
REPEAT_ACK_S = 2.0
GATHER_S = 0.005
GATHER_BYTES = 1 << 20
"""A batch below this size waits GATHER_S for more, so that many small writers cost few writes."""
BATCH_BYTES = 8 << 20
"""A larger one is written by parts, so that reading goes on while the disk is busy."""
SMALL_FRAME_BYTES = 1 << 17
BIG_FRAMES = 16
BIG_FRAME_S = 30.0
UNREAD_ACKS_BYTES = 1 << 16
MAX_CONNECTIONS = 10_000


class Writer:
    """State that all connections share: the batch that grows, the one being written, and who may not be read."""

    def __init__(self, store: LogStore, run_id: str, token: bytes | None, memory_bytes: int) -> None:
        self.store = store
        self.run_id = run_id
        self.token = token
        self.refused: Counter[str] = Counter()
        self.connections: set[Connection] = set()
        self.nodes: dict[str, Connection] = {}
        self.accepted: dict[str, tuple[str, int]] = dict(store.seqs)
        """Node -> (life, last frame taken): what is on file and what waits to be."""
        self.frames = self.size_bytes = self.unwritten_bytes = self.failed_writes = 0
        self.big_frames = BIG_FRAMES
        self.waiting_big: deque[Connection] = deque()
        self.full = self.ending = False
        self._memory_bytes = memory_bytes
        self._batches = deque([Batch()])
        self._work = asyncio.Event()

    # ---- what comes in

    def take(self, node: str, life: str, item: w.Text | w.Evidence) -> None:
        """Add a frame to the batch; one that was taken before is skipped."""
        if item.seq <= self.accepted[node][1]:
            return
        self.accepted[node] = (life, item.seq)
        if self._batches[-1].size_bytes > BATCH_BYTES:
            self._batches.append(Batch())
        batch = self._batches[-1]
        if isinstance(item, w.Evidence):
            batch.evidence.append((node, item))
            size = len(item.data) + 256
        else:
            name, prefix = f"cycle-{item.cycle:04d}.log", b"[rank %d] " % item.rank
            if item.rank == w.LAUNCHER_RANK:
                name, prefix = LAUNCHER_LOG, f"[{node}] ".encode()
            text = w.prefixed(prefix, item.data)
            batch.texts.setdefault(name, []).append(text)
            size = len(text) + 64
        batch.seqs[node] = (life, item.seq)
        batch.size_bytes += size
        self.frames += 1
        self.size_bytes += len(item.data)
        self.unwritten_bytes += size
        self._work.set()
        if self.unwritten_bytes > self._memory_bytes and not self.full:
            self.full = True
            for each in self.connections:
                each.update_reading()

    # ---- to the disk

    async def write_forever(self) -> None:
        """Write batch after batch; returns after `end` when nothing is left, or when the disk does not take the rest."""
        while True:
            if not self._batches[0].size_bytes:
                if self.ending:
                    return
                self._work.clear()
                await self._work.wait()
            if self._batches[0].size_bytes < GATHER_BYTES and not self.ending:
                await asyncio.sleep(GATHER_S)
            batch = self._batches.popleft()
            if not self._batches:
                self._batches.append(Batch())
            if batch.size_bytes and not await self._write(batch):
                return
            self._acknowledge(batch)

    def end(self) -> None:
        """Read no more, and let write_forever return when what was read is on file."""
        self.ending = True
        for each in self.connections:
            each.update_reading()
        self._work.set()

    async def _write(self, batch: Batch) -> bool:
        failed = False
        while True:
            try:
                await asyncio.to_thread(self.store.write, batch)
                if failed:
                    say("the log files can be written again")
                return True
            except OSError as error:
                self.failed_writes += 1
                if not failed:
                    say(f"the log files cannot be written: {error.strerror}; trying again every {RETRY_S:g} s")
                failed = True
            if self.ending:
                return False
            await asyncio.sleep(RETRY_S)

    def _acknowledge(self, batch: Batch) -> None:
        self.unwritten_bytes -= batch.size_bytes
        for node, (life, seq) in batch.seqs.items():
            connection = self.nodes.get(node)
            if connection is not None and connection.life == life:
                connection.acknowledge(seq)
        if self.full and self.unwritten_bytes <= self._memory_bytes // 2:
            self.full = False
            for each in self.connections:
                each.update_reading()

    async def repeat_acks(self) -> None:
        """Show agents whose frames wait for the disk that somebody is here."""
        while True:
            await asyncio.sleep(REPEAT_ACK_S)
            for node, connection in self.nodes.items():
                written = self.store.seqs.get(node, ("", 0))
                if self.accepted.get(node) != written and connection.life:
                    connection.acknowledge(written[1] if written[0] == connection.life else 0)

    def status(self) -> dict[str, Any]:
        """What logs/funnel.json says."""
        return {
            "schema": "keepstep.funnel/1",
            "pid": os.getpid(),
            "nodes": len(self.nodes),
            "frames": self.frames,
            "size_bytes": self.size_bytes,
            "failed_writes": self.failed_writes,
            "evidence_refused": self.store.evidence_refused,
            "copy_lost_bytes": self.store.copy_lost_bytes,
            "refused": dict(self.refused),
        }


class Connection(asyncio.Protocol):
    """One agent, or somebody who has not shown yet that it is one."""

    def __init__(self, writer: Writer) -> None:
        self.life = ""
        self._node = ""
        self._writer = writer
        self._nonce = secrets.token_hex(16)
        self._buffer = bytearray()
        self._big = False
        self._waits_big = False
        self._reading = True
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer: asyncio.TimerHandle | None = None
        if len(self._writer.connections) >= MAX_CONNECTIONS:
            self._writer.refused["too many connections"] += 1
            self._gone = True
            self._transport.abort()
            return
        self._writer.connections.add(self)
        self._transport.write(w.json_frame(w.CHALLENGE, w.Challenge(self._nonce)))
        self._limit_time(HELLO_S, "no hello")
        self.update_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._limit_time(None)
        self._writer.connections.discard(self)
        if self._writer.nodes.get(self._node) is self:
            del self._writer.nodes[self._node]
        self._release_big()

    def data_received(self, data: bytes) -> None:
        if self._gone:
            return
        self._buffer += data
        try:
            for kind, body in w.take_frames(self._buffer, w.MAX_FRAME_BYTES if self._node else w.MAX_HELLO_BYTES):
                self._on_frame(kind, body)
        except w.WireError as error:
            self._refuse(error)
            return
        self._release_big()
        self._want_big()

    def _on_frame(self, kind: int, body: bytes) -> None:
        if not self._node:
            if kind != w.HELLO:
                raise w.WireError("no hello", f"frame of kind {kind}")
            self._admit(w.parse_hello(body))
        elif kind == w.DATA:
            self._writer.take(self._node, self.life, w.parse_text(body))
        elif kind == w.EVIDENCE:
            self._writer.take(self._node, self.life, w.parse_evidence(body))
        else:
            raise w.WireError("unknown kind", str(kind))

    def _admit(self, hello: w.Hello) -> None:
        writer = self._writer
        if writer.token is not None and not proven(writer.token, self._nonce, hello.run_id, hello.node, hello.proof):
            raise w.WireError("no proof of the job token")
        if hello.run_id != writer.run_id:
            raise w.WireError("wrong run", repr(hello.run_id[:100]))
        older = writer.nodes.get(hello.node)
        if older is not None:
            older.drop()
        self._node, self.life = hello.node, hello.life
        writer.nodes[hello.node] = self
        if writer.accepted.get(hello.node, ("", 0))[0] != hello.life:
            writer.accepted[hello.node] = (hello.life, 0)
        written = writer.store.seqs.get(hello.node, ("", 0))
        self._limit_time(None)
        self._transport.write(w.json_frame(w.WELCOME, w.Welcome(written[1] if written[0] == hello.life else 0)))
        self.update_reading()

    def _refuse(self, error: w.WireError) -> None:
        self._writer.refused[error.reason] += 1
        self._transport.write(w.json_frame(w.REFUSED, w.Refused(str(error)[:300])))
        self._gone = True
        self._buffer.clear()
        self._transport.close()
        # A peer that reads nothing cannot hold the connection open.
        asyncio.get_running_loop().call_later(HELLO_S, self._transport.abort)

    def drop(self) -> None:
        """Close without a word: the same node has a newer connection."""
        self._gone = True
        self._transport.abort()

    def finish(self) -> None:
        """Close after the last acknowledgement is out."""
        self._gone = True
        self._transport.close()

    def acknowledge(self, seq: int) -> None:
        if self._transport.get_write_buffer_size() > UNREAD_ACKS_BYTES:
            self._writer.refused["reads no acks"] += 1
            self.drop()
            return
        if not self._gone:
            self._transport.write(w.frame(w.ACK, w.SEQ.pack(seq)))

    # ---- memory

    def update_reading(self) -> None:
        """Read exactly while there is memory for it."""
        # A hello is small, and an agent that waits for an answer to it would take this process for dead.
        full = self._writer.full and bool(self._node)
        wanted = not (full or self._writer.ending or self._waits_big)
        if wanted != self._reading and not self._gone and not self._transport.is_closing():
            self._reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _want_big(self) -> None:
        if self._big or self._waits_big or w.wanted_bytes(self._buffer) <= SMALL_FRAME_BYTES:
            return
        if self._writer.big_frames:
            self._writer.big_frames -= 1
            self._big = True
            self._limit_time(BIG_FRAME_S, "unfinished frame")
        else:
            self._waits_big = True
            self._writer.waiting_big.append(self)
            self.update_reading()

    def _release_big(self) -> None:
        """After a big frame is whole, or its connection gone: the next connection in line may read one."""
        if not self._big or (not self._gone and w.wanted_bytes(self._buffer) > SMALL_FRAME_BYTES):
            return
        self._big = False
        self._limit_time(None)
        self._writer.big_frames += 1
        while self._writer.waiting_big and self._writer.big_frames:
            following = self._writer.waiting_big.popleft()
            if not following._gone:
                following._waits_big = False
                following._want_big()
                following.update_reading()

    def _limit_time(self, seconds: float | None, reason: str = "") -> None:
        """Refuse the connection after so long for this reason, unless it was not read meanwhile."""
        if self._timer is not None:
            self._timer.cancel()

        def late() -> None:
            if self._reading:
                self._refuse(w.WireError(reason))
            else:
                self._limit_time(seconds, reason)

        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, late)


def say(text: str) -> None:
    print(f"log writer: {text}", file=sys.stderr, flush=True)
