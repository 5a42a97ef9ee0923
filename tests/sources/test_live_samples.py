"""Live samples against stand-ins: NVML as a module of our own, an exporter on this machine, trees as the kernel lays them out.

Nothing here has seen a GPU; the names and numbers of the stand-in are those of nvml.h.
"""

from __future__ import annotations

import http.server
import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.records.event import Event
from keepstep.sources.live import dcgm, ibsysfs, nvml
from keepstep.sources.reading import read_text


class NVMLError_GpuIsLost(Exception):
    """As pynvml's."""


class StandIn:
    """The module `pynvml` with the functions that are asked. `lost`: index of a GPU that does not answer."""

    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(self, lost: int | None = None, rows: tuple[int, ...] = (0, 0, 0, 0), action: int = 0) -> None:
        self.lost = lost
        self.rows = rows
        self.action = action
        self.down = False

    def nvmlInit(self) -> None:
        if self.down:
            raise RuntimeError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == self.lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"GPU-0000000%d-0000-0000-0000-000000000000" % handle

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=b"00000000:1%d:00.0" % handle)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.10"

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8 if handle else 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=99, memory=1)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 650_100

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x4

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return {(0, 0): 5, (1, 0): 0, (0, 1): 50, (1, 1): 1}[kind, counter]

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, ...]:
        return self.rows

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.action))]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=77, usedGpuMemory=1 << 30)]


def signatures(events: list[Event]) -> set[str]:
    return {e.signature for e in events}


def test_nvml_gives_the_levels_that_nvidia_smi_prints() -> None:
    sample = nvml.sample_gpus(shipped(), StandIn())
    assert sample.problem is None
    first = next(e for e in sample.events if e.signature == "gpu.sample")
    assert first.gpu is not None and (first.gpu.index, first.gpu.pci) == (0, "0000:10:00.0")
    levels = first.attrs["levels"]
    assert (
        levels["power"] == 650.1 and levels["reason_sw_power_cap"] is True and levels["ecc_corrected_aggregate"] == 50
    )
    assert levels["recovery"] == "none" and levels["remap_failed"] is False and levels["driver"] == "570.10"
    (slow,) = [e for e in sample.events if e.signature == "gpu.pcie_degraded"]
    assert slow.gpu is not None and slow.gpu.index == 1
    (held, _) = [e for e in sample.events if e.signature == "gpu.process"]
    assert held.attrs == {"pid": 77, "used_mib": 1024}


@pytest.mark.parametrize(
    ("nvml_module", "signature"),
    [
        (StandIn(rows=(0, 9, 0, 1)), "gpu.remap_failed"),
        (StandIn(rows=(0, 1, 1, 0)), "gpu.remap_pending"),
        (StandIn(action=1), "gpu.recovery.reset"),
        (StandIn(action=2), "gpu.recovery.reboot"),
        (StandIn(lost=1), "gpu.lost"),
    ],
)
def test_nvml_states_are_the_same_events_as_those_of_the_tool(nvml_module: StandIn, signature: str) -> None:
    assert signature in signatures(nvml.sample_gpus(shipped(), nvml_module).events)


def test_what_is_not_there_is_said_and_is_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    down = StandIn()
    down.down = True
    sample = nvml.sample_gpus(shipped(), down)
    assert sample.events == [] and "Driver Not Loaded" in str(sample.problem)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "nvidia-ml-py is not installed" in str(nvml.sample_gpus(shipped()).problem)


def test_a_driver_that_hangs_is_given_up() -> None:
    release = threading.Event()

    class Hanging(StandIn):
        def nvmlInit(self) -> None:
            release.wait(30)

    sample = nvml.sample_gpus(shipped(), Hanging(), deadline_s=0.05)
    release.set()
    assert sample.events == [] and "does not answer" in str(sample.problem)


