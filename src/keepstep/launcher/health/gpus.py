"""The GPUs that a process of this job would use, and their state, through NVML (nvidia-ml-py, extra `gpu`).

The module `pynvml` is passed around as an object, so that tests give a stand-in. Every call into it has a time-out: with a sick GPU
the driver may never answer, and that is what these records must be able to say.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from keepstep.launcher.bounded import Pending

CALL_TIMEOUT_S = 5.0
"""A healthy driver answers in milliseconds; the first call after a while may have to wake GPUs without persistence mode."""
MB = 1 << 20
RECOVERY_ACTIONS = {
    0: "none",
    1: "gpu_reset",
    2: "node_reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
"""NVML_GPU_RECOVERY_ACTION_* (nvml.h); drivers from R570 on tell it."""


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a GPU. `pid` is the driver's view: in a container it may be another namespace's."""

    pid: int
    used_mb: float | None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or one MIG instance (then `mig` is its UUID and memory is the instance's). None: this driver does not tell."""

    index: int
    uuid: str
    mig: str | None = None
    pci: str | None = None
    name: str | None = None
    memory_used_mb: float | None = None
    """Without what the driver reserves for itself, where the driver tells the two apart."""
    memory_total_mb: float | None = None
    processes: list[GpuProcess] = []
    ecc_volatile: int | None = None
    """Uncorrectable memory errors since the last reset."""
    ecc_aggregate: int | None = None
    """Uncorrectable memory errors in the life of the GPU."""
    remap_pending: bool | None = None
    """A row waits for a reset to be replaced."""
    remap_failed: bool | None = None
    recovery_action: str | None = None
    """What the driver asks for: one of RECOVERY_ACTIONS."""
    answering: bool = True


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML said. `gpus` is empty when `problem` tells why it could not be asked."""

    gpus: list[Gpu] = []
    available: bool = True
    """False: no NVML library, module or GPU driver here. That is no fault of the node by itself."""
    answering: bool = True
    problem: str | None = None
    ignored: str | None = None
    """The first entry of CUDA_VISIBLE_DEVICES that names no GPU; CUDA ignores it and all after it."""


class NotAnsweringError(Exception):
    """Raised when a call into the driver did not come back in time."""


class Driver:
    """NVML behind a time-out. After one call has hung no further one is made until it has come back."""

    def __init__(self, nvml: Any, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.nvml = nvml
        self.timeout_s = timeout_s
        self._hung: Pending[Any] | None = None

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of NVML. Raises NotAnsweringError, AttributeError (older module) or the module's own errors."""
        if self._hung is not None and self._hung.running:
            raise NotAnsweringError("an earlier call has not come back")
        function = getattr(self.nvml, name)
        pending: Pending[Any] = Pending(lambda: function(*args, **kwargs))
        try:
            return pending.result(self.timeout_s)
        except TimeoutError:
            if not pending.running:
                raise
            self._hung = pending
            raise NotAnsweringError(f"{name}: no answer within {self.timeout_s:g} s") from None

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """As `call`, with None for everything this GPU, driver or module does not offer. Raises NotAnsweringError."""
        try:
            return self.call(name, *args, **kwargs)
        except NotAnsweringError:
            raise
        except Exception:
            # NVMLError_NotSupported and its kin: which of them differs between drivers, "not told" is what all mean.
            return None


def load_nvml() -> Any | None:
    """The module `pynvml`, None when nvidia-ml-py is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_gpus(nvml: Any | None = None, visible: str | None = None, timeout_s: float = CALL_TIMEOUT_S) -> GpuReport:
    """State of the GPUs that a process of this job would use. Never raises, never hangs for longer than a call's time-out.

    `visible`: a value of CUDA_VISIBLE_DEVICES, None: this process's own. Indices are NVML's, in PCI order, which is also CUDA's
    where all GPUs are of one model or CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    nvml = load_nvml() if nvml is None else nvml
    if nvml is None:
        return GpuReport(available=False, problem="nvidia-ml-py is not installed: pip install 'keepstep[gpu]'")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    driver = Driver(nvml, timeout_s)
    try:
        driver.call("nvmlInit")
    except NotAnsweringError as error:
        return GpuReport(answering=False, problem=f"the GPU driver does not answer: {error}")
    except Exception as error:
        return GpuReport(available=False, problem=f"NVML cannot be used: {error}")
    try:
        chosen, ignored = select(list(_devices(driver)), visible)
        gpus = [_read(driver, device) for device in chosen]
        return GpuReport(
            gpus=gpus,
            answering=all(g.answering for g in gpus),
            problem=None if all(g.answering for g in gpus) else "a GPU does not answer",
            ignored=ignored,
        )
    except NotAnsweringError as error:
        return GpuReport(answering=False, problem=f"the GPU driver does not answer: {error}")
    except Exception as error:
        return GpuReport(available=False, problem=f"NVML cannot be used: {type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(Exception):
            driver.call("nvmlShutdown")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device as CUDA_VISIBLE_DEVICES may name it."""

    index: int
    uuid: str
    handle: Any
    parent: Device | None = None
    """The GPU of a MIG instance."""


def select(devices: list[Device], visible: str | None) -> tuple[list[Device], str | None]:
    """Devices that CUDA_VISIBLE_DEVICES chooses, and the entry at which it stops to mean anything (None: there is none).

    As CUDA reads it: not set means all GPUs, an empty value none; an entry is an index, a GPU-UUID or a MIG-UUID, UUIDs may be
    shortened to a unique beginning; the first entry that names nothing ends the list.
    """
    whole = [d for d in devices if d.parent is None]
    if visible is None:
        return whole, None
    chosen: list[Device] = []
    for raw in visible.split(",") if visible.strip() else []:
        entry = raw.strip()
        if entry.isdigit():
            found = [d for d in whole if d.index == int(entry)]
        elif entry.startswith(("GPU-", "MIG-")):
            found = [d for d in devices if d.uuid.startswith(entry)]
        else:
            found = []
        if len(found) != 1:
            return chosen, entry
        chosen += found
    return chosen, None


def _devices(driver: Driver) -> Iterator[Device]:
    """All GPUs and their MIG instances."""
    for index in range(driver.call("nvmlDeviceGetCount")):
        handle = driver.call("nvmlDeviceGetHandleByIndex", index)
        gpu = Device(index=index, uuid=_text(driver.call("nvmlDeviceGetUUID", handle)), handle=handle)
        yield gpu
        for number in range(driver.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            # Slots without an instance raise NotFound.
            instance = driver.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if instance is not None:
                uuid = _text(driver.call("nvmlDeviceGetUUID", instance))
                yield Device(index=index, uuid=uuid, handle=instance, parent=gpu)


def _read(driver: Driver, device: Device) -> Gpu:
    """State of one device: health of the whole GPU, memory and processes of the instance where it is one."""
    gpu = device.parent or device
    facts: dict[str, Any] = {}
    try:
        _read_memory(driver, device.handle, facts)
        _read_health(driver, gpu.handle, facts)
    except NotAnsweringError:
        facts["answering"] = False
    return Gpu(index=gpu.index, uuid=gpu.uuid, mig=device.uuid if device.parent else None, **facts)


def _read_memory(driver: Driver, handle: Any, facts: dict[str, Any]) -> None:
    # Version 1 counts the driver's own reserve as used, which is more than the usual tolerance on large GPUs.
    version = getattr(driver.nvml, "nvmlMemory_v2", None)
    memory = driver.ask("nvmlDeviceGetMemoryInfo", handle, version) if version is not None else None
    memory = memory or driver.ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is not None:
        facts |= {"memory_used_mb": memory.used / MB, "memory_total_mb": memory.total / MB}
    processes: dict[int, GpuProcess] = {}
    for kind in ("Compute", "Graphics"):
        for item in driver.ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) or []:
            used = item.usedGpuMemory
            processes[item.pid] = GpuProcess(pid=item.pid, used_mb=None if used is None else used / MB)
    facts["processes"] = sorted(processes.values(), key=lambda p: p.pid)


def _read_health(driver: Driver, handle: Any, facts: dict[str, Any]) -> None:
    nvml = driver.nvml
    facts["name"] = _text(driver.ask("nvmlDeviceGetName", handle))
    pci = driver.ask("nvmlDeviceGetPciInfo", handle)
    facts["pci"] = None if pci is None else _text(pci.busId)
    for key, kind in (("ecc_volatile", "NVML_VOLATILE_ECC"), ("ecc_aggregate", "NVML_AGGREGATE_ECC")):
        error_type = getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1)
        facts[key] = driver.ask("nvmlDeviceGetTotalEccErrors", handle, error_type, getattr(nvml, kind, None))
    rows = driver.ask("nvmlDeviceGetRemappedRows", handle)
    if rows is not None:
        facts |= {"remap_pending": bool(rows[2]), "remap_failed": bool(rows[3])}
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = driver.ask("nvmlDeviceGetFieldValues", handle, [field]) if field is not None else None
    if values is not None and values[0].nvmlReturn == 0:
        action = int(values[0].value.uiVal)
        facts["recovery_action"] = RECOVERY_ACTIONS.get(action, f"action_{action}")


def _text(value: Any) -> Any:
    """Older modules return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
