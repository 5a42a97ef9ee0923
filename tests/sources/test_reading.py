"""Files and folders as they come -> events, and what is said about what was not read."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pytest
import zstandard

from keepstep.records.codec import to_json
from keepstep.records.cycle import Cycle, RankPlace
from keepstep.records.event import Event, Evidence, Gpu
from keepstep.sources import onefile, reading
from keepstep.sources.decoding import open_stream, to_text, what_binary
from keepstep.sources.documents import Document
from keepstep.sources.onefile import WHOLE_BYTES, chunks
from keepstep.sources.reading import Reading, read_paths
from tests.sources.making import NOON, SECOND, catalog, matcher, read, read_lines, xid

SHARED = os.environ.get("KEEPSTEP_SHARED")
LINE = f"2031-06-15T12:00:00Z h1 kernel: {xid(79)}\n"


def seen(found: Reading) -> list[str]:
    return [e.signature for e in found.events]


def one(found: Reading) -> Event:
    (event,) = (e for e in found.events if e.signature != "text.words")
    return event


class TestBytes:
    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("plain", LINE.encode()),
            ("gzip", gzip.compress(LINE.encode())),
            ("two gzip members", gzip.compress(b"first\n") + gzip.compress(LINE.encode())),
            ("zstd", zstandard.compress(LINE.encode())),
            ("two zstd frames", zstandard.compress(b"first\n") + zstandard.compress(LINE.encode())),
            ("UTF-8 with mark", b"\xef\xbb\xbf" + LINE.encode()),
            ("UTF-16", LINE.encode("utf-16")),
            ("UTF-16, other order", b"\xfe\xff" + LINE.encode("utf-16-be")),
            ("UTF-32", LINE.encode("utf-32")),
            ("a block of NUL before", b"\0" * 4096 + LINE.encode()),
            ("CRLF", LINE.replace("\n", "\r\n").encode()),
            ("no line end", LINE.rstrip().encode()),
            ("broken bytes", LINE.encode() + b"\xff\xfe broken \xc3\n"),
            ("Latin-1", "Gerät läuft über, größer\n".encode("latin-1") + LINE.encode()),
        ],
    )
    def test_forms(self, tmp_path: Path, name: str, data: bytes) -> None:
        event = one(read_lines(tmp_path, data))
        assert (event.signature, event.node, event.time_ns) == ("xid.79", "h1", NOON)

    @pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
    def test_a_truncated_file_gives_what_is_there_and_says_so(self, tmp_path: Path, pack: object) -> None:
        noise = "".join(f"{n} {n * 7919 % 10007} noise\n" for n in range(20_000))
        data = pack((LINE + noise).encode())  # type: ignore[operator]
        found = read_lines(tmp_path, data[: len(data) // 2])
        assert seen(found) == ["xid.79"]
        assert any("end early" in text for text in found.unreadable)

    def test_a_compressed_bomb_is_unpacked_piece_by_piece(self) -> None:
        packed = zstandard.compress(b"\0" * (64 << 20))
        largest = max(len(block) for block in open_stream(io.BytesIO(packed)).blocks)
        assert largest <= 32 << 20

    @pytest.mark.parametrize(
        ("data", "what"),
        [
            (b"\x7fELF\x02\x01", "an ELF file (a program or a core)"),
            (b"\x80\x04\x95\x10", "a pickle"),
            (b"PK\x03\x04rest", "a zip archive (torch checkpoints are some)"),
            (bytes(range(256)) * 8, "binary data"),
            (b"\0" * 100, "nothing but NUL bytes"),
            (b"text\n", None),
            (b"", None),
            (b"\x1b[31mred\x1b[0m\r\n\x08", None),
        ],
    )
    def test_what_is_no_text(self, data: bytes, what: str | None) -> None:
        assert what_binary(data) == what

    def test_binary_files_are_named(self, tmp_path: Path) -> None:
        found = read_lines(tmp_path, b"\x7fELF" + bytes(1000))
        assert found.events == [] and "input.log: an ELF file" in found.unreadable[0]

    def test_text_that_was_cut_in_a_character(self) -> None:
        assert to_text("größe".encode()[:-1] + b"\xc3") == "größ\ufffd"


class TestFolders:
    def test_names_tell_whose_lines_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "gpu-17").mkdir()
        (tmp_path / "gpu-17" / "kern.log").write_text(f"[ 12.5] {xid(79)}\n")
        assert one(read(tmp_path)).node == "gpu-17"

    def test_names_above_the_folder_that_was_given_tell_nothing(self, tmp_path: Path) -> None:
        assert one(read_lines(tmp_path / "node12", f"{xid(79)}\n")).node is None

    def test_what_is_left_out_is_said(self, tmp_path: Path) -> None:
        for name in ("model.safetensors", "x.pt", "core.1234", ".hidden", "__0_0.distcp"):
            (tmp_path / name).write_text(LINE)
        (tmp_path / "good.log").write_text(LINE)
        (tmp_path / "loop").symlink_to(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        found = read(tmp_path)
        assert seen(found) == ["xid.79"]
        left = {Path(s.path).name: s.why for s in found.skipped}
        assert left.keys() == {"model.safetensors", "x.pt", "core.1234", "__0_0.distcp", "loop", "pipe"}
        assert (left["loop"], left["pipe"]) == ("a link to a folder", "not a regular file")

    def test_a_file_is_read_once_whatever_links_lead_to_it(self, tmp_path: Path) -> None:
        (tmp_path / "a.log").write_text(LINE)
        (tmp_path / "b.log").symlink_to("a.log")
        os.link(tmp_path / "a.log", tmp_path / "c.log")
        assert len(read(tmp_path).used) == 1

    def test_what_cannot_be_read_is_named_and_the_rest_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.log").write_text(LINE)
        found = read(tmp_path / "a.log", tmp_path / "missing.log")
        assert seen(found) == ["xid.79"] and "missing.log: No such file" in found.unreadable[0]

    def test_flight_recorder_dumps_are_listed(self, tmp_path: Path) -> None:
        (tmp_path / "nccl_trace_rank_3").write_bytes(b"\x80\x02}(X\x07\x00\x00\x00versionX\x09\x00\x00\x00pg_config")
        found = read(tmp_path)
        assert [Path(p).name for p in found.dumps] == ["nccl_trace_rank_3"] and found.unreadable == []

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Standard:
            buffer = io.BytesIO(LINE.encode())

        monkeypatch.setattr(sys, "stdin", Standard)
        assert seen(read_paths(["-"], catalog(), matcher=matcher())) == ["xid.79"]


class TestRunFolder:
    def make(self, folder: Path) -> None:
        for name in ("cycles", "logs", "incidents", "evidence/cycle-0001/vm"):
            (folder / name).mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        places = [
            RankPlace(
                rank=r, local_rank=r % 2, node=f"n{r // 2}", host="h", gpu_uuid=f"GPU-{r}", pci=f"0000:{r:02x}:00.0"
            )
            for r in range(4)
        ]
        record = Cycle(run_id="job-1", attempt=0, cycle=1, started_at="2031-06-15T11:00:00Z", ranks=places)
        (folder / "cycles" / "cycle-0001.json").write_bytes(to_json(record))
        (folder / "logs" / "cycle-0001.log").write_text(
            "[rank 3] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        )
        (folder / "incidents" / "INC-0001.json").write_text(LINE)
        evidence = folder / "evidence" / "cycle-0001" / "vm"
        head = "# source: kmsg\n# boot at 2031-06-15T11:57:20.000000000Z\n"
        (evidence / "kernel.log").write_text(f"{head}[  100.000000] {xid(79)}\n")

    def test_a_rank_is_a_node_and_a_gpu_there(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        (event, *_) = [e for e in read(tmp_path).events if e.rank == 3]
        assert (event.node, event.cycle, event.job) == ("n1", 1, "job-1")
        assert event.gpu == Gpu(uuid="GPU-3", pci="0000:03:00.0", index=1)

    def test_the_kernels_log_is_of_its_node_and_time(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        (event,) = [e for e in read(tmp_path).events if e.signature == "xid.79"]
        assert (event.node, event.time_ns, event.time_quality) == ("vm", NOON - 60 * SECOND, "boot_relative")

    def test_what_keepstep_concluded_is_no_evidence(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        found = read(tmp_path)
        assert not any("incidents" in used.path for used in found.used)
        assert any(s.path.endswith("incidents") for s in found.skipped)


class TestLargeLogs:
    """The same text read as a whole and streamed in small chunks gives the same events."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onefile, "WHOLE_BYTES", 20_000)
        monkeypatch.setattr(onefile, "CHUNK_BYTES", 4096)

    def text(self) -> str:
        lines = []
        for n in range(3000):
            lines.append(f"[rank{n % 4}]: 2031-06-15 12:{n // 60 % 60:02d}:{n % 60:02d},123 INFO data batch {n} ready")
            if n % 700 == 350:
                lines.append(xid(79))
            if n % 900 == 450:
                lines.append(f"Jun 15 12:{n // 60 % 60:02d}:{n % 60:02d} h7 kernel: [{n}.5] {xid(48)}")
        return "\n".join([*lines, "==> node8-dmesg.txt <==", f"[   77.250000] {xid(94)}", ""])

    def facts(self, found: Reading) -> list[tuple[object, ...]]:
        return [
            (
                e.signature,
                e.order,
                e.time_ns,
                e.time_quality,
                e.boot_ns,
                e.node,
                e.rank,
                e.count,
                e.attrs.get("last_order"),
                e.source,
            )
            for e in found.events
            if e.kind == "gpu.xid"
        ]

    def test_streamed_as_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        streamed = read_lines(tmp_path, self.text())
        monkeypatch.setattr(onefile, "WHOLE_BYTES", 1 << 30)
        whole = read_lines(tmp_path, self.text())
        assert [u.read_as for u in streamed.used] == ["log lines, streamed"]
        assert self.facts(streamed) == self.facts(whole)
        assert sum(u.lines for u in whole.used) + 1 == sum(u.lines for u in streamed.used)  # the section's own line

    @pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
    def test_compressed(self, tmp_path: Path, pack: object) -> None:
        plain = read_lines(tmp_path, self.text())
        packed = read_lines(tmp_path, pack(self.text().encode()))  # type: ignore[operator]
        assert self.facts(packed) == self.facts(plain)

    def test_wide_characters(self, tmp_path: Path) -> None:
        assert self.facts(read_lines(tmp_path, self.text().encode("utf-16"))) == self.facts(
            read_lines(tmp_path, self.text())
        )

    def test_pieces_go_to_parsers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def parse(document: Document, _catalog: object) -> list[Event] | None:
            lines = [n for n in document.lines if "Traceback" in n.text]
            return [event_at(document, n.number, n.rank) for n in lines] or None

        monkeypatch.setattr(onefile, "PARSERS", (("traces", parse),))
        lines = [f"[rank{n % 4}]: 2031-06-15 12:00:00,000 INFO batch {n}" for n in range(2000)]
        lines[1000] = "[rank2]: Traceback (most recent call last):"
        found = read_lines(tmp_path, "\n".join(lines) + "\n")
        traces = [e for e in found.events if e.kind == "rank.exception"]
        assert [(e.order, e.rank, e.time_ns) for e in traces] == [(1001, 2, NOON)]

    def test_steps_at_the_end(self, tmp_path: Path) -> None:
        text = "".join(f"[rank0]: step {n} loss 2.1\n" for n in range(3000))
        events = [e for e in read_lines(tmp_path, text).events if e.kind == "job.progress"]
        assert [e.attrs["last_step"] for e in events] == [2999]

    def test_repeats_of_several_writers_are_counted_for_each(self, tmp_path: Path) -> None:
        lines = []
        for n in range(2000):
            lines.append(f"2031-06-15T12:00:00.{n:06d}Z h{n % 3} kernel: {xid(95, '1a' if n % 2 else '1b')}")
        events = [e for e in read_lines(tmp_path, "\n".join(lines)).events if e.signature.startswith("xid.95")]
        counts = {(e.node, e.gpu.pci): e.count for e in events if e.gpu is not None}
        expected: dict[tuple[str, str], int] = {}
        for n in range(2000):
            key = (f"h{n % 3}", f"0000:{'1a' if n % 2 else '1b'}:00.0")
            expected[key] = expected.get(key, 0) + 1
        assert counts == expected and len(events) == 6
        assert max(e.attrs["last_order"] for e in events) == 2000
        assert max(e.last_ns or 0 for e in events) == NOON + 1999_000

    def test_a_storm_between_two_lines(self, tmp_path: Path) -> None:
        lines = [f"[ {n}.000001] {xid(95)}" for n in range(3000)]
        (event,) = read_lines(tmp_path, "\n".join(lines)).events
        assert (event.count, event.order, event.attrs["last_order"]) == (3000, 1, 3000)


