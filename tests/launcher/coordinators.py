"""Real coordinator processes for tests, and clients that speak to them by hand."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect, unix_connect

from keepstep.launcher import messages as m
from keepstep.launcher.clock import boot_ns
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.lead import make_folder_id
from keepstep.launcher.files import make_run_dir, write_durable
from keepstep.launcher.node.guardian import _UnixConnection
from keepstep.launcher.trust import client_context, make_token, prove
from keepstep.records.codec import to_json, to_pretty_json
from tests.launcher.harness import wait_until

LIMIT_S = 20.0
RUN = "run-1"
TOKEN = make_token().encode()
_decode = msgspec.json.Decoder(m.FromCoordinator).decode
MAIN = "from keepstep.launcher.coordination.coordinatormain import main; main()"
_ids = itertools.count(10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Served:
    """A coordinator process on a run folder of its own, over a Unix socket and, when asked, over loopback TCP."""

    def __init__(self, folder: Path, network: bool = False, tls: bool = True, **config: Any) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.socket = folder / "c.sock"
        self.before = ""
        """Code that runs in the process first: a limit made shorter."""
        self.tls = tls
        self.endpoint = f"127.0.0.1:{free_port()}" if network else ""
        self.processes: list[subprocess.Popen[bytes]] = []
        self.clients: list[Client] = []
        make_run_dir(self.run_dir)
        make_folder_id(self.run_dir)
        given: dict[str, Any] = {
            "run_id": RUN,
            "run_dir": str(self.run_dir),
            "node": "a",
            "script": "train.py",
            "tls": tls,
            "attribution": False,
        }
        given |= config
        given.setdefault("min_nodes", given.get("nnodes", 1))
        write_durable(self.run_dir / "run.json", to_pretty_json(RunConfig(**given)))

    def start(self, *more: str, launch: str = "first", token: bytes | None = TOKEN) -> subprocess.Popen[bytes]:
        """Start one (another, where one runs) and wait until it listens."""
        command = [sys.executable, "-c", f"{self.before}{MAIN}", "--run-dir", str(self.run_dir)]
        command += ["--socket", str(self.socket), "--started-ns", str(boot_ns()), "--launch", launch, *more]
        fds: list[int] = []
        if self.endpoint:
            command += ["--listen", self.endpoint]
            if token is not None:
                read_end, write_end = os.pipe()
                os.write(write_end, token)
                os.close(write_end)
                command += ["--token-fd", str(read_end)]
                fds = [read_end]
        before = len(self.epochs)
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=fds)
        for fd in fds:
            os.close(fd)
        self.processes.append(process)
        wait_until(lambda: process.poll() is not None or (len(self.epochs) > before and self._listens()))
        return process

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket)):
                return False
        if not self.endpoint:
            return True
        host, _, port = self.endpoint.rpartition(":")
        with socket.socket() as probe:
            return not probe.connect_ex((host, int(port)))

    @property
    def epochs(self) -> list[Path]:
        return sorted((self.run_dir / "journal").glob("*.jsonl"))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for client in self.clients:
            client.close()

    # ---- clients

    def connect(self, path: str = "/agent", network: bool = False) -> Client:
        options: dict[str, Any] = {"compression": None, "ping_interval": None, "max_size": None, "close_timeout": 1}
        if not network:
            return Client(unix_connect(str(self.socket), f"ws://localhost{path}", **options), self)
        if self.tls:
            context = client_context()
            url = f"wss://{self.endpoint}{path}"
            return Client(connect(url, ssl=context, server_hostname="keepstep", proxy=None, **options), self)
        return Client(connect(f"ws://{self.endpoint}{path}", proxy=None, **options), self)

    def join(self, node: str, network: bool = False, **fields: Any) -> Client:
        """A client that was welcomed as a node."""
        client = self.connect(network=network)
        client.greet(node, **fields)
        welcome = client.hear()
        assert isinstance(welcome, m.Welcome), welcome
        client.welcome = welcome
        return client

    def operate(self, what: str, network: bool = False, proof: str | None = None, **fields: Any) -> m.Reply:
        """One command of a person."""
        with self.connect("/operator", network) as client:
            nonce = client.challenge.nonce
            proof = proof if proof is not None else prove(TOKEN, nonce, RUN, "")
            client.say(m.Operator(id=1, what=what, run_id=RUN, proof=proof if network else "", **fields))
            reply = client.hear()
        assert isinstance(reply, m.Reply)
        return reply

    def status(self) -> dict[str, Any]:
        return dict(self.operate("status").result)

    def refused(self) -> dict[str, int]:
        return dict(self.status()["refused"])

    def post(self, body: bytes, network: bool = False) -> tuple[int, Any]:
        """POST /fenced: status and answer."""
        connection: http.client.HTTPConnection
        if not network:
            connection = _UnixConnection(str(self.socket))
        else:
            host, _, port = self.endpoint.rpartition(":")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(host, int(port), timeout=LIMIT_S, context=context)
        with contextlib.closing(connection):
            connection.request("POST", "/fenced", body)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())


class Client:
    """One WebSocket. The challenge is read when it is made."""

    def __init__(self, opening: ClientConnection, served: Served) -> None:
        self._stack = contextlib.ExitStack()
        self._kept: list[Any] = []
        self.connection = self._stack.enter_context(opening)
        served.clients.append(self)
        self.welcome: m.Welcome | None = None
        challenge = self.hear()
        assert isinstance(challenge, m.Challenge)
        self.challenge = challenge

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def say(self, message: m.AgentMessage) -> None:
        """Send; a connection that the other end closes meanwhile is found out by who reads."""
        with contextlib.suppress(ConnectionClosed):
            self.connection.send(to_json(message).decode())

    def hear(self, limit_s: float = LIMIT_S) -> Any:
        return _decode(self.connection.recv(timeout=limit_s))

    def hear_end(self) -> int:
        """Read until the other end closes; returns the close code."""
        try:
            while True:
                self.connection.recv(timeout=LIMIT_S)
        except ConnectionClosed as error:
            return error.rcvd.code if error.rcvd is not None else 1006

    def hello(self, node: str, proof: str | None = None, **fields: Any) -> m.Hello:
        known: dict[str, Any] = {"host": "h", "pid": 100, "nproc": 1, "next_port": 5, "next_addr": "127.0.0.1"}
        proof = proof if proof is not None else prove(TOKEN, self.challenge.nonce, RUN, node)
        return m.Hello(**{"id": next(_ids), "run_id": RUN, "node": node, "proof": proof, **known, **fields})

    def greet(self, node: str, **fields: Any) -> None:
        self.say(self.hello(node, **fields))

    def ask(self, make: Any) -> m.Reply:
        """Send `make(id)`, and hear its reply; what comes between is kept for `until`."""
        number = next(_ids)
        self.say(make(number))
        while True:
            message = self.hear()
            if isinstance(message, m.Reply) and message.id == number:
                return message
            self._kept.append(message)

    def beat(self) -> m.Reply:
        return self.ask(lambda i: m.Beat(id=i))

    def up_to(self, kind: type[Any]) -> list[Any]:
        """All messages up to the next one of a kind."""
        found: list[Any] = []
        while not found or not isinstance(found[-1], kind):
            found.append(self._kept.pop(0) if self._kept else self.hear())
        return found

    def until(self, kind: type[Any]) -> Any:
        """The next message of a kind; what comes before is dropped."""
        return self.up_to(kind)[-1]

    # ---- a life in short

    def started(self, cycle: int, rank: int) -> m.Reply:
        ranks = [{"rank": rank, "local_rank": 0, "pid": 7}]
        now = time.time_ns()
        return self.ask(lambda i: m.Started(id=i, cycle=cycle, ranks=ranks, assigned_ns=now, started_ns=now))

    def stopped(self, cycle: int, rank: int, status: int = 0) -> m.Reply:
        now = time.time_ns()
        failures = [m.Failure(rank=rank, status=status, time_ns=now)] if status else []
        return self.ask(
            lambda i: m.Stopped(
                id=i,
                cycle=cycle,
                statuses={str(rank): status},
                failures=failures,
                completed={},
                completed_ns=0,
                captured_ns=now,
                stopped_ns=now,
                next_port=6,
            )
        )


@contextlib.contextmanager
def serving(*more: str, network: bool = False, tls: bool = True, before: str = "", **config: Any) -> Iterator[Served]:
    """A started coordinator in a folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        served = Served(Path(folder), network, tls, **config)
        served.before = before
        try:
            served.start(*more)
            yield served
        finally:
            served.close()
