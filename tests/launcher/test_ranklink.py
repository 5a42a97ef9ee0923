"""The agent's socket for ranks, over a real Unix socket, with the trainer's own client and with hand-made frames."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.exchange import HighWater
from keepstep.launcher.node.images import MAX_FACTS_BYTES, NodeImages
from keepstep.launcher.node.ranklink import MAX_REASON_CHARS, RankServer
from keepstep.records import frames
from keepstep.records.errors import ChannelError
from keepstep.trainer.channel import ABSENT, AgentChannel

LIMIT_S = 10.0


class Host:
    """The agent's part: one set of keys, and what it was told."""

    run_id = "job7"
    images: NodeImages

    def __init__(self) -> None:
        self.cycle = 2
        self.keys: dict[str, Any] = {}
        self.reports: list[tuple[int, int, str, dict[str, Any]]] = []
        self.shared: list[tuple[str, int]] = []
        self.refuse: str | None = None
        self.requests: list[tuple[int, int, str, str]] = []

    def current_cycle(self) -> int:
        return self.cycle

    async def share(self, op: str, cycle: int, request: dict[str, Any]) -> dict[str, Any]:
        self.shared.append((op, cycle))
        if self.refuse is not None:
            raise ChannelError(self.refuse)
        match op:
            case "set":
                self.keys[request["key"]] = request["value"]
                return {}
            case "cas":
                return {"value": self.keys.setdefault(request["key"], request["value"])}
            case "get":
                return {"found": request["key"] in self.keys, "value": self.keys.get(request["key"])}
            case "wait":
                missing = [k for k in request["keys"] if k not in self.keys]
                if missing:
                    error = ChannelError("timeout")
                    error.result = {"missing": missing}  # type: ignore[attr-defined]
                    raise error
                return {"values": {k: self.keys[k] for k in request["keys"]}}
            case "mark_get":
                return {"mark": self.keys.get(request["root_id"])}
            case "mark_set":
                self.keys[request["root_id"]] = {k: request[k] for k in ("step", "cycle", "digest")}
                return {}
        return {"granted": True}

    async def fetch(self, checkpoint: str, file: str) -> tuple[dict[str, Any], int]:
        held = self.images.open(checkpoint, file)
        if held is None:
            raise ChannelError("in the memory of no node")
        return {"size_bytes": held[1].size_bytes, "tier": "shm", "facts": held[1].facts}, held[0]

    def report(self, cycle: int, rank: int, kind: str, fields: dict[str, Any]) -> None:
        self.reports.append((cycle, rank, kind, fields))

    async def request(self, cycle: int, rank: int, what: str, reason: str) -> None:
        if self.refuse is not None:
            raise ChannelError(self.refuse)
        self.requests.append((cycle, rank, what, reason))

    def inject(self, cycle: int, spec: str) -> str | None:
        return None if spec == "known" else f"not one of this run's injections: {spec}"


