"""The kernel's log followed: FIFOs, stand-ins for journalctl and dmesg, and /dev/kmsg itself where it can be written."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.catalog.load import Catalog, load
from keepstep.catalog.matcher import Matcher
from keepstep.records.errors import ConfigError, StorageError
from keepstep.records.event import Event
from keepstep.sources.kernel.cursor import Position, load_position, save_position
from keepstep.sources.kernel.feeds import DmesgFeed, JournalFeed, KmsgFeed, PipeFeed, Record, open_feed
from keepstep.sources.kernel.follow import Batch, Opener, follow
from keepstep.sources.kernel.records import KMSG, boot_id, read_records

SRC = Path(__file__).resolve().parents[3] / "src"
LIMIT_S = 60.0
TOKEN = uuid.uuid4().hex[:12]
"""Of this run of the tests: other lines of the host's log are none of ours."""
SITE = f"""
[[signature]]
id = "test.mark"
kind = "test.mark"
title = "a mark of a test"
severity = "info"
role = "context"
scope = "node"
depth = 9
pattern = ['mark-{TOKEN} (?P<number>\\d+)']
examples = ["mark-{TOKEN} 1"]
source = "these tests"
reason = "lines that tests write themselves"
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog file with the mark."""
    path = tmp_path_factory.mktemp("site") / "site.toml"
    path.write_text(SITE)
    return path


@pytest.fixture(scope="module")
def known(site: Path) -> tuple[Catalog, Matcher]:
    catalog = load([site])
    return catalog, Matcher(catalog)


class Reader:
    """A reader in a thread; `events` are those it handed on, `position` the last one it would have saved."""

    def __init__(
        self,
        opener: Opener,
        known: tuple[Catalog, Matcher],
        position: Position | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.seen_at: list[float] = []
        self.position = position
        self.error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._stop_r, self._stop_w = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(opener, *known, position))
        self._thread.start()

    def _run(self, opener: Opener, catalog: Catalog, matcher: Matcher, position: Position | None) -> None:
        try:
            for batch in follow(opener, matcher, catalog, position, self._stop_r):
                self._take(batch)
        except StorageError as error:
            self.error = error
        with self._changed:
            self._changed.notify_all()

    def _take(self, batch: Batch) -> None:
        with self._changed:
            ours = [e for e in batch.events if e.kind in ("test.mark", "monitor.gap")]
            self.events += ours
            self.seen_at += [time.time()] * len(ours)
            self.position = batch.position
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition() or self.error is not None, LIMIT_S)

    def numbers(self) -> list[int]:
        return [int(e.attrs["number"]) for e in self.events if e.kind == "test.mark"]

    def gaps(self) -> list[dict[str, Any]]:
        return [e.attrs for e in self.events if e.kind == "monitor.gap"]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.write(self._stop_w, b"x")
        self._thread.join(LIMIT_S)
        os.close(self._stop_r)
        os.close(self._stop_w)


Start = Callable[..., Reader]


@pytest.fixture
def start(known: tuple[Catalog, Matcher]) -> Iterator[Start]:
    """Start readers; all are stopped at the end."""
    readers: list[Reader] = []

    def make(opener: Opener, position: Position | None = None) -> Reader:
        readers.append(Reader(opener, known, position))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def mark(number: int) -> str:
    return f"mark-{TOKEN} {number}"


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    return path


def write(path: Path, *lines: str) -> None:
    with path.open("w") as file:
        file.writelines(f"{line}\n" for line in lines)


