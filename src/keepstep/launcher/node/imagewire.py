"""How agents hand images to each other: one connection an image, blocking sockets, TLS as everywhere between nodes of a job.

Frames and greeting are those of the log funnel (launcher/output/logwire.py: challenge, hello, refused). Then

    kind        sent by   body
    16 get      client    JSON {checkpoint, file}
    17 found    server    JSON {size_bytes}, followed by so many bytes without frames
    18 damaged  client    JSON {checkpoint, file}, after the bytes: what came has another fingerprint; the server looks at its own

An address is `host:port`, or `unix:PATH` between launchers of one host.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import ssl
from collections.abc import Iterator

import msgspec

from keepstep.checkpoint.format.blocks import BLOCK_BYTES
from keepstep.checkpoint.format.fingerprint import check_text, fingerprint, same_method
from keepstep.launcher.node.images import Image
from keepstep.launcher.output import logwire as w
from keepstep.launcher.trust import PinError, check_pin, client_context, prove
from keepstep.records.errors import KeepstepError, VerificationError

GET, FOUND, DAMAGED = range(16, 19)
CONNECT_S = 5.0
IO_S = 30.0
"""How long any one read or write may take; a peer that does nothing for so long is given up."""
PIECE_BYTES = 1 << 18
"""Encrypted at a time."""
SCAVENGER_TOS = 0x20
"""Class selector 1 (RFC 2474, RFC 3662): switches that know of classes let everything else go first."""


class PullError(KeepstepError):
    """Raised when an image did not come: no connection, refused, gone meanwhile, cut short."""


class Wanted(msgspec.Struct, frozen=True):
    checkpoint: str
    file: str


class Found(msgspec.Struct, frozen=True):
    size_bytes: int


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. `tls` means nothing on Unix sockets."""

    run_id: str
    node: str
    token: bytes | None
    tls: bool


def send_frame(sock: socket.socket, kind: int, message: msgspec.Struct) -> None:
    """Raises OSError."""
    sock.sendall(w.json_frame(kind, message))


def recv_frame(sock: socket.socket, *wanted: int) -> tuple[int, bytes]:
    """One small frame of a wanted kind: (kind, body). Raises PullError or OSError."""
    length, kind = w.FRAME_HEAD.unpack(_exactly(sock, w.FRAME_HEAD.size))
    if not 1 <= length <= w.MAX_HELLO_BYTES:
        raise PullError(f"a frame of {length} bytes where one of at most {w.MAX_HELLO_BYTES} belongs")
    body = _exactly(sock, length - 1)
    if kind == w.REFUSED and kind not in wanted:
        raise PullError(f"refused: {msgspec.json.decode(body, type=w.Refused).error}")
    if kind not in wanted:
        raise PullError(f"a frame of kind {kind} where {wanted} belongs")
    return kind, body


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        # Released at once: a view that an error's traceback still held would keep the mapping from being closed.
        with view[at:] as rest:
            got = sock.recv_into(rest)
        if not got:
            raise PullError("the connection ended early")
        at += got


def blocks_of(view: memoryview) -> Iterator[memoryview]:
    """`view` in pieces of BLOCK_BYTES."""
    for begin in range(0, len(view), BLOCK_BYTES):
        with view[begin : begin + BLOCK_BYTES] as block:
            yield block


def fingerprint_of(fd: int, size_bytes: int, method: str) -> str:
    """Fingerprint of the first bytes of a memfd. Raises ConfigError (package missing) or OSError."""
    with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
        return fingerprint(blocks_of(view), method)


def pull(
    address: str,
    image: Image,
    into_fd: int,
    caller: Caller,
    connections: set[socket.socket],
    *,
    background: bool = False,
) -> None:
    """Fill `into_fd` with `image` from the agent at `address`, and verify it.

    Raises PullError, VerificationError (no fingerprint in its facts, or it has another one; the sender is told) or ConfigError.
    `connections` has the connection while it is open: whoever shuts it down ends this. `background`: marked in the network as
    traffic that lets all other go first.
    """
    expected = check_text(image.facts.get("fingerprint"))
    try:
        with contextlib.closing(_connect(address, caller, background)) as sock, _listed(sock, connections):
            send_frame(sock, GET, Wanted(image.checkpoint, image.file))
            _, body = recv_frame(sock, FOUND)
            size_bytes = msgspec.json.decode(body, type=Found).size_bytes
            if size_bytes != image.size_bytes:
                raise PullError(f"{size_bytes} bytes are offered where {image.size_bytes} belong")
            seen = _receive(sock, into_fd, size_bytes, same_method(expected))
            if seen != expected:
                with contextlib.suppress(OSError):
                    send_frame(sock, DAMAGED, Wanted(image.checkpoint, image.file))
                raise VerificationError(
                    f"{image.checkpoint}/{image.file} from the memory at {address}: fingerprint {seen}, not {expected}"
                )
    except (OSError, msgspec.MsgspecError, PinError) as error:
        raise PullError(f"{image.checkpoint}/{image.file} from the memory at {address}: {error}") from error


@contextlib.contextmanager
def _listed(sock: socket.socket, connections: set[socket.socket]) -> Iterator[None]:
    connections.add(sock)
    try:
        yield
    finally:
        connections.discard(sock)


def _receive(sock: socket.socket, fd: int, size_bytes: int, method: str) -> str:
    """Each block is hashed while the next one travels, and while it is still in the cache."""
    with mmap.mmap(fd, size_bytes) as memory, memoryview(memory) as view:

        def arriving() -> Iterator[memoryview]:
            for block in blocks_of(view):
                _fill(sock, block)
                yield block

        return fingerprint(arriving(), method)


def _connect(address: str, caller: Caller, background: bool) -> socket.socket:
    sock = _open(address, background)
    try:
        if caller.token is not None and caller.tls and not address.startswith("unix:"):
            secure = client_context().wrap_socket(sock, server_hostname="keepstep")
            sock = secure
            check_pin(secure, caller.token)
        _, body = recv_frame(sock, w.CHALLENGE)
        nonce = msgspec.json.decode(body, type=w.Challenge).nonce
        proof = prove(caller.token, nonce, caller.run_id, caller.node) if caller.token is not None else ""
        life = secrets.token_hex(8)
        send_frame(sock, w.HELLO, w.Hello(run_id=caller.run_id, node=caller.node, life=life, proof=proof))
    except BaseException:
        sock.close()
        raise
    return sock


def _open(address: str, background: bool) -> socket.socket:
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(IO_S)
            sock.connect(address.removeprefix("unix:"))
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    sock.settimeout(IO_S)
    if background:
        with contextlib.suppress(OSError):
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, SCAVENGER_TOS)
            else:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, SCAVENGER_TOS)
    return sock


def send_bytes(sock: socket.socket, fd: int, size_bytes: int) -> None:
    """The first bytes of a memfd: by sendfile in clear text, through OpenSSL otherwise. Raises OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        with open(os.dup(fd), "rb", buffering=0) as file:
            sock.sendfile(file, 0, size_bytes)
        return
    for begin in range(0, size_bytes, PIECE_BYTES):
        sock.sendall(os.pread(fd, min(PIECE_BYTES, size_bytes - begin), begin))