class Served:
    """A RankServer on a loop of its own thread."""

    def __init__(self, folder: Path) -> None:
        self.host = Host()
        self.path = folder / "agent.sock"
        self.images = self.host.images = NodeImages()
        self.server = RankServer(self.path, self.host, self.images)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.call(self.server.start())

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LIMIT_S)

    def channel(self, *, run_id: str = "job7", cycle: int = 2, rank: int = 1) -> AgentChannel:
        return AgentChannel(str(self.path), run_id=run_id, cycle=cycle, rank=rank, timeout_s=LIMIT_S)

    def connect(self, *, greet: bool = True) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(LIMIT_S)
        sock.connect(str(self.path))
        if greet:
            assert ask(sock, {"op": "hello", "run_id": "job7", "cycle": 2, "rank": 1, "pid": 1}) == {"ok": True}
        return sock

    def stop(self) -> None:
        self.call(self.server.close())

        async def rest() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

        self.call(rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.images.close()
        self.thread.join()
        self.loop.close()


def ask(sock: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    sock.sendall(frames.pack(request))
    return frames.recv_frame(sock)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.stop()


class TestRequests:
    def test_shared_keys(self, served: Served) -> None:
        channel = served.channel()
        assert channel.get("k") is ABSENT
        channel.set("k", [1, None])
        assert channel.get("k") == [1, None]
        assert channel.cas("k", 5) == [1, None]
        assert channel.wait(["k"], 1.0) == {"k": [1, None]}
        assert channel.grant("c", 3)
        channel.close()
        assert {op for op, _ in served.host.shared} == {"get", "set", "cas", "wait", "grant"}
        assert {cycle for _, cycle in served.host.shared} == {2}

    def test_a_rank_asks_for_the_end_of_its_cycle(self, served: Served) -> None:
        channel = served.channel(rank=3)
        assert channel.request("stop", "converged")
        assert channel.request("exclude", "x" * (MAX_REASON_CHARS + 1))
        assert served.host.requests == [(2, 3, "stop", "converged"), (2, 3, "exclude", "x" * MAX_REASON_CHARS)]
        served.host.refuse = "the cycle is over"
        with pytest.raises(ChannelError, match="the cycle is over"):
            channel.request("stop", "again")
        channel.close()

    def test_only_the_known_requests_reach_the_agent(self, served: Served) -> None:
        with served.connect() as sock:
            reply = ask(sock, {"op": "request", "what": "reboot", "reason": ""})
        assert not reply["ok"] and "neither stop nor exclude" in reply["error"]
        assert served.host.requests == []

    def test_a_wait_that_ran_out_names_what_is_missing(self, served: Served) -> None:
        channel = served.channel()
        channel.set("here", 1)
        with pytest.raises(ChannelError, match="gone"):
            channel.wait(["here", "gone"], 0.01)
        channel.close()

    def test_what_the_coordinator_refuses_is_said_and_the_connection_stays(self, served: Served) -> None:
        with served.connect() as sock:
            served.host.refuse = "cycle 2 is over"
            assert ask(sock, {"op": "get", "key": "k"}) == {"ok": False, "error": "cycle 2 is over"}
            served.host.refuse = None
            assert ask(sock, {"op": "get", "key": "k"}) == {"ok": True, "found": False, "value": None}

    def test_reports_carry_the_rank_of_the_hello(self, served: Served) -> None:
        channel = served.channel(rank=5)
        channel.report("restored", {"step": 3})
        channel.close()
        assert served.host.reports == [(2, 5, "restored", {"step": 3})]

    def test_injections(self, served: Served) -> None:
        with served.connect() as sock:
            assert ask(sock, {"op": "inject", "spec": "known"}) == {"ok": True}
            refused = ask(sock, {"op": "inject", "spec": "x"})
            assert refused == {"ok": False, "error": "not one of this run's injections: x"}


class TestFencing:
    @pytest.mark.parametrize("cycle", [1, 3])
    def test_a_rank_of_another_cycle_is_refused_and_counted(self, cycle: int, served: Served) -> None:
        with pytest.raises(ChannelError, match=f"cycle {cycle} is over; this agent runs cycle 2"):
            served.channel(cycle=cycle).get("k")
        assert (served.server.refused, served.host.shared) == (1, [])

    def test_a_rank_of_another_run_is_refused_and_counted(self, served: Served) -> None:
        with pytest.raises(ChannelError, match="first request must be hello of this run"):
            served.channel(run_id="job8").get("k")
        assert (served.server.refused, served.host.shared) == (1, [])

    def test_nothing_before_a_hello(self, served: Served) -> None:
        with served.connect(greet=False) as sock:
            assert ask(sock, {"op": "set", "key": "k", "value": 1})["ok"] is False
            assert sock.recv(1) == b""
        assert (served.server.refused, served.host.keys) == (1, {})

    @pytest.mark.parametrize("op", ["set", "report", "buffer", "inject", "grant"])
    def test_a_request_after_its_cycle_is_refused(self, op: str, served: Served) -> None:
        with served.connect() as sock:
            served.host.cycle = 3
            request = {
                "op": op,
                "key": "k",
                "value": 1,
                "kind": "x",
                "fields": {},
                "name": "b",
                "size_bytes": 8,
                "spec": "known",
            }
            assert ask(sock, request) == {"ok": False, "error": "cycle 2 is over"}
        assert (served.host.shared, served.host.reports) == ([], [])


class TestMalformed:
    BODIES: tuple[tuple[str, bytes], ...] = (
        ("no JSON", b"{"),
        ("no UTF-8", b'"\xff"'),
        ("no object", b"[1]"),
        ("no op", b"{}"),
        ("an unknown op", b'{"op":"fly"}'),
        ("a missing field", b'{"op":"report","kind":"x"}'),
        ("a field of another type", b'{"op":"report","kind":"x","fields":5}'),
        ("a size that is no number", b'{"op":"buffer","name":"b","size_bytes":"x"}'),
        ("a buffer of infinite size", b'{"op":"buffer","name":"b","size_bytes":1e999}'),
        ("a buffer of no size", b'{"op":"buffer","name":"b","size_bytes":0}'),
        ("a buffer of less than nothing", b'{"op":"buffer","name":"b","size_bytes":-1}'),
        ("nested without end", b"[" * 200_000),
        ("nothing", b""),
    )

    @pytest.mark.parametrize("body", [b for _, b in BODIES], ids=[n for n, _ in BODIES])
    def test_is_refused_counted_and_ends_only_its_own_connection(self, body: bytes, served: Served) -> None:
        other = served.channel()
        other.set("k", 1)
        with served.connect() as sock:
            sock.sendall(struct.pack(">I", len(body)) + body)
            reply = frames.recv_frame(sock)
            assert (reply["ok"], reply["error"].startswith("malformed request: ")) == (False, True)
            assert sock.recv(1) == b""
        assert served.server.refused == 1
        assert other.get("k") == 1
        other.close()

    def test_an_oversized_frame_is_refused_before_it_is_read(self, served: Served) -> None:
        with served.connect() as sock:
            sock.sendall(struct.pack(">I", frames.MAX_FRAME_BYTES + 1))
            assert f"frame of {frames.MAX_FRAME_BYTES + 1} bytes is over" in frames.recv_frame(sock)["error"]
        assert served.server.refused == 1

    def test_the_largest_frame_is_taken(self, served: Served) -> None:
        request = {"op": "set", "key": "k", "value": ""}
        room = frames.MAX_FRAME_BYTES - len(json.dumps(request, separators=(",", ":")))
        with served.connect() as sock:
            assert ask(sock, {**request, "value": "x" * room}) == {"ok": True}
        assert len(served.host.keys["k"]) == room

    def test_an_answer_too_large_for_a_frame_is_said(self, served: Served) -> None:
        served.host.keys = {f"k{n}": "x" * 200_000 for n in range(8)}
        with served.connect() as sock:
            reply = ask(sock, {"op": "wait", "keys": list(served.host.keys), "timeout_s": 1})
        assert (reply["ok"], "over the limit" in reply["error"]) == (False, True)

    @pytest.mark.parametrize("part", [b"", b"\x00\x00", b"\x00\x00\x00\x20{"])
    def test_a_rank_that_dies_in_the_middle_is_no_malformed_request(self, part: bytes, served: Served) -> None:
        with served.connect() as sock:
            sock.sendall(part)
        with served.connect() as sock:
            assert ask(sock, {"op": "get", "key": "k"})["ok"]
        assert served.server.refused == 0


class TestBuffers:
    @staticmethod
    def use(channel: AgentChannel, name: str, size: int, act: Callable[[mmap.mmap], Any]) -> Any:
        fd = channel.buffer(name, size)
        try:
            with mmap.mmap(fd, size) as memory:
                return act(memory)
        finally:
            os.close(fd)

    def test_the_memory_outlives_the_rank_and_its_cycle(self, served: Served) -> None:
        first = served.channel()
        self.use(first, "stage", 8192, lambda memory: memory.write(b"kept"))
        first.close()
        served.host.cycle = 3
        second = served.channel(cycle=3)
        assert self.use(second, "stage", 8192, lambda memory: memory[:4]) == b"kept"
        second.close()

    def test_ranks_and_names_do_not_share(self, served: Served) -> None:
        channel, other = served.channel(rank=1), served.channel(rank=2)
        self.use(channel, "a", 4096, lambda memory: memory.write(b"mine"))
        assert self.use(channel, "b", 4096, lambda memory: memory[:4]) == bytes(4)
        assert self.use(other, "a", 4096, lambda memory: memory[:4]) == bytes(4)
        channel.close()
        other.close()

    def test_another_size_is_a_fresh_buffer_and_the_old_mapping_stays_valid(self, served: Served) -> None:
        channel = served.channel()
        fd = channel.buffer("a", 4096)
        with mmap.mmap(fd, 4096) as old:
            old.write(b"old")
            assert self.use(channel, "a", 8192, lambda memory: memory[:3]) == bytes(3)
            assert old[:3] == b"old"
        os.close(fd)
        channel.close()

    def test_more_than_this_host_has_is_refused_and_the_agent_lives(self, served: Served) -> None:
        with served.connect() as sock:
            reply = ask(sock, {"op": "buffer", "name": "b", "size_bytes": 1 << 47})
            assert (reply["ok"], reply["error"].startswith(f"no memory for a buffer of {1 << 47} bytes")) == (
                False,
                True,
            )
            assert ask(sock, {"op": "get", "key": "k"})["ok"]


class TestMemory:
    NAME = "job7-step-00000005-c0002-a0000"

    def test_what_a_rank_kept_is_found_by_any_rank_of_a_later_cycle(self, served: Served) -> None:
        first = served.channel(rank=1)
        fd = first.buffer("slot", 8192)
        os.pwrite(fd, b"image", 0)
        os.close(fd)
        assert first.keep("slot", self.NAME, "rank-1", 5, {"step": 5}) is True
        first.close()
        served.host.cycle = 3
        other = served.channel(rank=0, cycle=3)
        got = other.fetch(self.NAME, "rank-1")
        try:
            assert (got.size_bytes, got.tier, got.facts) == (5, "shm", {"step": 5})
            assert os.pread(got.fd, 5, 0) == b"image"
            with pytest.raises(OSError):
                os.pwrite(got.fd, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(got.fd, 8192)
        finally:
            os.close(got.fd)
        other.close()

    def test_a_fetch_of_what_nobody_holds_is_refused_and_the_connection_stays(self, served: Served) -> None:
        channel = served.channel()
        with pytest.raises(ChannelError, match="fetch was refused: in the memory of no node"):
            channel.fetch(self.NAME, "rank-1")
        channel.set("k", 1)
        assert channel.get("k") == 1
        channel.close()

    @pytest.mark.parametrize(
        "change",
        [
            {"buffer": "other"},
            {"size_bytes": 8193},
            {"size_bytes": 0},
            {"checkpoint": "../x"},
            {"file": ".hidden"},
            {"file": "a/b"},
            {"facts": {"x": "y" * MAX_FACTS_BYTES}},
        ],
    )
    def test_what_cannot_be_kept_is_refused_and_the_connection_stays(
        self, change: dict[str, Any], served: Served
    ) -> None:
        good = {"op": "keep", "buffer": "slot", "checkpoint": self.NAME, "file": "f", "size_bytes": 8, "facts": {}}
        with served.connect() as sock:
            sock.sendall(frames.pack({"op": "buffer", "name": "slot", "size_bytes": 8192}))
            reply, fds = frames.recv_frame_with_fds(sock)
            os.close(fds[0])
            assert reply["ok"]
            assert not ask(sock, {**good, **change})["ok"]
            assert served.images.images() == []
            assert ask(sock, good) == {"ok": True, "kept": True}
            assert ask(sock, {"op": "unkeep", "buffer": "slot"}) == {"ok": True}
        assert served.images.images() == []

    def test_no_descriptor_stays_behind_in_the_agent(self, served: Served) -> None:
        channel = served.channel()
        os.close(channel.buffer("slot", 4096))
        channel.keep("slot", self.NAME, "f", 8, {})
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            os.close(channel.buffer("slot", 4096))
            os.close(channel.fetch(self.NAME, "f").fd)
        # The last reply may still be on its way out of the handler.
        channel.set("k", 1)
        assert len(os.listdir("/proc/self/fd")) == before
        channel.close()

    def test_high_water_marks_pass_through(self, served: Served) -> None:
        channel = served.channel()
        assert channel.mark_get("root") is None
        channel.mark_set("root", HighWater(step=5, cycle=2, digest="ab" * 32))
        assert channel.mark_get("root") == HighWater(step=5, cycle=2, digest="ab" * 32)
        channel.close()


def test_a_socket_left_by_an_earlier_agent_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / "agent.sock"))
    served = Served(tmp_path)
    channel = served.channel()
    channel.set("k", 1)
    channel.close()
    served.stop()
    assert not served.path.exists()
