"""Who may talk to the coordinator: the first message of a connection, and a count of everybody who was refused.

Over a network the server sends a random challenge first, and the client's first message proves the job token by an HMAC over
it; the token itself never travels. On a Unix socket in a 0700 folder the kernel has done that already.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from keepstep.launcher import messages as m
from keepstep.launcher.trust import proven
from keepstep.records.codec import to_json
from keepstep.records.errors import KeepstepError

MAX_FIRST_BYTES = 64 << 10
FIRST_MESSAGE_S = 30.0
TOO_BIG = 1009
"""Close code of RFC 6455, section 7.4.1."""

T = TypeVar("T")

_decode_hello = msgspec.json.Decoder(m.Hello).decode
_decode_operator = msgspec.json.Decoder(m.Operator).decode


class RefusedConnectionError(KeepstepError):
    """Raised when the first message of a connection does not open it."""


class Admission:
    """What new connections need to know and to prove."""

    def __init__(self, run_id: str, token: bytes | None, log_addr: str, folder_id: str) -> None:
        self.run_id = run_id
        self.log_addr = log_addr
        self.folder_id = folder_id
        self.refused: Counter[str] = Counter()
        self._token = token

    def count(self, why: str) -> None:
        """One more refusal of a kind; the first of each kind is said in the log."""
        self.refused[why] += 1
        if self.refused[why] == 1:
            print(f"coordinator: refused: {why} (further ones are counted)", file=sys.stderr, flush=True)

    def closed(self, code: int) -> None:
        """A connection was closed with this code: by this end where a message was longer than any may be."""
        if code == TOO_BIG:
            self.count("oversized")

    def report(self) -> None:
        """Say how many were refused, at the end."""
        if self.refused:
            counts = ", ".join(f"{n} {why}" for why, n in sorted(self.refused.items()))
            print(f"coordinator: refused in all: {counts}", file=sys.stderr, flush=True)

    async def admit(self, socket: WebSocket, network: bool, epoch: int) -> tuple[m.Hello, str]:
        """The Hello of an agent that may come in, and the address it comes from. Raises RefusedConnectionError."""
        hello, nonce = await self._opening(socket, epoch, _decode_hello, "the first message must be hello")
        self._check(network, nonce, hello.run_id, hello.node, hello.proof)
        return hello, socket.client.host if socket.client is not None and network else "127.0.0.1"

    async def admit_operator(self, socket: WebSocket, network: bool, epoch: int) -> m.Operator:
        """The command of a person who may give one. Raises RefusedConnectionError."""
        message, nonce = await self._opening(socket, epoch, _decode_operator, "malformed command")
        self._check(network, nonce, message.run_id, "", message.proof)
        return message

    async def _opening(self, socket: WebSocket, epoch: int, decode: Callable[[str], T], what: str) -> tuple[T, str]:
        """The first message and the challenge it had to answer; `what` is said of one that cannot be decoded."""
        text, nonce = await self._first(socket, epoch)
        try:
            return decode(text), nonce
        except msgspec.MsgspecError as error:
            self.count("malformed")
            raise RefusedConnectionError(f"{what}: {error}") from None

    async def _first(self, socket: WebSocket, epoch: int) -> tuple[str, str]:
        await socket.accept()
        nonce = secrets.token_hex(16)
        await socket.send_text(to_json(m.Challenge(epoch=epoch, nonce=nonce)).decode())
        try:
            text = await asyncio.wait_for(socket.receive_text(), FIRST_MESSAGE_S)
        except TimeoutError:
            self.count("silent")
            raise RefusedConnectionError("no first message") from None
        except KeyError:
            self.count("malformed")
            raise RefusedConnectionError("the first message must be text") from None
        if len(text) > MAX_FIRST_BYTES:
            self.count("oversized")
            raise RefusedConnectionError(f"the first message has {len(text)} bytes, at most {MAX_FIRST_BYTES} are read")
        return text, nonce

    def _check(self, network: bool, nonce: str, run_id: str, node: str, proof: str) -> None:
        if not network:
            return
        if self._token is None or not proven(self._token, nonce, run_id, node, proof):
            self.count("no_token")
            raise RefusedConnectionError(
                "no proof of the job token: give every launcher the same --token-file (or KEEPSTEP_JOB_TOKEN)"
            )

    async def refuse(self, socket: WebSocket, reply: m.Reply) -> None:
        """Say why, and close."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            await socket.send_text(to_json(reply).decode())
            await socket.close(code=1008)
