"""The agent's end of the log funnel: a thread that sends a node's output to the job's log writer and reconnects as needed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import ssl
import threading
from collections.abc import Callable

import msgspec

from keepstep.launcher.output import logwire as w
from keepstep.launcher.output.logbuffer import SendBuffer
from keepstep.launcher.trust import PinError, check_pin, client_context, prove

SILENT_S = 10.0
"""The writer repeats its acknowledgement more often than this while it owes one; a quieter connection is dead."""
CONNECT_S = 10.0
HANDSHAKE_S = 2.0
RETRY_FIRST_S = 0.1
RETRY_LAST_S = 2.0
SOCKET_BYTES = 1 << 16


class _LostError(Exception):
    """Raised inside when the connection is of no more use; says why."""


class Funnel:
    """A connection that lasts. Output is put into `buffer`; call `wake` after that. No method but `close` waits."""

    def __init__(
        self,
        address: str,
        run_id: str,
        node: str,
        token: bytes | None,
        tls: bool,
        on_room: Callable[[], None],
        buffer: SendBuffer,
        *,
        silent_s: float = SILENT_S,
    ) -> None:
        """`address`: host:port or unix:PATH. `on_room` is called, in this thread, when frames were acknowledged."""
        self.buffer = buffer
        self.reconnects = 0
        self.problem: str | None = "not connected yet"
        """Why there is no connection now."""
        self._address = address
        self._identity = (run_id, node, secrets.token_hex(8))
        self._token = token
        self._tls = tls and token is not None
        self._on_room = on_room
        self._silent_s = silent_s
        self._ending = False
        self._asleep = False
        self._loop = asyncio.new_event_loop()
        self._work = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name="keepstep-funnel", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to send."""
        if self._asleep:
            self._asleep = False
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._work.set)

    def move(self, address: str) -> None:
        """Go on with a writer at another address; what is not acknowledged is sent there."""
        if address != self._address:
            self._address = address
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._drop_session)

    def close(self) -> None:
        """End the thread. What the writer has not acknowledged is lost: wait for `buffer.empty` before."""
        self._ending = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._drop_session)
        self._thread.join(5)

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session.cancel()

    def _main(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._stay_connected())

    async def _stay_connected(self) -> None:
        delay_s = RETRY_FIRST_S
        while not self._ending:
            self._session = asyncio.ensure_future(self._connect_and_send())
            await asyncio.wait({self._session})
            if self._session.cancelled():
                delay_s = RETRY_FIRST_S
                continue
            error = self._session.exception()
            if self.problem is None:  # it was connected
                delay_s = RETRY_FIRST_S
                self.reconnects += 1
            self.problem = _reason(error)
            self._session = asyncio.ensure_future(asyncio.sleep(delay_s * random.uniform(0.5, 1.0)))
            await asyncio.wait({self._session})
            delay_s = min(2 * delay_s, RETRY_LAST_S)

    async def _connect_and_send(self) -> None:
        """Raises when the connection ends, whatever it was."""
        reader, writer = await self._open_whole()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._introduce(reader, writer)
            self.problem = None
            sending = asyncio.ensure_future(self._send(writer))
            try:
                await self._receive(reader)
            finally:
                sending.cancel()
                await asyncio.wait({sending})
        finally:
            await _abort(writer)

    async def _open_whole(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """`_open` with a time limit. asyncio leaves a transport behind when it is cancelled in a handshake: let that end."""
        opening = asyncio.ensure_future(self._open())
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.shield(opening)
        except (TimeoutError, asyncio.CancelledError):
            await asyncio.wait({opening}, timeout=HANDSHAKE_S)
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                await _abort(opening.result()[1])
            opening.cancel()
            raise

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._address.startswith("unix:"):
            return await asyncio.open_unix_connection(self._address.removeprefix("unix:"))
        host, _, port = self._address.rpartition(":")
        context: ssl.SSLContext | None = client_context() if self._tls else None
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        if context is not None:
            assert self._token is not None
            try:
                check_pin(writer.get_extra_info("ssl_object"), self._token)
            except PinError:
                await _abort(writer)
                raise
        writer.transport.set_write_buffer_limits(SOCKET_BYTES)
        return reader, writer

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        run_id, node, life = self._identity
        challenge = msgspec.json.decode(await _expect(reader, w.CHALLENGE), type=w.Challenge)
        proof = prove(self._token, challenge.nonce, run_id, node) if self._token is not None else ""
        writer.write(w.json_frame(w.HELLO, w.Hello(run_id=run_id, node=node, life=life, proof=proof)))
        welcome = msgspec.json.decode(await _expect(reader, w.WELCOME), type=w.Welcome)
        self._acknowledged(welcome.seq)
        self.buffer.rewind()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._work.clear()
            self._asleep = True
            frame = self.buffer.take()
            if frame is None:
                await self._work.wait()
                continue
            self._asleep = False
            writer.write(frame)
            await writer.drain()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        silent = 0
        while silent < 2:  # what was owed at the end of one period had the whole next one
            try:
                async with asyncio.timeout(self._silent_s / 2):
                    head = await reader.readexactly(w.FRAME_HEAD.size)
            except TimeoutError:
                silent = silent + 1 if self.buffer.waits_for_ack else 0
                continue
            silent = 0
            async with asyncio.timeout(CONNECT_S):
                body = await _body(reader, head, w.ACK)
            self._acknowledged(w.SEQ.unpack(body)[0])
            self._work.set()
        raise _LostError(f"no answer for {self._silent_s:g} s")

    def _acknowledged(self, seq: int) -> None:
        if self.buffer.acknowledge(seq):
            self._on_room()


async def _expect(reader: asyncio.StreamReader, wanted: int) -> bytes:
    return await _body(reader, await reader.readexactly(w.FRAME_HEAD.size), wanted)


async def _body(reader: asyncio.StreamReader, head: bytes, wanted: int) -> bytes:
    length, kind = w.FRAME_HEAD.unpack(head)
    if not 1 <= length <= w.MAX_HELLO_BYTES:
        raise _LostError(f"the log writer sent a frame of {length} bytes")
    body = await reader.readexactly(length - 1)
    if kind == w.REFUSED:
        raise _LostError(f"the log writer refused: {msgspec.json.decode(body, type=w.Refused).error}")
    if kind != wanted:
        raise _LostError(f"the log writer sent a frame of kind {kind}")
    return body


async def _abort(writer: asyncio.StreamWriter) -> None:
    """Close at once, and let the loop see the end of the transport before it is closed itself."""
    writer.transport.abort()
    with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
        async with asyncio.timeout(1.0):
            await writer.wait_closed()


def _reason(error: BaseException | None) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the log writer closed the connection"
    return str(error) or type(error).__name__
