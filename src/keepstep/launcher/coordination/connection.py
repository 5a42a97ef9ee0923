"""One agent's connection at the coordinator: what waits to be sent, so that an agent that stopped reading holds up nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from starlette.websockets import WebSocket, WebSocketDisconnect

from keepstep.launcher import messages as m

OUTGOING_MAX_BYTES = 16 << 20
"""What may wait for one connection before it is given up."""


class Connection:
    """One agent's WebSocket with what waits to be sent to it."""

    def __init__(self, socket: WebSocket, hello: m.Hello) -> None:
        self.node = hello.node
        self.hello = hello
        """What it began with; no other Hello counts."""
        self.welcomed = False
        """Commands wait until its Hello is part of the state."""
        self.last_command: str | None = None
        self._socket = socket
        self._outgoing: deque[str] = deque()
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._reader = asyncio.current_task()
        self._task = asyncio.create_task(self._send_all())

    def send(self, text: str) -> None:
        """Queue a message; a connection that does not take them is closed."""
        self._waiting_bytes += len(text)
        if self._waiting_bytes > OUTGOING_MAX_BYTES:
            self.close()
            return
        self._outgoing.append(text)
        self._news.set()

    async def answer(self, text: str) -> None:
        """Send at once, where nothing waits before it. For the task that reads, which may wait for a slow connection."""
        if self._outgoing:
            self.send(text)
        else:
            await self._socket.send_text(text)

    async def _send_all(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            while True:
                while self._outgoing:
                    text = self._outgoing.popleft()
                    await self._socket.send_text(text)
                    self._waiting_bytes -= len(text)
                self._news.clear()
                await self._news.wait()

    def close(self) -> None:
        """Stop sending; the task that reads ends the connection."""
        self._task.cancel()
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