class TestFifo:
    def test_lines_of_any_tool(self, fifo: Path, start: Start) -> None:
        reader = start(functools.partial(open_feed, str(fifo)))
        write(fifo, f"[   12.500000] {mark(1)}", "nothing", f"2031-06-15T12:00:00Z h7 kernel: {mark(2)}")
        write(fifo, mark(3))
        reader.wait(lambda: len(reader.events) == 3)
        first, second, third = reader.events
        assert (first.boot_ns, first.seq, second.node, second.time_quality) == (12_500_000_000, 1, "h7", "exact")
        assert third.time_ns is not None and third.seq == 4 and third.boot_id == first.boot_id
        assert reader.numbers() == [1, 2, 3]

    def test_records_keep_their_numbers_and_a_hole_is_said(self, fifo: Path, start: Start) -> None:
        reader = start(functools.partial(open_feed, str(fifo)))
        write(fifo, f"3,10,5000000,-;{mark(1)}", f"3,11,6000000,-;{mark(2)}", f"3,15,7000000,-;{mark(3)}")
        reader.wait(lambda: len(reader.numbers()) == 3)
        assert [e.seq for e in reader.events] == [10, 11, 15, 15]
        assert reader.gaps() == [{"reason": "the ring was overrun", "lost": 3}]
        gap = reader.events[2]
        assert (gap.severity, gap.kind) == ("warning", "monitor.gap")

    def test_records_that_were_handled_are_passed_over_after_a_restart(self, fifo: Path, start: Start) -> None:
        first = start(functools.partial(open_feed, str(fifo)))
        write(fifo, f"3,10,5000000,-;{mark(1)}")
        first.wait(lambda: len(first.events) == 1)
        first.close()
        second = start(functools.partial(open_feed, str(fifo)), first.position)
        write(fifo, f"3,10,5000000,-;{mark(1)}", f"3,11,6000000,-;{mark(2)}")
        second.wait(lambda: len(second.events) == 1)
        assert second.numbers() == [2] and second.events[0].boot_id == first.events[0].boot_id

    def test_a_line_in_pieces(self, fifo: Path, start: Start) -> None:
        reader = start(functools.partial(open_feed, str(fifo)))
        with fifo.open("wb", buffering=0) as file:
            file.write(mark(7).encode()[:9])
            file.write(mark(7).encode()[9:] + b"\n" + b"x" * 200_000 + b"\n")
            file.write(mark(8).encode() + b"\n")
        reader.wait(lambda: len(reader.events) == 2)
        assert reader.numbers() == [7, 8]


class TestKmsg:
    """The device's own behaviour, from a socket whose reads are its reads."""

    def feed(
        self, monkeypatch: pytest.MonkeyPatch, reads: list[bytes | OSError], position: Position | None = None
    ) -> list[Record]:
        given = iter(reads)

        def read(_fd: int, _size: int) -> bytes:
            one = next(given, BlockingIOError())
            if isinstance(one, OSError):
                raise one
            return one

        feed = KmsgFeed(position, Path("/dev/null"))
        monkeypatch.setattr("keepstep.sources.kernel.feeds.os.read", read)
        try:
            return feed.read()
        finally:
            feed.close()

    def test_after_the_position(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads: list[bytes | OSError] = [b"6,%d,1000,-;line %d" % (n, n) for n in (4, 5, 6)]
        records = self.feed(monkeypatch, reads, Position(stream=boot_id(), seq=5))
        assert [(r.position.seq, r.text, r.lost) for r in records] == [(6, "kernel: line 6", 0)]

    def test_the_ring_went_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads: list[bytes | OSError] = [b"6,4,1000,-;a", BrokenPipeError(errno.EPIPE, ""), b"6,90,2000,-;b"]
        records = self.feed(monkeypatch, reads)
        assert [(r.lost, r.reason) for r in records] == [(0, ""), (85, "the ring was overrun")]

    def test_the_ring_went_round_while_nobody_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        records = self.feed(monkeypatch, [b"6,90,2000,-;b"], Position(stream=boot_id(), seq=5))
        assert [r.lost for r in records] == [84]

    def test_another_boot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        records = self.feed(monkeypatch, [b"6,0,0,-;a", b"6,1,0,-;b"], Position(stream="an earlier boot", seq=5))
        assert [(r.lost, r.reason) for r in records] == [(-1, "another boot since then"), (0, "")]

    def test_other_programs_write_there_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert [r.text for r in self.feed(monkeypatch, [b"30,1,0,-;systemd[1]: Started"])] == ["systemd[1]: Started"]

    def test_no_permission_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="CAP_SYSLOG"):
            KmsgFeed(None, tmp_path / "missing")


def script(folder: Path, name: str, body: str) -> str:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def entry(number: int, **fields: object) -> str:
    record = {
        "__CURSOR": f"c{number}",
        "_TRANSPORT": "kernel",
        "_BOOT_ID": "b1",
        "_HOSTNAME": "h7",
        "MESSAGE": mark(number),
    }
    return json.dumps(record | {"__REALTIME_TIMESTAMP": str(1925200000000000 + number)} | fields)


JOURNAL = """
import sys, time
after = [a.partition("=")[2] for a in sys.argv if a.startswith("--cursor=")]
entries = open({entries!r}).read().splitlines()
begin = next((i for i, e in enumerate(entries) if after and '"' + after[0] + '"' in e), 0)
print("\\n".join(entries[begin:]), flush=True)
sys.stdin.close()
time.sleep(600) if {stays} else sys.exit(0)
"""


