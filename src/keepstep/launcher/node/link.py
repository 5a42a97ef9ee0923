"""The agent's end of its connection to the coordinator: requests survive reconnects, and any order of deaths."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import msgspec
from websockets.asyncio.client import connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from keepstep.launcher import messages as m
from keepstep.launcher.trust import PinError, check_pin, client_context, prove
from keepstep.records.codec import to_json
from keepstep.records.errors import ChannelError, KeepstepError

RETRY_S = 0.02
MAX_RETRY_S = 0.5
OPEN_S = 10.0
OPEN_ONE_OF_MANY_S = 2.0

_decode = msgspec.json.Decoder(m.FromCoordinator).decode


class RefusedError(KeepstepError):
    """Raised when the coordinator refuses this agent: wrong run, name taken, no token."""


class Target(msgspec.Struct, frozen=True):
    """Where a coordinator may be: a Unix socket (path), or host:port."""

    address: str
    tls: bool = False

    @property
    def local(self) -> bool:
        return self.address.startswith("/")


class Link:
    """Sends messages until each is answered; reconnects as long as it is told to."""

    def __init__(
        self,
        targets: Callable[[], list[Target]],
        hello: Callable[[int], m.Hello],
        on_command: Callable[[Any], None],
        give_up_s: float | None = None,
        token: bytes | None = None,
        on_refused: Callable[[int], None] = lambda _sent_ns: None,
    ) -> None:
        """`targets`: where to look for the coordinator now, in this order.

        `give_up_s`: how long the coordinator may stay away before `run` raises RefusedError; None is for ever. `on_refused` gets
        the CLOCK_MONOTONIC ns before which every target was found without a listener: no coordinator was up then.
        """
        self._targets = targets
        self.give_up_s = give_up_s
        self._hello = hello
        self._on_command = on_command
        self._token = token
        self._on_refused = on_refused
        self._pending: dict[int, tuple[m.AgentMessage, asyncio.Future[Any]]] = {}
        self._next_id = 1
        self._epoch = 0
        self._connection: Any = None
        self._cut_until = 0.0
        self.welcomed = asyncio.Event()
        self.welcome: m.Welcome | None = None
        self.hello_sent_ns = 0
        """CLOCK_MONOTONIC when the newest Hello was sent: the coordinator has known of this node since then."""
        self.target: Target | None = None
        """Where the newest connection went."""

    def new_id(self) -> int:
        """Id for the next message."""
        self._next_id += 1
        return self._next_id

    @property
    def connected(self) -> bool:
        """Whether a coordinator has welcomed this agent on the present connection."""
        return self._connection is not None

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

    def forget(self, future: asyncio.Future[Any]) -> None:
        """Do not send this request again (a renewal that is out of date)."""
        self._pending = {n: entry for n, entry in self._pending.items() if entry[1] is not future}

    def cut(self, seconds: float) -> None:
        """Drop the connection and make no other for a while (an injected partition)."""
        self._cut_until = time.monotonic() + seconds
        self.drop()

    def drop(self) -> None:
        """Give up the present connection, on which nothing comes any more, and look for a coordinator again."""
        if self._connection is not None:
            self._connection.transport.abort()

    def _spawn_send(self, message: m.AgentMessage) -> None:
        task = asyncio.ensure_future(self._send(self._connection, message))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def _send(self, connection: Any, message: m.AgentMessage) -> None:
        await connection.send(to_json(message).decode(), text=True)

    async def run(self) -> None:
        """Connect, and again after every loss. Ends by cancellation, or with RefusedError."""
        lost_at = time.monotonic()
        retry_s = RETRY_S
        while True:
            began_ns = time.monotonic_ns()
            refused = []
            pin: PinError | None = None
            targets = self._targets()
            async for target in knock(targets) if time.monotonic() >= self._cut_until else knock([]):
                try:
                    if await self._try(target):
                        lost_at = time.monotonic()
                        retry_s = RETRY_S
                        break
                except (ConnectionRefusedError, FileNotFoundError):
                    refused.append(target)
                except PinError as error:
                    pin = error
                except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError, EOFError):
                    pass
            self._connection = None
            if refused and len(refused) == len(targets):
                self._on_refused(began_ns)
            if self.give_up_s is not None and time.monotonic() - lost_at > self.give_up_s:
                where = ", ".join(t.address for t in self._targets())
                why = str(pin) if pin else "the leading launcher is gone, or its host is"
                raise RefusedError(f"no coordinator at {where} for {self.give_up_s:g} s: {why}")
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, MAX_RETRY_S) if not self._targets()[0].local else RETRY_S

    async def _try(self, target: Target) -> bool:
        """One connection to its end. False when it was not welcomed."""
        options: dict[str, Any] = {
            "max_size": m.MAX_MESSAGE_BYTES,
            "compression": None,
            "ping_interval": None,
            "open_timeout": OPEN_S if len(self._targets()) == 1 else OPEN_ONE_OF_MANY_S,
        }
        if target.local:
            opening = unix_connect(target.address, "ws://localhost/agent", **options)
        elif target.tls:
            opening = connect(
                f"wss://{target.address}/agent", ssl=client_context(), server_hostname="keepstep", proxy=None, **options
            )
        else:
            opening = connect(f"ws://{target.address}/agent", proxy=None, **options)
        welcomed = False
        async with opening as connection:
            if target.tls and not target.local:
                assert self._token is not None
                check_pin(connection.transport.get_extra_info("ssl_object"), self._token)
            try:
                welcomed = await self._greet(connection)
                if welcomed:
                    self.target = target
                    await self._session(connection)
            except (OSError, ConnectionClosed, EOFError):
                if not welcomed:
                    raise
            finally:
                self._connection = None
        return welcomed

    async def _greet(self, connection: Any) -> bool:
        """Challenge, hello, welcome. False when this coordinator is an old one, or asks for patience. Raises RefusedError."""
        challenge = _decode(await asyncio.wait_for(connection.recv(), OPEN_S))
        if not isinstance(challenge, m.Challenge) or challenge.epoch < self._epoch:
            return False
        hello = self._hello(self._epoch)
        if self._token is not None:
            proof = prove(self._token, challenge.nonce, hello.run_id, hello.node)
            hello = msgspec.structs.replace(hello, proof=proof)
        sent_ns = time.monotonic_ns()
        await self._send(connection, hello)
        first = _decode(await asyncio.wait_for(connection.recv(), OPEN_S + 20))
        if isinstance(first, m.Reply):
            if isinstance(first.result, dict) and first.result.get("retry"):
                return False
            raise RefusedError(first.error or "the coordinator refused this launcher")
        if not isinstance(first, m.Welcome) or first.epoch < self._epoch:
            return False
        self._epoch = first.epoch
        self.hello_sent_ns = sent_ns
        self.welcome = first
        self.welcomed.set()
        self._on_command(first)
        return True

    async def _session(self, connection: Any) -> None:
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


async def knock(targets: list[Target]) -> AsyncGenerator[Target, None]:
    """The order in which to try places: as given, but of several hosts those first that answer first.

    A host that is gone does not answer at all, and must not keep anybody from the one that has taken over. Hosts that say nothing
    are left out this time; those that refuse come last, for the caller to find that out.
    """
    remote = [t for t in targets if not t.local]
    for target in targets:
        if target.local or len(remote) == 1:
            yield target
    if len(remote) <= 1:
        return
    asked = {asyncio.ensure_future(_answers(t)): t for t in remote}
    refusing: list[Target] = []
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                target, answer = asked.pop(task), task.result()
                if answer == "open":
                    yield target
                elif answer == "refused":
                    refusing.append(target)
        for target in refusing:
            yield target
    finally:
        for task in asked:
            task.cancel()


async def _answers(target: Target) -> Literal["open", "refused", "silent"]:
    host, _, port = target.address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), OPEN_ONE_OF_MANY_S)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, TimeoutError):
        return "silent"
    writer.close()
    return "open"
