"""One suite over all back-ends of the side channel: memory, torchrun's store, the agent's socket."""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from keepstep.checkpoint.exchange import Fetched, HighWater, KeptSet, NoStoreError
from keepstep.records import frames
from keepstep.records.errors import ChannelError, ConfigError
from keepstep.trainer.channel import (
    ABSENT,
    AgentChannel,
    Channel,
    MemoryChannel,
    StoreChannel,
    open_channel,
    scoped,
)
from keepstep.trainer.ownmemory import OwnMemory


class AgentServer(socketserver.ThreadingUnixStreamServer):
    """A server for frames.py: one thread a connection, one set of keys."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: Path, *, run_id: str = "job7", cycle: int = 2) -> None:
        self.run_id, self.cycle = run_id, cycle
        self.keys = MemoryChannel()
        self.reports: list[tuple[int, str, dict[str, Any]]] = []
        self.hellos: list[dict[str, Any]] = []
        self.memory = OwnMemory()
        self.marks: dict[str, dict[str, Any]] = {}
        self.granting = True
        super().__init__(str(path), _AgentHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class _AgentHandler(socketserver.BaseRequestHandler):
    server: AgentServer

    def handle(self) -> None:
        sock: socket.socket = self.request
        hello = frames.recv_frame(sock)
        self.server.hellos.append(hello)
        if (hello.get("op"), hello.get("run_id"), hello.get("cycle")) != (
            "hello",
            self.server.run_id,
            self.server.cycle,
        ):
            sock.sendall(frames.pack({"ok": False, "error": f"cycle is {self.server.cycle}"}))
            return
        sock.sendall(frames.pack({"ok": True}))
        with contextlib.suppress(ConnectionError):
            while True:
                request = frames.recv_frame(sock)
                self.answer(sock, request, hello["rank"])

    def answer(self, sock: socket.socket, request: dict[str, Any], rank: int) -> None:
        keys = self.server.keys
        reply: dict[str, Any] = {"ok": True}
        op = request["op"]
        if op == "set":
            keys.set(request["key"], request["value"])
        elif op == "get":
            value = keys.get(request["key"])
            reply |= {"found": False, "value": None} if value is ABSENT else {"found": True, "value": value}
        elif op == "cas":
            reply["value"] = keys.cas(request["key"], request["value"])
        elif op == "wait":
            try:
                reply["values"] = keys.wait(request["keys"], request["timeout_s"])
            except ChannelError:
                missing = [key for key in request["keys"] if keys.get(key) is ABSENT]
                reply = {"ok": False, "error": "timeout", "missing": missing}
        elif op == "report":
            self.server.reports.append((rank, request["kind"], request["fields"]))
        elif op == "grant":
            reply["granted"] = self.server.granting
        elif op in ("buffer", "fetch", "keep", "unkeep", "kept"):
            self.answer_memory(sock, op, request)
            return
        elif op == "mark_get":
            reply["mark"] = self.server.marks.get(request["root_id"])
        elif op == "mark_set":
            self.server.marks[request["root_id"]] = {k: request[k] for k in ("step", "cycle", "digest")}
        else:
            reply = {"ok": False, "error": f"unknown op {op!r}"}
        sock.sendall(frames.pack(reply))

    def answer_memory(self, sock: socket.socket, op: str, request: dict[str, Any]) -> None:
        memory = self.server.memory
        arguments = {k: v for k, v in request.items() if k not in ("op", "after")}
        reply: dict[str, Any] = {"ok": True}
        fds = array.array("i")
        try:
            if op == "buffer":
                fds.append(memory.buffer(**arguments))
            elif op == "fetch":
                got = memory.fetch(**arguments)
                fds.append(got.fd)
                reply |= {"size_bytes": got.size_bytes, "tier": got.tier, "facts": got.facts}
            elif op == "keep":
                reply["kept"] = memory.keep(**arguments)
            elif op == "unkeep":
                memory.unkeep(**arguments)
            elif "checkpoint" in request:
                files = [f for f in memory.kept_files(request["checkpoint"]) if f.file > request["after"]]
                # A page is as short as can be here, so that every listing needs several.
                shown = [{k: v for k, v in msgspec.to_builtins(f).items() if k != "checkpoint"} for f in files[:1]]
                reply |= {"files": shown, "more": len(files) > 1}
            else:
                reply["sets"] = msgspec.to_builtins(memory.kept())
        except ChannelError as error:
            reply = {"ok": False, "error": str(error)}
        data = frames.pack(reply)
        sent = sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])
        sock.sendall(data[sent:])
        for fd in fds:
            os.close(fd)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent.sock") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        server.memory.close()


def _agent_client(server: AgentServer, rank: int, **options: Any) -> AgentChannel:
    return AgentChannel(str(server.server_address), run_id="job7", cycle=2, rank=rank, **options)


class Ends:
    """Makes ends (ranks) of one channel and closes them afterwards."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._made: list[Any] = []

    def end(self, rank: int = 0) -> Channel:
        self._made.append(self._make(rank))
        return cast(Channel, self._made[-1])

    def close(self) -> None:
        for made in self._made:
            made.close()


