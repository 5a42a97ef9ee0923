"""The guardian with real processes: it ends ranks when the lease is over or the agent is dead, and tells the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher.node import guardian as g
from keepstep.launcher.node.guard import Guard
from keepstep.launcher.procs import state_of
from keepstep.launcher.trust import fence_key, fence_proven, make_token, server_context
from tests.launcher.harness import alive, wait_until

RUN = "run-1"
TOKEN = make_token().encode()
LONG_S = 60.0

AGENT = """
import asyncio, json, os, subprocess, sys, time
from keepstep.launcher.node.guard import Guard

async def main():
    word, lease_s, ranks = json.loads(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    word["pid"] = os.getpid()
    guard = Guard(word, lambda: print("expired", flush=True), lambda text: print("say", text, flush=True))
    guard.start()
    below = "[sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True"
    script = f"import subprocess, sys; subprocess.Popen({below}).wait()"
    children = [subprocess.Popen([sys.executable, "-c", script], start_new_session=True) for _ in range(ranks)]
    guard.extend(time.monotonic_ns() + int(lease_s * 1e9))
    guard.ranks_started([c.pid for c in children])
    print("ranks", *[c.pid for c in children], flush=True)
    print("guardian", *guard.pids, flush=True)
    loop = asyncio.get_running_loop()
    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        match line.split():
            case ["extend", seconds]:
                guard.extend(time.monotonic_ns() + int(float(seconds) * 1e9))
            case ["gone"]:
                guard.ranks_gone()
            case ["guardian"]:
                print("guardian", *guard.pids, flush=True)
            case ["fenced"]:
                print("fenced", guard._page[1], guard.expiry_ns, flush=True)
            case ["close"]:
                guard.close()
                print("closed", flush=True)
            case []:
                os._exit(0)

asyncio.run(main())
"""


class TestAgent:
    """A launcher in miniature: a process with a Guard and ranks that have a child each, in a session of its own."""

    __test__ = False

    def __init__(self, lease_s: float, ranks: int = 2, targets: tuple[str, ...] = (), tls: bool = False) -> None:
        key = fence_key(TOKEN if tls else None, RUN).hex()
        word = {"node": "n", "boot_id": "boot", "key": key, "targets": list(targets), "tls": tls}
        command = [sys.executable, "-c", textwrap.dedent(AGENT), json.dumps(word), str(lease_s), str(ranks)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.ranks = [int(p) for p in self.answer("ranks")]
        self.guardian = int(self.answer("guardian")[0])

    def ask(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self, word: str) -> list[str]:
        """The next line that begins with `word`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.split()[:1] == [word]:
                return line.split()[1:]
        raise AssertionError(f"no {word!r} before the end of its output")

    @property
    def grandchildren(self) -> list[int]:
        found: list[int] = []
        for rank in self.ranks:
            text = Path(f"/proc/{rank}/task/{rank}/children").read_text()
            found += [int(p) for p in text.split()]
        return found

    def fenced_ns(self) -> int:
        """When its guardian ended its ranks, 0: it has not."""
        self.ask("fenced")
        fenced, expiry = self.answer("fenced")
        self.expiry_ns = int(expiry)
        return int(fenced)

    def close(self) -> None:
        for pid in (self.process.pid, self.guardian):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                for below in Path(f"/proc/{rank}/task/{rank}/children").read_text().split():
                    os.kill(int(below), signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


Start = Callable[..., TestAgent]


@pytest.fixture
def start() -> Iterator[Start]:
    agents: list[TestAgent] = []

    def make(*args: Any, **kwargs: Any) -> TestAgent:
        agents.append(TestAgent(*args, **kwargs))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


def none_alive(*pids: int) -> Callable[[], bool]:
    return lambda: not any(alive(pid) for pid in pids)


def ignores(pid: int, signum: int) -> bool:
    """Whether a process ignores a signal (SigIgn in /proc/PID/status)."""
    text = Path(f"/proc/{pid}/status").read_text()
    mask = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigIgn:"))
    return bool(mask >> (signum - 1) & 1)


class TestLease:
    def test_ranks_and_all_below_them_end_with_the_lease_while_the_agent_is_stopped(self, start: Start) -> None:
        agent = start(1.5)
        wait_until(lambda: len(agent.grandchildren) == 2)
        below = agent.grandchildren
        os.kill(agent.process.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(agent.process.pid) == "T")
        assert all(alive(pid) for pid in (*agent.ranks, *below))
        wait_until(none_alive(*agent.ranks, *below))
        assert state_of(agent.process.pid) == "T"
        assert alive(agent.guardian)
        os.kill(agent.process.pid, signal.SIGCONT)
        # The agent comes to itself and hears of it.
        assert agent.answer("expired") == []
        wait_until(lambda: agent.fenced_ns() > 0)
        assert agent.fenced_ns() >= agent.expiry_ns

    def test_ranks_that_are_stopped_end_too(self, start: Start) -> None:
        agent = start(0.5, 1)
        os.kill(agent.ranks[0], signal.SIGSTOP)
        wait_until(none_alive(*agent.ranks))

    def test_not_before_the_lease_is_over(self, start: Start) -> None:
        began = time.monotonic()
        agent = start(1.0, 1)
        wait_until(none_alive(*agent.ranks))
        assert time.monotonic() - began >= 1.0

    def test_a_lease_that_is_renewed_kills_nobody(self, start: Start) -> None:
        agent = start(0.6)
        for _ in range(8):
            agent.ask("extend 0.6")
            assert agent.fenced_ns() == 0
            # All of them together last twice as long as one lease.
            time.sleep(0.15)
        assert all(alive(pid) for pid in agent.ranks)
        wait_until(none_alive(*agent.ranks))

    def test_a_shorter_lease_does_not_take_back_a_longer_one(self, start: Start) -> None:
        agent = start(LONG_S, 1)
        agent.ask("extend 0.01")
        assert agent.fenced_ns() == 0
        time.sleep(2 * g.IDLE_S)
        assert alive(agent.ranks[0])

    def test_when_no_rank_is_left_nothing_is_guarded(self, start: Start) -> None:
        """The pids it knew may be somebody else's by then."""
        agent = start(0.8, 1)
        agent.ask("gone")
        assert agent.fenced_ns() == 0
        time.sleep(1.2)
        assert alive(agent.ranks[0])
        assert agent.fenced_ns() == 0


class TestGuardian:
    def test_it_is_started_again_and_guards_as_before(self, start: Start) -> None:
        agent = start(3.0, 1)
        first = agent.guardian
        os.kill(first, signal.SIGKILL)
        assert "the guardian ended (status -9); starting it again" in " ".join(agent.answer("say"))

        def another() -> bool:
            agent.ask("guardian")
            agent.guardian = int(agent.answer("guardian")[0])
            return agent.guardian != first

        wait_until(another)
        # As long as the agent is stopped, only the new guardian can do it.
        os.kill(agent.process.pid, signal.SIGSTOP)
        wait_until(none_alive(*agent.ranks))

    def test_signals_to_a_whole_group_do_not_end_it(self, start: Start) -> None:
        agent = start(2.0, 1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            wait_until(lambda signum=signum: ignores(agent.guardian, signum))  # type: ignore[misc]
            os.kill(agent.guardian, signum)
        wait_until(none_alive(*agent.ranks))
        assert alive(agent.guardian)

    def test_it_ends_with_the_launcher_that_closes_it(self, start: Start) -> None:
        agent = start(LONG_S, 1)
        agent.ask("close")
        agent.answer("closed")
        assert not alive(agent.guardian)
        assert alive(agent.ranks[0])

    def test_it_holds_no_token_and_loads_little(self, start: Start) -> None:
        agent = start(LONG_S, 1, tls=True)
        wait_until(lambda: b"keepstep.launcher.node.guardian" in Path(f"/proc/{agent.guardian}/cmdline").read_bytes())
        for name in ("cmdline", "environ"):
            data = Path(f"/proc/{agent.guardian}/{name}").read_bytes()
            assert TOKEN not in data
            assert fence_key(TOKEN, RUN).hex().encode() not in data
        code = "import sys, keepstep.launcher.node.guardian; print([m for m in sys.modules if m.split('.')[0] in BIG])"
        big = "BIG = {'torch', 'msgspec', 'websockets', 'starlette', 'cryptography', 'numpy'}; "
        found = subprocess.run([sys.executable, "-c", big + code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "[]"


# --- what it tells


class Words:
    """A coordinator's /fenced: keeps what comes."""

    def __init__(self, server: HTTPServer, target: str) -> None:
        self.target = target
        self.got: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.event = threading.Event()
        self._server = server

    def wait(self) -> dict[str, Any]:
        assert self.event.wait(30)
        return self.got[-1]


def handler(words: list[Words]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = words[0].statuses.pop(0) if words[0].statuses else 200
            self.send_response(status if self.path == "/fenced" else 404)
            self.end_headers()
            words[0].got.append(body)
            if status == 200:
                words[0].event.set()

        def log_message(self, *_: Any) -> None:
            pass

        def address_string(self) -> str:
            return "guardian"

    return Handler


class UnixHTTPServer(HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0


@contextlib.contextmanager
def listening(where: Path | ssl.SSLContext | None) -> Iterator[Words]:
    """An HTTP server at a Unix socket's path, or on loopback with or without TLS."""
    words: list[Words] = []
    server: HTTPServer
    if isinstance(where, Path):
        server, target = UnixHTTPServer(str(where), handler(words)), str(where)  # type: ignore[arg-type]
    else:
        server = HTTPServer(("127.0.0.1", 0), handler(words))
        target = f"127.0.0.1:{server.server_port}"
        if where is not None:
            server.socket = where.wrap_socket(server.socket, server_side=True)
    words.append(Words(server, target))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield words[0]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def kill_and_reap(agent: TestAgent) -> None:
    agent.process.kill()
    agent.process.wait()


class TestWord:
    def test_an_agent_that_dies_takes_its_ranks_along_and_the_coordinator_hears_of_it(
        self, start: Start, tmp_path: Path
    ) -> None:
        with listening(tmp_path / "c.sock") as words:
            agent = start(LONG_S, 2, (words.target,))
            wait_until(lambda: len(agent.grandchildren) == 2)
            below = agent.grandchildren
            kill_and_reap(agent)
            word = words.wait()
            # It is said when it is true, not before.
            assert none_alive(*agent.ranks, *below)()
        assert (word["node"], word["pid"], word["boot_id"]) == ("n", agent.process.pid, "boot")
        assert fence_proven(fence_key(None, RUN), "n", agent.process.pid, "boot", word["proof"])
        wait_until(none_alive(agent.guardian))

    def test_over_tls_with_the_key_of_the_token(self, start: Start) -> None:
        with listening(server_context(TOKEN)) as words:
            agent = start(LONG_S, 1, (words.target,), tls=True)
            kill_and_reap(agent)
            word = words.wait()
        assert fence_proven(fence_key(TOKEN, RUN), "n", agent.process.pid, "boot", word["proof"])
        assert not fence_proven(fence_key(TOKEN, "another run"), "n", agent.process.pid, "boot", word["proof"])

    def test_a_node_without_ranks_is_told_of_too(self, start: Start, tmp_path: Path) -> None:
        with listening(tmp_path / "c.sock") as words:
            agent = start(LONG_S, 0, (words.target,))
            kill_and_reap(agent)
            assert words.wait()["node"] == "n"

    def test_each_place_is_tried_in_turn_until_one_takes_it(self, start: Start, tmp_path: Path) -> None:
        nowhere = str(tmp_path / "nowhere.sock")
        with listening(tmp_path / "a.sock") as refusing, listening(tmp_path / "b.sock") as words:
            refusing.statuses += [403] * 10
            agent = start(LONG_S, 0, (nowhere, refusing.target, words.target))
            kill_and_reap(agent)
            words.wait()
            wait_until(none_alive(agent.guardian))
        assert (len(refusing.got), len(words.got)) == (1, 1)

    def test_it_ends_also_when_nobody_listens(self, start: Start, tmp_path: Path) -> None:
        agent = start(LONG_S, 1, (str(tmp_path / "nowhere.sock"), "127.0.0.1:9"))
        kill_and_reap(agent)
        wait_until(none_alive(agent.guardian, *agent.ranks))


def test_a_guard_without_a_renewal_yet_ends_nobody() -> None:
    """Ranks may be started before the first renewal was answered."""

    async def main() -> list[str]:
        called: list[str] = []
        word = {"node": "n", "pid": os.getpid(), "boot_id": "b", "key": "00", "targets": [], "tls": False}
        guard = Guard(word, lambda: called.append("expired"), lambda _: None)
        guard.ranks_started([])
        await asyncio.sleep(0.05)
        guard.extend(time.monotonic_ns())
        await asyncio.sleep(0.05)
        guard.close()
        return called

    assert asyncio.run(main()) == ["expired"]
