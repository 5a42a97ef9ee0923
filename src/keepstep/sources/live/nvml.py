"""One sample of the GPUs of this machine through NVML (nvidia-ml-py, extra `gpu`).

The module `pynvml` is passed around as an object, so that tests give a stand-in. A sick GPU may never answer: everything runs in a
thread that is given up after a deadline.
"""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.fields import BY_NAME
from keepstep.sources.snapshots.gpu_health import gpu_events, process_event
from keepstep.sources.snapshots.samples import Building, GpuSample

DEADLINE_S = 20.0
"""For all GPUs together. A healthy driver needs milliseconds each; without persistence mode the first call wakes them up."""
GPUS_LIMIT = 64
MIB = 1 << 20

_SIMPLE: tuple[tuple[str, str, tuple[Any, ...], float], ...] = (
    ("pcie_gen", "nvmlDeviceGetCurrPcieLinkGeneration", (), 1),
    ("pcie_gen_max", "nvmlDeviceGetMaxPcieLinkGeneration", (), 1),
    ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", (), 1),
    ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", (), 1),
    ("pcie_replays", "nvmlDeviceGetPcieReplayCounter", (), 1),
    ("temperature", "nvmlDeviceGetTemperature", (0,), 1),
    ("clock_sm", "nvmlDeviceGetClockInfo", (1,), 1),
    ("clock_sm_max", "nvmlDeviceGetMaxClockInfo", (1,), 1),
    ("power", "nvmlDeviceGetPowerUsage", (), 1000),
    ("power_limit", "nvmlDeviceGetEnforcedPowerLimit", (), 1000),
    ("power_default", "nvmlDeviceGetPowerManagementDefaultLimit", (), 1000),
    ("ecc_corrected_volatile", "nvmlDeviceGetTotalEccErrors", (0, 0), 1),
    ("ecc_uncorrected_volatile", "nvmlDeviceGetTotalEccErrors", (1, 0), 1),
    ("ecc_corrected_aggregate", "nvmlDeviceGetTotalEccErrors", (0, 1), 1),
    ("ecc_uncorrected_aggregate", "nvmlDeviceGetTotalEccErrors", (1, 1), 1),
    ("retired_pending", "nvmlDeviceGetRetiredPagesPendingStatus", (), 1),
)
"""Level, function, arguments after the device, divisor. Numbers of clocks, sensors and error kinds are those of nvml.h."""
_FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}


class Sample(NamedTuple):
    """Events of one sample. `problem`: why there are none, or not all; None when everything answered."""

    events: list[Event]
    problem: str | None


