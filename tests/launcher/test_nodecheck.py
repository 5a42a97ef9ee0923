"""Node checks: trees of sysfs as files, real file systems and clock, stand-ins for NVML and NVIDIA's tools."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.launcher.health import nodecheck, nodeprobe
from keepstep.launcher.health.gpus import GpuReport, read_gpus
from keepstep.launcher.health.nodecheck import (
    CheckResult,
    Limits,
    Request,
    check_checkpoint_root,
    check_clock,
    check_gpus,
    check_infiniband,
    check_network,
    check_room,
    failures,
    run_checks,
)
from tests.disks import small_tmpfs
from tests.launcher.fake_nvml import FakeGpu, FakeNvml

SHARED = os.environ.get("KEEPSTEP_SHARED")


def by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {r.name: r for r in results}


def ok_of(results: list[CheckResult]) -> dict[str, bool | None]:
    return {r.name: r.ok for r in results}


class TestGpus:
    def check(self, *gpus: FakeGpu, expected: int | None = None) -> list[CheckResult]:
        return check_gpus(read_gpus(FakeNvml(*gpus), ",".join(str(i) for i in range(len(gpus)))), expected)

    def test_healthy(self) -> None:
        results = self.check(FakeGpu("GPU-a"), expected=1)
        assert ok_of(results) == dict.fromkeys(("gpu", "gpu.0.row_remap", "gpu.0.ecc", "gpu.0.recovery_action"), True)
        assert failures(results) == []

    @pytest.mark.parametrize(
        ("gpu", "name", "says"),
        [
            (FakeGpu("GPU-a", rows=(0, 1, 1, 0)), "gpu.0.row_remap", "waits for a reset"),
            (FakeGpu("GPU-a", rows=(0, 9, 0, 1)), "gpu.0.row_remap", "could not remap"),
            (FakeGpu("GPU-a", ecc=(3, 8)), "gpu.0.ecc", "3 uncorrectable"),
            (FakeGpu("GPU-a", action=2), "gpu.0.recovery_action", "needs node_reboot"),
        ],
    )
    def test_each_sign_of_a_sick_gpu_is_a_definite_failure(self, gpu: FakeGpu, name: str, says: str) -> None:
        results = self.check(FakeGpu("GPU-z"), gpu)
        name = name.replace(".0.", ".1.")
        assert [r.name for r in results if r.ok is False] == [name]
        assert says in by_name(results)[name].detail and by_name(results)[name].next_step
        assert says in failures(results)[0] and "00000000:01:00.0" in failures(results)[0]

    def test_errors_of_an_earlier_life_do_not_count(self) -> None:
        assert by_name(self.check(FakeGpu("GPU-a", ecc=(0, 50))))["gpu.0.ecc"].ok is True

    def test_what_a_gpu_does_not_tell_is_unknown(self) -> None:
        results = self.check(FakeGpu("GPU-a", ecc=None, rows=None, action=None))
        assert [r.ok for r in results] == [True, None, None, None]

    def test_too_few(self) -> None:
        (present, *_) = self.check(FakeGpu("GPU-a"), expected=8)
        assert (present.ok, present.value, present.limit) == (False, "1 GPUs", "8 GPUs")

    def test_a_driver_that_does_not_answer_is_a_definite_failure(self) -> None:
        nvml = FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b", hangs=True))
        try:
            results = check_gpus(read_gpus(nvml, "0,1", timeout_s=0.05), None)
        finally:
            nvml.release.set()
        assert results[0].ok is False
        # What the first one said before stays known.
        assert by_name(results)["gpu.0.ecc"].ok is True and "gpu.1.ecc" not in by_name(results)

    def test_without_nvml_nothing_is_known_unless_gpus_were_asked_for(self) -> None:
        report = GpuReport(available=False, problem="no library")
        assert [r.ok for r in check_gpus(report, None)] == [None]
        assert [r.ok for r in check_gpus(report, 8)] == [False]


def ib_port(root: Path, name: str, state: str, physical: str, lost: int | None = 0) -> None:
    port = root / "class/infiniband" / name / "ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "phys_state").write_text(f"{physical}\n")
    if lost is not None:
        (port / "counters/link_downed").write_text(f"{lost}\n")


class TestInfiniBand:
    @pytest.fixture(autouse=True)
    def no_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NCCL_IB_HCA", raising=False)

    @pytest.mark.parametrize(
        ("state", "physical", "lost", "ok"),
        [
            ("4: ACTIVE", "5: LinkUp", 3, True),
            ("1: DOWN", "2: Polling", 0, None),
            ("1: DOWN", "3: Disabled", None, None),
            ("1: DOWN", "2: Polling", 1, False),
            ("2: INIT", "5: LinkUp", 0, False),
        ],
    )
    def test_a_port(self, tmp_path: Path, state: str, physical: str, lost: int | None, ok: bool | None) -> None:
        ib_port(tmp_path, "mlx5_0", state, physical, lost)
        (result,) = check_infiniband(tmp_path)
        assert (result.name, result.ok, result.value) == ("link.mlx5_0:1", ok, state.partition(": ")[2])
        assert bool(result.next_step) == (ok is False)

    @pytest.mark.parametrize(
        ("setting", "names"),
        [
            ("mlx5_1", {"mlx5_1:1": False, "mlx5_10:1": False}),
            ("=mlx5_1:1", {"mlx5_1:1": False}),
            ("=mlx5_0,mlx5_10", {"mlx5_0:1": True, "mlx5_10:1": False}),
            ("^mlx5_1", {"mlx5_0:1": True}),
            ("^=mlx5_1", {"mlx5_0:1": True, "mlx5_10:1": None}),
        ],
    )
    def test_only_the_ports_that_nccl_uses_count(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, names: dict[str, bool | None]
    ) -> None:
        ib_port(tmp_path, "mlx5_0", "4: ACTIVE", "5: LinkUp")
        ib_port(tmp_path, "mlx5_1", "1: DOWN", "2: Polling")
        ib_port(tmp_path, "mlx5_10", "1: DOWN", "2: Polling")
        monkeypatch.setenv("NCCL_IB_HCA", setting)
        assert {r.name.removeprefix("link."): r.ok for r in check_infiniband(tmp_path)} == names

    def test_a_host_without_any(self, tmp_path: Path) -> None:
        assert check_infiniband(tmp_path) == []

    @pytest.mark.skipif(SHARED is None, reason="KEEPSTEP_SHARED is not set: no recorded sysfs tree")
    def test_a_recorded_host_is_healthy(self, tmp_path: Path) -> None:
        (tmp_path / "class").mkdir()
        (tmp_path / "class/infiniband").symlink_to(Path(str(SHARED)) / "data/sysfs/class-infiniband-h100")
        results = check_infiniband(tmp_path)
        assert len(results) == 9
        assert {r.ok for r in results} == {True}


def net_device(root: Path, name: str, *, flags: int = 0x1003, carrier: str | None = "1", physical: bool = True) -> None:
    device = root / "class/net" / name
    device.mkdir(parents=True)
    (device / "flags").write_text(f"{flags:#x}\n")
    if carrier is not None:
        (device / "carrier").write_text(f"{carrier}\n")
    if physical:
        (device / "device").mkdir()


class TestNetwork:
    def test_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        net_device(tmp_path, "eth0")
        net_device(tmp_path, "eth1", carrier="0")
        net_device(tmp_path, "eth2", flags=0x1002, carrier=None)
        net_device(tmp_path, "docker0", carrier="0", physical=False)
        assert ok_of(check_network(tmp_path)) == {"link.eth0": True, "link.eth1": None}
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
        assert ok_of(check_network(tmp_path)) == {"link.eth1": False}


class TestRoom:
    def test_this_host_has_some(self, tmp_path: Path) -> None:
        results = by_name(check_room(Request(run_dir=tmp_path / "not" / "yet", limits=Limits(run_dir_free_bytes=1))))
        assert {"disk.run_dir", "disk.tmp", "disk.shm", "memory", "open_files"} == set(results)
        assert results["disk.run_dir"].ok

    def test_too_little_is_named_with_place_and_limit(self, tmp_path: Path) -> None:
        huge = 1 << 60
        limits = Limits(run_dir_free_bytes=huge, memory_bytes=huge, open_files=1 << 40)
        results = by_name(check_room(Request(run_dir=tmp_path, limits=limits)))
        assert [results[n].ok for n in ("disk.run_dir", "memory", "open_files")] == [False] * 3
        assert str(tmp_path) in results["disk.run_dir"].detail
        assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) == results["open_files"].value
        assert all(results[n].next_step for n in ("disk.run_dir", "memory", "open_files"))


class TestClock:
    def test_skew_against_a_reference(self) -> None:
        now, boot = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        (right,) = check_clock(Request(reference=(now, boot)))
        (wrong,) = check_clock(Request(reference=(now - 5 * 10**9, boot)))
        assert (right.ok, wrong.ok) == (True, False)
        assert wrong.value.startswith("+5.0") and "+5.0" in failures([wrong])[0]

    def test_the_time_since_the_reference_does_not_count_as_skew(self) -> None:
        now, boot = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        hour = 3600 * 10**9
        assert check_clock(Request(reference=(now - hour, boot - hour)))[0].ok is True

    def test_without_one_it_never_speaks_against_the_node(self) -> None:
        (result,) = check_clock(Request())
        assert result.ok is not False
        assert result.value


class TestCheckpointRoot:
    def test_writable_and_left_as_it_was(self, tmp_path: Path) -> None:
        (result,) = check_checkpoint_root(Request(checkpoint_root=tmp_path))
        assert result.ok is True
        assert list(tmp_path.iterdir()) == []

    def test_one_that_does_not_exist_yet_is_judged_by_its_parent_and_not_made(self, tmp_path: Path) -> None:
        (result,) = check_checkpoint_root(Request(checkpoint_root=tmp_path / "a/b"))
        assert result.ok is True
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_fails(self, tmp_path: Path) -> None:
        with small_tmpfs(tmp_path / "disk", "size=1m") as disk:
            with open(disk / "filler", "wb") as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            (result,) = check_checkpoint_root(Request(checkpoint_root=disk))
        assert result.ok is False
        assert "No space left" in result.detail and str(disk) in result.detail

    def test_a_mount_that_hangs_is_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        release = threading.Event()
        monkeypatch.setattr(nodecheck, "write_probe", lambda _folder: release.wait(60))
        begin = time.monotonic()
        try:
            results = by_name(run_checks(1, Request(checkpoint_root=tmp_path, timeout_s=0.5), no_gpus))
        finally:
            release.set()
        assert time.monotonic() - begin < 10
        assert results["checkpoint"].ok is None and "no answer" in results["checkpoint"].detail
        # The others were made all the same.
        assert results["memory"].ok is True


def no_gpus() -> GpuReport:
    return GpuReport(available=False, problem="none here")


class TestRun:
    def test_level_1_on_this_host(self, tmp_path: Path) -> None:
        begin = time.monotonic()
        results = run_checks(1, Request(run_dir=tmp_path, checkpoint_root=tmp_path, timeout_s=10.0))
        assert time.monotonic() - begin < 11
        assert {"gpu", "clock", "checkpoint", "disk.run_dir", "memory"} <= set(by_name(results))
        assert not any(r.name.startswith("probe.") for r in results)

    def test_a_check_that_breaks_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(_request: Request) -> list[CheckResult]:
            raise RuntimeError("odd host")

        monkeypatch.setattr(nodecheck, "LEVEL_1", [("link", broken)])
        (gpu, link) = run_checks(1, Request(), no_gpus)
        assert (gpu.ok, link.ok) == (None, None)
        assert "odd host" in link.detail

    def test_a_hung_gpu_reader_fails_the_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        release = threading.Event()

        def hangs() -> GpuReport:
            release.wait(60)
            return GpuReport()

        monkeypatch.setattr(nodecheck, "LEVEL_1", [])
        try:
            (gpu,) = run_checks(1, Request(timeout_s=0.1), hangs)
        finally:
            release.set()
        assert gpu.ok is False and gpu.next_step


class TestProbes:
    def test_memory_and_disk_are_measured(self, tmp_path: Path) -> None:
        results = nodeprobe.probe_memory(Request()) + nodeprobe.probe_disk(Request(run_dir=tmp_path))
        assert [r.name for r in results] == ["probe.memory_copy", "probe.disk_write"]
        assert all(float(r.value.removesuffix(" MB/s")) > 0 for r in results)
        slow = Limits(memory_copy_mb_per_s=1e9, disk_write_mb_per_s=1e9)
        results = nodeprobe.probe_memory(Request(limits=slow)) + nodeprobe.probe_disk(Request(limits=slow))
        assert [r.ok for r in results] == [False, False]

    @pytest.mark.parametrize(
        ("script", "oks"),
        [
            ('print(\'{"skip": "torch sees no GPU"}\')', [None]),
            ("raise SystemExit('CUDA error: an illegal memory access')", [False]),
            (
                'print(\'{"gpus": [{"gpu": 0, "tflops": 600.5, "same": true, "finite": true},'
                ' {"gpu": 1, "tflops": 590, "same": false, "finite": true}]}\')',
                [True, False],
            ),
        ],
    )
    def test_what_the_gpu_probe_printed_is_judged(self, script: str, oks: list[bool | None]) -> None:
        results = nodeprobe.probe_gpus(Request(), script)
        assert [r.ok for r in results] == oks
        if oks == [False]:
            assert "illegal memory access" in results[0].detail

    def test_the_real_gpu_probe_says_that_there_is_none(self) -> None:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
        (result,) = nodeprobe.probe_gpus(Request())
        assert (result.ok, result.detail) == (None, "torch sees no GPU")


DCGM_3 = {
    "DCGM GPU Diagnostic": {
        "test_categories": [
            {
                "category": "Hardware",
                "tests": [
                    {
                        "name": "GPU Memory",
                        "results": [
                            {"gpu_ids": "0", "status": "PASS"},
                            {"gpu_ids": "3", "status": "FAIL", "warnings": "uncorrectable error at row 7"},
                        ],
                    },
                    {"name": "Pulse Test", "results": [{"gpu_ids": "0", "status": "SKIP"}]},
                ],
            }
        ]
    }
}
DCGM_4 = {
    "DCGM Diagnostic": {
        "test_categories": [
            {
                "category": "Integration",
                "tests": [
                    {
                        "name": "pcie",
                        "results": [{"entity_group": "GPU", "entity_id": 0, "status": "Pass"}],
                        "test_summary": {"status": "Pass"},
                    }
                ],
            }
        ]
    }
}


class TestDcgm:
    """With recorded shapes of its output and a stand-in for the program: there is no GPU here."""

    def test_both_layouts_are_read(self) -> None:
        passed, failed = nodeprobe.read_dcgm(json.dumps(DCGM_3))
        assert passed == 1
        assert failed == ["Hardware GPU Memory GPU 3 uncorrectable error at row 7"]
        assert nodeprobe.read_dcgm("Successfully ran\n" + json.dumps(DCGM_4)) == (2, [])

    @pytest.mark.parametrize("text", ["", "Error: unable to connect", "{broken", "{}", '{"status": "WARN"}'])
    def test_no_verdict_is_none(self, text: str) -> None:
        assert nodeprobe.read_dcgm(text) == (0, [])

    @pytest.fixture
    def install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
        def install(output: str, code: int) -> None:
            (tmp_path / "out").write_text(output)
            tool = tmp_path / "dcgmi"
            tool.write_text(f'#!/bin/sh\n[ "$*" = "diag -r 2 -j" ] || exit 9\ncat {tmp_path}/out\nexit {code}\n')
            tool.chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

        return install

    @pytest.mark.parametrize(
        ("output", "code", "ok"),
        [
            (json.dumps(DCGM_4), 0, True),
            (json.dumps(DCGM_3), 0, False),
            ("Error: unable to establish a connection", 206, None),
            ("", 0, None),
        ],
    )
    def test_verdict(self, install: Callable[[str, int], None], output: str, code: int, ok: bool | None) -> None:
        install(output, code)
        assert nodeprobe.probe_dcgm(Request())[0].ok is ok

    def test_levels(self) -> None:
        assert [len(nodeprobe.probes(level)) for level in (1, 2, 3)] == [0, 3, 4]
