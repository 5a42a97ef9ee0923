"""Who may speak to a coordinator: everybody else is refused, told why, and counted, while a node that may goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.websockets import WebSocket, WebSocketDisconnect

from keepstep.launcher import messages as m
from keepstep.launcher.coordination import admission
from keepstep.launcher.coordination.admission import MAX_FIRST_BYTES, Admission, RefusedConnectionError
from keepstep.launcher.trust import make_token, prove
from keepstep.records.codec import to_json
from tests.launcher.coordinators import RUN, TOKEN, Client, Served, serving

OTHER = make_token().encode()
TOO_BIG = (1009, 1006)
"""What a client sees of the close: its reset may overtake the frame that says why."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(network=True, nnodes=3, lease_s=60.0) as served:
        yield served


@pytest.fixture(scope="module")
def good(served: Served) -> Iterator[Client]:
    """A node that is welcome, over the network."""
    with served.join("good", network=True) as client:
        yield client


@contextlib.contextmanager
def one_more(served: Served, good: Client, why: str) -> Iterator[None]:
    """What happens inside is counted once as `why`, and the good node is still answered."""
    before = served.refused()
    yield
    assert served.refused() == {**before, why: before.get(why, 0) + 1}
    assert good.beat().ok


def reason(client: Client) -> str:
    """Why this client was refused; the connection is closed then."""
    reply = client.hear()
    assert isinstance(reply, m.Reply)
    assert not reply.ok
    assert client.hear_end() == 1008
    return reply.error or ""


NO_PROOF = "no proof of the job token: give every launcher the same --token-file"


class TestToken:
    @pytest.mark.parametrize(
        "make",
        [
            lambda nonce: "",
            lambda nonce: "0" * 64,
            lambda nonce: prove(OTHER, nonce, RUN, "b"),
            lambda nonce: prove(TOKEN, nonce, RUN, "c"),
            lambda nonce: prove(TOKEN, nonce, "another run", "b"),
            lambda nonce: prove(TOKEN, nonce + "0", RUN, "b"),
            lambda nonce: prove(TOKEN, "", RUN, "b"),
            lambda nonce: TOKEN.decode(),
            lambda nonce: "\ud7ff" * 10,
        ],
        ids=["none", "zeros", "other token", "other node", "other run", "other nonce", "no nonce", "token", "text"],
    )
    def test_a_client_that_does_not_prove_it(self, served: Served, good: Client, make: Any) -> None:
        with one_more(served, good, "no_token"), served.connect(network=True) as client:
            client.greet("b", proof=make(client.challenge.nonce))
            assert NO_PROOF in reason(client)

    def test_a_proof_that_was_overheard_is_worth_nothing(self, served: Served, good: Client) -> None:
        with served.connect(network=True) as first:
            overheard = prove(TOKEN, first.challenge.nonce, RUN, "good")
        with one_more(served, good, "no_token"), served.connect(network=True) as client:
            client.greet("good", proof=overheard, pid=good_pid())
            assert NO_PROOF in reason(client)

    def test_a_person_over_the_network_proves_it_too(self, served: Served, good: Client) -> None:
        with one_more(served, good, "no_token"):
            reply = served.operate("stop", network=True, proof="")
            assert NO_PROOF in (reply.error or "")
        assert served.operate("status", network=True).result["phase"] == "forming"

    def test_on_this_host_the_sockets_folder_is_the_proof(self, served: Served) -> None:
        assert served.status()["phase"] == "forming"

    def test_it_is_nowhere_to_be_seen(self, served: Served) -> None:
        pid = served.processes[-1].pid
        for name in ("cmdline", "environ"):
            assert TOKEN not in Path(f"/proc/{pid}/{name}").read_bytes()
        assert TOKEN.decode() not in served.log
        for path in served.run_dir.rglob("*"):
            assert not path.is_file() or TOKEN not in path.read_bytes(), path


def good_pid() -> int:
    return 100


class TestFirstMessage:
    @pytest.mark.parametrize("network", [True, False])
    @pytest.mark.parametrize(
        "text",
        ["", "no json", "{", "[]", '{"type":"hello"}', '{"type":"nothing"}', to_json(m.Beat(id=1)).decode(), "\0"],
    )
    def test_a_malformed_one(self, served: Served, good: Client, network: bool, text: str) -> None:
        with one_more(served, good, "malformed"), served.connect(network=network) as client:
            client.connection.send(text)
            assert reason(client).startswith("the first message must be hello")

    def test_a_malformed_command(self, served: Served, good: Client) -> None:
        with one_more(served, good, "malformed"), served.connect("/operator") as client:
            client.connection.send('{"type":"operator","what":5}')
            assert reason(client).startswith("malformed command")

    def test_one_that_is_too_long_before_the_proof(self, served: Served, good: Client) -> None:
        with one_more(served, good, "oversized"), served.connect(network=True) as client:
            client.greet("b", levels=["x" * MAX_FIRST_BYTES])
            assert f"at most {MAX_FIRST_BYTES} are read" in reason(client)

    def test_one_that_is_longer_than_any_message(self, served: Served, good: Client) -> None:
        with one_more(served, good, "oversized"), served.connect(network=True) as client:
            client.greet("b", levels=["x" * m.MAX_MESSAGE_BYTES])
            assert client.hear_end() in TOO_BIG

    def test_a_binary_one(self, served: Served, good: Client) -> None:
        with one_more(served, good, "malformed"), served.connect(network=True) as client:
            client.connection.send(to_json(client.hello("b")))
            assert reason(client) == "the first message must be text"

    def test_a_frame_that_breaks_the_protocol(self, served: Served, good: Client) -> None:
        before = served.refused()
        with served.connect(network=True) as client:
            client.connection.socket.sendall(b"\xff" * 64)
            assert client.hear_end() in (1002, 1006)
        assert served.refused() == before
        assert good.beat().ok

    def test_what_is_no_websocket_at_all(self, served: Served, good: Client) -> None:
        host, _, port = served.endpoint.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
            while raw.recv(1 << 16):
                pass
        assert good.beat().ok