class TestJournal:
    def opener(self, folder: Path, entries: list[str], stays: bool = True) -> Opener:
        (folder / "entries").write_text("\n".join(entries))
        command = script(folder, "journalctl", JOURNAL.format(entries=str(folder / "entries"), stays=stays))
        return lambda position: JournalFeed(position, command)

    def test_entries(self, tmp_path: Path, start: Start) -> None:
        reader = start(self.opener(tmp_path, [entry(1), "broken {", entry(2, _SOURCE_MONOTONIC_TIMESTAMP="5000000")]))
        reader.wait(lambda: len(reader.events) == 2)
        first, second = reader.events
        assert (first.node, first.boot_id, first.time_ns, first.time_quality) == (
            "h7",
            "b1",
            1925200000000001000,
            "exact",
        )
        assert second.boot_ns == 5_000_000_000 and first.id != second.id

    def test_after_the_last_one(self, tmp_path: Path, start: Start) -> None:
        reader = start(self.opener(tmp_path, [entry(n) for n in range(1, 5)]), Position(stream="b1", cursor="c2"))
        reader.wait(lambda: len(reader.numbers()) == 2)
        assert reader.numbers() == [3, 4] and reader.gaps() == []

    def test_a_cursor_that_is_gone_is_a_gap(self, tmp_path: Path, start: Start) -> None:
        reader = start(self.opener(tmp_path, [entry(8)]), Position(stream="b1", cursor="c2"))
        reader.wait(lambda: len(reader.numbers()) == 1)
        assert reader.gaps() == [{"reason": "the journal does not hold the last entry any more"}]

    def test_it_is_started_again_when_it_ends(
        self, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("keepstep.sources.kernel.follow.REOPEN_S", 0.01)
        opener = self.opener(tmp_path, [entry(1)], stays=False)
        reader = start(opener)
        reader.wait(lambda: len(reader.events) == 1)
        (tmp_path / "entries").write_text("\n".join([entry(1), entry(2)]))
        reader.wait(lambda: len(reader.events) == 2)
        assert reader.numbers() == [1, 2] and reader.gaps() == []

    def test_it_is_given_up_when_it_ends_every_time(
        self, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("keepstep.sources.kernel.follow.REOPEN_S", 0.01)
        reader = start(self.opener(tmp_path, [], stays=False))
        reader.wait(lambda: False)
        assert "has ended" in str(reader.error)


class TestDmesg:
    def test_the_ring_then_what_comes_and_not_again_after_a_restart(self, tmp_path: Path, start: Start) -> None:
        lines = [f"<6>[{n:5d}.000000] {mark(n)}" for n in (1, 2, 3)]
        command = script(tmp_path, "dmesg", f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(600)")
        first = start(lambda position: DmesgFeed(position, command))
        first.wait(lambda: len(first.events) == 3)
        second = start(
            lambda position: DmesgFeed(position, command), Position(stream=boot_id(), boot_ns=2 * 10**9, seq=2)
        )
        second.wait(lambda: len(second.events) == 1)
        assert second.numbers() == [3] and second.gaps() == []

    def test_a_ring_that_holds_nothing_known(self, tmp_path: Path, start: Start) -> None:
        command = script(
            tmp_path, "dmesg", f"import time; print('<6>[    9.0] {mark(9)}', flush=True); time.sleep(600)"
        )
        reader = start(
            lambda position: DmesgFeed(position, command), Position(stream=boot_id(), boot_ns=2 * 10**9, seq=2)
        )
        reader.wait(lambda: len(reader.numbers()) == 1)
        assert reader.gaps() == [{"reason": "the ring was overrun"}]


class TestSources:
    def test_what_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(StorageError, match="neither a FIFO"):
            open_feed(str(tmp_path / "file"), None)
        with pytest.raises(StorageError, match="No such file"):
            open_feed(str(tmp_path / "missing"), None)

    def test_a_fifo_is_one(self, fifo: Path) -> None:
        feed = open_feed(str(fifo), None)
        assert isinstance(feed, PipeFeed) and feed.read() == []
        feed.close()


class TestCursor:
    def test_what_was_saved(self, tmp_path: Path) -> None:
        path = tmp_path / "cursor"
        assert load_position(path) is None
        for position in (Position(stream="a", seq=4), Position(stream="b", cursor="s=1;i=2")):
            save_position(path, position)
            assert load_position(path) == position
        assert [p.name for p in tmp_path.iterdir()] == ["cursor"]

    def test_another_file_is_not_taken_for_one(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("my notes")
        with pytest.raises(ConfigError, match="not a cursor"):
            load_position(tmp_path / "x")

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="cannot write"):
            save_position(tmp_path / "no" / "cursor", Position(stream="a"))


def scan(site: Path, *arguments: str, out: Path) -> subprocess.Popen[bytes]:
    """`keepstep scan --follow` as a process of its own, whose output is appended to a file."""
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    command = [
        sys.executable,
        "-m",
        "keepstep.cli.main",
        "scan",
        "--follow",
        "--catalog",
        str(site),
        "--signature",
        "test.mark",
    ]
    with out.open("ab") as file:
        return subprocess.Popen([*command, *arguments], stdout=file, stderr=subprocess.DEVNULL, env=environment)


def until(condition: Callable[[], bool]) -> None:
    """Poll; a process that prints to a file gives no other sign."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.02)


def printed(out: Path) -> list[dict[str, Any]]:
    lines = out.read_bytes().split(b"\n") if out.exists() else []
    return [json.loads(line) for line in lines[:-1] if line]


def writable() -> bool:
    try:
        os.close(os.open(KMSG, os.O_RDWR | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def say(number: int) -> None:
    """One record; the kernel limits the rate for each open file, so each record has its own."""
    with KMSG.open("w") as file:
        file.write(f"<6>{mark(number)}\n")


@pytest.mark.skipif(not writable(), reason="/dev/kmsg cannot be written here")
class TestThisKernel:
    def test_events_come_as_they_are_written(self, start: Start) -> None:
        reader = start(functools.partial(open_feed, str(KMSG)))
        for number in range(1000, 1005):
            say(number)
        reader.wait(lambda: 1004 in reader.numbers())
        ours = [e for e in reader.events if e.kind == "test.mark" and 1000 <= int(e.attrs["number"]) < 1005]
        assert [int(e.attrs["number"]) for e in ours] == list(range(1000, 1005))
        assert all(e.boot_id == boot_id() and e.boot_ns is not None for e in ours)
        assert [e.seq for e in ours] == sorted({e.seq for e in ours if e.seq is not None})
        assert abs(time.time_ns() - (ours[0].time_ns or 0)) < LIMIT_S * 10**9

    def test_none_is_lost_and_none_comes_twice_when_the_reader_is_killed(self, site: Path, tmp_path: Path) -> None:
        out, cursor = tmp_path / "out", tmp_path / "cursor"
        said = 0

        def seen() -> dict[tuple[str, int], dict[str, Any]]:
            """By record, which is how a consumer tells what it has had before."""
            return {(e["boot_id"], e["seq"]): e for e in printed(out) if int(e["attrs"]["number"]) < 900}

        for life in range(4):
            process = scan(site, "--cursor-file", str(cursor), out=out)
            try:
                for _ in range(20):
                    say(said)
                    said += 1
                # Killed in the middle of its work, but for the last time.
                least = said - 10 if life < 3 else said
                until(lambda least=least: len(seen()) >= least)  # type: ignore[misc]
            finally:
                process.kill()
                process.wait()
            if life < 3:
                say(said)
                said += 1
        assert sorted(int(e["attrs"]["number"]) for e in seen().values()) == list(range(said))
        assert len({e["id"] for e in seen().values()}) == said

    def test_reading_it_all_at_once(self) -> None:
        say(5000)
        fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert any(mark(5000).encode() in record for record in read_records(fd, time.monotonic() + 5))
        finally:
            os.close(fd)


@pytest.mark.skipif(shutil.which("dmesg") is None or not writable(), reason="dmesg or /dev/kmsg cannot be used here")
def test_dmesg_of_this_host(start: Start) -> None:
    reader = start(DmesgFeed)
    say(7000)
    reader.wait(lambda: 7000 in reader.numbers())
    assert reader.error is None


def test_a_fifo_is_printed_as_it_is_written(site: Path, tmp_path: Path, fifo: Path) -> None:
    out = tmp_path / "out"
    process = scan(site, str(fifo), out=out)
    try:
        write(fifo, f"3,1,1000,-;{mark(1)}", "nothing")
        until(lambda: len(printed(out)) == 1)
        write(fifo, f"3,2,2000,-;{mark(2)}")
        until(lambda: len(printed(out)) == 2)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    assert [e["schema"] for e in printed(out)] == ["keepstep.event/1"] * 2
