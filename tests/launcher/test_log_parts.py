"""What must hold for every order of events: frames in pieces, the agent's buffer, and the writer's files after a kill."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.launcher.output import logwire as w
from keepstep.launcher.output.logbuffer import SendBuffer
from keepstep.launcher.output.logstore import Batch, LogStore
from keepstep.records.errors import StorageError


@given(bodies=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(1, 400), max_size=20))
def test_frames_come_out_whole_however_they_come_in(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(w.frame(w.DATA, body) for body in bodies)
    buffer, found = bytearray(), []
    for cut in [*cuts, len(stream)]:
        buffer += stream[:cut]
        stream = stream[cut:]
        found += list(w.take_frames(buffer, 1000))
    assert found == [(w.DATA, body) for body in bodies]
    assert buffer == b""


@given(lines=st.lists(st.binary(max_size=30).map(lambda x: x.replace(b"\n", b"")), min_size=1), end=st.booleans())
def test_every_line_gets_its_prefix(lines: list[bytes], end: bool) -> None:
    if not end and not lines[-1]:
        lines[-1] = b"x"
    data = b"\n".join(lines) + (b"\n" if end else b"")
    assert w.prefixed(b"[p] ", data) == b"".join(b"[p] " + line + b"\n" for line in lines)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TestSendBuffer:
    @given(
        steps=st.lists(
            st.one_of(
                st.tuples(st.just("put"), st.integers(0, 3), st.integers(1, 40_000)),
                st.tuples(st.just("take"), st.just(0), st.just(0)),
                st.tuples(st.just("ack"), st.just(0), st.integers(0, 3)),
                st.tuples(st.just("rewind"), st.just(0), st.just(0)),
            ),
            max_size=80,
        )
    )
    @settings(deadline=None)
    def test_all_of_it_once_and_in_order_over_reconnects(self, steps: list[tuple[str, int, int]]) -> None:
        """A receiver that skips numbers it has seen gets what each rank printed."""
        buffer = SendBuffer(window_bytes=100_000)
        put: dict[int, bytes] = defaultdict(bytes)
        got: dict[int, bytes] = defaultdict(bytes)
        received = acked = number = 0

        def receive() -> bool:
            nonlocal received
            frame = buffer.take()
            if frame is None:
                return False
            text = w.parse_text(frame[w.FRAME_HEAD.size :])
            assert text.seq <= received + 1
            if text.seq == received + 1:
                received += 1
                got[text.rank] += text.data
            return True

        for what, rank, size in steps:
            if what == "put":
                number += 1
                data = b"%d:" % number + b"x" * size + b"\n"
                put[rank] += data
                buffer.put(0, rank, w.STDOUT, data)
            elif what == "take":
                receive()
            elif what == "ack":
                acked = max(acked, received - size)
                buffer.acknowledge(acked)
            else:
                buffer.rewind()
        while receive() or received > acked:
            acked = received
            buffer.acknowledge(acked)
        assert got == put
        assert buffer.held_bytes == 0
        assert buffer.empty.is_set()

    def test_a_rank_has_its_share(self) -> None:
        buffer = SendBuffer(capacity_bytes=1000)
        buffer.shares = 2
        buffer.put(0, 0, w.STDOUT, b"x" * 500)
        assert not buffer.has_room(0)
        assert buffer.has_room(1)
        assert buffer.take() is not None
        assert not buffer.has_room(0)
        buffer.acknowledge(1)
        assert buffer.has_room(0)

    def test_ranks_take_turns(self) -> None:
        buffer = SendBuffer()
        for _ in range(3):
            buffer.put(0, 0, w.STDOUT, b"x" * 60_000)
        buffer.put(0, 1, w.STDOUT, b"y\n")
        ranks = []
        while (frame := buffer.take()) is not None:
            ranks.append(w.parse_text(frame[w.FRAME_HEAD.size :]).rank)
        assert ranks == [0, 1, 0, 0]

    def test_small_pieces_of_a_stream_go_together_but_not_over_cycles(self) -> None:
        buffer = SendBuffer()
        for cycle in (0, 0, 1, 1):
            buffer.put(cycle, 0, w.STDOUT, b"a\n")
        texts = []
        while (frame := buffer.take()) is not None:
            text = w.parse_text(frame[w.FRAME_HEAD.size :])
            texts.append((text.cycle, text.data))
        assert texts == [(0, b"a\na\n"), (1, b"a\na\n")]

    def test_what_is_sent_and_unacknowledged_is_bounded(self) -> None:
        buffer = SendBuffer(window_bytes=100_000)
        for _ in range(10):
            buffer.put(0, 0, w.STDOUT, b"x" * 60_000)
        taken = 0
        while buffer.take() is not None:
            taken += 1
        assert taken == 2
        buffer.acknowledge(1)
        assert buffer.take() is not None

    def test_stuck_means_no_progress_while_something_waits(self) -> None:
        clock = Clock()
        buffer = SendBuffer(hold_s=10, clock=clock)
        clock.now = 100
        assert not buffer.stuck()
        buffer.put(0, 0, w.STDOUT, b"1\n")
        assert not buffer.stuck()
        buffer.take()
        buffer.put(0, 0, w.STDOUT, b"2\n")
        clock.now = 111
        assert buffer.stuck()
        buffer.acknowledge(1)
        assert not buffer.stuck()


class Crash(BaseException):
    """The process ends here."""


class TestStore:
    @given(
        sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
        cut=st.integers(0, 400),
        both=st.booleans(),
    )
    @settings(max_examples=150, deadline=None)
    def test_after_a_kill_at_any_byte_every_frame_is_there_once(
        self, tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cut: int, both: bool
    ) -> None:
        """The kill leaves the first `cut` bytes of what the last batch writes: state first, then its files."""
        folder = tmp_path_factory.mktemp("store")
        store = LogStore(folder, None)
        batches = [
            Batch(
                texts={"cycle-0000.log": [b"%d %s\n" % (n, b"x" * size)]}
                | ({"launcher.log": [b"%d said\n" % n]} if both else {}),
                seqs={"node": ("life", n + 1)},
            )
            for n, size in enumerate(sizes)
        ]
        ranks = [batch.texts["cycle-0000.log"][0] for batch in batches]
        launcher = batches[-1].texts.get("launcher.log")
        whole = os.pwrite
        for batch in batches[:-1]:
            store.write(batch)
        left = cut

        def torn(fd: int, data: bytes, offset: int) -> int:
            nonlocal left
            written = whole(fd, data[:left], offset) if left else 0
            left -= written
            if written < len(data):
                raise Crash
            return written

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", torn)
            with contextlib.suppress(Crash):
                store.write(batches[-1])
        store.close()
        again = LogStore(folder, None)
        life, on_file = again.seqs.get("node", ("life", 0))
        assert life == "life"
        assert on_file in (len(sizes) - 1, len(sizes))
        for batch in batches[on_file:]:  # an agent sends all of it again
            if launcher is not None:
                batch.texts["launcher.log"] = launcher
            again.write(batch)
        again.close()
        logs = folder / "logs"
        assert (logs / "cycle-0000.log").read_bytes() == b"".join(ranks)
        said = (logs / "launcher.log").read_bytes()
        if both:  # at least once, the last one perhaps twice
            once = b"".join(b"%d said\n" % n for n in range(len(sizes)))
            assert said in (once, once + b"%d said\n" % (len(sizes) - 1))

    def test_a_batch_that_a_disk_refuses_leaves_nothing_and_may_come_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LogStore(tmp_path, None)
        store.write(Batch(texts={"cycle-0000.log": [b"first\n"]}, seqs={"node": ("life", 1)}))
        batch = Batch(texts={"cycle-0000.log": [b"second, which is longer\n"]}, seqs={"node": ("life", 2)})
        whole = os.pwrite

        def full(fd: int, data: bytes, offset: int) -> int:
            if data[:1] != b"{":
                whole(fd, data[:4], offset)
                raise OSError(28, "No space left on device")
            return whole(fd, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(OSError, match="No space"):
                store.write(batch)
        assert (tmp_path / "logs" / "cycle-0000.log").read_bytes() == b"first\n"
        store.write(batch)
        assert (tmp_path / "logs" / "cycle-0000.log").read_bytes() == b"first\nsecond, which is longer\n"
        store.close()
        again = LogStore(tmp_path, None)
        assert again.seqs == {"node": ("life", 2)}
        again.close()

    def test_the_state_stays_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("keepstep.launcher.output.logstore.STATE_BYTES", 2000)
        store = LogStore(tmp_path, None)
        for n in range(200):
            store.write(Batch(texts={"cycle-0000.log": [b"x\n"]}, seqs={f"node-{n % 3}": ("life", n + 1)}))
        assert (tmp_path / "logs" / ".funnel-state").stat().st_size < 2200
        store.close()
        again = LogStore(tmp_path, None)
        assert again.seqs == {f"node-{n % 3}": ("life", n + 1) for n in range(197, 200)}
        again.close()

    def test_a_copy_that_cannot_be_written_holds_up_nothing(self, tmp_path: Path) -> None:
        store = LogStore(tmp_path, str(tmp_path / "no such folder" / "mine"))
        store.write(Batch(texts={"cycle-0000.log": [b"x\n"]}, seqs={"node": ("life", 1)}))
        assert store.copy_lost_bytes == 2
        assert (tmp_path / "logs" / "cycle-0000.log").read_bytes() == b"x\n"
        store.close()

    def test_one_writer_a_run(self, tmp_path: Path) -> None:
        store = LogStore(tmp_path, None)
        with pytest.raises(StorageError, match="another log writer"):
            LogStore(tmp_path, None)
        store.close()
        LogStore(tmp_path, None).close()

    def test_the_state_is_what_the_docstring_says(self, tmp_path: Path) -> None:
        store = LogStore(tmp_path, None)
        store.write(Batch(texts={"cycle-0003.log": [b"x\n"]}, seqs={"node-a": ("life", 4711)}))
        store.close()
        last = (tmp_path / "logs" / ".funnel-state").read_bytes().splitlines()[-1]
        assert json.loads(last) == {"files": {"cycle-0003.log": [0, 2]}, "seqs": {"node-a": ["life", 4711]}}
