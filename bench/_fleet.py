"""Simulated agents for `coordinator_scale.py`: thousands of connections that speak the agents' protocol from one epoll loop.

WebSocket frames are written by hand (RFC 6455, section 5.2) with a mask of zeros, so that the clients leave the processor to the
coordinator: what it has to do for a frame is the same. An agent answers as a real one does whose ranks start and stop at once.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.trust import check_pin, client_context, prove
from keepstep.records.codec import to_json

RANKS = 8
FIRST_PID = 1 << 23
"""Beyond every real process: nothing here can be signalled by mistake."""
LEAF_NODES = 32
BLOCK_NODES = 512
BEAT_S = 1.0
BIG_BYTES = 4096
"""Longer messages are rank maps: they are counted and not decoded, which would be the clients' work."""
UPGRADE = (
    b"GET /agent HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)

_decode = msgspec.json.Decoder(m.FromCoordinator).decode


@dataclass(slots=True, eq=False)
class SimulatedAgent:
    """One node. `waiting`: id of a request -> what it was."""

    index: int
    sock: socket.socket
    node: str
    shaken: bool = False
    """Connected, and TLS is established where there is any."""
    upgraded: bool = False
    welcomed: bool = False
    last_id: int = 0
    cycle: int = -1
    first_rank: int = 0
    beat_sent_s: float = 0.0
    rtt_s: float = 0.0
    buffer: bytearray = field(default_factory=bytearray)
    waiting: dict[int, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return FIRST_PID + self.index * 16

    @property
    def boot_id(self) -> str:
        return f"boot-{self.index}"


class Fleet:
    """All simulated agents of one job. `seen` counts events by name, `last_s` has the time (monotonic) of each one's last."""

    def __init__(self, address: tuple[str, int], run_id: str, token: bytes, count: int, tls: bool) -> None:
        self.agents: list[SimulatedAgent] = []
        self.seen: Counter[str] = Counter()
        self.last_s: dict[str, float] = {}
        self.beat_rtts_s: list[float] = []
        self.map_bytes = 0
        self.first_ranks: dict[int, list[int]] = {}
        """Cycle -> what every StartCycle of it said; each agent must get ranks of its own."""
        self._address = address
        self._run_id = run_id
        self._token = token
        self._count = count
        self._context = client_context() if tls else None
        self._epoll = select.epoll()
        self._by_fd: dict[int, SimulatedAgent] = {}
        self._beat_at_s = 0.0
        self._next_beat = 0
        self._began_s = 0.0

    def release(self) -> float:
        """Let every agent connect at once; returns when (monotonic seconds)."""
        self._began_s = self._beat_at_s = time.monotonic()
        for index in range(self._count):
            sock = socket.socket()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            sock.connect_ex(self._address)
            agent = SimulatedAgent(index, sock, f"node-{index:04d}")
            self.agents.append(agent)
            self._by_fd[sock.fileno()] = agent
            # EPOLLOUT says that the connection is there; once it is, only EPOLLIN matters.
            self._epoll.register(sock, select.EPOLLOUT | select.EPOLLIN)
        return self._began_s

    def close(self) -> None:
        """Close what is still open."""
        for agent in self._by_fd.values():
            agent.sock.close()
        self._by_fd.clear()
        self._epoll.close()

    def drop(self, agent: SimulatedAgent) -> None:
        """The agent's process died: the kernel closes its connection."""
        self._by_fd.pop(agent.sock.fileno(), None)
        agent.welcomed = False
        agent.sock.close()

    def run_until(self, over: Callable[[], bool], limit_s: float, what: str) -> None:
        """Serve all agents until `over`; leaves the benchmark with a message after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not over():
            if time.monotonic() > deadline:
                sys.exit(f"coordinator_scale: {what}: not within {limit_s:g} s; seen so far: {dict(self.seen)}")
            self._turn()

    def run_for(self, seconds: float) -> None:
        """Serve all agents for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._turn()

    def ask(self, agent: SimulatedAgent, kind: str, message: m.AgentMessage) -> None:
        """Send a message under the agent's next id; its answer is counted under "answered KIND"."""
        agent.last_id += 1
        agent.waiting[agent.last_id] = kind
        self._send(agent, msgspec.structs.replace(message, id=agent.last_id))

    def _turn(self) -> None:
        """Heartbeats that are due, spread evenly over the second, then what the sockets have."""
        now = time.monotonic()
        while self._beat_at_s <= now:
            agent = self.agents[self._next_beat]
            if agent.welcomed:
                self._beat(agent, now)
            self._next_beat = (self._next_beat + 1) % len(self.agents)
            self._beat_at_s += BEAT_S / len(self.agents)
        for fd, _ in self._epoll.poll(min(0.01, max(0.0, self._beat_at_s - now))):
            agent_there = self._by_fd.get(fd)
            if agent_there is not None:
                self._ready(agent_there)

    def _ready(self, agent: SimulatedAgent) -> None:
        if not agent.shaken and not self._shake(agent):
            return
        while True:
            try:
                data = agent.sock.recv(1 << 18)
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            except OSError:
                data = b""
            if not data:
                self._count_event("closed")
                self.drop(agent)
                return
            agent.buffer += data
            self._frames(agent)
            if self._context is None or agent.sock.fileno() < 0:
                return

    def _shake(self, agent: SimulatedAgent) -> bool:
        """The connection is there: finish TLS if there is any, and ask for a WebSocket. False: not yet."""
        if error := agent.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            sys.exit(f"coordinator_scale: agent {agent.index} cannot connect: {os.strerror(error)}")
        if self._context is not None and not isinstance(agent.sock, ssl.SSLSocket):
            agent.sock = self._context.wrap_socket(
                agent.sock, server_hostname="keepstep", do_handshake_on_connect=False
            )
        if isinstance(agent.sock, ssl.SSLSocket):
            try:
                agent.sock.do_handshake()
            except ssl.SSLWantReadError:
                self._epoll.modify(agent.sock, select.EPOLLIN)
                return False
            except ssl.SSLWantWriteError:
                return False
            if agent.index == 0:
                # All would find the same key; checking it is a client's work and no part of what is measured.
                check_pin(agent.sock, self._token)
        self._epoll.modify(agent.sock, select.EPOLLIN)
        agent.shaken = True
        self._count_event("connected")
        agent.sock.sendall(UPGRADE)
        return True

    def _frames(self, agent: SimulatedAgent) -> None:
        buffer = agent.buffer
        if not agent.upgraded:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            if not buffer.startswith(b"HTTP/1.1 101"):
                sys.exit(f"coordinator_scale: no WebSocket: {bytes(buffer[:200])!r}")
            agent.upgraded = True
            del buffer[: end + 4]
        at = 0
        while len(buffer) - at >= 2:
            size, start = buffer[at + 1], at + 2
            if size == 126 and len(buffer) >= at + 4:
                size, start = struct.unpack_from(">H", buffer, at + 2)[0], at + 4
            elif size == 127 and len(buffer) >= at + 10:
                size, start = struct.unpack_from(">Q", buffer, at + 2)[0], at + 10
            elif size >= 126:
                break
            if len(buffer) < start + size:
                break
            if buffer[at] == 0x81:
                self._take(agent, bytes(buffer[start : start + size]))
            at = start + size
        del buffer[:at]

    def _take(self, agent: SimulatedAgent, text: bytes) -> None:
        if len(text) > BIG_BYTES:
            self.map_bytes += len(text)
            self._count_event("rank map")
            return
        message = _decode(text)
        match message:
            case m.Challenge():
                self._hello(agent, message.nonce)
            case m.Welcome():
                agent.welcomed = True
                self._count_event("welcomed")
            case m.Reply():
                self._answered(agent, message)
            case m.StartCycle():
                self._count_event(f"start {message.cycle}")
                self._start(agent, message)
            case m.StopCycle():
                self._count_event(f"stop {message.cycle}")
                self._stop(agent, message.cycle, status=-15)
            case m.AskStop():
                self._count_event("asked to stop")
                self._stop(agent, message.cycle, status=0)
            case m.End():
                self._count_event("end")
                self.drop(agent)

    def _answered(self, agent: SimulatedAgent, reply: m.Reply) -> None:
        if not reply.ok:
            sys.exit(f"coordinator_scale: {agent.node}: {agent.waiting.get(reply.id)}: refused: {reply.error}")
        kind = agent.waiting.pop(reply.id)
        if kind == "beat":
            agent.rtt_s = time.monotonic() - agent.beat_sent_s
            self.beat_rtts_s.append(agent.rtt_s)
        elif kind == "started":
            self._attach(agent)
        self._count_event(f"answered {kind}")

    def _hello(self, agent: SimulatedAgent, nonce: str) -> None:
        hello = m.Hello(
            id=0,
            run_id=self._run_id,
            node=agent.node,
            host=f"host-{agent.index:04d}.cluster.example",
            pid=agent.pid,
            nproc=RANKS,
            next_port=40000 + agent.index,
            next_addr=f"10.{agent.index >> 8}.{agent.index & 255}.1",
            proof=prove(self._token, nonce, self._run_id, agent.node),
            levels=[f"block-{agent.index // BLOCK_NODES}", f"leaf-{agent.index // LEAF_NODES}"],
            boot_id=agent.boot_id,
        )
        self._send(agent, hello)

    def _beat(self, agent: SimulatedAgent, now: float) -> None:
        agent.beat_sent_s = now
        completed = int(3 * (now - self._began_s)) if agent.cycle >= 0 else None
        at_ns = time.time_ns()
        self.ask(agent, "beat", m.Beat(id=0, cycle=agent.cycle, completed=completed, at_ns=at_ns, rtt_s=agent.rtt_s))

    def _start(self, agent: SimulatedAgent, command: m.StartCycle) -> None:
        """Ranks are there at once; the rank map is asked for where it is not in the command."""
        agent.cycle, agent.first_rank = command.cycle, command.first_rank
        self.first_ranks.setdefault(command.cycle, []).append(command.first_rank)
        now = time.time_ns()
        ranks = [{"rank": command.first_rank + k, "local_rank": k, "pid": agent.pid + 1 + k} for k in range(RANKS)]
        started = m.Started(
            id=0,
            cycle=command.cycle,
            ranks=ranks,
            assigned_ns=now,
            started_ns=now,
            # What the script is has shown in its first cycle.
            expect_steps=command.cycle > 0,
        )
        self.ask(agent, "started", started)
        if not command.node_spans:
            self.ask(agent, "rank map", m.GetCycle(id=0, cycle=command.cycle))

    def _attach(self, agent: SimulatedAgent) -> None:
        """All ranks of a node attached through the trainer library: a launcher says so once."""
        attrs = {"ranks": RANKS}
        note = m.Note(id=0, cycle=agent.cycle, kind="attached", rank=agent.first_rank, t_ns=time.time_ns(), attrs=attrs)
        self.ask(agent, f"attached {agent.cycle}", note)

    def _stop(self, agent: SimulatedAgent, cycle: int, status: int) -> None:
        now = time.time_ns()
        ranks = [str(agent.first_rank + k) for k in range(RANKS)]
        failures = [
            m.Failure(rank=int(rank), status=status, time_ns=now, cascade=True, stopped_by_us=True) for rank in ranks
        ]
        stopped = m.Stopped(
            id=0,
            cycle=cycle,
            statuses=dict.fromkeys(ranks, status),
            failures=failures if status else [],
            completed=dict.fromkeys(ranks, 100),
            completed_ns=now,
            captured_ns=now,
            stopped_ns=now,
            next_port=41000 + agent.index,
        )
        self.ask(agent, f"stopped {cycle}", stopped)

    def _send(self, agent: SimulatedAgent, message: m.AgentMessage) -> None:
        text = to_json(message)
        size = len(text)
        header = struct.pack(">BB", 0x81, 0x80 | size) if size < 126 else struct.pack(">BBH", 0x81, 0xFE, size)
        frame = header + b"\0\0\0\0" + text
        if agent.sock.send(frame) != len(frame):
            sys.exit(f"coordinator_scale: the coordinator does not read what {agent.node} sends")

    def _count_event(self, name: str) -> None:
        self.seen[name] += 1
        self.last_s[name] = time.monotonic()
