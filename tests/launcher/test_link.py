"""The agent's connection against real WebSocket servers on sockets: requests outlive every connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed

from keepstep.launcher import messages as m
from keepstep.launcher.node.link import Link, RefusedError, Target
from keepstep.records.codec import to_json
from keepstep.records.errors import ChannelError

LIMIT_S = 10.0
_decode = msgspec.json.Decoder(m.FromAgent).decode
Script = Callable[["Session"], Awaitable[None]]


class Session:
    """The server's end of one connection."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def receive(self) -> Any:
        return _decode(await asyncio.wait_for(self._connection.recv(), LIMIT_S))

    async def send(self, *messages: m.FromCoordinator) -> None:
        for message in messages:
            await self._connection.send(to_json(message).decode())

    async def challenge(self, epoch: int = 1, nonce: str = "nonce") -> Any:
        """Send the challenge; returns what answers it."""
        await self.send(m.Challenge(epoch=epoch, nonce=nonce))
        return await self.receive()

    async def greet(self, epoch: int = 1) -> m.Hello:
        hello = await self.challenge(epoch)
        assert isinstance(hello, m.Hello)
        await self.send(m.Welcome(epoch=epoch, attempt=0, boot_id="b", anchor_utc_ns=1, anchor_boot_ns=1))
        return hello

    async def until_gone(self) -> None:
        with suppress(ConnectionClosed):
            while True:
                await self._connection.recv()


