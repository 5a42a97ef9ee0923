"""Evidence of a host: real processes, sockets, pipes and files; stand-ins for NVML, torch's dump pipe and NCCL's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.launcher.clock import boot_ns
from keepstep.launcher.health import hangevidence, hostevidence, kernellog
from keepstep.launcher.health.gpus import GpuReport, read_gpus
from keepstep.launcher.health.hangevidence import (
    Recorder,
    collect_dumps,
    nccl_version_of,
    parse_socket,
    query_ras,
    ras_refusal,
    sockets_of,
    trigger,
)
from keepstep.launcher.health.hostevidence import (
    HostEvidence,
    Snapshot,
    collect,
    core_folder,
    memory_counters,
    snapshot,
    young_files,
)
from keepstep.records.codec import from_json
from keepstep.records.event import Event
from keepstep.sources.live import ibsysfs
from keepstep.sources.reading import read_paths
from tests.launcher.fake_nvml import FakeGpu, FakeNvml


@contextlib.contextmanager
def small_memory_group(name: str, limit_bytes: int) -> Iterator[tuple[Path, str]]:
    """A new memory cgroup with a limit, and its line in /proc/PID/cgroup; skips where none can be made."""
    for parent, limit, line in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", f"4:memory:/{name}\n"),
        ("/sys/fs/cgroup", "memory.max", f"0::/{name}\n"),
    ):
        group = Path(parent) / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / limit).exists():
                continue
            (group / limit).write_text(str(limit_bytes))
            yield group, line
            return
        finally:
            group.rmdir()
    pytest.skip("no memory cgroup can be made here (run the tests as root)")


def healthy_gpus() -> GpuReport:
    return read_gpus(FakeNvml(FakeGpu("GPU-a", ecc=(1, 4))), "0")


class TestCollect:
    def test_a_failed_cycle(self, tmp_path: Path) -> None:
        before = snapshot()
        found = asyncio.run(
            collect(tmp_path / "e", boot_ns(), {}, False, 5.0, before=before, cwd=tmp_path, gpus=healthy_gpus)
        )
        assert [i.name for i in found.items] == ["kernel_log", "gpus", "ports", "memory_events", "core_files"]
        assert found.gpus is not None and found.gpus.gpus[0].ecc_volatile == 1
        # The file says what could be read and what not, whatever this host permits.
        assert (tmp_path / "e/kernel.log").read_text().startswith("# source: ")
        assert from_json((tmp_path / "e/host.json").read_bytes(), HostEvidence) == found
        for item in found.items:
            assert all((tmp_path / "e" / f).exists() for f in item.files)

    def test_a_hang_of_real_ranks(self, tmp_path: Path) -> None:
        code = """
            import socket, sys
            server = socket.create_server(("127.0.0.1", 0))
            client = socket.create_connection(server.getsockname())
            print(client.getpeername()[1], flush=True)
            sys.stdin.read()
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            port = int(rank.stdout.readline())
            found = asyncio.run(
                collect(
                    tmp_path,
                    boot_ns(),
                    {3: rank.pid},
                    True,
                    2.0,
                    recorder=Recorder(dump_prefix=f"{tmp_path}/dump_", pipe_prefix=f"{tmp_path}/pipe_"),
                    gpus=healthy_gpus,
                )
            )
            rank.communicate(b"")
        sockets = json.loads((tmp_path / "sockets.json").read_bytes())["3"]
        assert {"LISTEN", "ESTABLISHED"} == {s["state"] for s in sockets}
        assert any(s["peer"] == f"127.0.0.1:{port}" for s in sockets)
        # It has no NCCL: its missing dump is on record, and NCCL was not asked.
        (dump,) = found.dumps
        assert (dump.rank, dump.status, dump.asked) == (3, "missing", False)
        assert [found.item(n).status for n in ("sockets", "flight_recorder", "nccl_ras")] == [  # type: ignore[union-attr]
            *("got", "empty", "unavailable")
        ]

    def test_a_part_that_hangs_costs_no_more_than_the_limit_and_hides_nothing(self, tmp_path: Path) -> None:
        release = threading.Event()

        def hangs() -> GpuReport:
            release.wait(60)
            return GpuReport()

        begin = time.monotonic()
        try:
            found = asyncio.run(collect(tmp_path, boot_ns(), {}, True, 0.5, gpus=hangs))
        finally:
            release.set()
        # asyncio.run also ends: no pool waits for the thread.
        assert time.monotonic() - begin < 5
        status = {i.name: i.status for i in found.items}
        assert status["gpus"] == "timed_out"
        assert status["memory_events"] != "timed_out" and status["core_files"] != "timed_out"

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        found = asyncio.run(collect(tmp_path / "file/e", boot_ns(), {}, True, 1.0, gpus=healthy_gpus))
        assert [(i.name, i.status) for i in found.items] == [("folder", "failed")]

    def test_a_broken_part_is_an_entry(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("odd host")

        monkeypatch.setattr(hostevidence, "memory_counters", broken)
        found = asyncio.run(collect(tmp_path, boot_ns(), {}, False, 5.0, gpus=healthy_gpus))
        item = found.item("memory_events")
        assert item is not None and (item.status, item.detail) == ("failed", "RuntimeError: odd host")


def told(folder: Path) -> dict[str, Event]:
    """Signature -> event of what a verdict is made of."""
    return {e.signature: e for e in read_paths([str(folder)], shipped()).events}


class TestGpusBetweenBeginAndFailure:
    def collected(self, folder: Path, before: FakeGpu | None, after: FakeGpu) -> dict[str, Event]:
        begin = None if before is None else read_gpus(FakeNvml(before), "0")
        nvml = FakeNvml(after)
        try:
            asyncio.run(
                collect(folder, boot_ns(), {}, False, 5.0, gpus=lambda: read_gpus(nvml, "0", 0.2), gpus_before=begin)
            )
        finally:
            nvml.release.set()
        return told(folder)

    def test_a_new_memory_error_is_a_sign(self, tmp_path: Path) -> None:
        found = self.collected(tmp_path, FakeGpu("GPU-a", ecc=(0, 4)), FakeGpu("GPU-a", ecc=(1, 5)))
        event = found["gpu.ecc_uncorrected"]
        assert event.gpu is not None and event.gpu.uuid == "GPU-a"
        assert event.time_ns is not None and event.evidence.path.endswith("gpus.json")

    @pytest.mark.parametrize("before", [FakeGpu("GPU-a", ecc=(1, 5), rows=(0, 1, 1, 0)), None])
    def test_what_was_there_before_is_none(self, tmp_path: Path, before: FakeGpu | None) -> None:
        found = self.collected(tmp_path, before, FakeGpu("GPU-a", ecc=(1, 5), rows=(0, 1, 1, 0)))
        assert not [s for s in found if s.startswith("gpu.") and s not in ("gpu.sample", "gpu.driver")]

    def test_a_row_that_waits_for_a_reset_and_what_the_driver_asks_for(self, tmp_path: Path) -> None:
        found = self.collected(tmp_path, FakeGpu("GPU-a"), FakeGpu("GPU-a", rows=(0, 1, 1, 0), action=1))
        assert {"gpu.remap_pending"} <= found.keys()
        assert any("recovery" in s for s in found)

    def test_a_gpu_that_does_not_answer_any_more(self, tmp_path: Path) -> None:
        assert "gpu.lost" in self.collected(tmp_path, FakeGpu("GPU-a"), FakeGpu("GPU-a", hangs=True))


class TestPorts:
    @pytest.fixture
    def port(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A tree as /sys/class/infiniband with one port."""
        port = tmp_path / "sys" / "mlx5_0" / "ports" / "1"
        for folder in ("counters", "hw_counters"):
            (port / folder).mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "phys_state").write_text("5: LinkUp\n")
        (port / "counters" / "link_downed").write_text("3\n")
        monkeypatch.setattr(hostevidence, "INFINIBAND", tmp_path / "sys")
        return port

    def collected(self, folder: Path, before: Snapshot | None) -> dict[str, Event]:
        asyncio.run(collect(folder, boot_ns(), {}, False, 5.0, before=before, gpus=healthy_gpus))
        return told(folder)

    def test_a_link_that_went_down_while_the_cycle_ran(self, tmp_path: Path, port: Path) -> None:
        before = snapshot()
        (port / "counters" / "link_downed").write_text("5\n")
        found = self.collected(tmp_path / "e", before)
        event = found["counter.total"]
        assert event.nic == "mlx5_0" and event.evidence.path.endswith("ports.json") and event.time_ns is not None
        verdict = attribute(read_paths([str(tmp_path / "e")], shipped()).events, shipped())
        assert (verdict.fault_class, verdict.first_cause is not None) == ("fabric", True)

    def test_counters_that_may_not_be_read_are_not_asked_again(
        self, tmp_path: Path, port: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def denied(place: Path) -> dict[str, int]:
            asked.append(place)
            raise PermissionError

        monkeypatch.setattr(ibsysfs, "_counters", denied)
        self.collected(tmp_path / "e", snapshot())
        assert asked == [port]
        assert json.loads((tmp_path / "e" / "ports.json").read_bytes())["end"]["mlx5_0/1"]["counters"] == {}

    def test_counters_that_stood_still_say_nothing(self, tmp_path: Path, port: Path) -> None:
        self.collected(tmp_path / "e", snapshot())
        assert attribute(read_paths([str(tmp_path / "e")], shipped()).events, shipped()).signature == "unknown"

    def test_a_device_that_does_not_answer_holds_no_cycle_up(self, port: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        release = threading.Event()

        def hangs() -> None:
            release.wait(60)

        monkeypatch.setattr(hostevidence, "read_ports", hangs)
        monkeypatch.setattr(hostevidence, "PORTS_S", 0.05)
        try:
            assert snapshot().ports is None
        finally:
            release.set()


class TestMemory:
    def group(self, root: Path, cgroup: str, files: dict[str, str]) -> dict[str, int]:
        (root / "proc").write_text(cgroup)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return memory_counters(root / "proc", root / "fs")

    def test_version_2(self, tmp_path: Path) -> None:
        events = "low 0\nhigh 2\nmax 31\noom 3\noom_kill 1\n"
        found = self.group(tmp_path, "0::/job/step_0\n", {"fs/job/step_0/memory.events": events})
        assert found == {"low": 0, "high": 2, "max": 31, "oom": 3, "oom_kill": 1}

    def test_version_1_and_both(self, tmp_path: Path) -> None:
        found = self.group(
            tmp_path,
            "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n",
            {
                "fs/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
                "fs/memory/job/memory.failcnt": "17\n",
            },
        )
        assert found == {"under_oom": 0, "oom_kill": 2, "failcnt": 17}

    def test_a_container_that_sees_the_hosts_path(self, tmp_path: Path) -> None:
        found = self.group(tmp_path, "4:memory:/kubepods/pod1/c1\n", {"fs/memory/memory.failcnt": "5\n"})
        assert found == {"failcnt": 5}

    def test_a_real_kill_is_counted_and_in_the_kernels_log(self, tmp_path: Path) -> None:
        with small_memory_group(f"keepstep-test-{os.getpid()}", 64 << 20) as (group, line):
            (tmp_path / "cgroup").write_text(line)
            sequence = kernellog.last_sequence()
            before = memory_counters(tmp_path / "cgroup")
            code = f"import os; open('{group}/cgroup.procs', 'w').write('0'); bytes(b'x') * (512 << 20)"
            status = subprocess.run([sys.executable, "-c", code], check=False).returncode
            after = memory_counters(tmp_path / "cgroup")
        assert status == -signal.SIGKILL
        assert after["oom_kill"] - before.get("oom_kill", 0) == 1
        if sequence is not None:
            log = kernellog.read_log(0, after_sequence=sequence)
            assert any("Memory cgroup out of memory: Killed process" in line for line in log.ooms)

    def test_growth_since_the_cycle_began(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        counters = {"oom_kill": 1, "max": 7}
        monkeypatch.setattr(hostevidence, "memory_counters", lambda: dict(counters))
        before = snapshot()
        counters["oom_kill"] = 3
        found = asyncio.run(collect(tmp_path, boot_ns(), {}, False, 5.0, before=before, gpus=healthy_gpus))
        assert found.memory_events == {"oom_kill": 2}
        assert json.loads((tmp_path / "memory-events.json").read_bytes())["now"] == {"oom_kill": 3, "max": 7}


class TestCoreFiles:
    @pytest.mark.parametrize(
        ("pattern", "folder"),
        [
            ("core", "/work-dir"),
            ("core.%p", "/work-dir"),
            ("/var/crash/core.%e.%p", "/var/crash"),
            ("/cores/%h/core", "/cores"),
            ("/cores/core", "/cores"),
            ("|/usr/lib/systemd/systemd-coredump %P", "/var/lib/systemd/coredump"),
            ("|/usr/share/apport/apport -p%p", None),
            ("|", None),
        ],
    )
    def test_where_they_go(self, pattern: str, folder: str | None) -> None:
        found, _ = core_folder(f"{pattern}\n", Path("/work-dir"))
        assert found == (None if folder is None else Path(folder))

    def test_only_young_files_of_that_name(self, tmp_path: Path) -> None:
        now = time.time()
        for name, age_s in (("core.1", 0), ("core.2", 3600), ("model.pt", 0)):
            (tmp_path / name).write_text("x")
            os.utime(tmp_path / name, (now - age_s, now - age_s))
        (tmp_path / "core.d").mkdir()
        assert young_files(tmp_path, "core", now - 60) == [str(tmp_path / "core.1")]


class TestSockets:
    def test_lines_of_proc(self) -> None:
        v4 = "   1: 0100007F:1F90 0200007F:C001 01 00000010:00000400 01:00000014 00000003  0 0 4711 1"
        found = parse_socket(v4, {"4711"})
        assert found is not None
        assert (found.local, found.peer, found.state) == ("127.0.0.1:8080", "127.0.0.2:49153", "ESTABLISHED")
        assert (found.tx_bytes, found.rx_bytes, found.retransmits) == (16, 1024, 3)
        v6 = v4.replace("0100007F", "00000000000000000000000001000000").replace(
            "0200007F", "0000000000000000FFFF00000200007F"
        )
        found = parse_socket(v6, {"4711"})
        assert found is not None and (found.local, found.peer) == ("[::1]:8080", "127.0.0.2:49153")
        assert parse_socket(v4, {"1"}) is None
        assert parse_socket("rubbish", {"4711"}) is None

    def test_unread_bytes_of_a_real_connection(self) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
            server.accept()[0] as accepted,
        ):
            accepted.sendall(bytes(1000))
            client.recv(1)
            name = f"127.0.0.1:{client.getsockname()[1]}"
            (ours,) = [s for s in sockets_of(os.getpid()) if s.local == name]
        assert (ours.state, ours.rx_bytes) == ("ESTABLISHED", 999)

    def test_a_process_that_is_gone(self) -> None:
        with subprocess.Popen(["/bin/true"]) as process:
            process.wait()
        assert sockets_of(process.pid) == []


class FakeRank:
    """A rank's dump pipe as torch makes it: a FIFO opened for reading without blocking, polled; a request makes it dump."""

    def __init__(self, recorder: Recorder, rank: int, dump: Callable[[Path], None]) -> None:
        self.got = b""
        pipe = f"{recorder.pipe_prefix}{rank}.pipe"
        os.mkfifo(pipe)
        self._fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._target = Path(f"{recorder.dump_prefix}{rank}")
        self._dump = dump
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.005):
            try:
                data = os.read(self._fd, 128)
            except BlockingIOError:
                continue
            if data:
                self.got += data
                self._dump(self._target)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        os.close(self._fd)


class TestFlightRecorder:
    @pytest.fixture
    def recorder(self, tmp_path: Path) -> Recorder:
        (tmp_path / "node").mkdir()
        (tmp_path / "pipes").mkdir()
        (tmp_path / "evidence").mkdir()
        return Recorder(dump_prefix=f"{tmp_path}/node/dump_", pipe_prefix=f"{tmp_path}/pipes/trigger_")

    @pytest.fixture
    def rank(self, recorder: Recorder) -> Iterator[Callable[[int, Callable[[Path], None]], FakeRank]]:
        ranks: list[FakeRank] = []

        def start(number: int, dump: Callable[[Path], None]) -> FakeRank:
            ranks.append(FakeRank(recorder, number, dump))
            return ranks[-1]

        yield start
        for item in ranks:
            item.close()

    def test_a_dump_that_is_written_slowly_is_waited_for(
        self, recorder: Recorder, rank: Callable[..., FakeRank], tmp_path: Path
    ) -> None:
        def slowly(target: Path) -> None:
            with open(target, "wb", buffering=0) as file:
                for n in range(5):
                    file.write(bytes([n]) * 1000)
                    time.sleep(0.05)

        asked = rank(0, slowly)
        (dump,) = collect_dumps(recorder, [0], tmp_path / "evidence", boot_ns(), 10.0)
        assert asked.got == b"1\n"
        assert (dump.status, dump.asked, dump.size_bytes) == ("got", True, 5000)
        assert (tmp_path / "evidence" / str(dump.file)).read_bytes() == b"".join(bytes([n]) * 1000 for n in range(5))

    def test_every_way_of_not_answering_is_told_apart(
        self, recorder: Recorder, rank: Callable[..., FakeRank], tmp_path: Path
    ) -> None:
        rank(0, lambda target: None)
        rank(1, lambda target: target.write_bytes(b""))
        rank(2, lambda target: target.write_bytes(b"dump"))
        begin = time.monotonic()
        dumps = collect_dumps(recorder, [0, 1, 2, 3], tmp_path / "evidence", boot_ns(), 1.0)
        assert time.monotonic() - begin < 5
        assert [(d.status, d.asked) for d in dumps] == [
            *[("missing", True), ("empty", True), ("got", True), ("missing", False)]
        ]

    def test_a_dump_of_an_earlier_cycle_is_none_and_the_watchdogs_own_counts(
        self, recorder: Recorder, tmp_path: Path
    ) -> None:
        for number, age_s in ((0, 3600.0), (1, 0.0)):
            path = Path(f"{recorder.dump_prefix}{number}")
            path.write_bytes(b"dump")
            os.utime(path, (time.time() - age_s,) * 2)
        dumps = collect_dumps(recorder, [0, 1], tmp_path / "evidence", boot_ns() - 60 * 10**9, 1.0)
        assert [(d.status, d.asked) for d in dumps] == [("missing", False), ("got", False)]

    def test_bounds(self, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hangevidence, "DUMP_LIMIT_BYTES", 10)
        monkeypatch.setattr(hangevidence, "TOTAL_LIMIT_BYTES", 15)
        for number, size in enumerate((11, 10, 10)):
            Path(f"{recorder.dump_prefix}{number}").write_bytes(bytes(size))
        dumps = collect_dumps(recorder, [0, 1, 2], tmp_path / "evidence", boot_ns() - 10**9, 1.0)
        assert [d.status for d in dumps] == ["too_large", "got", "too_large"]
        assert [p.stat().st_size for p in (tmp_path / "evidence").iterdir()] == [10]

    def test_a_link_in_the_place_of_a_dump_is_not_followed(self, recorder: Recorder, tmp_path: Path) -> None:
        Path(f"{recorder.dump_prefix}0").symlink_to("/etc/hostname")
        (dump,) = collect_dumps(recorder, [0], tmp_path / "evidence", 0, 0.1)
        assert dump.status == "missing"

    def test_only_a_pipe_that_somebody_reads_is_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        os.mkfifo(tmp_path / "unread")
        assert [trigger(tmp_path / name) for name in ("file", "unread", "none")] == [False] * 3
        assert (tmp_path / "file").read_bytes() == b""


class TestNcclVersion:
    def test_the_gate(self) -> None:
        safe = [
            v for v in [(2, 24, 3), (2, 27, 3), (2, 28, 9), (2, 29, 2), (2, 29, 7), (2, 31, 2)] if not ras_refusal(v)
        ]
        assert safe == [(2, 29, 2), (2, 31, 2)]
        assert "2.27.7" in str(ras_refusal((2, 27, 7)))
        assert ras_refusal(None) is not None

    def process(self, folder: Path, library: Path) -> Path:
        maps = folder / "proc/7/maps"
        maps.parent.mkdir(parents=True)
        maps.write_text(f"7f00-7f01 r-xp 00000000 00:00 1    /lib/libc.so.6\n7f02-7f03 r-xp 0 00:00 2  {library}\n")
        return folder / "proc"

    def test_by_the_wheel(self, tmp_path: Path) -> None:
        library = tmp_path / "site-packages/nvidia/nccl/lib/libnccl.so.2"
        library.parent.mkdir(parents=True)
        (tmp_path / "site-packages/nvidia_nccl_cu12-2.29.3.dist-info").mkdir()
        assert nccl_version_of(7, self.process(tmp_path, library)) == (2, 29, 3)

    @pytest.mark.parametrize("name", ["libnccl.so.2", "libtorch_cuda.so"])
    def test_by_the_librarys_own_string(self, tmp_path: Path, name: str) -> None:
        library = tmp_path / name
        library.write_bytes(bytes(5000) + b"\0NCCL version 2.31.2+cuda13.0\0" + bytes(100))
        assert nccl_version_of(7, self.process(tmp_path, library)) == (2, 31, 2)

    def test_without(self, tmp_path: Path) -> None:
        (tmp_path / "libnccl.so.2").write_bytes(b"")
        assert nccl_version_of(7, self.process(tmp_path, tmp_path / "libnccl.so.2")) is None
        assert nccl_version_of(os.getpid()) is None


class TestRas:
    """With a stand-in for NCCL's client: there is no NCCL here."""

    def install(self, folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
        tool = folder / "ncclras"
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def test_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, monkeypatch, 'echo "asked $*"')
        assert query_ras(10.0) == ("asked -v -t 7\n", None)

    def test_a_hung_client_is_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, monkeypatch, "exec sleep 60")
        text, problem = query_ras(0.2)
        assert text == "" and "no answer within 0.2 s" in str(problem)

    def test_a_refused_connection_keeps_what_it_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, monkeypatch, "echo 'Connection refused' >&2; exit 1")
        assert query_ras(5.0) == ("Connection refused\n", "exit 1")

    def test_not_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert query_ras(1.0) == ("", "ncclras is not on PATH")

    def test_it_is_asked_after_everything_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, monkeypatch, f"ls {tmp_path}/e")
        monkeypatch.setattr(hangevidence, "nccl_version_of", lambda _pid: (2, 31, 2))
        found = asyncio.run(collect(tmp_path / "e", boot_ns(), {0: os.getpid()}, True, 5.0, gpus=healthy_gpus))
        assert found.items[-1].name == "nccl_ras" and found.items[-1].status == "got"
        listed = (tmp_path / "e/nccl-ras.txt").read_text().split()
        assert {"kernel.log", "sockets.json", "gpus.json"} <= set(listed)
