"""A real coordinator process and nodes that are only connections: who is told what, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect, unix_connect

from keepstep.launcher import messages as m
from keepstep.launcher.clock import boot_ns
from keepstep.launcher.config import RunConfig
from keepstep.launcher.guardian import tell
from keepstep.launcher.lead import make_folder_id
from keepstep.launcher.runfolder import read_cycles
from keepstep.launcher.trust import check_pin, client_context, fence_key, make_token, prove
from keepstep.records.codec import to_json, to_pretty_json

NODES, RANKS, LIMIT_S = 5, 2, 30.0
PID = 1 << 23
"""Beyond every real process."""
_decode = msgspec.json.Decoder(m.FromCoordinator).decode


class Node:
    """One connection. `told`: every command that came, in order; `answers`: replies by id."""

    def __init__(self, name: str, connection: ClientConnection) -> None:
        self.name = name
        self.told: list[m.FromCoordinator] = []
        self.answers: dict[int, m.Reply] = {}
        self.connection = connection
        self._news = asyncio.Condition()
        self._last_id = 0
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for text in self.connection:
            message = _decode(text)
            async with self._news:
                if isinstance(message, m.Reply):
                    self.answers[message.id] = message
                else:
                    self.told.append(message)
                self._news.notify_all()

    async def ask(self, message: m.AgentMessage) -> Any:
        """Send a message; returns its answer's result."""
        self._last_id += 1
        number = self._last_id
        await self.connection.send(to_json(msgspec.structs.replace(message, id=number)).decode())
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: number in self.answers), LIMIT_S)
        assert self.answers[number].ok, self.answers[number].error
        return self.answers[number].result

    async def wait(self, kind: type[m.FromCoordinator], cycle: int | None = None) -> Any:
        """The command of this kind (and cycle), once it has come."""

        def found() -> list[m.FromCoordinator]:
            return [t for t in self.told if isinstance(t, kind) and cycle in (None, getattr(t, "cycle", None))]

        async with self._news:
            return (await asyncio.wait_for(self._news.wait_for(found), LIMIT_S))[-1]

    async def start(self, command: m.StartCycle) -> None:
        ranks = [{"rank": command.first_rank + k, "local_rank": k, "pid": PID} for k in range(RANKS)]
        await self.ask(m.Started(id=0, cycle=command.cycle, ranks=ranks, assigned_ns=1, started_ns=2))

    async def stop(self, command: m.StartCycle, status: int) -> None:
        stopped = m.Stopped(
            id=0,
            cycle=command.cycle,
            statuses={str(command.first_rank + k): status for k in range(RANKS)},
            failures=[],
            completed={},
            completed_ns=5,
            captured_ns=5,
            stopped_ns=5,
            next_port=40001,
        )
        await self.ask(stopped)


class Running:
    """A coordinator process, on its Unix socket or on loopback with TLS and a job token."""

    def __init__(self, run_dir: Path, tls: bool) -> None:
        self.tls = tls
        self.token = make_token().encode() if tls else None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        self.target = endpoint if tls else str(run_dir / "s")
        self.process = start_coordinator(run_dir, endpoint, self.token)

    async def connect(self, stack: contextlib.AsyncExitStack) -> ClientConnection:
        """A new connection, as soon as it listens."""
        url = f"wss://{self.target}/agent" if self.tls else "ws://localhost/agent"
        while True:
            # Only now: an ssl object is used up by one try.
            safe: dict[str, Any] = {"ssl": client_context(), "server_hostname": "keepstep", "proxy": None}
            opening = connect(url, **safe) if self.tls else unix_connect(self.target, url)
            try:
                connection = await stack.enter_async_context(opening)
            except OSError:
                assert self.process.poll() is None
                await asyncio.sleep(0.02)
                continue
            if self.token is not None:
                check_pin(connection.transport.get_extra_info("ssl_object"), self.token)
            return connection

    async def join(self, number: int, stack: contextlib.AsyncExitStack) -> Node:
        """A node that was welcomed."""
        node = Node(f"n{number}", await self.connect(stack))
        challenge = await node.wait(m.Challenge)
        hello = m.Hello(
            id=0,
            run_id="r",
            node=node.name,
            host=f"h{number}",
            pid=PID,
            nproc=RANKS,
            next_port=40000,
            next_addr="127.0.0.1",
            boot_id="b",
            proof=prove(self.token, challenge.nonce, "r", node.name) if self.token is not None else "",
        )
        await node.connection.send(to_json(hello).decode())
        await node.wait(m.Welcome)
        return node

    async def say_dead(self, node: Node) -> None:
        """What a guardian does whose launcher died."""
        word = {"node": node.name, "pid": PID, "boot_id": "b", "key": fence_key(self.token, "r").hex()}
        await asyncio.to_thread(tell, {**word, "targets": [self.target], "tls": self.tls})