class Coordinator:
    """Runs one script for each connection, the last one for all that follow. A failed script fails the test."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.connections = 0
        self.errors: list[BaseException] = []

    async def __call__(self, connection: ServerConnection) -> None:
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        try:
            await script(Session(connection))
        except (ConnectionClosed, asyncio.CancelledError):
            pass
        except BaseException as error:
            self.errors.append(error)
            raise


def hello_of(epoch: int) -> m.Hello:
    who: dict[str, Any] = {"run_id": "r", "node": "n", "host": "h", "pid": 1, "nproc": 1}
    return m.Hello(id=1, epoch=epoch, next_port=1, next_addr="127.0.0.1", **who)


def beat(completed: int) -> Callable[[int], m.AgentMessage]:
    return lambda number: m.Beat(id=number, cycle=0, completed=completed)


@asynccontextmanager
async def linked(tmp_path: Path, coordinator: Coordinator) -> AsyncIterator[tuple[Link, list[Any], asyncio.Task[None]]]:
    commands: list[Any] = []
    path = tmp_path / "coordinator.sock"
    link = Link(at(path), hello_of, commands.append)
    async with (
        unix_serve(coordinator, str(path), ping_interval=None, compression=None),
        running(link) as (_, task),
    ):
        yield link, commands, task
    assert coordinator.errors == []


@asynccontextmanager
async def running(link: Link) -> AsyncIterator[tuple[Link, asyncio.Task[None]]]:
    task = asyncio.create_task(link.run())
    try:
        yield link, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def at(*paths: Path) -> Callable[[], list[Target]]:
    targets = [Target(str(path)) for path in paths]
    return lambda: targets


async def within(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, LIMIT_S)


async def answer_all(session: Session, epoch: int = 1) -> None:
    """Answer every message with how far it says it is."""
    await session.greet(epoch)
    while True:
        message = await session.receive()
        await session.send(m.Reply(epoch=epoch, id=message.id, result=message.completed))


def test_a_request_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with linked(tmp_path, Coordinator(answer_all)) as (link, _, _):
            assert await within(link.request(beat(5))) == 5
            await within(link.welcomed.wait())
            assert link.welcome is not None
            assert link.welcome.boot_id == "b"

    asyncio.run(main())


def test_replies_find_their_requests_in_any_order(tmp_path: Path) -> None:
    async def backwards(session: Session) -> None:
        await session.greet()
        got = [await session.receive() for _ in range(5)]
        for message in reversed(got):
            await session.send(m.Reply(epoch=1, id=message.id, result=message.completed * 10))
        await session.send(m.Reply(epoch=1, id=got[0].id, result="once more"), m.Reply(epoch=1, id=99_999))
        await session.until_gone()

    async def main() -> None:
        async with linked(tmp_path, Coordinator(backwards)) as (link, _, task):
            futures = [link.request(beat(n)) for n in range(5)]
            assert await within(asyncio.gather(*futures)) == [0, 10, 20, 30, 40]
            assert not task.done()

    asyncio.run(main())


def test_requests_are_repeated_in_order_until_they_are_answered(tmp_path: Path) -> None:
    seen: list[list[int]] = [[], [], []]

    def dies_after(index: int, answers: int) -> Script:
        async def script(session: Session) -> None:
            await session.greet()
            for n in range(4 - index):
                message = await session.receive()
                seen[index].append(message.completed)
                if n < answers:
                    await session.send(m.Reply(epoch=1, id=message.id, result=message.completed))
            # The end of the script closes the connection.

        return script

    async def last(session: Session) -> None:
        await session.greet()
        while True:
            message = await session.receive()
            seen[2].append(message.completed)
            await session.send(m.Reply(epoch=1, id=message.id, result=message.completed))

    async def main() -> None:
        coordinator = Coordinator(dies_after(0, 1), dies_after(1, 1), last)
        async with linked(tmp_path, coordinator) as (link, _, _):
            futures = [link.request(beat(n)) for n in range(4)]
            assert await within(asyncio.gather(*futures)) == [0, 1, 2, 3]
        assert seen == [[0, 1, 2, 3], [1, 2, 3], [2, 3]]

    asyncio.run(main())


def test_a_request_made_while_others_are_repeated_is_sent_too(tmp_path: Path) -> None:
    """The server reads nothing until the sender is blocked, so that the request comes in the middle of the repeating."""

    async def main() -> None:
        reading = asyncio.Event()

        async def slow(session: Session) -> None:
            await session.greet()
            await reading.wait()
            while True:
                message = await session.receive()
                await session.send(m.Reply(epoch=1, id=message.id, result=message.key))

        async with linked(tmp_path, Coordinator(slow)) as (link, _, _):
            big = "x" * 900_000
            futures = [
                link.request(lambda i, n=n: m.KvSet(id=i, cycle=0, key=str(n), value=big))  # type: ignore[misc]
                for n in range(4)
            ]
            await within(link.welcomed.wait())
            for _ in range(20):
                await asyncio.sleep(0)
            futures.append(link.request(lambda i: m.KvSet(id=i, cycle=0, key="late", value=1)))
            reading.set()
            assert await within(asyncio.gather(*futures)) == ["0", "1", "2", "3", "late"]

    asyncio.run(main())


def test_it_waits_for_a_coordinator_that_is_not_there_yet(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "coordinator.sock"
        refused: list[int] = []
        nobody = asyncio.Event()

        def on_refused(before_ns: int) -> None:
            refused.append(before_ns)
            nobody.set()

        before_ns = time.monotonic_ns()
        async with running(Link(at(path), hello_of, lambda _: None, on_refused=on_refused)) as (link, _):
            future = link.request(beat(3))
            await within(nobody.wait())
            async with unix_serve(Coordinator(answer_all), str(path), ping_interval=None):
                assert await within(future) == 3
                # Whoever listens now began after this.
                assert before_ns <= refused[0] <= time.monotonic_ns()
                assert link.welcome is not None

    asyncio.run(main())


def test_commands_are_passed_on_in_order(tmp_path: Path) -> None:
    stop = m.StopCycle(epoch=1, cycle=0, reason="exit")
    end = m.End(epoch=1, exit_code=0, outcome="succeeded", cause="finished")

    async def commanding(session: Session) -> None:
        await session.greet()
        message = await session.receive()
        await session.send(stop, end, m.Reply(epoch=1, id=message.id))
        await session.until_gone()

    async def main() -> None:
        async with linked(tmp_path, Coordinator(commanding)) as (link, commands, _):
            await within(link.request(beat(0)))
            assert isinstance(commands[0], m.Welcome)
            assert commands[1:] == [stop, end]

    asyncio.run(main())


def test_a_refusal_of_a_request_is_raised_with_its_result(tmp_path: Path) -> None:
    async def refusing(session: Session) -> None:
        await session.greet()
        message = await session.receive()
        await session.send(m.Reply(epoch=1, id=message.id, ok=False, error="timeout", result={"missing": ["k"]}))
        await session.until_gone()

    async def main() -> None:
        async with linked(tmp_path, Coordinator(refusing)) as (link, _, _):
            with pytest.raises(ChannelError, match="timeout") as caught:
                await within(link.request(beat(0)))
            assert caught.value.result == {"missing": ["k"]}  # type: ignore[attr-defined]

    asyncio.run(main())


def test_a_refused_agent_ends_with_the_reason(tmp_path: Path) -> None:
    async def refusing(session: Session) -> None:
        await session.challenge()
        await session.send(m.Reply(epoch=1, id=1, ok=False, error="node name 'n' is taken"))

    async def main() -> None:
        async with linked(tmp_path, Coordinator(refusing)) as (_, _, task):
            with pytest.raises(RefusedError, match="node name 'n' is taken"):
                await within(task)

    asyncio.run(main())


class TestEpochs:
    def test_the_highest_epoch_seen_is_carried_in_every_hello(self, tmp_path: Path) -> None:
        hellos: list[int] = []

        def once(epoch: int) -> Script:
            async def script(session: Session) -> None:
                hellos.append((await session.greet(epoch)).epoch)

            return script

        async def last(session: Session) -> None:
            hellos.append((await session.greet(7)).epoch)
            message = await session.receive()
            await session.send(m.Reply(epoch=7, id=message.id))
            await session.until_gone()

        async def main() -> None:
            async with linked(tmp_path, Coordinator(once(3), once(5), last)) as (link, _, _):
                await within(link.request(beat(0)))
            assert hellos == [0, 3, 5]

        asyncio.run(main())

    def test_a_welcome_of_a_lower_epoch_gets_no_requests(self, tmp_path: Path) -> None:
        async def first(session: Session) -> None:
            await session.greet(5)

        async def old(session: Session) -> None:
            # It is not even told who asks.
            with pytest.raises(ConnectionClosed):
                await session.challenge(4)

        async def main() -> None:
            new = lambda session: answer_all(session, 6)  # noqa: E731
            async with linked(tmp_path, Coordinator(first, old, new)) as (link, _, _):
                assert await within(link.request(beat(2))) == 2
                assert link.welcome is not None
                assert link.welcome.epoch == 6

        asyncio.run(main())

    def test_messages_of_a_lower_epoch_are_ignored(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        async def mixed(session: Session) -> None:
            await session.greet(5)
            message = await session.receive()
            await session.send(
                m.StopCycle(epoch=4, cycle=0, reason="old"),
                m.Reply(epoch=4, id=message.id, result="old"),
                m.Reply(epoch=5, id=message.id, result="new"),
            )
            await session.until_gone()

        async def main() -> None:
            async with linked(tmp_path, Coordinator(mixed)) as (link, commands, _):
                assert await within(link.request(beat(0))) == "new"
                assert [type(command) for command in commands] == [m.Welcome]

        asyncio.run(main())
        assert "ignoring a coordinator of epoch 4 < 5" in capsys.readouterr().err

    def test_a_welcome_of_a_lower_epoch_than_its_challenge_is_none(self, tmp_path: Path) -> None:
        async def two_faced(session: Session) -> None:
            await session.challenge(5)
            await session.send(m.Welcome(epoch=3, attempt=0, boot_id="b", anchor_utc_ns=1, anchor_boot_ns=1))
            await session.until_gone()

        async def main() -> None:
            first = lambda session: session.greet(4)  # noqa: E731
            new = lambda session: answer_all(session, 6)  # noqa: E731
            async with linked(tmp_path, Coordinator(first, two_faced, new)) as (link, _, _):
                assert await within(link.request(beat(2))) == 2
                assert link.welcome is not None
                assert link.welcome.epoch == 6

        asyncio.run(main())


class TestDrop:
    def test_a_dropped_connection_is_made_again_and_nothing_is_lost(self, tmp_path: Path) -> None:
        async def silent(session: Session) -> None:
            await session.greet()
            await session.until_gone()

        async def main() -> None:
            async with linked(tmp_path, Coordinator(silent, answer_all)) as (link, _, _):
                await within(link.welcomed.wait())
                future = link.request(beat(6))
                while not link.connected:
                    await asyncio.sleep(0.001)
                link.drop()
                assert await within(future) == 6

        asyncio.run(main())

    def test_a_request_that_is_forgotten_is_not_sent_again(self, tmp_path: Path) -> None:
        async def silent(session: Session) -> None:
            await session.greet()
            await session.until_gone()

        async def main() -> None:
            async with linked(tmp_path, Coordinator(silent, answer_all)) as (link, _, _):
                old = link.request(beat(1))
                while not link.connected:
                    await asyncio.sleep(0.001)
                link.forget(old)
                link.drop()
                assert await within(link.request(beat(2))) == 2
                assert not old.done()

        asyncio.run(main())

    def test_a_cut_lasts_as_long_as_it_was_asked_for(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with linked(tmp_path, Coordinator(answer_all)) as (link, _, _):
                await within(link.request(beat(1)))
                began = time.monotonic()
                link.cut(0.3)
                assert await within(link.request(beat(2))) == 2
                assert time.monotonic() - began >= 0.3

        asyncio.run(main())
