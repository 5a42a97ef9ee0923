"""Memory tiers of several nodes, with real sockets between them, around the coordinator's real book; only the link is short."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from keepstep.checkpoint.format.fingerprint import fingerprint
from keepstep.launcher import messages as m
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination import holdings
from keepstep.launcher.coordination.holdings import Holdings
from keepstep.launcher.node.images import MAX_COPIED_SETS, MAX_FACTS_BYTES, Image
from keepstep.launcher.node.imagewire import blocks_of
from keepstep.launcher.node.memorytier import NOTE_IMAGES, MemoryTier
from keepstep.launcher.trust import make_token
from keepstep.records.errors import ChannelError
from tests.launcher.lives import Lead, hello, shape

TOKEN = make_token().encode()
LIMIT_S = 20.0
MARKER = "manifest.json"
_decode = msgspec.json.Decoder(m.FromAgent).decode


def folder(step: int) -> str:
    return f"run-1-step-{step:08d}-c0000-a0000"


def data_of(step: int, file: str, size: int = 50_000) -> bytes:
    return random.Random(f"{step} {file}").randbytes(size)


class Node:
    """One launcher as far as memory goes: the owner of a MemoryTier."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.config = RunConfig(
            run_id="run-1",
            run_dir=str(cluster.folder),
            node=name,
            script="",
            nnodes=len(cluster.names),
            endpoints=["127.0.0.1:1"],
            memory_tier=cluster.tier,
        )
        self.run_id = "run-1"
        self.said: list[str] = []
        self.notes: list[m.KeepNote] = []
        self.tier = MemoryTier(self, cluster.folder, TOKEN)

    def say(self, text: str) -> None:
        self.said.append(text)

    def send(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.cluster.answer(self, make(1)))

    def keep(self, step: int, file: str, rank: int = 0, size: int = 50_000, buffer: str | None = None) -> None:
        """As a rank of this node would."""
        data = data_of(step, file, size)
        name = buffer or file
        fd = self.tier.images.buffer(rank, name, size)
        os.pwrite(fd, data, 0)
        os.close(fd)
        facts = {"step": step, "fingerprint": fingerprint(blocks_of(memoryview(data)))}
        self.tier.images.keep(rank, name, Image(checkpoint=folder(step), file=file, size_bytes=size, facts=facts))

    def holds(self) -> set[tuple[int, str]]:
        return {(i.facts["step"], i.file) for i in self.tier.images.images()}

    async def fetch(self, step: int, file: str) -> tuple[str, bytes]:
        reply, fd = await self.tier.fetch(folder(step), file)
        try:
            return reply["tier"], os.pread(fd, reply["size_bytes"], 0)
        finally:
            os.close(fd)

    def damage(self, step: int, file: str) -> None:
        """Flip a byte of the copy held here, past everybody."""
        fd = self.tier.images._copies[folder(step), file].fd
        byte = os.pread(fd, 1, 1234)
        os.pwrite(fd, bytes([byte[0] ^ 0x40]), 1234)


class Cluster:
    """Nodes a, b, ... of one job; `spares` of them without ranks."""

    def __init__(self, folder: Path, names: str = "ab", spares: int = 0, tier: str = "peer") -> None:
        self.folder, self.names, self.tier = folder, names, tier
        active = len(names) - spares
        self.lead = Lead(folder, shape(active, spares=spares))
        for name in names:
            self.lead.tell(hello(name))
        self.holdings = Holdings(tier)
        self.reported: list[m.Note] = []
        self.away = asyncio.Event()
        self.away.set()
        self.nodes = {name: Node(self, name) for name in names}

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    async def __aenter__(self) -> Cluster:
        for node in self.nodes.values():
            node.tier.start()
            node.tier.tell_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            await node.tier.close()

    async def answer(self, node: Node, message: Any) -> Any:
        """What the link and the coordinator do, over the wire's encoding."""
        await self.away.wait()
        message = _decode(msgspec.json.encode(message))
        if isinstance(message, m.KeepNote):
            node.notes.append(message)
        text = self.holdings.answer(
            self.lead.job, node.config.node, message, 1, self._send, lambda _, note: self.reported.append(note)
        )
        return json.loads(text).get("result")

    def _send(self, node: str, order: Any) -> None:
        self.nodes[node].tier.copy(msgspec.json.decode(msgspec.json.encode(order), type=m.CopyImages))

    def lose(self, name: str) -> None:
        """The node is gone, and the coordinator knows."""
        self.lead.tell((name, None))
        self.holdings.forget(name)

    async def copied(self, name: str, step: int, file: str) -> None:
        """Wait until the coordinator knows that this node holds it."""

        def known() -> bool:
            one = self.holdings._sets.get(folder(step))
            return one is not None and name in one.files.get(file, {})

        await self.until(known)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.01)