class TestSilence:
    """A client that says nothing; by an injected limit."""

    def test_it_is_sent_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admission, "FIRST_MESSAGE_S", 0.01)
        sent: list[Any] = []

        async def main() -> None:
            quiet: asyncio.Queue[Any] = asyncio.Queue()
            quiet.put_nowait({"type": "websocket.connect"})

            async def send(message: Any) -> None:
                sent.append(message)

            socket = WebSocket({"type": "websocket", "client": None}, quiet.get, send)
            gate = Admission(RUN, TOKEN, "", "")
            with pytest.raises(RefusedConnectionError, match="no first message"):
                await gate.admit(socket, True, 3)
            assert gate.refused == {"silent": 1}

        asyncio.run(main())
        assert [message["type"] for message in sent] == ["websocket.accept", "websocket.send"]
        assert '"epoch":3' in sent[1]["text"]

    def test_one_that_leaves_is_no_refusal(self) -> None:
        async def main() -> None:
            gone: asyncio.Queue[Any] = asyncio.Queue()
            gone.put_nowait({"type": "websocket.connect"})
            gone.put_nowait({"type": "websocket.disconnect", "code": 1001})

            async def send(message: Any) -> None:
                pass

            gate = Admission(RUN, TOKEN, "", "")
            with pytest.raises(WebSocketDisconnect):
                await gate.admit(WebSocket({"type": "websocket", "client": None}, gone.get, send), True, 3)
            assert gate.refused == {}

        asyncio.run(main())

    def test_many_silent_clients_hold_up_nobody(self, served: Served, good: Client) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(served.connect())
            assert good.beat().ok
            assert served.status()["phase"] == "forming"


class TestAfterTheFirst:
    def test_a_malformed_message_of_a_node_ends_its_connection_only(self, served: Served, good: Client) -> None:
        with served.join("b", network=True) as client, one_more(served, good, "malformed"):
            client.connection.send('{"type":"beat"}')
            assert "malformed message" in reason(client)
        with served.join("b", network=True) as again:
            assert again.beat().ok

    def test_a_binary_message_of_a_node(self, served: Served, good: Client) -> None:
        with served.join("b", network=True) as client, one_more(served, good, "malformed"):
            client.connection.send(to_json(m.Beat(id=1)))
            assert client.hear_end() == 1008

    def test_an_oversized_message_of_a_node(self, served: Served, good: Client) -> None:
        with served.join("b", network=True) as client, one_more(served, good, "oversized"):
            client.say(m.KvSet(id=1, key="k", value="x" * m.MAX_MESSAGE_BYTES))
            assert client.hear_end() in TOO_BIG

    def test_a_message_about_a_cycle_that_is_not(self, served: Served, good: Client) -> None:
        with served.join("b", network=True) as client, one_more(served, good, "old_cycle"):
            reply = client.ask(lambda i: m.KvSet(id=i, cycle=7, key="k", value=1))
            assert (reply.ok, reply.error) == (False, "cycle 7 is over (current: -1)")

    def test_a_message_that_only_a_person_may_send(self, served: Served, good: Client) -> None:
        with served.join("b", network=True) as client:
            reply = client.ask(lambda i: m.Operator(id=i, what="stop", run_id=RUN))
            assert not reply.ok
        assert served.status()["phase"] == "forming"

    def test_another_run(self, served: Served, good: Client) -> None:
        with one_more(served, good, "refused_join"), served.connect() as client:
            client.greet("b", run_id="other")
            assert reason(client) == "this is run 'run-1', not 'other'"

    def test_a_name_that_is_taken(self, served: Served, good: Client) -> None:
        with one_more(served, good, "refused_join"), served.connect() as client:
            client.greet("good", pid=200)
            assert "node name 'good' is taken by host h pid 100" in reason(client)


def test_the_address_of_a_node_is_the_one_the_coordinator_sees(served: Served, good: Client) -> None:
    with served.join("b", network=True, next_addr=""):
        journal = served.epochs[-1].read_text().splitlines()
    joined = next(line for line in reversed(journal) if '"type":"node"' in line and '"node":"b"' in line)
    assert '"next_addr":"127.0.0.1"' in joined


def test_counts_are_told_at_the_end() -> None:
    gate = Admission(RUN, TOKEN, "", "")
    gate.report()
    for why in ("no_token", "malformed", "no_token"):
        gate.count(why)
    gate.report()
    assert gate.refused == {"no_token": 2, "malformed": 1}


def test_the_log_says_each_kind_once(capsys: pytest.CaptureFixture[str]) -> None:
    gate = Admission(RUN, TOKEN, "", "")
    for _ in range(1000):
        gate.count("no_token")
    gate.report()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "coordinator: refused: no_token (further ones are counted)",
        "coordinator: refused in all: 1000 no_token",
    ]
