"""The kernel's log: recorded records, a socket that behaves like /dev/kmsg, stand-ins for the tools, and this host's own log."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.launcher.clock import boot_ns
from keepstep.launcher.health import kernellog
from keepstep.launcher.health.kernellog import KernelLog, make_log, read_log, write_log
from keepstep.sources.kernel.records import parse_kmsg, read_records

SHARED = os.environ.get("KEEPSTEP_SHARED")
XID = "NVRM: Xid (PCI:0000:38:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


class TestRecords:
    def test_fields_and_continuation(self) -> None:
        record = b"4,1101,3158687599,-,caller=T1;oom-kill:constraint=CONSTRAINT_MEMCG; a=b\n SUBSYSTEM=pci\n"
        assert parse_kmsg(record) == (4, 1101, 3158687599000, "oom-kill:constraint=CONSTRAINT_MEMCG; a=b")

    def test_bytes_that_are_not_printable(self) -> None:
        parsed = parse_kmsg(rb"6,1,2,-;tab\x09 and \x5cx")
        assert parsed is not None and parsed.text == "tab\t and \\x"

    @given(st.binary(max_size=200))
    def test_what_is_no_record_is_none_and_never_raises(self, data: bytes) -> None:
        parsed = parse_kmsg(data)
        assert parsed is None or b";" in data

    def test_one_read_is_one_record_until_there_is_no_more(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with ours, theirs:
            ours.setblocking(False)
            for n in range(5):
                theirs.send(b"6,%d,%d,-;line %d\n" % (n, n * 1000, n))
            records = read_records(ours.fileno(), time.monotonic() + 5)
        assert [parse_kmsg(r) for r in records] == [(6, n, n * 1_000_000, f"line {n}") for n in range(5)]

    @pytest.mark.skipif(SHARED is None, reason="KEEPSTEP_SHARED is not set: no recorded log")
    def test_a_recorded_log(self) -> None:
        lines = (Path(str(SHARED)) / "data/kernel-logs/kmsg.kmsg.1.log").read_bytes().splitlines()
        parsed = [parse_kmsg(line) for line in lines if line.strip()]
        assert len(parsed) > 20 and None not in parsed
        sequences = [p.seq for p in parsed if p is not None]
        assert sequences == sorted(sequences)


class TestPicking:
    LINES: ClassVar = [
        "[1.000000] usb 1-1: new device",
        f"[2.000000] {XID}",
        "[3.000000] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        "[4.000000] python invoked oom-killer: gfp_mask=0x140cca",
        "[5.000000] Memory cgroup out of memory: Killed process 123 (python)",
    ]

    def test_xids_and_kills_are_set_apart(self) -> None:
        log = make_log("kmsg", self.LINES)
        assert log.lines == self.LINES
        assert (log.xids, log.ooms) == (self.LINES[1:3], self.LINES[3:])

    def test_the_bound_drops_the_oldest_lines_but_no_xid(self) -> None:
        flood = [f"[{n}.0] audit: noise" for n in range(10, 1000)]
        log = make_log("kmsg", self.LINES + flood, limit_bytes=2000)
        assert sum(len(line) + 1 for line in log.lines) <= 2000
        assert log.lines == flood[-len(log.lines) :]
        assert log.dropped_lines == len(self.LINES + flood) - len(log.lines)
        assert log.xids == self.LINES[1:3]

    def test_files(self, tmp_path: Path) -> None:
        write_log(make_log("kmsg", self.LINES), tmp_path)
        source, boot, *lines = (tmp_path / "kernel.log").read_text().splitlines()
        assert (source, lines) == ("# source: kmsg", self.LINES)
        assert boot.startswith("# boot at 20") and boot.endswith("Z")
        assert (tmp_path / "kernel-xid.log").read_text().splitlines() == [boot, *self.LINES[1:3]]
        write_log(KernelLog(source="none", problem="/dev/kmsg: Permission denied"), tmp_path)
        source, _, problem = (tmp_path / "kernel.log").read_text().splitlines()
        assert (source, problem) == ("# source: none", "# /dev/kmsg: Permission denied")
        assert not (tmp_path / "kernel-xid.log").exists()


class TestTools:
    """/dev/kmsg is a folder that does not exist; the tools are scripts."""

    def read(self, folder: Path, monkeypatch: pytest.MonkeyPatch, since_s: float = 0.0, **tools: str) -> KernelLog:
        for name, body in tools.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv(
            "PATH", f"{folder}:/usr/bin:/bin" if "dmesg" in tools and "journalctl" in tools else str(folder)
        )
        monkeypatch.setattr(kernellog, "log_time_s", lambda _ns: since_s)
        return read_log(0, limit_s=2.0, path=folder / "no-kmsg")

    def test_dmesg_does_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        log = self.read(
            tmp_path, monkeypatch, 5.0, dmesg=f"echo '[    1.5] old'; echo '[   12.25] {XID.replace(chr(39), '')}'"
        )
        assert log.source == "dmesg"
        assert len(log.lines) == len(log.xids) == 1
        assert "no-kmsg: No such file" in str(log.problem)

    def test_journalctl_comes_next(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        log = self.read(
            tmp_path,
            monkeypatch,
            dmesg="echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1",
            journalctl="echo '[    9.000001] host kernel: hello'",
        )
        assert (log.source, log.lines) == ("journalctl", ["[    9.000001] host kernel: hello"])
        assert "Operation not permitted" in str(log.problem)

    def test_neither(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        log = self.read(tmp_path, monkeypatch)
        assert (log.source, log.lines) == ("none", [])
        assert "dmesg: not installed" in str(log.problem) and "journalctl: not installed" in str(log.problem)

    def test_one_that_hangs_is_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = time.monotonic()
        log = self.read(tmp_path, monkeypatch, dmesg="exec /bin/sleep 60", journalctl="exit 1")
        assert time.monotonic() - begin < 20
        assert log.source == "none" and "no answer" in str(log.problem)


def readable() -> bool:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not readable(), reason="/dev/kmsg cannot be read here")
class TestThisHost:
    def test_the_whole_log_and_nothing_after_its_last_record(self) -> None:
        everything = read_log(0)
        assert everything.source == "kmsg" and everything.lines
        last = kernellog.last_sequence()
        assert last is not None
        # Whatever came in between is the only thing that can be new.
        assert len(read_log(0, after_sequence=last).lines) < len(everything.lines)

    def test_by_time(self) -> None:
        stamps = [float(line[1:].partition("]")[0]) for line in read_log(boot_ns() - 10**9 * 60).lines]
        assert all(s >= kernellog.log_time_s(boot_ns() - 10**9 * 61) for s in stamps)


def test_times_are_the_logs_own_with_room_for_its_drift() -> None:
    a_day_ago = boot_ns() - 86_400 * 10**9
    assert kernellog.log_time_s(a_day_ago) >= 0
    now_s = time.monotonic()
    assert now_s - 3 - now_s * 2e-4 < kernellog.log_time_s(boot_ns()) < now_s
