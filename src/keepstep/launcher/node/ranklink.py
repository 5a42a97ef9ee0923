"""The agent's Unix socket for its ranks (wire format: keepstep.records.frames): the side channel and the marks of ranks.

The agent forwards what the whole job shares to the coordinator and answers the rest itself. While the coordinator is away a
rank's request simply waits: it is repeated to the next one.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, Protocol

from keepstep.launcher.node.images import NodeImages, checked_image
from keepstep.records import frames
from keepstep.records.errors import ChannelError, KeepstepError

MAX_REASON_CHARS = 2000


class RankHost(Protocol):
    """What the socket needs from the agent."""

    run_id: str

    def current_cycle(self) -> int: ...

    async def share(self, op: str, cycle: int, request: dict[str, Any]) -> dict[str, Any]:
        """Forward set, get, cas, wait, grant, mark_get, mark_set or kept. Raises ChannelError."""
        ...

    async def fetch(self, checkpoint: str, file: str) -> tuple[dict[str, Any], int]:
        """An image of this or another node's memory: {size_bytes, tier, facts} and a descriptor to close. Raises KeepstepError."""
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


class RankServer:
    """Accepts ranks of the current cycle only."""

    def __init__(self, path: Path, host: RankHost, images: NodeImages) -> None:
        """`images`: what this node's memory holds; theirs who made it to close."""
        self.path = path
        self.refused = 0
        self._images = images
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            cycle, rank = await self._greet(reader, writer)
            while True:
                request = await self._recv(reader)
                reply, fd = await self._answer(cycle, rank, request)
                try:
                    await self._reply(writer, reply, fd)
                finally:
                    if fd is not None:
                        os.close(fd)
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
            case "set" | "get" | "cas" | "wait" | "grant" | "mark_get" | "mark_set" | "kept":
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
            case "buffer" | "keep" | "unkeep" | "fetch":
                return await self._answer_memory(op, rank, request)
            case "inject":
                why = self._host.inject(cycle, str(request["spec"]))
                return ({"ok": True} if why is None else {"ok": False, "error": why}), None
        raise ValueError(f"unknown op {op!r}")

    async def _answer_memory(self, op: str, rank: int, request: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """What is about this node's memory: a reply, and a descriptor to send along and close."""
        match op:
            case "buffer":
                name, size = str(request["name"]), int(request["size_bytes"])
                try:
                    # Allocating touches every page, which takes a second for some gigabytes.
                    fd = await asyncio.to_thread(self._images.buffer, rank, name, size)
                except OSError as error:
                    why = f"no memory for a buffer of {size} bytes: {error}"
                    return {"ok": False, "no_room": True, "error": why}, None
                return {"ok": True, "size_bytes": size}, fd
            case "keep":
                what = str(request["checkpoint"]), str(request["file"]), int(request["size_bytes"])
                try:
                    image = checked_image(*what, dict(request["facts"]))
                    return {"ok": True, "kept": self._images.keep(rank, str(request["buffer"]), image)}, None
                except ValueError as error:
                    return {"ok": False, "error": str(error)}, None
            case "unkeep":
                self._images.unkeep(rank, str(request["buffer"]))
                return {"ok": True}, None
        try:
            reply, fd = await self._host.fetch(str(request["checkpoint"]), str(request["file"]))
        except KeepstepError as error:
            return {"ok": False, "error": str(error)}, None
        return {"ok": True, **reply}, fd
