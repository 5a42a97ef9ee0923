"""Repairs called off, strangers on a connection, devices not passed in, disks of an array: what is nearly the same text."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, signatures_of, verdict_of

PASSED = "2031-03-04T08:05:40Z quarantine: node h-31 all checks passed, node uncordoned"
CANCELLED = "2031-03-04T08:05:41Z drainer: drain of node h-31 cancelled"


def test_a_repair_that_was_called_off_for_a_machine_that_is_well_is_no_fault() -> None:
    assert verdict_of(lines(PASSED, CANCELLED)).no_current_fault


@pytest.mark.parametrize(
    "text",
    [
        CANCELLED,
        lines(CANCELLED, PASSED.replace("all checks passed, node", "operator")),
        lines(PASSED.replace("08:05:40", "06:05:40"), CANCELLED),
        lines(PASSED, "2031-03-04T08:05:40Z ALERT GpuXidError firing node=h-31", CANCELLED),
        lines(PASSED, CANCELLED, "2031-03-04T08:05:50Z h-31 kernel: NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE"),
        lines(PASSED, CANCELLED, "2031-03-04T08:05:50Z ALERT GpuXidError firing node=h-31"),
    ],
)
def test_a_repair_that_was_called_off_otherwise_is_a_fault(text: str) -> None:
    assert "derived.monitor.called_off" not in conclusions(text)
    assert not verdict_of(text).no_current_fault


TAKEN = "2031/08/04 06:41:19 XidCriticalError: Xid=69 on Device=GPU-7540a9b3, the device will go unhealthy."
XID = "NVRM: Xid (PCI:0000:4f:00): 69, pid=5512, name=python3, Class Error: ChId 0010, Class 0000cbc0, Offset 00000298"


def test_a_gpu_taken_out_for_what_a_program_did_is_well() -> None:
    assert verdict_of(lines(TAKEN, XID)).no_current_fault
    assert "python.exception" not in signatures_of(TAKEN)


@pytest.mark.parametrize(
    "text",
    [
        XID,
        lines(TAKEN, XID, "RuntimeError: CUDA error: an illegal memory access was encountered"),
        lines(TAKEN, XID, XID.replace("4f:00", "5f:00")),
        lines(TAKEN, XID, XID.replace("5512", "7781")),
        lines(TAKEN, XID, XID.replace("69, pid=5512, name=python3, Class", "48, pid=1, name=x, DBE")),
        lines(TAKEN.replace("=69", "=94"), XID),
        lines(TAKEN.replace("=69", "=79")),
        lines(TAKEN, XID, "the job hangs since 06:41"),
    ],
)
def test_a_gpu_taken_out_for_more_than_that_stays_a_fault(text: str) -> None:
    assert not verdict_of(text).no_current_fault


CLOSED = (
    "w1:311:402 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer 172.18.0.40<51120>"
)
HOSTS = lines("$ cat hostfile", "w1 slots=8", "w2 slots=8")


@pytest.mark.parametrize("name", ["w2", "w2.cluster", "w2-ib0.cluster", "ib-w2"])
def test_a_member_of_the_job_is_no_stranger(name: str) -> None:
    text = lines(CLOSED, HOSTS, "$ getent hosts 172.18.0.40", f"172.18.0.40     {name}")
    assert "derived.stranger_connected" not in conclusions(text)


def test_a_peer_without_a_name_is_no_stranger() -> None:
    assert "derived.stranger_connected" not in conclusions(lines(CLOSED, HOSTS))


def test_a_device_that_the_host_has_not_either_was_not_kept_back() -> None:
    refused = "ls: cannot access '/dev/infiniband': No such file or directory"
    none = "w3:77:104 [0] NCCL INFO NET/IB : No device found."
    inside, outside = "$ docker exec c1 ls /dev/infiniband", "(host) $ ls /dev/infiniband"
    wanted = "derived.not_passed_in"
    assert wanted in conclusions(lines(none, inside, refused, outside, "uverbs0  uverbs1"))
    assert wanted not in conclusions(lines(none, inside, refused, outside, refused))
    assert wanted not in conclusions(lines(none, "$ ls /dev/infiniband", refused, outside, "uverbs0"))


ECC = "[rank5]: RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    "text",
    [
        lines("==> run 1, node c-07 <==", ECC, "==> run 1, node c-08 <==", ECC),
        lines("==> run 1, node c-07 <==", ECC, "==> run 2, node c-07 <==", ECC),
        lines("==> run 1, node c-07 <==", ECC, "==> run 2, node c-07 <==", "step 10 loss 2.0", "step 20 loss 1.9"),
        lines("==> run 1, node c-07 <==", ECC, "==> run 2, node c-07 <==", ECC.replace("rank5", "rank6")),
    ],
)
def test_memory_that_does_not_fail_in_each_run_gets_its_reset(text: str) -> None:
    assert "derived.gpu.ecc_each_run" not in conclusions(text)


def test_a_well_array_is_no_fault_and_one_that_was_rebuilt_is_none_any_more() -> None:
    well = lines(
        "$ cat /proc/mdstat", "md0 : active raid1 nvme0n1[0] nvme1n1[1]", "      1500 blocks super 1.2 [2/2] [UU]"
    )
    assert verdict_of(well).first_cause is None
    failed = "[ 8123.1] md/raid1:md1: Disk failure on nvme1n1p1, disabling device."
    assert "derived.raid.degraded" in conclusions(failed)
    assert "derived.raid.degraded" not in conclusions(lines(failed, "[ 9911.1] md: md1: recovery done."))


@pytest.mark.parametrize("state", ["mixed", "allocated", "idle*x"])
def test_a_machine_that_works_is_not_cordoned_for_a_disk(state: str) -> None:
    text = lines(
        "$ cat /proc/mdstat", "md1 : active raid1 nvme0n1p1[0] nvme1n1p1[1](F)", "$ sinfo -h -n g-2 -o %T", state
    )
    assert verdict_of(text).action == "drain_at_checkpoint"


WHOLE = lines("==> baseline.log <==", "step 500 loss 3.1021", "step 501 loss 3.0984", "step 520 loss 3.0012")
RESUMED = lines("==> resumed.log <==", "Resumed from checkpoint at step 500")


@pytest.mark.parametrize(
    ("losses", "parts"),
    [
        (("step 501 loss 3.0984", "step 520 loss 3.2204"), True),
        (("step 501 loss 3.0984", "step 520 loss 3.0015"), False),
        (("step 501 loss 3.0984", "step 520 loss 2.8000"), False),
        (("step 501 loss 3.5000", "step 520 loss 3.6000"), False),
        (("step 600 loss 3.0984", "step 620 loss 3.2204"), False),
    ],
)
def test_a_resumed_run_parts_from_the_other_one_only_where_it_began_alike(losses: tuple[str, str], parts: bool) -> None:
    assert ("derived.ckpt.runs_part" in conclusions(lines(WHOLE, RESUMED, *losses))) == parts


def test_a_path_at_full_speed_and_an_idle_gpu_are_no_bad_link() -> None:
    assert verdict_of("PCIETreeSpeed level=info PCIe path to root complex supports full speed").first_cause is None
