"""A stand-in for the module `pynvml`, with its names and its ways: bytes, errors as exceptions, calls that hang."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MB = 1 << 20


class NVMLError(Exception):
    """As pynvml.NVMLError."""


@dataclass
class FakeGpu:
    """State of one GPU. None: not supported."""

    uuid: str
    used_mb: float = 0.0
    reserved_mb: float = 600.0
    total_mb: float = 80_000.0
    processes: dict[int, float] = field(default_factory=dict)
    ecc: tuple[int, int] | None = (0, 0)
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    action: int | None = 0
    mig: list[FakeGpu] = field(default_factory=list)
    hangs: bool = False


class FakeNvml:
    """Pass it where a module is taken."""

    nvmlMemory_v2 = 0x2000028
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_AGGREGATE_ECC = 1
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(self, *gpus: FakeGpu, init_error: str | None = None, init_hangs: bool = False) -> None:
        self.gpus = list(gpus)
        self.init_error = init_error
        self.init_hangs = init_hangs
        self.release = threading.Event()
        """Set it to let hung calls come back."""
        self.calls: list[str] = []

    def _enter(self, name: str, gpu: FakeGpu | None = None) -> None:
        self.calls.append(name)
        if (gpu is not None and gpu.hangs) or (name == "nvmlInit" and self.init_hangs):
            self.release.wait(60)

    def nvmlInit(self) -> None:
        self._enter("nvmlInit")
        if self.init_error:
            raise NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self._enter("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7 if gpu.mig else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.mig):
            raise NVMLError("Not Found")
        return gpu.mig[index]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:
        self._enter("nvmlDeviceGetName", gpu)
        return b"NVIDIA H100"

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(busId=b"00000000:0%d:00.0" % self.gpus.index(gpu))

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        self._enter("nvmlDeviceGetMemoryInfo", gpu)
        used = gpu.used_mb + (0 if version else gpu.reserved_mb)
        return SimpleNamespace(used=int(used * MB), total=int(gpu.total_mb * MB))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=int(mb * MB)) for pid, mb in gpu.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        raise NVMLError("Not Supported")

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, error_type: int, counter: int) -> int:
        assert error_type == 1
        if gpu.ecc is None:
            raise NVMLError("Not Supported")
        return gpu.ecc[counter]

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:
        if gpu.rows is None:
            raise NVMLError("Not Supported")
        return gpu.rows

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[int]) -> list[Any]:
        assert fields == [230]
        if gpu.action is None:
            return [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=0))]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=gpu.action))]
