"""Rank output through real pipes: whole lines, in order, whatever bytes they are made of."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.launcher.output.logs import MAX_LINE_BYTES, LogThread, Stream, wants

LIMIT_S = 20.0


class Output:
    """A log thread with its file; `pipe` gives the write end of one rank's stream."""

    def __init__(self, folder: Path, console_hold_s: float = 1.0) -> None:
        self.folder = folder
        self.logs = LogThread(console_hold_s=console_hold_s)
        self.path = folder / "cycle.log"
        self.logs.start_cycle(self.path)

    def pipe(self, rank: int = 0, console: int | None = None, prefix: bytes = b"", extra: Path | None = None) -> int:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self.logs.add(
            Stream(
                fd=read_end,
                rank=rank,
                local_rank=rank,
                name="stdout",
                pending=bytearray(),
                console=console,
                console_prefix=prefix,
                extra=extra.open("ab", buffering=0) if extra is not None else None,
            )
        )
        return write_end

    def lines(self) -> list[bytes]:
        """The whole file once every writer is gone. Its last line is complete like all others."""
        assert self.logs.drain(LIMIT_S)
        content = self.path.read_bytes()
        assert content == b"" or content.endswith(b"\n")
        return content.split(b"\n")[:-1]


def send(fd: int, *chunks: bytes) -> None:
    """Write all of it and close."""
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            view = view[os.write(fd, view) :]
    os.close(fd)


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    output = Output(tmp_path)
    yield output
    output.logs.close()


