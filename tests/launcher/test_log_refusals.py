"""What the log writer takes from whom: proofs, names, frames, evidence and its bounds."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from keepstep.launcher.output import logwire as w
from tests.launcher.log_harness import (
    LIMIT_S,
    RUN,
    Agent,
    Client,
    Server,
    wait_until,
)


def files_of(server: Server) -> set[Path]:
    """What is in the run folder, without temporary files of records that are written all the time."""
    return {p for p in server.run_dir.rglob("*") if not p.name.startswith(".funnel.json")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("refused"), flags=["--status-s", "0.05"])
    yield server
    assert server.stop() == 0


class TestRefused:
    """One log writer sees all of this, and goes on."""

    @pytest.fixture(autouse=True)
    def before(self, server: Server) -> None:
        server.seen = server.refused()

    @pytest.fixture
    def client(self, server: Server) -> Iterator[Client]:
        client = Client(server.address)
        yield client
        client.close()

    def test_somebody_who_speaks_no_tls(self, server: Server) -> None:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while sock.recv(100):
                pass
        server.wait_refused("no TLS")

    def test_another_token(self, server: Server, client: Client) -> None:
        kind, body = client.hello(token=b"not the token of this job")
        assert kind == w.REFUSED
        assert b"no proof" in body
        assert client.frame() == (0, b"")
        server.wait_refused("no proof of the job token")

    def test_a_proof_for_another_run(self, server: Server, client: Client) -> None:
        assert client.hello(run_id="run-2")[0] == w.REFUSED
        server.wait_refused("wrong run")

    def test_a_repeated_proof(self, server: Server, client: Client) -> None:
        """The nonce differs from connection to connection."""
        other = Client(server.address)
        other.nonce = client.nonce
        assert other.hello()[0] == w.REFUSED
        other.close()
        server.wait_refused("no proof of the job token")

    @pytest.mark.parametrize("node", ["", "../../etc", "a/b", ".hidden", "a\nb", "x" * 101, "nöde", "a\0b"])
    def test_a_node_name_that_is_none(self, node: str, server: Server, client: Client) -> None:
        assert client.hello(node=node)[0] == w.REFUSED
        server.wait_refused("node name")

    def test_data_before_hello(self, server: Server, client: Client) -> None:
        before = files_of(server)
        client.sock.sendall(w.data_frame(1, 0, 0, w.STDOUT, b"hi\n"))
        assert client.frame()[0] == w.REFUSED
        server.wait_refused("no hello")
        assert files_of(server) == before

    def test_a_large_frame_before_hello(self, server: Server, client: Client) -> None:
        client.sock.sendall(w.FRAME_HEAD.pack(w.MAX_HELLO_BYTES + 1, w.HELLO))
        assert client.frame()[0] == w.REFUSED
        server.wait_refused("oversized")

    @pytest.mark.parametrize(
        ("frame", "reason"),
        [
            (w.data_frame(1, -1, 0, w.STDOUT, b"x\n"), "cycle"),
            (w.data_frame(1, w.MAX_CYCLE, 0, w.STDOUT, b"x\n"), "cycle"),
            (w.data_frame(1, 0, -2, w.STDOUT, b"x\n"), "rank"),
            (w.data_frame(1, 0, -1, w.STDOUT, b"x\n"), "rank"),
            (w.data_frame(1, 0, w.MAX_RANK, w.STDOUT, b"x\n"), "rank"),
            (w.data_frame(1, 0, 0, 9, b"x\n"), "rank"),
            (w.frame(w.DATA, b"short"), "malformed"),
            (w.frame(w.EVIDENCE, b"short"), "malformed"),
            (w.evidence_frame(1, 0, 0, "../name", b"x"), "evidence name"),
            (w.evidence_frame(1, 0, 0, "..", b"x"), "evidence name"),
            (w.frame(w.EVIDENCE, w.EVIDENCE_HEAD.pack(1, 0, 0, 255) + b"name"), "evidence name"),
            (w.evidence_frame(1, -1, 0, "name", b"x"), "cycle"),
            (w.frame(99, b""), "unknown kind"),
            (w.json_frame(w.HELLO, w.Hello(run_id=RUN, node="again", life="l")), "unknown kind"),
            (w.FRAME_HEAD.pack(w.MAX_FRAME_BYTES + 1, w.DATA), "oversized"),
            (w.FRAME_HEAD.pack(0, 0), "malformed"),
        ],
    )
    def test_a_frame_that_is_none(self, frame: bytes, reason: str, server: Server, client: Client) -> None:
        before = files_of(server)
        assert client.hello()[0] == w.WELCOME
        client.sock.sendall(frame)
        assert client.frame()[0] == w.REFUSED
        server.wait_refused(reason)
        assert files_of(server) == before

    def test_a_frame_sent_twice_is_written_once(self, server: Server, client: Client) -> None:
        assert client.hello("node-c")[0] == w.WELCOME
        client.sock.sendall(w.data_frame(1, 7, 5, w.STDOUT, b"once\n") * 2 + w.data_frame(2, 7, 5, w.STDOUT, b"last\n"))
        while w.SEQ.unpack(client.frame()[1])[0] < 2:
            pass
        again = Client(server.address)
        kind, body = again.hello("node-c")
        assert (kind, msgspec.json.decode(body)) == (w.WELCOME, {"seq": 2})
        again.sock.sendall(w.data_frame(2, 7, 5, w.STDOUT, b"last\n") + w.data_frame(3, 7, 5, w.STDOUT, b"new\n"))
        while w.SEQ.unpack(again.frame()[1])[0] < 3:
            pass
        again.close()
        assert server.log("cycle-0007.log") == [b"[rank 5] once", b"[rank 5] last", b"[rank 5] new"]

    def test_an_agent_with_another_token_keeps_away_from_a_writer_it_does_not_know(self, server: Server) -> None:
        agent = Agent(server, token=b"another token, just as long")
        wait_until(lambda: "pin" in (agent.logs.problem() or ""))
        agent.close()


class TestEvidence:
    @pytest.fixture
    def agent(self, server: Server) -> Iterator[Agent]:
        agent = Agent(server)
        yield agent
        agent.close()

    def test_a_file_arrives_under_its_node_and_cycle(self, server: Server, agent: Agent) -> None:
        data = random.Random(1).randbytes(300_000)
        assert agent.logs.send_evidence(3, "stacks-rank-00001.txt", data)
        assert agent.logs.send_evidence(3, "empty", b"")
        assert agent.logs.drain(LIMIT_S)
        folder = server.run_dir / "evidence" / "cycle-0003" / "node-a"
        assert (folder / "stacks-rank-00001.txt").read_bytes() == data
        assert (folder / "empty").read_bytes() == b""
        assert agent.logs.send_evidence(3, "stacks-rank-00001.txt", b"again")
        assert agent.logs.drain(LIMIT_S)
        assert (folder / "stacks-rank-00001.txt").read_bytes() == b"again"

    def test_names_and_sizes_are_bounded_here(self, server: Server, agent: Agent) -> None:
        for name in ("../x", "a/b", "", ".x"):
            assert not agent.logs.send_evidence(0, name, b"x")
        assert not agent.logs.send_evidence(0, "large", bytes(w.EVIDENCE_FILE_BYTES + 1))

    def test_sizes_are_bounded_there(self, server: Server) -> None:
        client = Client(server.address)
        client.hello()
        block = bytes(1 << 20)
        seq = 0
        for number in range(18):
            for piece in range(4):
                seq += 1
                client.sock.sendall(w.evidence_frame(seq, 0, piece << 20, f"file-{number}", block))
        client.sock.sendall(w.evidence_frame(seq + 1, 1, 4 << 20, "beyond", b"x"))
        while w.SEQ.unpack(client.frame()[1])[0] < seq + 1:
            pass
        client.close()
        files = [p for p in (server.run_dir / "evidence" / "cycle-0000").rglob("*") if p.is_file()]
        assert sum(p.stat().st_size for p in files) == w.EVIDENCE_CYCLE_BYTES
        wait_until(lambda: server.status()["evidence_refused"] == 9)