@pytest.fixture
def exporter() -> Iterator[str]:
    """An exporter on this machine with one GPU whose row remapping failed."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(b'DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="1",UUID="GPU-1",Hostname="n1"} 1\n')

        def log_message(self, format: str, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_exporter_is_scraped(exporter: str) -> None:
    text = dcgm.scrape(f"{exporter}/metrics")
    events = read_text("metrics", text, shipped(), Matcher(shipped())).events
    assert "gpu.remap_failed" in signatures(events) and {e.node for e in events} == {"n1"}


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/", "n1:9400/metrics"])
def test_only_http_addresses_are_read(url: str) -> None:
    with pytest.raises(dcgm.ScrapeError, match="not an http address"):
        dcgm.scrape(url)


def test_what_answers_wrongly_or_too_much_is_refused(exporter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dcgm.ScrapeError, match="404"):
        dcgm.scrape(f"{exporter}/other")
    monkeypatch.setattr(dcgm, "SIZE_LIMIT", 10)
    with pytest.raises(dcgm.ScrapeError, match="more than 10 bytes"):
        dcgm.scrape(f"{exporter}/metrics")


def tree(root: Path, ports: dict[str, dict[str, str]]) -> Path:
    """A tree as /sys/class/infiniband. `ports`: device -> file below ports/1 -> content."""
    for device, files in ports.items():
        for name, content in files.items():
            file = root / device / "ports" / "1" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n")
    return root


PORT = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
    "counters/symbol_error": "17",
    "counters/link_downed": "255",
    "counters/port_xmit_data": "123456",
    "hw_counters/local_ack_timeout_err": "0",
}


def test_ports_and_totals_of_a_tree(tmp_path: Path) -> None:
    reading = ibsysfs.read(tree(tmp_path, {"mlx5_0": PORT, "mlx5_1": PORT | {"state": "1: DOWN"}}))
    assert reading.levels["mlx5_0", "1"]["rate"] == "400 Gb/sec (4X NDR)"
    assert reading.counters["mlx5_0", "1"] == {"symbol_error": 17, "link_downed": 255, "local_ack_timeout_err": 0}
    events = ibsysfs.events_of(reading, reading, 60.0, shipped(), "n1")
    assert [e.nic for e in events if e.signature == "nic.port_down"] == ["mlx5_1"]


def test_totals_of_a_lifetime_are_no_fault_and_a_rate_is(tmp_path: Path) -> None:
    before = ibsysfs.read(tree(tmp_path / "a", {f"mlx5_{i}": PORT for i in range(4)}))
    same = ibsysfs.events_of(before, before, 60.0, shipped(), "n1")
    assert attribute(same, shipped()).action in ("none", "ask_human")
    worse = {f"mlx5_{i}": PORT | ({"counters/symbol_error": "917"} if i == 2 else {}) for i in range(4)}
    after = ibsysfs.read(tree(tmp_path / "b", worse))
    verdict = attribute(ibsysfs.events_of(before, after, 60.0, shipped(), "n1"), shipped())
    assert (verdict.fault_class, verdict.action, verdict.entity.nic) == ("fabric", "drain_at_checkpoint", "mlx5_2")


def test_ports_that_may_not_be_read_are_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, {"mlx5_0": PORT})
    opened = Path.open

    def refusing(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "symbol_error":
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    reading = ibsysfs.read(root)
    assert reading.denied == (("mlx5_0", "1"),) and ("mlx5_0", "1") not in reading.counters
    monkeypatch.undo()
    assert ("mlx5_0", "1") not in ibsysfs.read(root, reading.denied).counters


def test_a_machine_without_devices(tmp_path: Path) -> None:
    assert not ibsysfs.available(tmp_path / "none") and not ibsysfs.available(tmp_path)
    assert ibsysfs.read(tmp_path / "none").levels == {}


def test_a_tree_of_a_real_machine() -> None:
    shared = os.environ.get("KEEPSTEP_SHARED")
    if not shared:
        pytest.skip("KEEPSTEP_SHARED is not set")
    root = Path(shared) / "data/sysfs/class-infiniband-h100"
    reading = ibsysfs.read(root)
    assert len(reading.levels) == 9 and all(v["state"] == "4: ACTIVE" for v in reading.levels.values())
    assert reading.counters["mlx5_1", "1"]["link_downed"] == 255
    verdict = attribute(ibsysfs.events_of(reading, reading, 30.0, shipped(), "n1"), shipped())
    assert verdict.action in ("none", "ask_human") and verdict.fault_class == "unknown"
