"""Reading and TLS over asyncio transports for a process with thousands of connections.

asyncio's own TLS keeps a 256 KiB buffer a connection and reads ahead up to 512 KiB more: at 2,048 connections over 1 GB. This one
decrypts what a read brought in small slices and keeps nothing but an unfinished record.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, cast

SLICE_BYTES = 1 << 15
RECORD_BYTES = 1 << 14
"""Largest plain text of a TLS record (RFC 8446, section 5.1); one read returns at most one."""
HANDSHAKE_S = 10.0


class SharedReads(asyncio.BufferedProtocol):
    """Reads for `inner` into one buffer that all connections of a server share, in place of 256 KiB for each read."""

    def __init__(self, inner: asyncio.Protocol, shared: memoryview) -> None:
        self._inner = inner
        self._shared = shared
        self.connection_made = inner.connection_made  # type: ignore[method-assign]
        self.connection_lost = inner.connection_lost  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared

    def buffer_updated(self, nbytes: int) -> None:
        self._inner.data_received(bytes(self._shared[:nbytes]))


class SlimTls(asyncio.Protocol):
    """Stands between a transport and `inner`, which is connected once the handshake is done.

    `on_failure` is called when there is no TLS to be had with the other side; `inner` then hears of nothing.
    """

    def __init__(
        self, inner: asyncio.Protocol, context: ssl.SSLContext, server_side: bool, on_failure: Callable[[], None]
    ) -> None:
        self.paused = False
        self.inner = inner
        self._on_failure = on_failure
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ssl_object = context.wrap_bio(self._in, self._out, server_side=server_side)
        self._raw = memoryview(b"")
        self._ready = False
        self._failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._fail)
        self._advance()

    def data_received(self, data: bytes) -> None:
        self._raw = memoryview(bytes(self._raw) + data if self._raw else data)
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._ready:
            self.inner.connection_lost(exc)
        elif not self._failed:
            self._failed = True
            self._on_failure()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def resume(self) -> None:
        """Hand on what was left when the inner protocol paused, then read again."""
        if not self._failed:
            self._advance()
        if not self.paused:
            self.transport.resume_reading()

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(ssl.SSLError):  # the other side has closed
            while view:
                view = view[self.ssl_object.write(view) :]
        self._flush()

    def say_goodbye(self) -> None:
        """Tell the other side that no more comes."""
        with contextlib.suppress(ssl.SSLError):
            self.ssl_object.unwrap()
        self._flush()

    def _advance(self) -> None:
        """Handshake, then decrypt slice by slice while the inner protocol takes it."""
        try:
            while not (self.paused or self._failed or self.transport.is_closing()):
                if not self._ready and not self._handshake():
                    if not self._feed():
                        return
                    continue
                try:
                    data = self.ssl_object.read(RECORD_BYTES)
                except ssl.SSLWantReadError:
                    if not self._feed():
                        return
                    continue
                if not data:
                    self.transport.close()
                    return
                self.inner.data_received(data)
        except ssl.SSLError:
            self._fail()

    def _feed(self) -> bool:
        """Give OpenSSL the next slice; False when there is none."""
        if not self._raw:
            return False
        self._in.write(self._raw[:SLICE_BYTES])
        self._raw = self._raw[SLICE_BYTES:] if len(self._raw) > SLICE_BYTES else memoryview(b"")
        return True

    def _handshake(self) -> bool:
        try:
            self.ssl_object.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        self._flush()
        self._timer.cancel()
        self._ready = True
        self.inner.connection_made(_Channel(self))
        return True

    def _flush(self) -> None:
        if self._out.pending and not self.transport.is_closing():
            self.transport.write(self._out.read())

    def _fail(self) -> None:
        if not self._failed:
            self._failed = True
            self._flush()  # the alert says why
            self.transport.abort()
            if not self._ready:
                self._on_failure()


class _Channel(asyncio.Transport):
    """What the inner protocol sees as its transport."""

    def __init__(self, tls: SlimTls) -> None:
        super().__init__()
        self._tls = tls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._tls.write(bytes(data))

    def close(self) -> None:
        self._tls.say_goodbye()
        self._tls.transport.close()

    def abort(self) -> None:
        self._tls.transport.abort()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._tls.inner = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._tls.inner

    def is_closing(self) -> bool:
        return self._tls.transport.is_closing()

    def pause_reading(self) -> None:
        self._tls.paused = True
        self._tls.transport.pause_reading()

    def resume_reading(self) -> None:
        self._tls.paused = False
        # Not from within: the caller is in the middle of something.
        asyncio.get_running_loop().call_soon(self._tls.resume)

    def get_write_buffer_size(self) -> int:
        return self._tls.transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls.ssl_object if name == "ssl_object" else self._tls.transport.get_extra_info(name, default)
