"""What `coordinator_scale.py` is compared with: the same number of connections and lines a second against a bare asyncio server."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _common import cpu_s

SERVER = Path(__file__).parent / "_scripts" / "bare_server.py"
LINE = b'{"type":"beat","id":12345,"cycle":0,"completed":12345,"at_ns":1700000000000000000,"rtt_s":0.000123}\n'
LIMIT_S = 60.0


class Lines:
    """Connections of one epoll loop; `answered` counts the lines that came back."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self.answered = 0
        self.socks = []
        self._epoll = select.epoll()
        self._by_fd = {}
        for _ in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(address)
            self.socks.append(sock)
            self._by_fd[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLOUT)

    def turn(self, patience_s: float) -> None:
        """Say the first line on connections that are there, and take what came."""
        for fd, event in self._epoll.poll(patience_s):
            sock = self._by_fd[fd]
            if event & select.EPOLLOUT:
                self._epoll.modify(sock, select.EPOLLIN)
                sock.send(LINE)
            else:
                self.answered += sock.recv(4096).count(b"\n")

    def run_until(self, over: Callable[[], bool]) -> float:
        """Seconds until `over`."""
        began = time.monotonic()
        while not over():
            if time.monotonic() - began > LIMIT_S:
                sys.exit(f"coordinator_scale: the control does not answer: {self.answered} of {len(self.socks)}")
            self.turn(0.01)
        return time.monotonic() - began

    def close(self) -> None:
        for sock in self.socks:
            sock.close()
        self._epoll.close()


def measure(count: int, seconds: float) -> dict[str, float]:
    """All connect at once and say a line; then a line a second each, for some seconds; then one line to all."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        address = listening.getsockname()
        server = subprocess.Popen([sys.executable, str(SERVER), str(listening.fileno())], pass_fds=[listening.fileno()])
    try:
        # Answered once before anything is measured: the server has started.
        first = Lines(address, 1)
        first.run_until(lambda: first.answered == 1)
        first.close()
        lines = Lines(address, count)
        figures = {"joined": lines.run_until(lambda: lines.answered == count)}
        began, used_s, sent = time.monotonic(), cpu_s(server.pid), 0
        while (now := time.monotonic()) < began + seconds:
            while sent < (now - began) * count:
                lines.socks[sent % count].send(LINE)
                sent += 1
            lines.turn(0.5 / count)
        figures["core share of heartbeats"] = (cpu_s(server.pid) - used_s) / (time.monotonic() - began)
        lines.run_until(lambda: lines.answered == count + sent)
        lines.socks[0].send(b"all\n")
        figures["fan-out of a stop"] = lines.run_until(lambda: lines.answered == 2 * count + sent)
        lines.close()
    finally:
        server.kill()
        server.wait()
    return figures
