"""The agent's end of its connection to the coordinator: requests survive reconnects, and any order of deaths."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from websockets.asyncio.client import unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from keepstep.launcher import messages as m
from keepstep.records.codec import to_json
from keepstep.records.errors import ChannelError, KeepstepError

RETRY_S = 0.02

_decode = msgspec.json.Decoder(m.FromCoordinator).decode


class RefusedError(KeepstepError):
    """Raised when the coordinator refuses this agent: wrong run, name taken, job full."""


class Link:
    """Sends messages until each is answered; reconnects as long as it is told to."""

    def __init__(
        self,
        socket_path: Path,
        hello: Callable[[int], m.Hello],
        on_command: Callable[[Any], None],
        give_up_s: float | None = None,
    ) -> None:
        """`give_up_s`: how long the coordinator may stay away before `run` raises RefusedError; None is for ever."""
        self._path = socket_path
        self._give_up_s = give_up_s
        self._hello = hello
        self._on_command = on_command
        self._pending: dict[int, tuple[m.AgentMessage, asyncio.Future[Any]]] = {}
        self._next_id = 1
        self._epoch = 0
        self._connection: Any = None
        self.welcomed = asyncio.Event()
        self.welcome: m.Welcome | None = None

    def new_id(self) -> int:
        """Id for the next message."""
        self._next_id += 1
        return self._next_id

    def request(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]:
        """Send `make(id)`; the future gets the reply's result, or ChannelError when it is refused."""
        message = make(self.new_id())
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A refusal nobody waits for (a note of an old cycle) is no error of the program.
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._pending[message.id] = (message, future)
        if self._connection is not None:
            self._spawn_send(message)
        return future

    def _spawn_send(self, message: m.AgentMessage) -> None:
        task = asyncio.ensure_future(self._send(self._connection, message))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def _send(self, connection: Any, message: m.AgentMessage) -> None:
        await connection.send(to_json(message).decode(), text=True)

    async def run(self) -> None:
        """Connect, and again after every loss. Ends by cancellation, or with RefusedError."""
        lost_at = time.monotonic()
        while True:
            try:
                async with unix_connect(
                    str(self._path),
                    "ws://localhost/agent",
                    max_size=m.MAX_MESSAGE_BYTES,
                    compression=None,
                    ping_interval=None,
                    open_timeout=10,
                ) as connection:
                    try:
                        await self._session(connection)
                    finally:
                        lost_at = time.monotonic()
            except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError, EOFError):
                pass
            self._connection = None
            if self._give_up_s is not None and time.monotonic() - lost_at > self._give_up_s:
                raise RefusedError(
                    f"no coordinator at {self._path} for {self._give_up_s:g} s: the leading launcher is gone"
                )
            await asyncio.sleep(RETRY_S)

    async def _session(self, connection: Any) -> None:
        hello = self._hello(self._epoch)
        await self._send(connection, hello)
        first = _decode(await connection.recv())
        if isinstance(first, m.Reply):
            raise RefusedError(first.error or "the coordinator refused this launcher")
        if not isinstance(first, m.Welcome) or first.epoch < self._epoch:
            return
        self._epoch = first.epoch
        self.welcome = first
        self.welcomed.set()
        sent: set[int] = set()
        # Again until nothing is left: a request made while the others are being sent has no connection of its own yet.
        while waiting := [message for number, (message, _) in self._pending.items() if number not in sent]:
            for message in waiting:
                await self._send(connection, message)
                sent.add(message.id)
        self._connection = connection
        while True:
            self._receive(_decode(await connection.recv()))

    def _receive(self, message: m.FromCoordinator) -> None:
        if message.epoch < self._epoch:
            print(
                f"keepstep: ignoring a coordinator of epoch {message.epoch} < {self._epoch}",
                file=sys.stderr,
                flush=True,
            )
            return
        if not isinstance(message, m.Reply):
            self._on_command(message)
            return
        entry = self._pending.pop(message.id, None)
        if entry is None or entry[1].done():
            return
        if message.ok:
            entry[1].set_result(message.result)
        else:
            error = ChannelError(message.error or "refused")
            error.result = message.result  # type: ignore[attr-defined]
            entry[1].set_exception(error)
