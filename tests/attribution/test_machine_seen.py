"""What a machine does not have, what came and went, what goes with a version: what calms, and what must not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.sources.documents import split
from keepstep.sources.monitors.ledgers import ledger_events
from tests.attribution.jobtexts import conclusions, lines, verdict_of

DOWN = lines(
    "| Overall Health            | Failure                                      |",
    "| -> 0                      | Failure                                      |",
    "|    -> NVLINK system       | Failure                                      |",
    "|                           | GPU 0's NvLink link 0 is currently down      |",
)
PCIE = "GPU 0: NVIDIA A100 80GB PCIe (UUID: GPU-0c1d2e3f-1111-2222-3333-444455556666)"
L40S = "GPU 0: NVIDIA L40S (UUID: GPU-0c1d2e3f-1111-2222-3333-444455556666)"
SXM = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-0c1d2e3f-1111-2222-3333-444455556666)"
NONE_UP = "NVML: Unable to retrieve NVLink information as all links are inActive"
BROKEN = (
    "kernel: NVRM: Xid (PCI:0000:17:00): 74, pid='<unknown>', NVLink: fatal error detected on link 3(0x0, 0x0, 0x10000)"
)
NO_SWITCH = (
    "nv-fabricmanager[9]: query of NVSwitch devices failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]"
)
FM_FAILED = "systemd[1]: nvidia-fabricmanager.service: Failed with result 'exit-code'."


@pytest.mark.parametrize(
    "text",
    [
        lines(DOWN, PCIE, NONE_UP, "inventory: no NVLink bridge fitted"),
        lines(DOWN, L40S),
        lines(NO_SWITCH, FM_FAILED, L40S),
    ],
)
def test_what_the_machine_does_not_have_is_not_down(text: str) -> None:
    verdict = verdict_of(text)
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


@pytest.mark.parametrize(
    "text",
    [
        DOWN,
        lines(DOWN, PCIE),
        lines(DOWN, PCIE, NONE_UP),
        lines(DOWN, PCIE, NONE_UP, "NVLink bridge fitted between GPU 0 and GPU 1"),
        lines(DOWN, SXM, NONE_UP),
        lines(DOWN, L40S, SXM),
        lines(DOWN, PCIE, NONE_UP, BROKEN),
        lines(DOWN, PCIE, "$ nvidia-smi nvlink -s", PCIE, "\t Link 0: 25 GB/s", "\t Link 1: <inactive>"),
        lines(NO_SWITCH, FM_FAILED, SXM),
        lines(NO_SWITCH, FM_FAILED),
    ],
)
def test_links_and_switches_that_are_there_or_may_be_stay_a_fault(text: str) -> None:
    assert not verdict_of(text).no_current_fault


BAD = "12:01:14  True   GpuDcgmConnectivityFailureIsNotHealthy  ErrorCode:DCGM_CONNECTIVITY_ERROR Failed to connect to DCGM"
GOOD = "12:03:52  False  GpuDcgmConnectivityFailureIsHealthy     No Health Failures"
NEW = "nvidia-dcgm-fcrm2                    Pending    False"
FALLEN = "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=0, GPU has fallen off the bus."


def test_a_condition_of_a_node_that_was_being_set_up_is_over() -> None:
    verdict = verdict_of(lines(NEW, BAD, GOOD))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("platform", "none", True)


@pytest.mark.parametrize(
    "text",
    [
        lines(NEW, BAD),
        lines(NEW, GOOD, BAD.replace("12:01", "12:31")),
        lines(NEW, BAD, GOOD, FALLEN),
        lines(NEW, BAD, GOOD.replace("GpuDcgmConnectivityFailure", "GpuPowerWatch")),
    ],
)
def test_a_condition_that_stands_or_is_another_one_is_not_over(text: str) -> None:
    assert not verdict_of(text).no_current_fault


FIRST = "12:01:14 dcgm-exporter-x2 Error: Failed to initialize DCGM: error connecting to nv-hostengine"
LOOP = "12:01:15 kubelet Back-off restarting failed container dcgm-exporter"
UP = "12:03:41 dcgm-exporter-x2 DCGM successfully initialized!"


@pytest.mark.parametrize(
    ("text", "calm"),
    [
        (lines(FIRST, LOOP, UP), True),
        (lines(FIRST, LOOP), False),
        (lines(FIRST, LOOP.replace("dcgm-exporter", "trainer"), UP), False),
        (lines(UP.replace("12:03", "12:00"), FIRST, LOOP), False),
    ],
)
def test_a_monitor_that_came_up_late_is_no_fault(text: str, calm: bool) -> None:
    assert verdict_of(text).no_current_fault is calm


UUID = "GPU-52f37cd4-0000-7b6d-2b9f-9ab862e20000"
NAMED = f"Mar 01 10:00:00 n-7 kernel: NVRM: GPU at PCI:0000:1a:00: {UUID}"
STOPPED = (
    "Mar 01 10:00:01 n-7 kernel: NVRM: Xid (PCI:0000:1a:00): 119, pid=88112, name=python3, Timeout after 6s of waiting for"
    " RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20801702 0x4)."
)
RESET = f"Mar 01 10:20:00 n-7 nvsentinel-gpu-reset[77]: GPU reset executed: {UUID}, success: true"


def test_a_reset_that_names_the_gpu_by_its_uuid_takes_back_what_the_driver_said_of_its_address() -> None:
    verdict = verdict_of(lines(NAMED, STOPPED, RESET))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


@pytest.mark.parametrize(
    "text",
    [
        lines(NAMED, STOPPED, RESET.replace("true", "false")),
        lines(NAMED, STOPPED, RESET.replace("52f37cd4", "99999999")),
        lines(NAMED, RESET, STOPPED.replace("10:00:01", "10:41:00")),
        lines(NAMED, FALLEN, RESET),
    ],
)
def test_a_reset_that_failed_or_was_of_another_gpu_or_before_takes_nothing_back(text: str) -> None:
    assert not verdict_of(text).no_current_fault


RING = (
    "Nov 02 10:00:00 m-4 kernel: amdgpu 0000:26:00.0: amdgpu: ring sdma0 timeout, signaled seq=7712, emitted seq=7714"
)


@pytest.mark.parametrize(("result", "calm"), [("GPU reset(2) succeeded!", True), ("GPU reset(2) failed", False)])
def test_a_card_of_amd_is_well_again_when_its_driver_has_reset_it(result: str, calm: bool) -> None:
    after = f"Nov 02 10:00:07 m-4 kernel: amdgpu 0000:26:00.0: amdgpu: {result}"
    assert verdict_of(lines(RING, after)).no_current_fault is calm


XID = "Sep 15 08:12:44 n-3 kernel: NVRM: Xid (PCI:0000:17:00): 109, pid=5, name=python, Ch 00000016, errorString CTX SWITCH TIMEOUT"


def _fleet(*rows: str) -> str:
    return lines(XID, "==> fleet <==", "driver_version   hosts   hosts_with_xid109", *rows)


def test_what_goes_with_a_version_is_the_versions() -> None:
    verdict = verdict_of(_fleet("570.133.20   512   1", "575.57.08   48   44"))
    assert (verdict.fault_class, verdict.action) == ("framework", "ask_human")


@pytest.mark.parametrize(
    "rows",
    [
        ("570.133.20   512   300", "575.57.08   48   44"),
        ("570.133.20   512   1", "575.57.08   48   2"),
        ("570.133.20   2   0", "575.57.08   48   44"),
        ("570.133.20   512   1", "575.57.08   2   2"),
        ("575.57.08   48   44",),
    ],
)
def test_a_fault_of_all_versions_or_of_few_machines_is_not_the_versions(rows: tuple[str, ...]) -> None:
    assert "derived.version.of_table" not in conclusions(_fleet(*rows))


QUERY = "$ nvidia-smi --query-gpu=index,temperature.gpu,power.draw,utilization.gpu --format=csv,noheader"


def _cards(odd: str) -> str:
    return lines(QUERY, *(f"{n}, {33 + n % 3}, 68.0 W, 0 %" for n in range(7)), odd)


@pytest.mark.parametrize(
    ("odd", "right"),
    [("7, 81, 74.0 W, 0 %", True), ("7, 81, 674.0 W, 100 %", False), ("7, 44, 70.0 W, 0 %", False)],
)
def test_an_idle_card_far_warmer_than_its_idle_peers_does_not_lose_its_heat(odd: str, right: bool) -> None:
    assert ("derived.gpu.hot_idle" in conclusions(_cards(odd))) is right


def _one(*samples: str) -> str:
    header = (
        "$ nvidia-smi --query-gpu=timestamp,pci.bus_id,temperature.gpu,power.draw,utilization.gpu --format=csv,noheader"
    )
    return lines(header, *samples)


@pytest.mark.parametrize(
    ("first", "last", "right"),
    [
        (
            "2031/04/15 17:31:02, 00000000:02:00.0, 64, 58 W, 0 %",
            "2031/04/15 17:46:02, 00000000:02:00.0, 82, 59 W, 0 %",
            True,
        ),
        (
            "2031/04/15 17:31:02, 00000000:02:00.0, 88, 58 W, 0 %",
            "2031/04/15 17:46:02, 00000000:02:00.0, 76, 59 W, 0 %",
            False,
        ),
        (
            "2031/04/15 17:31:02, 00000000:02:00.0, 76, 58 W, 0 %",
            "2031/04/15 17:31:12, 00000000:02:00.0, 77, 59 W, 0 %",
            False,
        ),
        (
            "2031/04/15 17:31:02, 00000000:02:00.0, 76, 300 W, 99 %",
            "2031/04/15 17:46:02, 00000000:02:00.0, 77, 300 W, 99 %",
            False,
        ),
    ],
)
def test_a_card_that_stays_hot_for_minutes_without_work_is_to_be_looked_at(first: str, last: str, right: bool) -> None:
    assert ("derived.gpu.hot_idle" in conclusions(_one(first, last))) is right


@given(st.lists(st.text(alphabet="ab1 |,\t²", max_size=30), max_size=6))
def test_any_table_under_a_header_of_versions_is_read(rows: list[str]) -> None:
    text = "\n".join(["driver   nodes   affected", *rows])
    for document in split("f.txt", text):
        for event in ledger_events(document, shipped()):
            assert all(isinstance(n, int) for row in event.attrs.get("versions", []) for n in row[1:])


PORT_DOWN = "alert IbPortDown firing node=w-3 port mlx5_2/1 state DOWN phys Disabled"
SPARE = "inventory: w-3 mlx5_2 is not cabled on this node type (spare port)"


@pytest.mark.parametrize(
    ("text", "calm"),
    [
        (lines(PORT_DOWN, SPARE), True),
        (PORT_DOWN, False),
        (lines(PORT_DOWN, SPARE.replace("mlx5_2", "mlx5_7")), False),
        (lines(PORT_DOWN, SPARE, PORT_DOWN.replace("mlx5_2", "mlx5_0")), False),
        (lines(PORT_DOWN, "w-3 mlx5_2: no cable"), False),
        (lines(PORT_DOWN, SPARE, FALLEN), False),
    ],
)
def test_a_port_that_is_not_used_on_such_machines_is_down_as_it_should_be(text: str, calm: bool) -> None:
    assert verdict_of(text).no_current_fault is calm
