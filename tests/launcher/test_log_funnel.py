"""The log funnel between real processes: a log writer on a socket, agents' log threads that read real pipes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.launcher import logwire as w
from keepstep.launcher.config import RunConfig
from keepstep.launcher.logbuffer import SendBuffer
from keepstep.launcher.logs import LogThread, Stream
from keepstep.launcher.logsinks import FunnelSink
from keepstep.launcher.trust import client_context, prove
from keepstep.records.codec import to_pretty_json

LIMIT_S = 30.0
RUN = "run-1"
TOKEN = b"a token of a test, long enough"


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)


class Server:
    """A log writer process. `start` again after `kill` listens on the same address."""

    def __init__(
        self, folder: Path, *, token: bytes | None = TOKEN, listen: str = "127.0.0.1:0", flags: list[str]
    ) -> None:
        self.run_dir = folder
        self.address = listen
        self._token = token
        self._flags = flags
        self.stderr = folder / "writer.err"
        self.start()

    def start(self) -> None:
        read_end, write_end = os.pipe()
        if self._token is not None:
            os.write(write_end, self._token)
        os.close(write_end)
        command = [sys.executable, "-m", "keepstep.launcher.logserver", "--run-dir", str(self.run_dir), "--run-id", RUN]
        command += ["--listen", self.address, *self._flags]
        command += ["--token-fd", str(read_end)] if self._token is not None else []
        with self.stderr.open("ab") as err:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, pass_fds=[read_end])
        os.close(read_end)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.stderr.read_text()
        (self.address,) = json.loads(line)["listening"]

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self._reap()

    def _reap(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(LIMIT_S)

    def log(self, name: str = "cycle-0000.log") -> list[bytes]:
        """Lines of a file; it ends with a whole one."""
        content = (self.run_dir / "logs" / name).read_bytes()
        assert content == b"" or content.endswith(b"\n")
        return content.split(b"\n")[:-1]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "logs" / "funnel.json").read_bytes())
        return found

    def wait_refused(self, reason: str, times: int = 1) -> None:
        path = self.run_dir / "logs" / "funnel.json"
        wait_until(lambda: path.exists() and self.status()["refused"].get(reason) == times)


class Agent:
    """A log thread that sends to a log writer; `pipe` gives the write end of one rank's stdout."""

    def __init__(self, server: Server, node: str = "node-a", *, token: bytes | None = TOKEN, tls: bool = True) -> None:
        self.logs = LogThread(node)
        self.logs.use_funnel(server.address, RUN, node, token, tls)
        self.logs.start_cycle(server.run_dir / "not-used.log", 0)

    def pipe(self, rank: int, name: str = "stdout") -> int:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self.logs.add(
            Stream(
                fd=read_end,
                rank=rank,
                local_rank=rank,
                name=name,
                pending=bytearray(),
                console=None,
                console_prefix=b"",
                extra=None,
            )
        )
        return write_end

    def write(self, rank: int, *chunks: bytes) -> threading.Thread:
        """A rank that prints and ends, in a thread."""
        thread = threading.Thread(target=send, args=(self.pipe(rank), *chunks))
        thread.start()
        return thread

    def close(self) -> None:
        self.logs.close()


def send(fd: int, *chunks: bytes) -> None:
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            view = view[os.write(fd, view) :]
    os.close(fd)


def numbers(lines: list[bytes]) -> dict[int, list[int]]:
    """Rank -> the numbers in its lines, which have the form "[rank R] N ..."."""
    found: dict[int, list[int]] = defaultdict(list)
    for line in lines:
        match = re.match(rb"\[rank (\d+)\] (\d+)", line)
        assert match, line[:100]
        found[int(match[1])].append(int(match[2]))
    return found


@pytest.fixture
def cleanup() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


Start = Callable[..., Server]
Join = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path, cleanup: contextlib.ExitStack) -> Start:
    def start_server(*flags: str, **more: Any) -> Server:
        server = Server(tmp_path, flags=list(flags), **more)
        cleanup.callback(server.stop)
        return server

    return start_server


@pytest.fixture
def join(cleanup: contextlib.ExitStack) -> Join:
    def join_agent(server: Server, node: str = "node-a", **more: Any) -> Agent:
        agent = Agent(server, node, **more)
        cleanup.callback(agent.close)
        return agent

    return join_agent


