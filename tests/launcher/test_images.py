"""What a node's memory holds: buffers of ranks, what they keep in them, copies, and how all of it stays bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepstep.launcher.node.images import MAX_BUFFERS, MAX_COPIED_SETS, Image, Kind, NodeImages

PAGE = 4096


def folder(step: int) -> str:
    return f"job7-step-{step:08d}-c0000-a0000"


def image(step: int, file: str = "f", size: int = PAGE, copy: bool = False) -> Image:
    return Image(checkpoint=folder(step), file=file, size_bytes=size, facts={"step": step}, copy=copy)


class Room:
    """A host with so much memory: what is available follows from what is held."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.images = NodeImages(available=self.available)

    def available(self) -> int:
        return self.size - self.used()

    def used(self) -> int:
        buffers = sum(b.size_bytes for b in self.images._buffers.values())
        return buffers + sum(c.image.size_bytes for c in self.images._copies.values())

    def stage(self, rank: int, name: str, size: int = PAGE) -> None:
        os.close(self.images.buffer(rank, name, size))

    def copy(self, one: Image, kind: Kind = "peer") -> None:
        self.images.add_copy(self.images.reserve(one, kind), one, kind)

    def listed(self) -> set[tuple[int, str]]:
        return {(int(i.facts["step"]), i.file) for i in self.images.images()}


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room(100 * PAGE)
    yield made
    made.images.close()


class TestBuffers:
    def test_the_same_name_and_size_is_the_same_memory_in_every_cycle(self, room: Room) -> None:
        fd = room.images.buffer(0, "slot", PAGE)
        os.pwrite(fd, b"old", 0)
        os.close(fd)
        room.images.begin_cycle([0])
        fd = room.images.buffer(0, "slot", PAGE)
        assert os.pread(fd, 3, 0) == b"old"
        os.close(fd)

    def test_another_size_takes_the_facts_along(self, room: Room) -> None:
        room.stage(0, "slot")
        room.images.keep(0, "slot", image(5))
        room.stage(0, "slot", 2 * PAGE)
        assert room.listed() == set()
        assert room.images.open(folder(5), "f") is None

    def test_a_rank_has_so_many_and_no_more(self, room: Room) -> None:
        for n in range(MAX_BUFFERS):
            room.stage(0, f"b{n}", 1)
        with pytest.raises(ValueError, match=f"rank 0 has {MAX_BUFFERS} buffers already"):
            room.stage(0, "one more", 1)
        room.stage(0, "b0", 2)
        room.stage(1, "another rank", 1)

    def test_closing_gives_the_memory_back(self) -> None:
        before = sorted(os.listdir("/proc/self/fd"))
        room = Room(100 * PAGE)
        room.stage(0, "a")
        room.stage(0, "a", 2 * PAGE)
        room.images.keep(0, "a", image(5))
        room.copy(image(4, "other"))
        room.images.close()
        assert sorted(os.listdir("/proc/self/fd")) == before

    def test_copies_give_way_to_buffers_and_kept_images_of_present_ranks_do_not(self, room: Room) -> None:
        room.images.begin_cycle([0])
        room.stage(0, "slot", 50 * PAGE)
        room.images.keep(0, "slot", image(5, "own"))
        room.copy(image(4, "copied", 20 * PAGE))
        room.stage(0, "second", 45 * PAGE)
        assert room.listed() == {(5, "own")}
        with pytest.raises(OSError, match="bytes of memory are available"):
            room.stage(0, "third", 10 * PAGE)
        assert room.listed() == {(5, "own")}

    def test_images_of_ranks_that_moved_away_go_when_there_is_no_other_room(self, room: Room) -> None:
        room.stage(7, "slot", 60 * PAGE)
        room.images.keep(7, "slot", image(5, "moved"))
        room.images.begin_cycle([0])
        room.stage(0, "slot", 30 * PAGE)
        assert room.listed() == {(5, "moved")}
        room.stage(0, "second", 30 * PAGE)
        assert room.listed() == set()


class TestKept:
    def test_a_new_image_replaces_what_the_buffer_held(self, room: Room) -> None:
        room.stage(0, "slot")
        room.images.keep(0, "slot", image(5))
        assert room.images.take_changes() == ([image(5)], [])
        room.images.keep(0, "slot", image(6))
        assert room.images.take_changes() == ([image(6)], [(folder(5), "f")])
        room.images.unkeep(0, "slot")
        room.images.unkeep(0, "slot")
        assert room.images.take_changes() == ([], [(folder(6), "f")])
        assert room.listed() == set()

    def test_a_file_is_where_it_was_kept_last(self, room: Room) -> None:
        for name in ("one", "two"):
            fd = room.images.buffer(0, name, PAGE)
            os.pwrite(fd, name.encode(), 0)
            os.close(fd)
            room.images.keep(0, name, image(5))
        held = room.images.open(folder(5), "f")
        assert held is not None
        assert os.pread(held[0], 3, 0) == b"two"
        os.close(held[0])
        room.images.unkeep(0, "one")
        assert room.listed() == {(5, "f")}

    def test_ranks_that_moved_away_are_held_until_the_present_ones_kept_two_checkpoints(self, room: Room) -> None:
        room.stage(7, "slot")
        room.images.keep(7, "slot", image(5, "rank-7"))
        room.stage(7, "empty")
        room.images.begin_cycle([0, 1])
        room.copy(image(5, "fetched"), "fetched")
        for step in (6, 7):
            for rank in (0, 1):
                room.stage(rank, f"slot-{step}")
                assert {(5, "rank-7"), (5, "fetched")} <= room.listed()
                room.images.keep(rank, f"slot-{step}", image(step, f"rank-{rank}"))
        assert room.listed() == {(step, f"rank-{rank}") for step in (6, 7) for rank in (0, 1)}
        assert room.used() == 4 * PAGE

    def test_off_keeps_nothing_and_gives_buffers(self) -> None:
        images = NodeImages(enabled=False)
        os.close(images.buffer(0, "slot", PAGE))
        assert images.keep(0, "slot", image(5)) is False
        assert images.images() == []
        images.close()