def start_coordinator(run_dir: Path, endpoint: str, token: bytes | None) -> subprocess.Popen[bytes]:
    for name in ("logs", "journal", "cycles"):
        (run_dir / name).mkdir(parents=True)
    config = RunConfig(
        run_id="r", run_dir=str(run_dir), node="n0", script="x.py", nnodes=NODES, min_nodes=NODES, spares=1, nproc=RANKS
    )
    (run_dir / "run.json").write_bytes(to_pretty_json(config))
    make_folder_id(run_dir)
    command = [sys.executable, "-m", "keepstep.launcher.coordinatormain", "--run-dir", str(run_dir)]
    command += ["--socket", str(run_dir / "s"), "--started-ns", str(boot_ns()), "--launch", "life"]
    fds = []
    if token is not None:
        read_end, write_end = os.pipe()
        os.write(write_end, token)
        os.close(write_end)
        command += ["--listen", endpoint, "--token-fd", str(read_end)]
        fds = [read_end]
    with (run_dir / "logs" / "launcher.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=fds)
    for fd in fds:
        os.close(fd)
    return process


async def started(nodes: list[Node], cycle: int) -> dict[str, m.StartCycle]:
    """The start of a cycle as each node was told it; the nodes start."""
    commands = {node.name: await node.wait(m.StartCycle, cycle) for node in nodes}
    assert sorted(c.first_rank for c in commands.values()) == list(range(0, NODES * RANKS, RANKS))
    for node in nodes:
        await node.start(commands[node.name])
    return commands


async def life(running: Running) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await lose_one_and_stop(running, [await running.join(number, stack) for number in range(NODES + 1)])


async def lose_one_and_stop(running: Running, nodes: list[Node]) -> None:
    *members, spare = nodes
    first = await started(members, 0)
    spans = [[node.name, f"h{number}", RANKS] for number, node in enumerate(members)]
    for node in nodes:
        assert (await node.ask(m.GetCycle(id=0, cycle=0)))["node_spans"] == spans
        assert (await node.ask(m.Beat(id=0, cycle=0)))["lease_s"] > 0
    assert first["n0"].node_spans == spans

    lost = members.pop(2)
    await lost.connection.close()
    await running.say_dead(lost)
    for node in members:
        assert (await node.wait(m.StopCycle)).cycle == 0
        await node.stop(first[node.name], -15)

    members.append(spare)
    second = await started(members, 1)
    assert second[spare.name].first_rank == first[lost.name].first_rank
    await spare.ask(m.StopRequest(id=0, signum=15, node=spare.name))
    for node in members:
        await node.wait(m.AskStop)
        await node.stop(second[node.name], 0)
    for node in members:
        await node.wait(m.End)
        await node.connection.close()
        commands = [type(message) for message in node.told]
        began = [m.StartCycle] if node is spare else [m.StartCycle, m.StopCycle, m.StartCycle]
        assert commands == [m.Challenge, m.Welcome, *began, m.AskStop, m.End]


@pytest.mark.parametrize("tls", [False, True], ids=["unix", "tls"])
def test_each_node_is_told_its_own_part_and_everything_once(tmp_path: Path, tls: bool) -> None:
    running = Running(tmp_path, tls)
    try:
        asyncio.run(asyncio.wait_for(life(running), 2 * LIMIT_S))
        assert running.process.wait(LIMIT_S) == 0
    finally:
        running.process.kill()
        running.process.wait()
    ended = [(cycle.cycle, cycle.end_reason, cycle.ended_at is not None) for cycle in read_cycles(tmp_path)]
    assert ended == [(0, "node_lost", True), (1, "preempted", True)]
    assert (tmp_path / "cycles" / "current").readlink().name == "cycle-0001.json"