class TestWriter:
    @pytest.mark.parametrize("kind", ["tls", "clear", "unix"])
    def test_one_file_has_the_output_of_all_nodes(self, kind: str, start: Start, join: Join, tmp_path: Path) -> None:
        if kind == "unix":
            server = start(token=None, listen=f"unix:{tmp_path}/writer.sock")
            agents = [join(server, f"node-{n}", token=None) for n in range(3)]
        else:
            server = start(*(["--no-tls"] if kind == "clear" else []))
            agents = [join(server, f"node-{n}", tls=kind == "tls") for n in range(3)]
        threads = []
        for index, agent in enumerate(agents):
            for rank in (2 * index, 2 * index + 1):
                threads.append(agent.write(rank, *(b"%d %s\n" % (n, b"x" * (n % 150)) for n in range(2000))))
        for thread in threads:
            thread.join()
        for agent in agents:
            assert agent.logs.drain(LIMIT_S)
        assert numbers(server.log()) == {rank: list(range(2000)) for rank in range(6)}
        counts = agents[0].logs.counts()
        assert (counts.lines, counts.lost_bytes, counts.held_bytes, counts.reconnects) == (4000, {}, 0, 0)

    def test_each_cycle_its_file_and_the_users_copy(self, start: Start, join: Join, tmp_path: Path) -> None:
        config = RunConfig(run_id=RUN, run_dir=str(tmp_path), node="n", script="s", log_prefix=str(tmp_path / "mine"))
        (tmp_path / "run.json").write_bytes(to_pretty_json(config))
        server = start()
        agent = join(server)
        agent.write(0, b"first\n").join()
        assert agent.logs.drain(LIMIT_S)
        agent.logs.start_cycle(tmp_path / "not-used.log", 1)
        agent.write(0, b"second\n").join()
        assert agent.logs.drain(LIMIT_S)
        assert server.log() == [b"[rank 0] first"]
        assert server.log("cycle-0001.log") == [b"[rank 0] second"]
        assert server.stop() == 0
        assert (tmp_path / "mine_cycle0.log").read_bytes() == b"[rank 0] first\n"
        assert (tmp_path / "mine_cycle1.log").read_bytes() == b"[rank 0] second\n"
        assert not (tmp_path / "not-used.log").exists()

    def test_lines_of_launchers_have_their_own_file(self, start: Start, join: Join) -> None:
        server = start()
        agents = [join(server, name) for name in ("alpha", "beta.example")]
        agents[0].logs.say("keepstep: started\nand more")
        agents[1].logs.say("keepstep: ready \udcff")
        for agent in agents:
            assert agent.logs.drain(LIMIT_S)
        assert sorted(server.log("launcher.log")) == [
            b"[alpha] and more",
            b"[alpha] keepstep: started",
            b"[beta.example] keepstep: ready ?",
        ]

    def test_any_bytes_and_a_line_of_ten_megabytes(self, start: Start, join: Join) -> None:
        server = start()
        agent = join(server)
        odd = b"\x1b[31mred\x1b[0m 50%\r100%\r\xff\xfe nul \x00 end"
        size = 10_000_000
        threads = [agent.write(0, odd + b"\n", b"y" * size, b"\nafter"), agent.write(1, b"z" * size + b"\n")]
        for thread in threads:
            thread.join()
        assert agent.logs.drain(LIMIT_S)
        lines = {rank: [] for rank in (0, 1)}  # type: dict[int, list[bytes]]
        for line in server.log():
            lines[int(line[6:7])].append(line[9:])
        assert lines[0][0] == odd
        assert lines[0][-1] == b"after"
        assert b"".join(lines[0][1:-1]) == b"y" * size
        assert b"".join(lines[1]) == b"z" * size
        assert max(map(len, lines[1])) <= w.MAX_TEXT_BYTES

    def test_both_streams_of_a_rank_keep_their_order(self, start: Start, join: Join) -> None:
        server = start()
        agent = join(server)
        out, err = agent.pipe(0, "stdout"), agent.pipe(0, "stderr")
        for n in range(500):
            os.write(out, b"%d out\n" % n)
            os.write(err, b"%d err\n" % n)
        os.close(out)
        os.close(err)
        assert agent.logs.drain(LIMIT_S)
        for name in (b"out", b"err"):
            assert numbers([x for x in server.log() if x.endswith(name)])[0] == list(range(500))

    def test_a_second_writer_of_the_same_run_does_not_start(self, start: Start, tmp_path: Path) -> None:
        start(token=None, listen=f"unix:{tmp_path}/writer.sock")
        command = [sys.executable, "-m", "keepstep.launcher.logserver", "--run-dir", str(tmp_path), "--run-id", RUN]
        command += ["--listen", f"unix:{tmp_path}/other.sock", "--wait-s", "0"]
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert second.returncode == 1
        assert "another log writer of this run is alive" in second.stderr

    def test_no_network_address_without_a_token(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "keepstep.launcher.logserver", "--run-dir", str(tmp_path), "--run-id", RUN]
        command += ["--listen", "127.0.0.1:0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert done.returncode == 2
        assert "needs the job token" in done.stderr

    def test_it_ends_when_nobody_needs_it(self, start: Start) -> None:
        server = start("--idle-s", "0")
        assert server.process.wait(LIMIT_S) == 0


class TestKilledWriter:
    def test_nothing_is_lost_or_twice_over_many_kills(self, start: Start, join: Join) -> None:
        """Kills fall anywhere: before, within and after a write."""
        server = start()
        agents = [join(server, f"node-{n}") for n in range(2)]
        count, chance = 40_000, random.Random(7)
        threads = [a.write(i, *(b"%d %s\n" % (n, b"x" * 60) for n in range(count))) for i, a in enumerate(agents)]
        path = server.run_dir / "logs" / "cycle-0000.log"
        for _ in range(5):
            size = path.stat().st_size if path.exists() else 0
            wait_until(lambda size=size: (path.exists() and path.stat().st_size > size) or not threads[0].is_alive())
            time.sleep(chance.uniform(0, 0.03))
            server.kill()
            server.start()
        for thread in threads:
            thread.join()
        for agent in agents:
            assert agent.logs.drain(LIMIT_S)
        found = numbers(server.log())
        assert found == {rank: list(range(count)) for rank in range(2)}
        assert all(agent.logs.counts().lost_bytes == {} for agent in agents)
        assert sum(agent.logs.counts().reconnects for agent in agents) >= 2

    def test_a_full_disk_loses_nothing_and_is_said_once(self, start: Start, join: Join) -> None:
        server = start()
        logs = server.run_dir / "logs"
        (logs / "cycle-0000.log").symlink_to("/dev/full")  # not followed: an error like any other of the disk
        agent = join(server)
        agent.write(0, b"1 kept\n").join()
        assert not agent.logs.drain(1.5)
        (logs / "cycle-0000.log").unlink()
        assert agent.logs.drain(LIMIT_S)
        assert server.log() == [b"[rank 0] 1 kept"]
        said = server.stderr.read_text()
        assert said.count("cannot be written") == 1
        assert said.count("can be written again") == 1


class TestSilentServer:
    """The writer is away: the buffer of the node fills, then output is dropped and counted."""

    def funnel_agent(self, server: Server, hold_s: float) -> Agent:
        agent = Agent(server)
        agent.close()
        agent.logs = LogThread("node-a")
        buffer = SendBuffer(capacity_bytes=1 << 18, hold_s=hold_s)
        agent.logs._sink = FunnelSink(
            agent.logs._losses, server.address, RUN, "node-a", TOKEN, True, agent.logs._on_room, buffer
        )
        agent.logs.start_cycle(server.run_dir / "not-used.log", 0)
        return agent

    def test_loss_is_counted_exactly_and_marked(self, start: Start, cleanup: contextlib.ExitStack) -> None:
        server = start()
        agent = self.funnel_agent(server, hold_s=0.5)
        cleanup.callback(agent.close)
        server.kill()
        count = 20_000
        line = b"x" * 90
        agent.write(0, *(b"%06d %s\n" % (n, line) for n in range(count))).join()
        assert not agent.logs.drain(0.1)
        server.start()
        assert agent.logs.drain(LIMIT_S)
        lines = server.log()
        marks = [x for x in lines if b"bytes lost here" in x]
        kept = numbers([x for x in lines if x not in marks])[0]
        counts = agent.logs.counts()
        assert counts.lost_lines == {0: count - len(kept)}
        assert counts.lost_bytes == {0: (count - len(kept)) * (6 + 1 + 90 + 1)}
        marked = [re.search(rb"keepstep: (\d+) bytes lost here \((\d+) lines\)", x) for x in marks]
        assert sum(int(m[1]) for m in marked if m) == counts.lost_bytes[0]
        assert sum(int(m[2]) for m in marked if m) == counts.lost_lines[0]
        assert len(kept) > 1000
        assert kept == sorted(kept)

    def test_within_the_hold_time_the_rank_waits_and_nothing_is_lost(
        self, start: Start, cleanup: contextlib.ExitStack
    ) -> None:
        server = start()
        agent = self.funnel_agent(server, hold_s=60.0)
        cleanup.callback(agent.close)
        server.kill()
        writer = agent.write(0, *(b"%d %s\n" % (n, b"x" * 90) for n in range(20_000)))
        writer.join(0.5)
        assert writer.is_alive()  # its pipe is not read
        held = agent.logs.counts().held_bytes
        assert held <= (1 << 18) + (1 << 17)
        server.start()
        writer.join()
        assert agent.logs.drain(LIMIT_S)
        assert numbers(server.log()) == {0: list(range(20_000))}
        assert agent.logs.counts().lost_bytes == {}


def test_a_flooding_rank_delays_no_other(start: Start, join: Join) -> None:
    """The writer is stopped while one rank prints all that it can; then another rank says one line."""
    server = start()
    agent = join(server)
    server.process.send_signal(signal.SIGSTOP)
    flood = agent.write(
        0, *[b"".join(b"%d %s\n" % (n, b"f" * 1000) for n in range(k, k + 1000)) for k in range(0, 30_000, 1000)]
    )
    wait_until(lambda: agent.logs.counts().held_bytes > (4 << 20))
    started = time.monotonic()
    quiet = agent.pipe(1)
    os.write(quiet, b"0 heard\n")
    assert time.monotonic() - started < 1.0
    wait_until(lambda: not select_ready(quiet) or True)
    server.process.send_signal(signal.SIGCONT)
    flood.join()
    os.close(quiet)
    assert agent.logs.drain(LIMIT_S)
    lines = server.log()
    assert numbers(lines) == {0: list(range(30_000)), 1: [0]}
    before = sum(len(x) for x in lines[: lines.index(b"[rank 1] 0 heard")])
    assert before < 4 << 20  # of 30 MB: the line was not behind all that its neighbour had to say


class Client:
    """Somebody who speaks the wire format, well or badly."""

    def __init__(self, address: str, tls: bool = True) -> None:
        host, _, port = address.rpartition(":")
        self.sock: socket.socket = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        if tls:
            context: ssl.SSLContext = client_context()
            self.sock = context.wrap_socket(self.sock)
        self.file = self.sock.makefile("rb")
        kind, body = self.frame()
        assert kind == w.CHALLENGE
        self.nonce = msgspec.json.decode(body, type=w.Challenge).nonce

    def frame(self) -> tuple[int, bytes]:
        head = self.file.read(w.FRAME_HEAD.size)
        if len(head) < w.FRAME_HEAD.size:
            return 0, b""
        length, kind = w.FRAME_HEAD.unpack(head)
        return kind, self.file.read(length - 1)

    def hello(
        self, node: str = "node-b", run_id: str = RUN, token: bytes = TOKEN, life: str = "life"
    ) -> tuple[int, bytes]:
        proof = prove(token, self.nonce, run_id, node)
        self.sock.sendall(w.json_frame(w.HELLO, w.Hello(run_id=run_id, node=node, life=life, proof=proof)))
        return self.frame()

    def close(self) -> None:
        self.file.close()
        self.sock.close()


class TestRefused:
    @pytest.fixture
    def server(self, start: Start) -> Server:
        return start()

    @pytest.fixture
    def client(self, server: Server, cleanup: contextlib.ExitStack) -> Client:
        client = Client(server.address)
        cleanup.callback(client.close)
        return client

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
        client.sock.sendall(w.data_frame(1, 0, 0, w.STDOUT, b"hi\n"))
        assert client.frame()[0] == w.REFUSED
        server.wait_refused("no hello")
        assert not (server.run_dir / "logs" / "cycle-0000.log").exists()

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
        assert client.hello()[0] == w.WELCOME
        client.sock.sendall(frame)
        assert client.frame()[0] == w.REFUSED
        server.wait_refused(reason)
        assert sorted(p.name for p in (server.run_dir / "logs").iterdir() if not p.name.startswith(".")) == [
            "funnel.json"
        ]

    def test_a_frame_sent_twice_is_written_once(self, server: Server, client: Client) -> None:
        assert client.hello()[0] == w.WELCOME
        client.sock.sendall(w.data_frame(1, 0, 5, w.STDOUT, b"once\n") * 2 + w.data_frame(2, 0, 5, w.STDOUT, b"last\n"))
        while w.SEQ.unpack(client.frame()[1])[0] < 2:
            pass
        again = Client(server.address)
        kind, body = again.hello()
        assert (kind, msgspec.json.decode(body)) == (w.WELCOME, {"seq": 2})
        again.sock.sendall(w.data_frame(2, 0, 5, w.STDOUT, b"last\n") + w.data_frame(3, 0, 5, w.STDOUT, b"new\n"))
        while w.SEQ.unpack(again.frame()[1])[0] < 3:
            pass
        again.close()
        assert server.log() == [b"[rank 5] once", b"[rank 5] last", b"[rank 5] new"]

    def test_an_agent_with_another_token_keeps_away_from_a_writer_it_does_not_know(self, server: Server) -> None:
        agent = Agent(server, token=b"another token, just as long")
        wait_until(lambda: "pin" in (agent.logs.problem() or ""))
        agent.close()


class TestEvidence:
    def test_a_file_arrives_under_its_node_and_cycle(self, start: Start, join: Join) -> None:
        server = start()
        agent = join(server)
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

    def test_names_and_sizes_are_bounded_here(self, start: Start, join: Join) -> None:
        agent = join(start())
        for name in ("../x", "a/b", "", ".x"):
            assert not agent.logs.send_evidence(0, name, b"x")
        assert not agent.logs.send_evidence(0, "large", bytes(w.EVIDENCE_FILE_BYTES + 1))

    def test_sizes_are_bounded_there(self, start: Start, cleanup: contextlib.ExitStack) -> None:
        server = start("--no-tls")
        client = Client(server.address, tls=False)
        cleanup.callback(client.close)
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
        files = [p for p in (server.run_dir / "evidence").rglob("*") if p.is_file()]
        assert sum(p.stat().st_size for p in files) == w.EVIDENCE_CYCLE_BYTES
        wait_until(lambda: server.status()["evidence_refused"] == 9)


def select_ready(fd: int) -> bool:
    return os.get_blocking(fd)


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def test_memory_of_the_writer_is_bounded(start: Start, cleanup: contextlib.ExitStack) -> None:
    """64 clients that send as fast as they can, for a disk that takes nothing for a while."""
    server = start("--no-tls", "--memory-mb", "16")
    blocked = server.run_dir / "logs" / "cycle-0000.log"
    blocked.mkdir()
    idle_bytes = rss_bytes(server.process.pid)
    clients = [Client(server.address, tls=False) for _ in range(64)]
    text = (b"x" * 99 + b"\n") * 600
    for number, client in enumerate(clients):
        cleanup.callback(client.close)
        assert client.hello(node=f"node-{number}", life=f"life-{number}")[0] == w.WELCOME
        client.sock.setblocking(False)
    sent = 0
    for seq in range(1, 40):  # 2.4 MB each, until the sockets take no more
        for client in clients:
            with contextlib.suppress(BlockingIOError):
                sent += client.sock.send(w.data_frame(seq, 0, 0, w.STDOUT, text))
    wait_until(lambda: server.status()["failed_writes"] > 0)
    used_bytes = rss_bytes(server.process.pid) - idle_bytes
    assert sent > 16 << 20
    assert used_bytes < (16 << 20) + 64 * (1 << 17) + (16 << 20)