class TestCopies:
    def test_the_newest_whole_set_stays_beside_the_one_that_is_being_copied(self, room: Room) -> None:
        for step in range(1, 6):
            for file in ("a", "b"):
                room.copy(image(step, file))
                assert len({s for s, _ in room.listed()}) <= MAX_COPIED_SETS
        assert room.listed() == {(4, "a"), (4, "b"), (5, "a"), (5, "b")}

    def test_where_two_sets_have_no_room_the_older_one_goes(self, room: Room) -> None:
        room.copy(image(1, "a", 40 * PAGE))
        room.copy(image(2, "a", 40 * PAGE))
        assert room.listed() == {(2, "a")}

    def test_a_copy_takes_no_more_than_half_of_what_is_left(self, room: Room) -> None:
        room.stage(0, "slot", 60 * PAGE)
        with pytest.raises(OSError, match="bytes of memory are available"):
            room.copy(image(1, "a", 21 * PAGE))
        room.copy(image(1, "a", 20 * PAGE))

    def test_what_a_rank_waits_for_may_take_all_of_it_and_drops_copies_of_other_sets(self, room: Room) -> None:
        room.copy(image(1, "a", 40 * PAGE))
        room.copy(image(2, "b", 10 * PAGE))
        room.copy(image(2, "mine", 80 * PAGE), "fetched")
        assert room.listed() == {(2, "b"), (2, "mine")}

    def test_a_copy_of_what_a_rank_here_kept_meanwhile_is_dropped(self, room: Room) -> None:
        room.stage(0, "slot")
        fd = room.images.reserve(image(5), "peer")
        room.images.keep(0, "slot", image(5))
        room.images.add_copy(fd, image(5), "peer")
        assert [i.copy for i in room.images.images()] == [False]
        with pytest.raises(OSError):
            os.fstat(fd)

    def test_a_damaged_one_is_forgotten_unless_it_was_replaced(self, room: Room) -> None:
        room.copy(image(5))
        old = room.images.images()[0]
        room.copy(image(5))
        room.images.forget(old)
        assert room.listed() == {(5, "f")}
        room.images.forget(room.images.images()[0])
        assert room.listed() == set()


class Machine(RuleBasedStateMachine):
    """Any order of requests: what was told in changes is what is held, and memory never exceeds the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(12 * PAGE)
        self.told: dict[tuple[str, str], Image] = {}

    @rule(rank=st.integers(0, 2), name=st.sampled_from("xy"), pages=st.integers(1, 4))
    def buffer(self, rank: int, name: str, pages: int) -> None:
        try:
            self.room.stage(rank, name, pages * PAGE)
        except OSError:
            assert pages * PAGE > self.room.available()

    @rule(rank=st.integers(0, 2), name=st.sampled_from("xy"), step=st.integers(1, 4), file=st.sampled_from("ab"))
    def keep(self, rank: int, name: str, step: int, file: str) -> None:
        try:
            self.room.images.keep(rank, name, image(step, file))
        except ValueError:
            assert (rank, name) not in self.room.images._buffers

    @rule(rank=st.integers(0, 2), name=st.sampled_from("xy"))
    def unkeep(self, rank: int, name: str) -> None:
        self.room.images.unkeep(rank, name)

    @rule(ranks=st.sets(st.integers(0, 2), min_size=1))
    def cycle(self, ranks: set[int]) -> None:
        self.room.images.begin_cycle(ranks)

    @rule(step=st.integers(1, 4), file=st.sampled_from("ab"), pages=st.integers(1, 4), fetched=st.booleans())
    def copy(self, step: int, file: str, pages: int, fetched: bool) -> None:
        try:
            self.room.copy(image(step, file, pages * PAGE), "fetched" if fetched else "peer")
        except OSError:
            assert pages * PAGE * (1 if fetched else 2) > self.room.available()

    @invariant()
    def bounded(self) -> None:
        assert self.room.used() <= self.room.size
        copied = {c.image.checkpoint for c in self.room.images._copies.values() if c.kind == "peer"}
        assert len(copied) <= MAX_COPIED_SETS

    @invariant()
    def told_is_held(self) -> None:
        added, removed = self.room.images.take_changes()
        for key in removed:
            self.told.pop(key, None)
        self.told.update((one.key, one) for one in added)
        held = {one.key: one for one in self.room.images.images()}
        assert self.told == held
        for key, image in held.items():
            opened = self.room.images.open(*key)
            assert opened is not None and opened[1] == image
            os.close(opened[0])

    def teardown(self) -> None:
        self.room.images.close()


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
