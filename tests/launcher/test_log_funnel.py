"""The log funnel between real processes: a log writer on a socket, agents' log threads that read real pipes."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher.output import logwire as w
from keepstep.launcher.output.logbuffer import SendBuffer
from keepstep.launcher.output.logfunnel import Funnel
from tests.launcher.log_harness import (
    LIMIT_S,
    RUN,
    TOKEN,
    Agent,
    Client,
    Server,
    numbers,
    unread_bytes,
    wait_until,
)


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
        server = start("--log-prefix", str(tmp_path / "mine"))
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
        command = [
            sys.executable,
            "-m",
            "keepstep.launcher.output.logserver",
            "--run-dir",
            str(tmp_path),
            "--run-id",
            RUN,
        ]
        command += ["--listen", f"unix:{tmp_path}/other.sock", "--wait-s", "0"]
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert second.returncode == 1
        assert "another log writer of this run is alive" in second.stderr

    def test_no_network_address_without_a_token(self, tmp_path: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "keepstep.launcher.output.logserver",
            "--run-dir",
            str(tmp_path),
            "--run-id",
            RUN,
        ]
        command += ["--listen", "127.0.0.1:0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert done.returncode == 2
        assert "needs the job token" in done.stderr

    def test_it_ends_when_nobody_needs_it(self, tmp_path: Path) -> None:
        """Its parent is gone and no agent there. A parent that lives may have agents that are only cut off."""
        command = [
            sys.executable,
            "-m",
            "keepstep.launcher.output.logserver",
            "--run-dir",
            str(tmp_path),
            "--run-id",
            RUN,
        ]
        command += ["--listen", f"unix:{tmp_path}/writer.sock", "--idle-s", "0", "--status-s", "0.05"]
        parent = (
            "import subprocess, sys\n"
            "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)\n"
            "child.stdout.readline()\n"
            "print(child.pid, flush=True)\n"
            "sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", parent, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            status = Path(f"/proc/{pid}/cmdline")
            wait_until((tmp_path / "logs" / "funnel.json").exists)
            time.sleep(0.3)  # several looks at --idle-s 0
            assert b"logserver" in status.read_bytes()
        wait_until(lambda: not status.exists() or not status.read_bytes())


class TestKilledWriter:
    def test_nothing_is_lost_or_twice_over_many_kills(self, start: Start, join: Join) -> None:
        """Kills fall anywhere: before, within and after a write."""
        server = start()
        agents = [join(server, f"node-{n}") for n in range(2)]
        count, chance = 40_000, random.Random(7)
        threads = [a.write(i, *(b"%d %s\n" % (n, b"x" * 60) for n in range(count))) for i, a in enumerate(agents)]
        for _ in range(5):
            size_bytes = server.log_bytes()
            while server.log_bytes() == size_bytes and threads[0].is_alive():
                time.sleep(0.001)
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

    def test_loss_is_counted_exactly_and_marked(self, start: Start, join: Join) -> None:
        server = start()
        agent = join(server, buffer=SendBuffer(capacity_bytes=1 << 18, hold_s=0.5))
        server.kill()
        count = 20_000
        line = b"x" * 90
        agent.write(0, *(b"%06d %s\n" % (n, line) for n in range(count))).join()
        assert not agent.logs.drain(0.1)
        server.start()
        assert agent.logs.drain(LIMIT_S)
        following = marked_bytes = kept = 0
        for text in server.log():
            mark = re.fullmatch(rb"\[rank 0\] keepstep: (\d+) bytes lost here \((\d+) lines\): .*", text)
            if mark:
                marked_bytes += int(mark[1])
                following += int(mark[2])
            else:
                assert text == b"[rank 0] %06d " % following + line
                following += 1
                kept += 1
        assert following == count
        counts = agent.logs.counts()
        assert counts.lost_lines == {0: count - kept}
        assert counts.lost_bytes == {0: marked_bytes} == {0: (count - kept) * (6 + 1 + 90 + 1)}
        assert kept > 1000

    def test_within_the_hold_time_the_rank_waits_and_nothing_is_lost(self, start: Start, join: Join) -> None:
        server = start()
        agent = join(server, buffer=SendBuffer(capacity_bytes=1 << 18, hold_s=60.0))
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


def test_a_writer_that_hangs_is_left_and_found_again(start: Start, cleanup: contextlib.ExitStack) -> None:
    """Its host may be gone without a word; what it had read before it stopped is not written twice."""
    server = start()
    buffer = SendBuffer()
    funnel = Funnel(server.address, RUN, "node-a", TOKEN, True, lambda: None, buffer, silent_s=0.4)
    cleanup.callback(funnel.close)
    buffer.put(0, 0, w.STDOUT, b"1 before\n")
    funnel.wake()
    assert buffer.empty.wait(LIMIT_S)
    server.process.send_signal(signal.SIGSTOP)
    buffer.put(0, 0, w.STDOUT, b"2 meanwhile\n")
    funnel.wake()
    wait_until(lambda: "no answer" in (funnel.problem or ""))
    server.process.send_signal(signal.SIGCONT)
    assert buffer.empty.wait(LIMIT_S)
    assert server.log() == [b"[rank 0] 1 before", b"[rank 0] 2 meanwhile"]
    assert funnel.reconnects == 1


def test_a_flooding_rank_delays_no_other(start: Start, join: Join) -> None:
    """The writer is stopped while one rank prints all that it can; then another rank says one line."""
    server = start()
    agent = join(server)
    quiet = agent.pipe(1)
    server.process.send_signal(signal.SIGSTOP)
    count = 30_000
    flood = agent.write(0, b"".join(b"%d %s\n" % (n, b"f" * 1000) for n in range(count)))
    wait_until(lambda: agent.logs.counts().held_bytes > (4 << 20))
    os.write(quiet, b"0 heard\n")
    wait_until(lambda: unread_bytes(quiet) == 0)
    assert flood.is_alive()
    server.process.send_signal(signal.SIGCONT)
    flood.join()
    os.close(quiet)
    assert agent.logs.drain(LIMIT_S)
    lines = server.log()
    assert numbers(lines) == {0: list(range(count)), 1: [0]}
    before = sum(map(len, lines[: lines.index(b"[rank 1] 0 heard")]))
    assert before < 2 << 20  # it did not wait behind all that its neighbour had to say


def peak_rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize(
    ("size_bytes", "tls"),
    [(60_000, False), (60_000, True), (w.MAX_TEXT_BYTES, False)],
    ids=["small frames", "small frames over TLS", "large frames"],
)
def test_memory_of_the_writer_is_bounded(
    size_bytes: int, tls: bool, start: Start, cleanup: contextlib.ExitStack
) -> None:
    """64 clients that send as fast as they can, for a disk that takes nothing."""
    server = start("--memory-mb", "16", "--status-s", "0.05", *([] if tls else ["--no-tls"]))
    (server.run_dir / "logs" / "cycle-0000.log").mkdir()  # no file can be opened there
    idle_bytes = peak_rss_bytes(server.process.pid)
    clients = [Client(server.address, tls=tls) for _ in range(64)]
    frames = 4_000_000 // size_bytes
    text = b"x" * (size_bytes - 1) + b"\n"
    stream = memoryview(b"".join(w.data_frame(seq, 0, 0, w.STDOUT, text) for seq in range(1, frames + 1)))
    left = {}
    for number, client in enumerate(clients):
        cleanup.callback(client.close)
        assert client.hello(node=f"node-{number}", life=f"life-{number}")[0] == w.WELCOME
        client.sock.setblocking(False)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # else the kernel here holds all of it
        left[client] = stream
    blocked_since = time.monotonic()
    while time.monotonic() - blocked_since < 0.5:
        for client, rest in left.items():
            with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                left[client] = rest[client.sock.send(rest[: 1 << 18]) :]
                blocked_since = time.monotonic()
    wait_until(lambda: server.status()["failed_writes"] > 0)
    assert server.status()["refused"] == {}
    taken_bytes = server.status()["size_bytes"]
    used_bytes = peak_rss_bytes(server.process.pid) - idle_bytes
    assert all(left.values()), "every client is held up"
    assert 16 << 20 <= taken_bytes <= (16 << 20) + 2 * size_bytes
    # The frames that wait, and unfinished ones: at most 128 KiB each, a large one on 16 of the connections; TLS has as much.
    print(f"{used_bytes / 1e6:.1f} MB for {taken_bytes / 1e6:.1f} MB of output")
    assert used_bytes < (16 << 20) + 48 * (1 << 17) + 16 * (5 << 18) + tls * 64 * (1 << 17)