class TestLines:
    def test_every_line_has_its_rank(self, output: Output) -> None:
        send(output.pipe(3), b"one\ntwo\n\nfour\n")
        assert output.lines() == [b"[rank 3] one", b"[rank 3] two", b"[rank 3] ", b"[rank 3] four"]

    def test_a_last_line_without_newline_is_kept(self, output: Output) -> None:
        send(output.pipe(), b"whole\npart")
        assert output.lines() == [b"[rank 0] whole", b"[rank 0] part"]

    def test_a_line_that_comes_in_pieces_is_one_line(self, output: Output) -> None:
        first, second = output.pipe(0), output.pipe(1)
        os.write(first, b"beginning, ")
        os.write(second, b"another rank\n")
        os.write(first, b"middle, ")
        send(second, b"once more\n")
        send(first, b"end\n")
        assert sorted(output.lines()) == [
            b"[rank 0] beginning, middle, end",
            b"[rank 1] another rank",
            b"[rank 1] once more",
        ]

    @pytest.mark.parametrize(
        "line",
        [
            b"\xff\xfe not UTF-8 \x80",
            b"nul \x00 inside",
            b"progress 1%\rprogress 2%\r",
            "ümlaut €".encode(),
            b"\x1b[31mred\x1b[0m",
        ],
    )
    def test_bytes_are_kept_as_they_are(self, line: bytes, output: Output) -> None:
        send(output.pipe(), line + b"\n")
        assert output.lines() == [b"[rank 0] " + line]

    def test_a_long_line_without_end_is_cut_and_nothing_is_lost(self, output: Output) -> None:
        size = 3 * 1024 * 1024
        writer = threading.Thread(target=send, args=(output.pipe(), b"x" * size, b"\nafter\n"))
        writer.start()
        lines = output.lines()
        writer.join()
        assert lines[-1] == b"[rank 0] after"
        assert all(line.startswith(b"[rank 0] ") for line in lines)
        assert all(len(line) <= MAX_LINE_BYTES + (1 << 17) for line in lines)
        assert sum(len(line) - len(b"[rank 0] ") for line in lines[:-1]) == size

    def test_many_writers_never_break_a_line_or_the_order_of_a_rank(self, output: Output) -> None:
        count = 3000

        def write(fd: int, rank: int) -> None:
            send(fd, *(b"%d:%d:%s\n" % (rank, n, b"x" * (n % 200)) for n in range(count)))

        threads = [threading.Thread(target=write, args=(output.pipe(rank), rank)) for rank in range(6)]
        for thread in threads:
            thread.start()
        seen: dict[int, list[int]] = defaultdict(list)
        for line in output.lines():
            prefix, _, text = line.partition(b"] ")
            rank, number, filler = text.split(b":")
            assert prefix == b"[rank %d" % int(rank)
            assert filler == b"x" * (int(number) % 200)
            seen[int(rank)].append(int(number))
        for thread in threads:
            thread.join()
        assert seen == {rank: list(range(count)) for rank in range(6)}

    @given(chunks=st.lists(st.binary(max_size=20), max_size=12))
    @settings(max_examples=25, deadline=None)
    def test_any_bytes_in_any_pieces(self, tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
        output = Output(tmp_path_factory.mktemp("logs"))
        try:
            send(output.pipe(7), *chunks)
            text = b"".join(chunks)
            expected = text.split(b"\n")[: None if text and not text.endswith(b"\n") else -1]
            assert output.lines() == [b"[rank 7] " + line for line in expected]
        finally:
            output.logs.close()


class TestConsole:
    @pytest.fixture
    def console(self) -> Iterator[tuple[int, int]]:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        yield read_end, write_end
        for fd in (read_end, write_end):
            try:
                os.close(fd)
            except OSError:
                continue

    def test_without_prefix_it_gets_the_bytes_as_written(self, output: Output, console: tuple[int, int]) -> None:
        send(output.pipe(0, console[1]), b"a\nno end")
        output.lines()
        assert os.read(console[0], 100) == b"a\nno end"

    def test_with_tee_every_line_has_torchruns_prefix(self, output: Output, console: tuple[int, int]) -> None:
        send(output.pipe(1, console[1], b"[default1]:"), b"a\nb\nno end")
        output.lines()
        assert os.read(console[0], 100) == b"[default1]:a\n[default1]:b\n[default1]:no end\n"

    def test_a_reader_that_went_away_stops_no_logging(self, output: Output, console: tuple[int, int]) -> None:
        os.close(console[0])
        first = output.pipe(0, console[1])
        send(first, b"".join(b"line %d\n" % n for n in range(500)))
        send(output.pipe(1), b"another rank\n")
        lines = output.lines()
        assert lines[499] == b"[rank 0] line 499" or lines[500] == b"[rank 0] line 499"
        assert b"[rank 1] another rank" in lines
        assert len(lines) == 501

    def test_a_terminal_set_to_non_blocking_gets_everything(self, output: Output, console: tuple[int, int]) -> None:
        os.set_blocking(console[1], False)
        text = b"".join(b"line %06d\n" % n for n in range(20_000))
        writer = threading.Thread(target=send, args=(output.pipe(0, console[1]), text))
        writer.start()
        got = bytearray()
        while len(got) < len(text):
            got += os.read(console[0], 1 << 16)
        writer.join()
        assert got == text
        assert len(output.lines()) == 20_000

    def test_one_that_nobody_reads_stops_nobody(self, tmp_path: Path, console: tuple[int, int]) -> None:
        """Its output is dropped and counted, the log stays whole, and a line says what is missing once it is read again."""
        output = Output(tmp_path, console_hold_s=0.2)
        count, size = 40_000, 100
        text = b"".join(b"%0*d\n" % (size - 1, n) for n in range(count))
        shown = threading.Thread(target=send, args=(output.pipe(0, console[1]), text))
        shown.start()
        send(output.pipe(1), b"another rank\n")
        shown.join()
        lines = output.lines()
        assert [x for x in lines if x.startswith(b"[rank 0] ")] == [
            b"[rank 0] %0*d" % (size - 1, n) for n in range(count)
        ]
        assert b"[rank 1] another rank" in lines
        lost_bytes = output.logs.counts().console_lost_bytes
        assert lost_bytes > 0
        assert output.logs.counts().lost_bytes == {}
        kept_bytes = count * size - lost_bytes
        got = b""
        while len(got) < kept_bytes:
            got += os.read(console[0], 1 << 16)
        assert got == text[:kept_bytes]
        send(output.pipe(0, console[1]), b"shown again\n")
        assert output.logs.drain(LIMIT_S)
        said = b"keepstep: %d bytes were not shown here; the log has them\nshown again\n" % lost_bytes
        assert os.read(console[0], 1000) == said
        output.logs.close()

    def test_a_slow_one_gets_everything(self, tmp_path: Path, console: tuple[int, int]) -> None:
        output = Output(tmp_path, console_hold_s=20.0)
        text = b"".join(b"line %09d\n" % n for n in range(300_000))
        writer = threading.Thread(target=send, args=(output.pipe(0, console[1]), text))
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()  # slowed down: little is held here
        got = bytearray()
        while len(got) < len(text):
            got += os.read(console[0], 4096)
        writer.join()
        assert bytes(got) == text
        assert len(output.lines()) == 300_000
        assert output.logs.counts().console_lost_bytes == 0
        output.logs.close()


class TestLauncher:
    def test_its_lines_have_a_file_and_wait_for_it(self, tmp_path: Path) -> None:
        logs = LogThread("node-a")
        logs.say("before any cycle")
        logs.start_cycle(tmp_path / "cycle.log", 0)
        logs.say("later")
        logs.close()
        assert (tmp_path / "launcher.log").read_bytes() == b"[node-a] before any cycle\n[node-a] later\n"
        assert (tmp_path / "cycle.log").read_bytes() == b""


class TestFiles:
    def test_a_file_of_its_own_gets_the_raw_bytes_too(self, output: Output, tmp_path: Path) -> None:
        send(output.pipe(extra=tmp_path / "own.log"), b"a\nb")
        assert output.lines() == [b"[rank 0] a", b"[rank 0] b"]
        assert (tmp_path / "own.log").read_bytes() == b"a\nb"

    def test_each_cycle_has_its_file(self, output: Output, tmp_path: Path) -> None:
        send(output.pipe(), b"first\n")
        output.lines()
        output.logs.start_cycle(tmp_path / "next.log")
        send(output.pipe(), b"second\n")
        assert output.lines() == [b"[rank 0] first"]
        assert (tmp_path / "next.log").read_bytes() == b"[rank 0] second\n"

    def test_a_file_that_exists_is_appended_to(self, tmp_path: Path) -> None:
        (tmp_path / "cycle.log").write_bytes(b"before\n")
        output = Output(tmp_path)
        send(output.pipe(), b"after\n")
        assert output.lines() == [b"before", b"[rank 0] after"]
        output.logs.close()

    def test_the_users_copy(self, tmp_path: Path) -> None:
        output = Output(tmp_path)
        output.logs.start_cycle(tmp_path / "cycle.log", 0, tmp_path / "mine_cycle0.log")
        send(output.pipe(4), b"a\nb\n")
        assert output.lines() == [b"[rank 4] a", b"[rank 4] b"]
        assert (tmp_path / "mine_cycle0.log").read_bytes() == b"[rank 4] a\n[rank 4] b\n"
        output.logs.close()

    def test_a_disk_with_room_for_half_a_line_gets_no_half_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The line is counted as lost, and a later one says so."""
        output = Output(tmp_path)
        log_fd = next(int(p.name) for p in Path("/proc/self/fd").iterdir() if p.resolve() == output.path.resolve())
        whole, full = os.write, threading.Event()

        def write(fd: int, data: bytes) -> int:
            if fd != log_fd or not full.is_set():
                return whole(fd, data)
            if len(data) < 10:
                raise OSError(28, "No space left on device")
            return whole(fd, data[:10])

        full.set()
        monkeypatch.setattr(os, "write", write)
        send(output.pipe(2), b"a line that does not fit\n")
        assert output.lines() == []
        full.clear()
        send(output.pipe(2), b"fits\n")
        assert output.lines() == [
            b"[rank 2] keepstep: 25 bytes lost here (1 lines): the log could not be written",
            b"[rank 2] fits",
        ]
        output.logs.close()

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    def test_a_full_disk_stops_neither_the_rank_nor_the_terminal(self, tmp_path: Path) -> None:
        (tmp_path / "cycle.log").symlink_to("/dev/full")
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        output = Output(tmp_path)
        send(output.pipe(0, write_end), b"shown\n")
        assert output.logs.drain(LIMIT_S)
        assert os.read(read_end, 100) == b"shown\n"
        counts = output.logs.counts()
        assert (counts.lost_bytes, counts.lost_lines) == ({0: 6}, {0: 1})
        output.logs.close()
        os.close(read_end)
        os.close(write_end)


class TestDrain:
    def test_waits_for_every_writer(self, output: Output) -> None:
        first, second = output.pipe(0), output.pipe(1)
        send(first, b"done\n")
        assert not output.logs.drain(0.05)
        send(second, b"done\n")
        assert output.logs.drain(LIMIT_S)

    def test_a_process_that_inherited_the_pipe_is_a_writer(self, output: Output) -> None:
        fd = output.pipe()
        copy = os.dup(fd)
        send(fd, b"parent\n")
        assert not output.logs.drain(0.05)
        send(copy, b"child\n")
        assert output.lines() == [b"[rank 0] parent", b"[rank 0] child"]

    def test_without_streams_there_is_nothing_to_wait_for(self, output: Output) -> None:
        assert output.logs.drain(0.0)

    def test_close_ends_the_thread_although_a_writer_is_left(self, tmp_path: Path) -> None:
        output = Output(tmp_path)
        fd = output.pipe()
        os.write(fd, b"said\n")
        output.logs.close()
        assert not any(t.name == "keepstep-logs" and t.is_alive() for t in threading.enumerate())
        os.close(fd)


@pytest.mark.parametrize(
    ("spec", "local_rank", "stdout", "stderr"),
    [
        ("0", 0, False, False),
        ("1", 5, True, False),
        ("2", 0, False, True),
        ("3", 0, True, True),
        ("0:1,1:2", 0, True, False),
        ("0:1,1:2", 1, False, True),
        ("0:1,1:2", 2, False, False),
        ("10:3", 1, False, False),
        ("10:3", 10, True, True),
    ],
)
def test_which_streams_a_tee_means(spec: str, local_rank: int, stdout: bool, stderr: bool) -> None:
    assert (wants(spec, local_rank, "stdout"), wants(spec, local_rank, "stderr")) == (stdout, stderr)
