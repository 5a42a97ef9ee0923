"""The agent's Unix socket for its ranks (wire format: keepstep.records.frames): the side channel and the marks of ranks.

The agent forwards what the whole job shares to the coordinator and answers the rest itself. While the coordinator is away a
rank's request simply waits: it is repeated to the next one.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, Protocol

from keepstep.launcher.procs import available_memory_bytes, make_memfd
from keepstep.records import frames
from keepstep.records.errors import ChannelError

MAX_BUFFERS = 64
MAX_REASON_CHARS = 2000


class RankHost(Protocol):
    """What the socket needs from the agent."""

    run_id: str

    def current_cycle(self) -> int: ...

    async def share(self, op: str, cycle: int, request: dict[str, Any]) -> dict[str, Any]:
        """Forward set, get, cas, wait or grant. Raises ChannelError."""
        ...

    def report(self, cycle: int, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """Take a mark; the rank does not wait for the disk."""
        ...

    async def request(self, cycle: int, rank: int, what: str, reason: str) -> None:
        """Pass on what a rank asks for ("stop" or "exclude"); returns when it is journaled. Raises ChannelError."""
        ...

    def inject(self, cycle: int, spec: str) -> str | None:
        """Carry out an injection; returns why not, or None."""
        ...


class StagingBuffers:
    """memfds that outlive a rank: the same name and size gives the same memory again, in every cycle."""

    def __init__(self) -> None:
        self._fds: dict[tuple[int, str], tuple[int, int]] = {}

    def get(self, rank: int, name: str, size_bytes: int) -> int:
        """Descriptor of the buffer, made or replaced when the size differs. Raises OSError (no memory) or ValueError."""
        if size_bytes <= 0:
            raise ValueError(f"buffer {name!r}: size {size_bytes} bytes")
        held = self._fds.get((rank, name))
        if held is not None and held[1] == size_bytes:
            return held[0]
        if held is None and len([k for k in self._fds if k[0] == rank]) >= MAX_BUFFERS:
            raise ValueError(f"rank {rank} has {MAX_BUFFERS} buffers already")
        if held is not None:
            os.close(held[0])
            del self._fds[rank, name]
        available = available_memory_bytes()
        if size_bytes > available:
            # Asking the kernel instead would not fail: it would kill something.
            raise OSError(errno.ENOMEM, f"only {available} bytes of memory are available")
        fd = make_memfd(f"keepstep-{rank}-{name}"[:200], size_bytes)
        self._fds[rank, name] = (fd, size_bytes)
        return fd

    def close(self) -> None:
        """Give the memory back."""
        for fd, _ in self._fds.values():
            os.close(fd)
        self._fds.clear()


class RankServer:
    """Accepts ranks of the current cycle only."""

    def __init__(self, path: Path, host: RankHost) -> None:
        self.path = path
        self.refused = 0
        self.buffers = StagingBuffers()
        self._host = host
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen. The folder is 0700, so only this user gets here."""
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=frames.MAX_FRAME_BYTES)

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        self.path.unlink(missing_ok=True)
        self.buffers.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            cycle, rank = await self._greet(reader, writer)
            while True:
                request = await self._recv(reader)
                reply, fd = await self._answer(cycle, rank, request)
                await self._reply(writer, reply, fd)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            self.refused += 1
            await self._refuse(writer, f"malformed request: {error}")
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        try:
            await self._reply(writer, {"ok": False, "error": why}, None)
        except (ConnectionError, ValueError):
            return

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, int]:
        hello = await self._recv(reader)
        if hello.get("op") != "hello" or hello.get("run_id") != self._host.run_id:
            raise ValueError("the first request must be hello of this run")
        cycle, rank = int(hello["cycle"]), int(hello["rank"])
        if cycle != self._host.current_cycle():
            self.refused += 1
            await self._refuse(writer, f"cycle {cycle} is over; this agent runs cycle {self._host.current_cycle()}")
            raise ConnectionError
        await self._reply(writer, {"ok": True}, None)
        return cycle, rank

    async def _recv(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        if length > frames.MAX_FRAME_BYTES:
            raise ValueError(f"frame of {length} bytes is over the limit of {frames.MAX_FRAME_BYTES}")
        message = json.loads(await reader.readexactly(length))
        if not isinstance(message, dict):
            raise ValueError("frame is not a JSON object")
        return message

    async def _reply(self, writer: asyncio.StreamWriter, reply: dict[str, Any], fd: int | None) -> None:
        data = frames.pack(reply)
        if fd is None:
            writer.write(data)
            await writer.drain()
            return
        await writer.drain()
        transport_socket = writer.get_extra_info("socket")
        with socket.socket(fileno=os.dup(transport_socket.fileno())) as raw:
            # A rank waits for this reply, so its socket buffer is empty and the frame fits whole.
            sent = socket.send_fds(raw, [data], [fd])
        if sent != len(data):
            writer.write(data[sent:])
            await writer.drain()

    async def _answer(self, cycle: int, rank: int, request: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        op = request.get("op")
        if cycle != self._host.current_cycle():
            return {"ok": False, "error": f"cycle {cycle} is over"}, None
        match op:
            case "set" | "get" | "cas" | "wait" | "grant":
                try:
                    return {"ok": True, **await self._host.share(op, cycle, request)}, None
                except ChannelError as error:
                    return {"ok": False, "error": str(error), **(getattr(error, "result", None) or {})}, None
            case "report":
                self._host.report(cycle, rank, str(request["kind"]), dict(request["fields"]))
                return {"ok": True}, None
            case "request":
                what, reason = str(request["what"]), str(request["reason"])[:MAX_REASON_CHARS]
                if what not in ("stop", "exclude"):
                    raise ValueError(f"request {what!r}: neither stop nor exclude")
                try:
                    await self._host.request(cycle, rank, what, reason)
                except ChannelError as error:
                    return {"ok": False, "error": str(error)}, None
                return {"ok": True}, None
            case "buffer":
                try:
                    fd = self.buffers.get(rank, str(request["name"]), int(request["size_bytes"]))
                except OSError as error:
                    return {
                        "ok": False,
                        "error": f"no memory for a buffer of {request['size_bytes']} bytes: {error}",
                    }, None
                return {"ok": True, "size_bytes": int(request["size_bytes"])}, fd
            case "inject":
                why = self._host.inject(cycle, str(request["spec"]))
                return ({"ok": True} if why is None else {"ok": False, "error": why}), None
        raise ValueError(f"unknown op {op!r}")
