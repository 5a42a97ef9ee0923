"""Where an agent looks for its coordinator: several places, hosts that do not answer, TLS with a pin."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import serve, unix_serve
from websockets.exceptions import ConnectionClosed

from keepstep.launcher import messages as m
from keepstep.launcher.node import link as link_module
from keepstep.launcher.node.link import Link, RefusedError, Target, knock
from keepstep.launcher.trust import make_token, proven, server_context
from keepstep.records.codec import to_json
from tests.launcher.test_link import Coordinator, Session, answer_all, at, beat, hello_of, linked, running, within


class TestTargets:
    """Several places where a coordinator may be."""

    def test_the_first_that_answers_is_taken(self, tmp_path: Path) -> None:
        async def main() -> None:
            paths = [tmp_path / f"{n}.sock" for n in "abc"]
            refused: list[int] = []
            async with unix_serve(Coordinator(answer_all), str(paths[1]), ping_interval=None):
                link = Link(at(*paths), hello_of, lambda _: None, on_refused=refused.append)
                async with running(link):
                    assert await within(link.request(beat(2))) == 2
                    assert link.target == Target(str(paths[1]))
            # One of them listened: that says nothing about when a coordinator began.
            assert refused == []

        asyncio.run(main())

    def test_when_one_is_gone_the_next_has_the_higher_epoch(self, tmp_path: Path) -> None:
        async def main() -> None:
            paths = [tmp_path / f"{n}.sock" for n in "ab"]
            first = Coordinator(lambda session: session.greet(1))  # type: ignore[arg-type, return-value]
            old = await unix_serve(first, str(paths[0]), ping_interval=None)
            async with running(Link(at(*paths), hello_of, lambda _: None)) as (link, _):
                await within(link.welcomed.wait())
                old.close()
                await old.wait_closed()
                future = link.request(beat(4))
                successor = Coordinator(lambda session: answer_all(session, 2))
                async with unix_serve(successor, str(paths[1]), ping_interval=None):
                    assert await within(future) == 4
                    assert link.target == Target(str(paths[1]))

        asyncio.run(main())

    def test_targets_are_asked_for_anew_each_time(self, tmp_path: Path) -> None:
        async def main() -> None:
            paths = [tmp_path / f"{n}.sock" for n in "ab"]
            targets = [Target(str(paths[0]))]
            nobody = asyncio.Event()
            link = Link(lambda: targets, hello_of, lambda _: None, on_refused=lambda _: nobody.set())
            async with running(link), unix_serve(Coordinator(answer_all), str(paths[1]), ping_interval=None):
                await within(nobody.wait())
                targets[:] = [Target(str(paths[1]))]
                assert await within(link.request(beat(1))) == 1

        asyncio.run(main())

    def test_it_gives_up_naming_where_it_looked(self, tmp_path: Path) -> None:
        async def main() -> None:
            link = Link(at(tmp_path / "a.sock", tmp_path / "b.sock"), hello_of, lambda _: None, give_up_s=0.2)
            with pytest.raises(RefusedError, match=r"a\.sock, .*b\.sock for 0\.2 s"):
                await within(link.run())

        asyncio.run(main())

    def test_a_coordinator_that_asks_for_patience_is_asked_again(self, tmp_path: Path) -> None:
        async def busy(session: Session) -> None:
            hello = await session.challenge()
            why = "node name 'n' is taken by host h pid 1"
            await session.send(m.Reply(epoch=1, id=hello.id, ok=False, error=why, result={"retry": True}))

        async def main() -> None:
            coordinator = Coordinator(busy, busy, answer_all)
            async with linked(tmp_path, coordinator) as (link, _, _):
                assert await within(link.request(beat(2))) == 2
            assert coordinator.connections == 3

        asyncio.run(main())


class TestKnock:
    """Of several hosts those that answer go first."""

    @staticmethod
    async def order(*targets: Target) -> list[Target]:
        return [target async for target in knock(list(targets))]

    @staticmethod
    def target(sock: socket.socket) -> Target:
        return Target(f"127.0.0.1:{sock.getsockname()[1]}")

    def test_one_host_is_not_asked_first(self) -> None:
        local, remote = Target("/nowhere.sock"), Target("127.0.0.1:9")
        assert asyncio.run(self.order(local, remote)) == [local, remote]
        assert asyncio.run(self.order()) == []

    def test_those_that_refuse_come_last(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as gone:
            local, answers, refuses = Target("/nowhere.sock"), self.target(first), self.target(gone)
            gone.close()
            assert asyncio.run(self.order(refuses, answers, local)) == [local, answers, refuses]
            assert asyncio.run(self.order(refuses, refuses)) == [refuses, refuses]

    def test_a_host_that_says_nothing_keeps_nobody_from_the_one_that_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link_module, "OPEN_ONE_OF_MANY_S", 0.5)
        with contextlib.ExitStack() as stack:
            answers = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            # Its queue is full: the kernel drops whoever else would connect.
            for _ in range(2):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(silent.getsockname())

            async def main() -> None:
                began = time.monotonic()
                async with contextlib.aclosing(knock([self.target(silent), self.target(answers)])) as found:
                    assert await anext(found) == self.target(answers)
                    assert time.monotonic() - began < 0.5
                    assert [target async for target in found] == []

            asyncio.run(main())


class TestNetwork:
    """Over TCP with TLS: the pin before anything is said, then the proof of the token."""

    TOKEN = make_token().encode()

    @asynccontextmanager
    async def serving(self, coordinator: Coordinator, token: bytes | None) -> AsyncIterator[Target]:
        context = server_context(token) if token is not None else None
        async with serve(coordinator, "127.0.0.1", 0, ssl=context, ping_interval=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            yield Target(f"127.0.0.1:{port}", token is not None)

    @pytest.mark.parametrize("tls", [True, False])
    def test_the_proof_answers_the_challenge(self, tls: bool) -> None:
        hellos: list[m.Hello] = []

        async def asking(session: Session) -> None:
            hellos.append(await session.challenge(nonce="fresh"))
            await session.send(m.Welcome(epoch=1, attempt=0, boot_id="b", anchor_utc_ns=1, anchor_boot_ns=1))
            await session.until_gone()

        async def main() -> None:
            async with self.serving(Coordinator(asking), self.TOKEN if tls else None) as target:
                link = Link(lambda: [target], hello_of, lambda _: None, token=self.TOKEN)
                async with running(link):
                    before_ns = time.monotonic_ns()
                    await within(link.welcomed.wait())
                    assert before_ns <= link.hello_sent_ns <= time.monotonic_ns()

        asyncio.run(main())
        (hello,) = hellos
        assert proven(self.TOKEN, "fresh", "r", "n", hello.proof)
        assert self.TOKEN.decode() not in to_json(hello).decode()

    def test_a_coordinator_with_another_key_is_told_nothing(self) -> None:
        heard: list[Any] = []

        async def impostor(session: Session) -> None:
            with suppress(ConnectionClosed):
                heard.append(await session.challenge())

        async def main() -> None:
            async with self.serving(Coordinator(impostor), make_token().encode()) as target:
                link = Link(lambda: [target], hello_of, lambda _: None, 0.3, self.TOKEN)
                with pytest.raises(RefusedError, match=r"pin .* check that all hosts have the same token"):
                    await within(link.run())

        asyncio.run(main())
        assert heard == []

    def test_the_next_endpoint_is_tried_after_one_with_another_key(self) -> None:
        async def main() -> None:
            impostor = Coordinator(lambda session: session.until_gone())
            async with (
                self.serving(impostor, make_token().encode()) as wrong,
                self.serving(Coordinator(answer_all), self.TOKEN) as right,
            ):
                link = Link(lambda: [wrong, right], hello_of, lambda _: None, token=self.TOKEN)
                async with running(link):
                    assert await within(link.request(beat(3))) == 3
                    assert link.target == right

        asyncio.run(main())

    def test_an_answer_that_is_no_websocket_is_tried_again(self) -> None:
        asked: list[bytes] = []

        async def web_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        async def main() -> None:
            async with await asyncio.start_server(web_page, "127.0.0.1", 0) as server:
                target = Target(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
                link = Link(lambda: [target], hello_of, lambda _: None, 0.3, self.TOKEN)
                with pytest.raises(RefusedError, match="no coordinator at 127"):
                    await within(link.run())

        asyncio.run(main())
        # Nothing of the token travels in what is sent before the pin and the challenge.
        assert len(asked) > 1
        assert not any(self.TOKEN in text for text in asked)