def event_at(document: Document, number: int, rank: int | None) -> Event:
    return Event(
        kind="rank.exception",
        signature="xid.79",
        order=number,
        rank=rank,
        evidence=Evidence(path=document.path, line=number),
    )


class TestChunks:
    @pytest.mark.parametrize("sizes", [[1], [7, 1, 30], [1000]])
    def test_whole_lines(self, sizes: list[int]) -> None:
        data = b"".join(b"%d %s\n" % (n, b"x" * (n % 13)) for n in range(300)) + b"last"
        blocks: list[bytes] = []
        at = 0
        while at < len(data):
            size = sizes[len(blocks) % len(sizes)]
            blocks.append(data[at : at + size])
            at += size
        made = list(chunks(blocks, 64))
        assert b"".join(made) == data
        assert all(c.endswith(b"\n") for c in made[:-1])

    def test_a_line_without_an_end_is_cut(self) -> None:
        made = list(chunks([b"a\n", *[b"x" * 1000] * 200, b"\nb\n"], 5000))
        assert b"".join(made).count(b"\n") == 3
        assert sum(map(len, made)) < 40_000
        assert b"".join(made).endswith(b"\nb\n")


class TestFacts:
    def stale(self, folder: Path, text: str) -> list[str | None]:
        return [e.stale for e in read_lines(folder, text).events if e.kind == "gpu.xid"]

    def test_a_boot_in_the_stream(self, tmp_path: Path) -> None:
        text = f"[ 9000.1] {xid(79)}\n[    0.000000] Linux version 6.8.0-45 (gcc)\n[   12.5] {xid(48)}\n"
        assert self.stale(tmp_path, text) == ["previous_boot", None]

    def test_a_boot_that_journalctl_marks(self, tmp_path: Path) -> None:
        boot = "-- Boot 0a1b2c3d4e5f60718293a4b5c6d7e8f9 --"
        text = f"Jun 15 10:00:00 h1 kernel: {xid(79)}\n{boot}\nJun 15 11:00:00 h1 kernel: {xid(48)}\n"
        assert self.stale(tmp_path, text) == ["previous_boot", None]

    def test_boot_ids_of_a_journal(self, tmp_path: Path) -> None:
        def record(boot: str, code: int) -> str:
            return json.dumps({"_BOOT_ID": boot, "_HOSTNAME": "h1", "_TRANSPORT": "kernel", "MESSAGE": xid(code)})

        assert self.stale(tmp_path, "\n".join([record("aa", 79), record("bb", 48)])) == ["previous_boot", None]

    def test_a_later_boot_elsewhere(self, tmp_path: Path) -> None:
        text = f"Jul 27 02:10:11 nd-7 kernel: [88211.1] {xid(31)}\nuptime: boot at Jul 28 06:00\n"
        assert self.stale(tmp_path, text) == ["previous_boot"]

    def test_uptime(self, tmp_path: Path) -> None:
        lines = f"[Sun Jun 15 10:00:00 2031] {xid(79)}\n[Sun Jun 15 12:00:00 2031] {xid(48)}"
        text = f"==> dmesg -T <==\n{lines}\n$ uptime -s\n2031-06-15 11:00:00\n"
        assert self.stale(tmp_path, text) == ["previous_boot", None]

    def test_a_record_that_was_handled_before(self, tmp_path: Path) -> None:
        text = f"3,10412,7200000000,-;{xid(79)}\n3,11001,7300000000,-;{xid(48)}\n==> state <==\nboot_id=0a1b2c3d last_seq=10990\n"
        assert self.stale(tmp_path, text) == ["replay", None]

    @pytest.mark.parametrize(
        "said", ["node repaired+reset at uptime_s=8000", "last_repair uptime_s=8000", "GPU replaced at uptime_s: 8000"]
    )
    def test_a_repair_by_uptime(self, tmp_path: Path, said: str) -> None:
        text = f"3,412,7200000000,-;{xid(79)}\n3,500,9000000000,-;{xid(48)}\n==> state <==\n{said}\n"
        assert self.stale(tmp_path, text) == ["before_repair", None]

    @pytest.mark.parametrize(
        "said", ["GPU replaced at 2031-06-15T11:00:00Z", "repaired_at=2031-06-15 11:00:00", "last repair: Jun 15 11:00"]
    )
    def test_a_repair_by_time(self, tmp_path: Path, said: str) -> None:
        text = f"2031-06-15T10:00:00Z h1 kernel: {xid(79)}\n2031-06-15T12:00:00Z h1 kernel: {xid(48)}\n==> notes <==\n{said}\n"
        assert self.stale(tmp_path, text) == ["before_repair", None]

    @pytest.mark.parametrize("said", ["the GPU was not replaced", "rebooting soon", "boot loader", "up to date"])
    def test_what_says_nothing(self, tmp_path: Path, said: str) -> None:
        assert self.stale(tmp_path, f"2031-06-15T10:00:00Z h1 kernel: {xid(79)}\n{said}\n") == [None]