def play(cluster: Callable[[], Cluster], scene: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with cluster() as made:
            await scene(made)

    asyncio.run(main())


def test_a_peer_copies_what_is_kept_and_that_is_said_once(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        job["a"].keep(5, "rank-0")
        job["b"].keep(5, "rank-1")
        job["a"].keep(5, MARKER, size=100)
        everything = {(5, "rank-0"), (5, "rank-1"), (5, MARKER)}
        await job.until(lambda: job["a"].holds() == job["b"].holds() == everything)
        await job.until(lambda: len(job.reported) == 1)
        assert job.reported[0].attrs["files"] == 3
        assert await job["b"].fetch(5, "rank-0") == ("shm", data_of(5, "rank-0"))
        sets = (await job["a"].tier.kept("", ""))["sets"]
        assert [(s["files"], s["copied"]) for s in sets] == [(3, 3)]
        assert len(job["a"].notes) < 8, "notes are gathered"

    play(lambda: Cluster(tmp_path), scene)


def test_a_spare_gets_the_images_of_the_node_that_is_gone(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        job["a"].keep(5, "rank-0")
        job["b"].keep(5, "rank-1", size=20 << 20)
        await job.copied("b", 5, "rank-1")
        await job.copied("a", 5, "rank-1")
        await job["b"].tier.close()
        job.lose("b")
        listed = (await job["c"].tier.kept(folder(5), ""))["files"]
        assert [(f["file"], f["tier"], f["nodes"]) for f in listed] == [
            ("rank-0", "peer", ["a"]),
            ("rank-1", "peer", ["a"]),
        ]
        # All ranks of the node ask at once, and it comes once.
        got = await asyncio.gather(*(job["c"].fetch(5, "rank-1") for _ in range(4)))
        assert got == [("peer", data_of(5, "rank-1", 20 << 20))] * 4
        assert await job["c"].fetch(5, "rank-1") == ("shm", data_of(5, "rank-1", 20 << 20))
        with pytest.raises(ChannelError, match="in the memory of no node of this job"):
            await job["c"].fetch(5, "rank-9")

    play(lambda: Cluster(tmp_path, "abc", spares=1), scene)


def test_a_damaged_copy_is_never_handed_out(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        job["b"].keep(5, "rank-1")
        await job.copied("a", 5, "rank-1")
        job["a"].damage(5, "rank-1")
        job.lose("b")
        with pytest.raises(ChannelError, match=r"node a: .*fingerprint xxh3_128-16m:"):
            await job["c"].fetch(5, "rank-1")
        assert job["c"].holds() == set()
        # The node that held it looked, and tells that it holds nothing any more.
        await job.until(lambda: job["a"].holds() == set())
        await job.until(lambda: not job.holdings.newest())
        assert any("damaged" in line for line in job["a"].said)

    play(lambda: Cluster(tmp_path, "abc", spares=1), scene)


def test_another_holder_is_asked_when_one_has_it_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The damaged one is asked first.
    monkeypatch.setattr(holdings, "random", SimpleNamespace(sample=lambda names, count: sorted(names)[:count]))

    async def scene(job: Cluster) -> None:
        job["b"].keep(5, "rank-1")
        await job.copied("c", 5, "rank-1")
        await job["d"].fetch(5, "rank-1")
        await job.copied("d", 5, "rank-1")
        job["c"].damage(5, "rank-1")
        await job["b"].tier.close()
        job.lose("b")
        assert await job["a"].fetch(5, "rank-1") == ("peer", data_of(5, "rank-1"))
        assert any("node c" in line and "fingerprint" in line for line in job["a"].said)
        await job.until(lambda: job["c"].holds() == set())

    play(lambda: Cluster(tmp_path, "abcd"), scene)


def test_newer_sets_replace_older_copies_and_memory_stays_bounded(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        for step in range(1, 6):
            for file in ("rank-0", "rank-1"):
                job["a"].keep(step, file, buffer=f"{file}-{step % 2}")
            await job.until(lambda step=step: {(step, "rank-0"), (step, "rank-1")} <= job["b"].holds())  # type: ignore[misc]
            assert len({s for s, _ in job["b"].holds()}) <= MAX_COPIED_SETS
        assert job["b"].holds() == {(s, f"rank-{r}") for s in (4, 5) for r in (0, 1)}

    play(lambda: Cluster(tmp_path), scene)


def test_without_memory_for_it_nothing_is_copied_and_that_is_said_once(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        job["b"].tier.images._available = lambda: 90_000
        for step in (1, 2, 3):
            job["a"].keep(step, "rank-0")
            await job.until(lambda step=step: any(i.checkpoint == folder(step) for i in job["a"].tier.images.images()))  # type: ignore[misc]
            await asyncio.sleep(0.15)
        assert job["b"].holds() == set()
        assert len(job["b"].said) == 1 and "bytes of memory are available" in job["b"].said[0]

    play(lambda: Cluster(tmp_path), scene)


def test_an_image_that_is_overwritten_while_it_is_copied_is_not_held(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        job["a"].keep(5, "rank-0")
        fd = job["a"].tier.images._buffers[0, "rank-0"].fd
        os.pwrite(fd, b"the next step's bytes, before unkeep", 0)
        await job.until(lambda: any("fingerprint" in line for line in job["b"].said))
        assert job["b"].holds() == set()
        # What is kept next is copied all the same.
        job["a"].keep(6, "rank-0", buffer="other")
        await job.until(lambda: job["b"].holds() == {(6, "rank-0")})

    play(lambda: Cluster(tmp_path), scene)


def test_a_new_coordinator_hears_everything_again(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        job["a"].keep(5, "rank-0")
        await job.until(lambda: (5, "rank-0") in job["b"].holds())
        job.away.clear()
        job.holdings = Holdings("peer")
        job["a"].keep(6, "rank-0", buffer="next")
        question = asyncio.ensure_future(job["b"].tier.kept("", ""))
        job.away.set()
        for node in job.nodes.values():
            node.tier.tell_all()
        await question
        await job.until(lambda: job["b"].holds() == {(5, "rank-0"), (6, "rank-0")})
        sets = (await job["b"].tier.kept("", ""))["sets"]
        assert [(s["checkpoint"], s["copied"]) for s in sets] == [(folder(6), 1), (folder(5), 1)]

    play(lambda: Cluster(tmp_path), scene)


def test_so_much_at_once_comes_in_several_notes(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        pad = "x" * (MAX_FACTS_BYTES - 50)
        for number in range(NOTE_IMAGES + 10):
            rank, file = number % 8, f"f{number:05d}"
            os.close(job["a"].tier.images.buffer(rank, file, 1))
            one = Image(checkpoint=folder(5), file=file, size_bytes=1, facts={"step": 5, "pad": pad})
            job["a"].tier.images.keep(rank, file, one)
        sets = (await job["a"].tier.kept("", ""))["sets"]
        assert [s["files"] for s in sets] == [NOTE_IMAGES + 10]
        for number in range(NOTE_IMAGES + 10):
            job["a"].tier.images.unkeep(number % 8, f"f{number:05d}")
        assert (await job["a"].tier.kept("", ""))["sets"] == []
        assert max(len(msgspec.json.encode(note)) for note in job["a"].notes) < m.MAX_MESSAGE_BYTES
        assert max(len(note.removed) for note in job["a"].notes) <= NOTE_IMAGES

    play(lambda: Cluster(tmp_path, tier="node"), scene)


def test_what_a_rank_kept_is_known_before_its_next_question_is_answered(tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        for step in range(1, 6):
            job["a"].keep(step, "rank-0", buffer="slot")
            sets = (await job["a"].tier.kept("", ""))["sets"]
            assert folder(step) in [s["checkpoint"] for s in sets]

    play(lambda: Cluster(tmp_path, tier="node"), scene)


@pytest.mark.parametrize("tier", ["off", "node"])
def test_nothing_is_copied_without_the_tier_but_what_is_wanted_can_be_fetched(tier: str, tmp_path: Path) -> None:
    async def scene(job: Cluster) -> None:
        job["a"].keep(5, "rank-0")
        sets = (await job["a"].tier.kept("", ""))["sets"]
        assert job["b"].holds() == set()
        if tier == "off":
            assert sets == []
            with pytest.raises(ChannelError, match="no node"):
                await job["b"].fetch(5, "rank-0")
        else:
            assert [(s["files"], s["copied"]) for s in sets] == [(1, 0)]
            assert await job["b"].fetch(5, "rank-0") == ("peer", data_of(5, "rank-0"))

    play(lambda: Cluster(tmp_path, tier=tier), scene)


def test_the_end_gives_every_descriptor_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def scene(job: Cluster) -> None:
        job["a"].keep(5, "rank-0")
        await job.until(lambda: (5, "rank-0") in job["b"].holds())

    play(lambda: Cluster(tmp_path), scene)
    # One is the journal of the test's own coordinator.
    assert len(os.listdir("/proc/self/fd")) <= before + 1
