"""GPUs through NVML, with a stand-in for its module: no GPU is needed, and none was used."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.launcher.health import gpus
from keepstep.launcher.health.gpus import read_gpus
from tests.launcher.fake_nvml import FakeGpu, FakeNvml

A, B, C = "GPU-aa11-0000", "GPU-aa22-0000", "GPU-bb33-0000"
M = "MIG-cc44-0000"


@pytest.fixture
def nvml() -> Iterator[FakeNvml]:
    module = FakeNvml(FakeGpu(A), FakeGpu(B, mig=[FakeGpu(M, used_mb=5), FakeGpu("MIG-cc55-0000")]), FakeGpu(C))
    yield module
    module.release.set()


class TestVisibleDevices:
    @pytest.mark.parametrize(
        ("visible", "chosen", "ignored"),
        [
            ("0,2", [A, C], None),
            ("2, 0", [C, A], None),
            ("", [], None),
            ("GPU-bb", [C], None),
            (f"{A},GPU-aa22", [A, B], None),
            ("GPU-aa", [], "GPU-aa"),
            ("0,-1,2", [A], "-1"),
            ("7", [], "7"),
            ("1,nonsense,0", [B], "nonsense"),
        ],
    )
    def test_is_read_as_cuda_reads_it(
        self, nvml: FakeNvml, visible: str, chosen: list[str], ignored: str | None
    ) -> None:
        report = read_gpus(nvml, visible)
        assert ([g.uuid for g in report.gpus], report.ignored) == (chosen, ignored)

    def test_not_set_means_all(self, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert [g.uuid for g in read_gpus(nvml).gpus] == [A, B, C]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert [g.index for g in read_gpus(nvml).gpus] == [1]

    def test_a_mig_instance_has_its_own_memory_and_its_gpus_health(self, nvml: FakeNvml) -> None:
        nvml.gpus[1].rows = (0, 1, 1, 0)
        (gpu,) = read_gpus(nvml, "MIG-cc44").gpus
        assert (gpu.uuid, gpu.mig, gpu.memory_used_mb, gpu.remap_pending) == (B, M, 5, True)
        assert read_gpus(nvml, "MIG-cc").ignored == "MIG-cc"


class TestState:
    def test_everything_that_a_driver_tells(self) -> None:
        nvml = FakeNvml(FakeGpu(A, used_mb=300, processes={9: 200}, ecc=(2, 7), rows=(1, 2, 0, 1), action=4))
        (gpu,) = read_gpus(nvml, "0").gpus
        assert (gpu.name, gpu.pci) == ("NVIDIA H100", "00000000:00:00.0")
        assert (gpu.ecc_volatile, gpu.ecc_aggregate, gpu.remap_pending, gpu.remap_failed) == (2, 7, False, True)
        assert gpu.recovery_action == "drain_and_reset"
        assert [(p.pid, p.used_mb) for p in gpu.processes] == [(9, 200)]

    def test_the_drivers_own_reserve_is_not_in_use(self) -> None:
        nvml = FakeNvml(FakeGpu(A, used_mb=3, reserved_mb=600))
        assert read_gpus(nvml, "0").gpus[0].memory_used_mb == 3
        # An older module knows only the first version of the call.
        del FakeNvml.nvmlMemory_v2
        try:
            assert read_gpus(nvml, "0").gpus[0].memory_used_mb == 603
        finally:
            FakeNvml.nvmlMemory_v2 = 0x2000028

    def test_what_is_not_supported_is_unknown_and_not_zero(self) -> None:
        (gpu,) = read_gpus(FakeNvml(FakeGpu(A, ecc=None, rows=None, action=None)), "0").gpus
        assert (gpu.ecc_volatile, gpu.remap_pending, gpu.remap_failed, gpu.recovery_action) == (None,) * 4
        assert gpu.answering

    def test_an_action_that_is_newer_than_this_table(self) -> None:
        assert read_gpus(FakeNvml(FakeGpu(A, action=99)), "0").gpus[0].recovery_action == "action_99"


class TestTrouble:
    def test_without_the_module_or_driver_nothing_is_wrong_with_the_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        report = read_gpus(FakeNvml(init_error="Driver Not Loaded"))
        assert (report.available, report.answering) == (False, True)
        assert "Driver Not Loaded" in str(report.problem)
        monkeypatch.setattr(gpus, "load_nvml", lambda: None)
        assert "keepstep[gpu]" in str(read_gpus().problem)

    def test_a_hung_driver_is_given_up(self, nvml: FakeNvml) -> None:
        nvml.init_hangs = True
        begin = time.monotonic()
        report = read_gpus(nvml, timeout_s=0.05)
        assert time.monotonic() - begin < 5
        assert (report.available, report.answering) == (True, False)
        assert "nvmlInit: no answer within 0.05 s" in str(report.problem)
        # The shutdown was not even tried: it would hang as well.
        assert nvml.calls == ["nvmlInit"]

    def test_one_hung_gpu_does_not_hide_those_before_it(self, nvml: FakeNvml) -> None:
        nvml.gpus[1].hangs = True
        report = read_gpus(nvml, "0,1,2", timeout_s=0.05)
        # The driver is not asked again while a call hangs in it.
        assert [g.answering for g in report.gpus] == [True, False, False]
        assert not report.answering
        assert nvml.calls.count("nvmlDeviceGetMemoryInfo") == 2


def test_names_are_those_of_nvidia_ml_py() -> None:
    """Every function and constant that is used exists in the real module, where that is installed."""
    pynvml = pytest.importorskip("pynvml")
    source = inspect.getsource(gpus)
    for name in set(re.findall(r'"(nvml[A-Z]\w+|NVML_\w+)"', source)):
        assert hasattr(pynvml, name), name
    for kind in ("Compute", "Graphics"):
        assert hasattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses")
    table = {k: v for k, v in vars(pynvml).items() if k.startswith("NVML_GPU_RECOVERY_ACTION_")}
    assert {v: k.removeprefix("NVML_GPU_RECOVERY_ACTION_").lower() for k, v in table.items()} == gpus.RECOVERY_ACTIONS
    assert isinstance(pynvml.nvmlMemory_v2, int)


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no NVIDIA GPU here")
def test_a_real_driver_answers() -> None:
    pytest.importorskip("pynvml")
    report = read_gpus()
    assert report.answering and report.problem is None
    assert all(g.uuid.startswith("GPU-") and g.memory_total_mb for g in report.gpus)