@pytest.mark.skipif(SHARED is None, reason="KEEPSTEP_SHARED is not set: no recorded logs")
class TestRecordedLogs:
    def test_kernel_logs(self) -> None:
        found = read(Path(str(SHARED)) / "data/kernel-logs")
        assert found.unreadable == [] and {e.signature for e in found.events} >= {"xid.13", "xid.43"}
        assert all(e.time_quality == "exact" for e in found.events if e.signature == "xid.13")

    def test_flight_recorder_dumps(self) -> None:
        assert len(read(Path(str(SHARED)) / "data/flight-recorder").dumps) == 32


def test_around_a_fault_of_a_long_log_ordinary_lines_count_too(tmp_path: Path) -> None:
    """A long log is not stopped at them; beside a fault they are facts."""
    filler = "10:00:00 INFO request served in 12 ms by worker 4\n" * (WHOLE_BYTES // 50 + 1)
    saving = "[rank3]: 2031-02-14 11:00:00 saving checkpoint to /ckpt/step_400\n"
    text = saving + filler + saving + "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n" + filler
    path = tmp_path / "long.log"
    path.write_text(text)
    found = [e for e in read_paths([str(path)], catalog(), matcher=matcher()).events if e.signature == "job.saving"]
    assert [e.evidence.line for e in found] == [2 + filler.count("\n")]


class TestSeveralProcesses:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A run folder with a log, one of its own records and something that is no text, and ranks' logs beside it."""
        run = tmp_path / "run-1"
        (run / "logs").mkdir(parents=True)
        (run / "journal").mkdir()
        (run / "run.json").write_text("{}")
        (run / "logs" / "cycle-0000.log").write_text("[rank 3] KeyError: 'k'\n")
        (tmp_path / "core.bin.txt").write_bytes(b"\x7fELF" + b"\0\1" * 500)
        for rank in range(12):
            text = "step 1 loss 2.0\n" if rank != 7 else "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
            (tmp_path / f"rank{rank}.log").write_text(text)
        return tmp_path

    def test_the_same_as_one(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reading, "POOL_FROM_FILES", 4)
        monkeypatch.setattr(reading, "PART_FILES", 2)
        paths = [str(folder), str(folder / "run-1")]
        one, three = (read_paths(paths, catalog(), matcher=matcher(), jobs=n) for n in (1, 3))
        assert "xid.79" in {e.signature for e in one.events}
        assert three == one

    def test_a_folder_that_a_link_leads_out_of(self, folder: Path) -> None:
        (folder / "run-1" / "logs" / "linked.log").symlink_to(folder / "rank7.log")
        found = read_paths([str(folder / "run-1")], catalog(), matcher=matcher())
        assert "xid.79" in {e.signature for e in found.events}
