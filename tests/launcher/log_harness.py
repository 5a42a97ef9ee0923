"""A log writer process, agents that send to it, and a client that speaks its wire format well or badly."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.output import logwire as w
from keepstep.launcher.output.logbuffer import SendBuffer
from keepstep.launcher.output.logs import LogThread, Stream
from keepstep.launcher.trust import client_context, prove

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
        self.seen: dict[str, int] = {}
        self.stderr = folder / "writer.err"
        self.start()

    def start(self) -> None:
        read_end, write_end = os.pipe()
        if self._token is not None:
            os.write(write_end, self._token)
        os.close(write_end)
        command = [
            sys.executable,
            "-m",
            "keepstep.launcher.output.logserver",
            "--run-dir",
            str(self.run_dir),
            "--run-id",
            RUN,
        ]
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

    def log_bytes(self) -> int:
        """Size of the log of cycle 0, which may not be there yet."""
        path = self.run_dir / "logs" / "cycle-0000.log"
        return path.stat().st_size if path.exists() else 0

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "logs" / "funnel.json").read_bytes())
        return found

    def refused(self) -> dict[str, int]:
        wait_until((self.run_dir / "logs" / "funnel.json").exists)
        found: dict[str, int] = self.status()["refused"]
        return found

    def wait_refused(self, reason: str) -> None:
        """Wait until one more than `seen` is counted for this reason, and no other."""
        wait_until(lambda: self.refused() == self.seen | {reason: self.seen.get(reason, 0) + 1})


class Agent:
    """A log thread that sends to a log writer; `pipe` gives the write end of one rank's stdout."""

    def __init__(
        self,
        server: Server,
        node: str = "node-a",
        *,
        token: bytes | None = TOKEN,
        tls: bool = True,
        buffer: SendBuffer | None = None,
    ) -> None:
        self.logs = LogThread(node)
        self.logs.use_funnel(server.address, RUN, node, token, tls, buffer)
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


def send(fd: int, *chunks: bytes) -> None:
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            view = view[os.write(fd, view) :]
    os.close(fd)


def unread_bytes(fd: int) -> int:
    """What waits in a pipe."""
    found = bytearray(4)
    fcntl.ioctl(fd, termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)


def numbers(lines: list[bytes]) -> dict[int, list[int]]:
    """Rank -> the numbers in its lines, which have the form "[rank R] N ..."."""
    found: dict[int, list[int]] = defaultdict(list)
    for line in lines:
        match = re.match(rb"\[rank (\d+)\] (\d+)", line)
        assert match, line[:100]
        found[int(match[1])].append(int(match[2]))
    return found
