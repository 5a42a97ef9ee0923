"""Single lines of GPU drivers, their services, NCCL and torch: whose fault they are, and near ones that blame nobody."""

from __future__ import annotations

import pytest

from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.records.verdict import NODE_ACTIONS, Verdict
from keepstep.sources.reading import read_text

NCCL = "hx-7:811:877 [3] "
KERNEL = "2031-03-04T09:12:01.000000+00:00 hx-7 kernel: "
BLAMED = [
    (NCCL + "init.cc:2501 NCCL WARN Invalid rank requested : 8/8", "user_code", "fail_fast"),
    (
        NCCL + "os/linux.cc:780 NCCL WARN Error: failed to create shared memory file /dev/shm/nccl-XXXXXX, "
        "error No space left on device (28)",
        "user_code",
        "fail_fast",
    ),
    (
        NCCL
        + "p2p_resiliency.cc:47 NCCL WARN NET/IB: Fatal error. Detected 2 failed devices out of 2 devices on the send communicator",
        "fabric",
        "restart_job",
    ),
    (NCCL + "init.cc:731 NCCL WARN Cuda failure 101 'invalid device ordinal'", "user_code", "fail_fast"),
    ("RuntimeError: Distributed package doesn't have NCCL built in", "user_code", "fail_fast"),
    ("RuntimeError: HIP error: invalid device function", "user_code", "fail_fast"),
    (
        "Memory access fault by GPU node-4 (Agent handle: 0x55d0) on address 0x7f1a00000000. Reason: DRAM ECC failure.",
        "hardware",
        "reset_gpu",
    ),
    (
        KERNEL
        + "amdgpu 0000:c3:00.0: amdgpu: {1}socket: 2, die: 0 1 new uncorrectable hardware errors detected in umc block",
        "hardware",
        "reset_gpu",
    ),
    (
        KERNEL + "amdgpu 0000:c3:00.0: amdgpu: Saved bad pages 128 reaches threshold value 100",
        "hardware",
        "cordon_node",
    ),
    (
        KERNEL + "nvidia 0000:2a:00.0: Unable to change power state from D3cold to D0, device inaccessible",
        "hardware",
        "cordon_node",
    ),
    (KERNEL + "NVRM: RmFetchGspRmImages: No firmware image found", "platform", "cordon_node"),
    (KERNEL + "nvidia-nvswitch3: Failed to initialize device : -22", "fabric", "cordon_node"),
    (
        "GpuMemWatch  True  GpuMemWatchIsNotHealthy  ErrorCode:DCGM_FR_ROW_REMAP_FAILURE GPU:3 Recommended Action=CONTACT_SUPPORT;",
        "hardware",
        "cordon_node",
    ),
]
CALM = [
    NCCL + "nccl_net_ofi_init:1500 NCCL WARN NET/OFI No eligible providers were found",
    NCCL + "misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
    NCCL + "NCCL INFO comm 0x55d0 rank 3 nRanks 16 cudaDev 3 busId 5d000 - Abort COMPLETE",
    NCCL + "NCCL INFO [Service thread] Connection closed by localRank 2",
    NCCL
    + "NCCL INFO Detected mixed local Net device counts across ranks (min 7, max 8). Ignoring due to NCCL_IGNORE_NET_MISMATCH.",
    NCCL + "NCCL INFO NET/IB: send: The error is not fatal. Trying to continue...",
    NCCL + 'NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
    KERNEL + "amdgpu 0000:c3:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
    KERNEL + "amdgpu 0000:c3:00.0: amdgpu: 4 correctable hardware errors detected in umc block",
    KERNEL + "nvidia-nvswitch3: open (major=506)",
    KERNEL + "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
    "systemd[1]: Started NVIDIA Persistence Daemon.",
    "nvidia-imex.service: Failed with result 'exit-code'.",
    "GpuPowerWatch  True  GpuPowerWatchIsNotHealthy  ErrorCode:DCGM_FR_CLOCK_THROTTLE_POWER GPU:0 Recommended Action=NONE;",
    "W0814 select_algorithm.py: OutOfResources: out of resource: shared memory, Required: 262144. Ignoring this choice.",
]


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(shipped())


def judged(text: str, matcher: Matcher) -> Verdict:
    return attribute(read_text("a.log", text + "\n", shipped(), matcher).events, shipped())


@pytest.mark.parametrize(("line", "fault_class", "action"), BLAMED, ids=lambda v: v[:60])
def test_whose_fault_a_line_is(line: str, fault_class: str, action: str, matcher: Matcher) -> None:
    verdict = judged(line, matcher)
    assert (verdict.fault_class, verdict.action) == (fault_class, action)


@pytest.mark.parametrize("line", CALM, ids=lambda v: v[:60])
def test_a_near_line_is_no_cause(line: str, matcher: Matcher) -> None:
    assert not [m.signature.id for m in matcher.match_line(line) if m.signature.role in ("root", "cascade", "symptom")]
    assert judged(line, matcher).action not in NODE_ACTIONS


def test_a_driver_that_is_loaded_anew_ends_a_mismatch_of_versions(matcher: Matcher) -> None:
    mismatch = KERNEL + "NVRM: API mismatch: the client has the version 570.86.15, but"
    loaded = (
        KERNEL.replace("09:12", "09:20")
        + "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    )
    assert judged(mismatch, matcher).action == "cordon_node"
    assert judged(f"{mismatch}\n{loaded}", matcher).no_current_fault
    before = loaded.replace("09:20", "08:00")
    assert judged(f"{before}\n{mismatch}", matcher).action == "cordon_node"


def test_a_healthy_condition_takes_back_what_dcgm_said_and_no_other_condition(matcher: Matcher) -> None:
    bad = (
        '{"agent":"gpu-health-monitor","componentClass":"GPU","checkName":"GpuMemWatch","isFatal":true,"isHealthy":false,'
        '"errorCode":["DCGM_FR_VOLATILE_DBE_DETECTED"],"entitiesImpacted":[{"entityType":"GPU","entityValue":"2"}],'
        '"generatedTimestamp":"2031-04-02T11:00:00Z","nodeName":"hx-7"}'
    )
    good = (
        bad.replace('"isHealthy":false', '"isHealthy":true')
        .replace("11:00", "11:20")
        .replace('"DCGM_FR_VOLATILE_DBE_DETECTED"', "")
    )
    assert not judged(bad, matcher).no_current_fault
    assert judged(f"{bad}\n{good}", matcher).no_current_fault