def sample_gpus(catalog: Catalog, nvml: Any | None = None, deadline_s: float = DEADLINE_S) -> Sample:
    """Levels and events of all GPUs of this machine. Never raises; gives up after `deadline_s`."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Sample([], "NVML is not available: nvidia-ml-py is not installed (pip install 'keepstep[gpu]')")
    box: list[Sample] = []
    thread = threading.Thread(target=lambda: box.append(_sample(catalog, nvml)), daemon=True, name="keepstep-nvml")
    thread.start()
    thread.join(deadline_s)
    return box[0] if box else Sample([], f"the GPU driver does not answer within {deadline_s:g} s")


def _sample(catalog: Catalog, nvml: Any) -> Sample:
    try:
        nvml.nvmlInit()
    except Exception as error:
        return Sample([], f"NVML is not available: {_message(error)}")
    document = Document("nvml", "nvml", (), socket.gethostname())
    try:
        count = min(int(nvml.nvmlDeviceGetCount()), GPUS_LIMIT)
        read = [_read(nvml, index) for index in range(count)]
        samples = [sample for sample, _ in read if sample is not None]
        events = gpu_events(samples, document, catalog)
        for sample, processes in read:
            gpu = None if sample is None else sample.gpu
            events += [process_event(catalog, document, None, pid, used, gpu) for pid, used in processes]
        return Sample(events, None if count else "NVML knows no GPU here")
    except Exception as error:
        return Sample([], f"NVML stopped answering: {_message(error)}")
    finally:
        _quiet(nvml.nvmlShutdown)


def _read(nvml: Any, index: int) -> tuple[GpuSample | None, list[tuple[int, str]]]:
    """One GPU. Errors that say that it is gone become `lost`; everything that it does not offer is left out."""
    building = Building()
    building.identity["index"] = str(index)

    def ask(name: str, *args: Any) -> Any:
        function = getattr(nvml, name, None)
        if function is None:
            return None
        try:
            return function(*args)
        except Exception as error:
            # NotSupported and its kin differ between drivers; these names do not.
            if any(word in _message(error) for word in ("Lost", "GPU is lost", "Unknown Error", "fallen off")):
                building.lost = building.lost or Line(0, f"{name}: {_message(error)}", f"{name}: {_message(error)}")
            return None

    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        building.lost = building.lost or Line(0, "no device handle", "no device handle")
        return building.finish(), []
    building.identity["uuid"] = _text(ask("nvmlDeviceGetUUID", handle)) or ""
    pci = ask("nvmlDeviceGetPciInfo", handle)
    building.identity["pci"] = _text(getattr(pci, "busId", None)) or ""
    for name, text in _levels(nvml, ask, handle):
        building.set(BY_NAME[name], text, None)
    processes = []
    for process in ask("nvmlDeviceGetComputeRunningProcesses", handle) or []:
        used = getattr(process, "usedGpuMemory", None)
        processes.append((int(process.pid), "" if used is None else f"{used / MIB:.0f} MiB"))
    return building.finish(), processes


def _levels(nvml: Any, ask: Callable[..., Any], handle: Any) -> Iterator[tuple[str, str]]:
    """Levels as texts, which `Building` reads as it reads a tool's output."""
    for name, function, args, divisor in _SIMPLE:
        value = ask(function, handle, *args)
        if isinstance(value, int | float):
            yield name, f"{value / divisor:g}" if divisor != 1 else str(value)
    for name, function in (("product", "nvmlDeviceGetName"),):
        if (text := _text(ask(function, handle))) is not None:
            yield name, text
    if (version := _text(ask("nvmlSystemGetDriverVersion"))) is not None:
        yield "driver", version
    state = ask("nvmlDeviceGetPerformanceState", handle)
    if isinstance(state, int) and 0 <= state < 16:
        yield "pstate", f"P{state}"
    if (used := ask("nvmlDeviceGetUtilizationRates", handle)) is not None:
        yield "utilisation", str(used.gpu)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if isinstance(reasons, int):
        yield "reasons", str(reasons)
    if (rows := ask("nvmlDeviceGetRemappedRows", handle)) is not None:
        names = ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")
        yield from zip(names, (str(int(r)) for r in rows), strict=False)
    yield from _rarer(nvml, ask, handle)


def _rarer(nvml: Any, ask: Callable[..., Any], handle: Any) -> Iterator[tuple[str, str]]:
    """What only newer drivers tell: the recovery action, and the state of the NVLink fabric."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = ask("nvmlDeviceGetFieldValues", handle, [field]) if field is not None else None
    if values and values[0].nvmlReturn == 0:
        yield "recovery", str(int(values[0].value.uiVal))
    kind = getattr(nvml, "c_nvmlGpuFabricInfo_t", None)
    info = kind() if kind is not None else None
    if info is not None and ask("nvmlDeviceGetGpuFabricInfo", handle, info) is not None:
        state = _FABRIC_STATES.get(int(getattr(info, "state", 0)))
        if state is not None:
            yield "fabric_state", state
            yield "fabric_status", "Success" if int(getattr(info, "status", 0)) == 0 else "Failure"


def _text(value: Any) -> str | None:
    """Older modules return bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else None


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _quiet(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:
        return