@pytest.fixture(params=["memory", "store", "agent"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param == "memory":
        memory = MemoryChannel()
        result = Ends(lambda _rank: memory)
    elif request.param == "store":
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
        result = Ends(
            lambda _rank: StoreChannel(
                TCPStore("127.0.0.1", host.port, None, False, timedelta(seconds=20), wait_for_workers=False),
                "keepstep/job7/0",
            )
        )
    else:
        server = request.getfixturevalue("agent")
        result = Ends(lambda rank: _agent_client(server, rank))
    yield result
    result.close()


VALUES: list[Any] = [None, True, 0, -(2**53), 1.5, "", "text\n\u00e9", [], [1, [2]], {}, {"a": {"b": None}}]


def test_set_and_get(ends: Ends) -> None:
    one, two = ends.end(0), ends.end(1)
    assert one.get("k") is ABSENT
    for value in VALUES:
        one.set("k", value)
        assert two.get("k") == value
        assert type(two.get("k")) is type(value)


def test_compare_and_set_is_decided_once(ends: Ends) -> None:
    one, two = ends.end(0), ends.end(1)
    assert one.cas("k", None) is None
    assert two.cas("k", {"mine": 1}) is None
    assert two.cas("other", {"mine": 1}) == {"mine": 1}


def test_compare_and_set_under_contention(ends: Ends) -> None:
    channel = ends.end()
    gate = threading.Barrier(6)
    held: list[list[Any]] = [[] for _ in range(6)]

    def race(rank: int) -> None:
        for number in range(15):
            gate.wait(20)
            held[rank].append(channel.cas(f"k{number}", rank))

    threads = [threading.Thread(target=race, args=(rank,), daemon=True) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all(answers == held[0] for answers in held)
    assert len(held[0]) == 15


def test_wait_returns_all_values(ends: Ends) -> None:
    one, two = ends.end(0), ends.end(1)
    one.set("a", 1)
    waiting = threading.Event()
    result: list[Any] = []

    def wait() -> None:
        waiting.set()
        result.append(two.wait(["a", "b", "c"], 20.0))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert waiting.wait(10)
    one.set("b", None)
    one.set("c", [3])
    thread.join(20)
    assert result == [{"a": 1, "b": None, "c": [3]}]
    assert two.wait([], 0.0) == {}


def test_timeout_names_what_is_missing_and_the_channel_still_works(ends: Ends) -> None:
    channel = ends.end()
    channel.set("here", 1)
    began = time.monotonic()
    with pytest.raises(ChannelError, match=r"2 of 3 keys are missing after 0.15 s: gone/1, gone/2$"):
        channel.wait(["here", "gone/1", "gone/2"], 0.15)
    assert 0.1 < time.monotonic() - began < 10
    with pytest.raises(ChannelError):
        channel.wait(["gone/1"], 0.0)
    channel.set("gone/1", 2)
    assert channel.wait(["here", "gone/1"], 5.0) == {"here": 1, "gone/1": 2}


def test_wait_in_one_thread_holds_up_no_other(ends: Ends) -> None:
    """The background saver waits for other ranks while the training thread reads decisions, on the same object."""
    channel = ends.end()
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(channel.wait([f"late{n}"], 30.0)), daemon=True)
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for number in range(30):
        channel.set(f"k{number}", number)
        assert channel.get(f"k{number}") == number
        assert channel.cas(f"k{number}", -1) == number
    assert results == []
    for number in range(4):
        channel.set(f"late{number}", number)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(value for result in results for value in result.values()) == [0, 1, 2, 3]


def test_buffer_is_shared_memory_of_the_asked_size(ends: Ends) -> None:
    channel = ends.end()
    fd = channel.buffer("ckpt-0", 3 << 20)
    try:
        assert os.fstat(fd).st_size >= 3 << 20
        assert not os.get_inheritable(fd)
        with mmap.mmap(fd, 3 << 20) as view:
            view[-1] = 7
            assert os.pread(fd, 1, (3 << 20) - 1) == b"\7"
    finally:
        os.close(fd)
    bigger = channel.buffer("ckpt-0", 4 << 20)
    assert os.fstat(bigger).st_size >= 4 << 20
    os.close(bigger)


FOLDER, NEWER = "job7-step-00000005-c0002-a0000", "job7-step-00000010-c0002-a0000"


def _stage(channel: Channel, name: str, data: bytes) -> None:
    fd = channel.buffer(name, 4096)
    os.pwrite(fd, data, 0)
    os.close(fd)


def _read(got: Fetched) -> bytes:
    try:
        return os.pread(got.fd, got.size_bytes, 0)
    finally:
        os.close(got.fd)


def test_what_was_kept_is_listed_and_fetched(ends: Ends) -> None:
    channel = ends.end(0)
    assert channel.kept() == []
    for number in range(3):
        _stage(channel, f"slot-{number}", b"image %d" % number)
        facts = {"step": 5, "rank": number, "deep": {"a": [1, None]}}
        assert channel.keep(f"slot-{number}", FOLDER, f"rank-{number}", 7, facts) is True
    _stage(channel, "small", b"{}")
    channel.keep("small", NEWER, "index.json", 2, {})
    one = KeptSet(checkpoint=FOLDER, files=3, size_bytes=21, facts={"step": 5, "deep": {"a": [1, None]}})
    assert channel.kept() == [KeptSet(checkpoint=NEWER, files=1, size_bytes=2), one]
    assert [(f.file, f.size_bytes, f.tier, f.facts["rank"]) for f in channel.kept_files(FOLDER)] == [
        (f"rank-{n}", 7, "shm", n) for n in range(3)
    ]
    assert channel.kept_files("job7-step-00000099-c0002-a0000") == []
    got = channel.fetch(FOLDER, "rank-2")
    assert (got.size_bytes, got.tier, got.facts["rank"]) == (7, "shm", 2)
    assert not os.get_inheritable(got.fd)
    with pytest.raises(OSError):
        os.pwrite(got.fd, b"x", 0)
    assert _read(got) == b"image 2"


@pytest.mark.parametrize("ends", ["memory", "agent"], indirect=True)
def test_a_buffer_that_is_overwritten_is_listed_no_more(ends: Ends) -> None:
    channel = ends.end(0)
    _stage(channel, "slot", b"one")
    channel.keep("slot", FOLDER, "f", 3, {"n": 1})
    channel.keep("slot", FOLDER, "f", 3, {"n": 2})
    assert [f.facts for f in channel.kept_files(FOLDER)] == [{"n": 2}]
    channel.unkeep("slot")
    channel.unkeep("slot")
    channel.unkeep("never made")
    assert channel.kept() == []
    with pytest.raises(ChannelError, match=FOLDER):
        channel.fetch(FOLDER, "f")
    channel.keep("slot", FOLDER, "f", 3, {})
    os.close(channel.buffer("slot", 8192))
    assert channel.kept() == [], "another size is other memory"


@pytest.mark.parametrize("ends", ["memory", "agent"], indirect=True)
def test_what_cannot_be_kept_is_refused(ends: Ends) -> None:
    channel = ends.end(0)
    with pytest.raises(ChannelError, match="slot"):
        channel.keep("slot", FOLDER, "f", 1, {})
    _stage(channel, "slot", b"x")
    for checkpoint, file, size in ((FOLDER, "f", 4097), (FOLDER, "f", 0), ("x", "f", 1), (FOLDER, "../f", 1)):
        with pytest.raises(ChannelError):
            channel.keep("slot", checkpoint, file, size, {})
    assert channel.kept() == []


@pytest.mark.parametrize("ends", ["memory", "agent"], indirect=True)
def test_a_scope_has_the_same_memory_and_marks(ends: Ends) -> None:
    channel = ends.end(0)
    inner = scoped(channel, "ckpt-1")
    _stage(inner, "slot", b"one")
    assert inner.keep("slot", FOLDER, "f", 3, {})
    assert inner.kept() == channel.kept() != []
    assert inner.kept_files(FOLDER) == channel.kept_files(FOLDER)
    assert _read(inner.fetch(FOLDER, "f")) == b"one"
    inner.unkeep("slot")
    assert channel.kept() == []
    if not isinstance(channel, AgentChannel):
        with pytest.raises(NoStoreError):
            inner.mark_get("root")


def test_high_water_marks_need_a_launcher(ends: Ends) -> None:
    channel = ends.end(0)
    mark = HighWater(step=5, cycle=2, digest="ab" * 32)
    if isinstance(channel, AgentChannel):
        assert channel.mark_get("root") is None
        channel.mark_set("root", mark)
        assert channel.mark_get("root") == mark
        return
    with pytest.raises(NoStoreError, match="no launcher"):
        channel.mark_get("root")
    with pytest.raises(NoStoreError, match="no launcher"):
        channel.mark_set("root", mark)


def test_reports_and_grants(ends: Ends) -> None:
    channel = ends.end(3)
    channel.report("ckpt_block", {"step": 1, "begin_ns": 5, "end_ns": 6})
    assert channel.grant("folder", 12) is True


def test_values_that_are_not_json_are_refused(ends: Ends) -> None:
    channel = ends.end()
    for bad in (object(), b"x", {1, 2}, float("nan")):
        with pytest.raises(ChannelError):
            channel.set("k", bad)
        with pytest.raises(ChannelError):
            channel.cas("k", bad)
        with pytest.raises(ChannelError):
            channel.report("kind", {"field": bad})
    assert channel.get("k") is ABSENT


def test_scope_keeps_keys_apart(ends: Ends) -> None:
    channel = ends.end()
    inner = scoped(channel, "ckpt-1")
    inner.set("k", 1)
    assert channel.get("k") is ABSENT
    assert channel.get("ckpt-1/k") == 1
    assert inner.get("k") == 1
    assert inner.wait(["k"], 1.0) == {"k": 1}
    assert inner.cas("k", 2) == 1
    assert inner.grant("c", 1)


# ---- what only one back-end has


def test_agent_learns_who_reports_and_keeps_the_buffer(agent: AgentServer) -> None:
    channel = _agent_client(agent, rank=3)
    channel.report("committed", {"step": 5})
    assert agent.reports == [(3, "committed", {"step": 5})]
    assert agent.hellos[0] == {"op": "hello", "run_id": "job7", "cycle": 2, "rank": 3, "pid": os.getpid()}
    fd = channel.buffer("stage", 4096)
    with mmap.mmap(fd, 4096) as view:
        view[:4] = b"data"
    os.close(fd)
    channel.keep("stage", FOLDER, "rank-3", 4, {})
    got = agent.memory.fetch(FOLDER, "rank-3")
    assert os.pread(got.fd, 4, 0) == b"data", "the agent's copy outlives the rank's"
    os.close(got.fd)
    agent.granting = False
    assert channel.grant("folder", 5) is False
    channel.close()
    with pytest.raises(ChannelError, match="closed"):
        channel.get("k")


def test_agent_of_another_cycle_is_refused(agent: AgentServer) -> None:
    old = AgentChannel(str(agent.server_address), run_id="job7", cycle=1, rank=0)
    with pytest.raises(ChannelError, match="refused this rank: cycle is 2"):
        old.set("k", 1)
    assert agent.keys.get("k") is ABSENT


def test_agent_that_is_gone_is_an_error_not_a_hang(agent: AgentServer, tmp_path: Path) -> None:
    nobody = AgentChannel(str(tmp_path / "nobody.sock"), run_id="job7", cycle=2, rank=0)
    with pytest.raises(ChannelError, match="get failed"):
        nobody.get("k")


def test_agent_that_never_answers_times_out(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf.sock"))
        deaf.listen()
        channel = AgentChannel(str(tmp_path / "deaf.sock"), run_id="job7", cycle=2, rank=0, timeout_s=0.1)
        with pytest.raises(ChannelError, match="get failed: timed out"):
            channel.get("k")


def test_frames_over_the_limit_are_refused_before_they_are_sent(agent: AgentServer) -> None:
    channel = _agent_client(agent, rank=0)
    with pytest.raises(ChannelError, match="over the limit"):
        channel.set("k", "x" * frames.MAX_FRAME_BYTES)
    channel.set("k", 1)
    assert channel.get("k") == 1
    channel.close()


def test_connections_are_reused_not_piled_up(agent: AgentServer) -> None:
    channel = _agent_client(agent, rank=0)
    for number in range(20):
        channel.set("k", number)
    assert len(agent.hellos) == 1
    channel.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_environment_chooses_the_back_end(monkeypatch: pytest.MonkeyPatch, agent: AgentServer) -> None:
    for name in (frames.ENV_AGENT_SOCKET, frames.ENV_RUN_ID, frames.ENV_CYCLE, "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(open_channel(), MemoryChannel)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        open_channel()
    monkeypatch.setenv(frames.ENV_AGENT_SOCKET, str(agent.server_address))
    with pytest.raises(ConfigError, match="KEEPSTEP_RUN_ID"):
        open_channel()
    monkeypatch.setenv(frames.ENV_RUN_ID, "job7")
    monkeypatch.setenv(frames.ENV_CYCLE, "2")
    monkeypatch.setenv("RANK", "1")
    channel = open_channel()
    assert isinstance(channel, AgentChannel)
    channel.set("k", 1)
    assert agent.hellos[0]["rank"] == 1
    channel.close()


@pytest.mark.parametrize("hosted_by", ["agent", "rank 0"])
def test_store_of_torchrun_is_shared_with_the_process_group(monkeypatch: pytest.MonkeyPatch, hosted_by: str) -> None:
    """The channel works before init_process_group, on the same port, whoever hosts the store."""
    from datetime import timedelta

    import torch.distributed as dist

    port = _free_port()
    host = None
    if hosted_by == "agent":
        host = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20), wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": str(hosted_by == "agent"),
        "TORCHELASTIC_RESTART_COUNT": "4",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    channel = StoreChannel.from_environment("job7")
    channel.set("k", 1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    try:
        other = StoreChannel.from_environment("job7")
        assert other.get("k") == 1
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "5")
        assert StoreChannel.from_environment("job7").get("k") is ABSENT, "another life shares nothing"
    finally:
        dist.destroy_process_group()
    assert channel.get("k") == 1
    del host


def test_no_store_is_an_error_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ChannelError, match=r"no store answers at 127\.0\.0\.1"):
        StoreChannel.from_environment("job7", connect_timeout_s=0.5)
