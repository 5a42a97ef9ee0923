"""How a machine stands beside what was said of it, and texts in which it stands otherwise."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, verdict_of

NOT_READY = "2031-02-02 06:00:04 n12 RuntimeError: CUDA error: system not yet initialized"
PASSED = "2031-02-02 06:02:44 # all_reduce_perf -b 1G -e 1G -g 8 : avg bus bandwidth 471.2  #wrong 0"


@pytest.mark.parametrize("title", ["==> n12, checked at 06:02 <==", "==> same node afterwards <=="])
def test_a_fabric_that_was_late_and_passes_now_keeps_its_node(title: str) -> None:
    verdict = verdict_of(lines(NOT_READY, title, PASSED))
    assert (verdict.fault_class, verdict.action) == ("fabric", "restart_job")


@pytest.mark.parametrize(
    "text",
    [
        lines("==> n13, checked at 06:02 <==", PASSED),
        lines("==> n12, checked at 06:02 <==", PASSED.replace("#wrong 0", "#wrong 12")),
        lines(
            "==> n12, checked at 06:02 <==",
            PASSED,
            "2031-02-02 06:03:04 n12 RuntimeError: CUDA error: system not yet initialized",
        ),
        lines(
            "==> n12, checked at 06:02 <==",
            "n12 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=0, GPU has fallen off the bus.",
            PASSED,
        ),
    ],
)
def test_a_test_elsewhere_or_before_or_a_broken_gpu_does_not_calm(text: str) -> None:
    assert "derived.not_ready_passed" not in conclusions(lines(NOT_READY, text))


GONE = "train-3:88:131 [0] misc/ibvwrap.cc:84 NCCL WARN NET/IB : Unable to open device mlx5_4"


def test_a_device_that_the_container_may_not_open_is_no_broken_nic() -> None:
    text = lines(
        GONE,
        "$ kubectl exec train-3 -- cat /dev/infiniband/uverbs4",
        "cat: /dev/infiniband/uverbs4: Operation not permitted",
    )
    verdict = verdict_of(text)
    assert (verdict.fault_class, verdict.action) == ("platform", "ask_human")


def test_a_device_that_the_job_goes_on_without_takes_no_node_out() -> None:
    steps = ("step 100 loss 2.0", "step 110 loss 1.9")
    found = verdict_of(lines(GONE, *steps))
    assert (found.signature, found.action) == ("derived.nic_left_out", "ask_human")
    assert verdict_of(lines(*steps, GONE)).action == "cordon_node"
    dead = "[ 8123.2] mlx5_core 0000:9a:00.0: device's health compromised - reached miss count"
    assert verdict_of(lines(GONE, dead, *steps)).action == "cordon_node"


def test_a_device_that_answers_with_an_error_is_one() -> None:
    text = lines(GONE, "$ cat /dev/infiniband/uverbs4", "cat: /dev/infiniband/uverbs4: Input/output error")
    assert verdict_of(text).action == "cordon_node"


REFUSED = (
    "[   41.2] NVRM: The NVIDIA GPU 0000:0a:00.0 (PCI ID: 10de:2330)",
    "[   41.2] NVRM: installed in this system is not supported by the",
    "[   41.2] NVRM: NVIDIA 580.126.09 driver release.",
    "[   41.3] nvidia: probe of 0000:0a:00.0 failed with error -1",
    "[   43.9] NVRM: The NVIDIA probe routine failed for 1 device(s).",
)


def counted(shown: int, fitted: int) -> tuple[str, ...]:
    return ("$ nvidia-smi -L | wc -l", str(shown), "$ lspci -nn -d 10de:2330 | wc -l", str(fitted))


def test_one_of_eight_that_are_alike_is_broken() -> None:
    verdict = verdict_of(lines(*REFUSED, *counted(7, 8)))
    assert (verdict.fault_class, verdict.action) == ("hardware", "cordon_node")


@pytest.mark.parametrize(
    "more",
    [
        (),
        counted(7, 1),
        ("[   43.9] NVRM: None of the NVIDIA devices were initialized.", *counted(0, 1)),
    ],
)
def test_a_gpu_of_another_kind_or_all_of_them_are_the_drivers(more: tuple[str, ...]) -> None:
    verdict = verdict_of(lines(*REFUSED, *more))
    assert (verdict.fault_class, verdict.action) == ("platform", "ask_human")


PENDING = (
    "$ nvidia-smi --query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure --format=csv",
    "gpu_bus_id, remapped_rows.pending, remapped_rows.failure",
    "00000000:1B:00.0, 1, 0",
)


@pytest.mark.parametrize(
    ("count", "action"), [("0", "reset_gpu"), ("1", "drain_at_checkpoint"), ("", "drain_at_checkpoint")]
)
def test_a_reset_waits_for_jobs_and_for_nothing_else(count: str, action: str) -> None:
    assert verdict_of(lines(*PENDING, "$ squeue -w b12 -h | wc -l", count)).action == action


def test_a_queue_of_another_node_frees_nothing() -> None:
    told = (
        "2031-10-20T05:12:07+00:00 a100-c14 kernel: NVRM: Xid (PCI:0000:1b:00): 63, pid=1, New row marked for remapping"
    )
    text = lines(told, *PENDING, "$ squeue -w b12 -h | wc -l", "0")
    assert "derived.reset_now" not in conclusions(text)


IN_USE = (
    "DistNetworkError: The server socket has failed to bind. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE"
)
HELD = ("$ ss -ltnp", 'LISTEN 0 2048 *:29500 *:* users:(("torchrun",pid=7120,fd=11))')
ROW = ("$ ps -o pid,user,etime,args -p 7120", " 7120 ana 03:11:40 torchrun --nproc_per_node 2 --master_port 29500 a.py")


def test_a_port_of_ones_own_other_job_is_left_alone() -> None:
    own = ("$ cat run.sh", "CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 --master_port 29500 b.py")
    verdict = verdict_of(lines(IN_USE, *HELD, *ROW, *own))
    assert (verdict.fault_class, verdict.action) == ("user_code", "fail_fast")


@pytest.mark.parametrize(
    "command",
    [
        "CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 --master_port 29500 a.py",
        "torchrun --nproc_per_node 2 --master_port 29600 b.py",
    ],
)
def test_the_same_command_may_be_an_earlier_attempt(command: str) -> None:
    assert "derived.port_of_other" not in conclusions(lines(IN_USE, *HELD, *ROW, "$ cat run.sh", command))


WARNED = (
    "WARNING: automatic NUMA balancing is enabled (kernel.numa_balancing = 1); consider sysctl kernel.numa_balancing=0"
)
PACE = tuple(f"step {n} loss 2.10" for n in range(100, 104))


def test_a_warning_about_a_setting_is_none_of_a_job_that_goes_on() -> None:
    assert verdict_of(lines(WARNED, *PACE)).no_current_fault
    assert not verdict_of(lines(*PACE, WARNED)).no_current_fault
    assert not verdict_of(lines(WARNED, *PACE, "# it hangs since 03:10")).no_current_fault


def test_numa_balancing_that_was_caught_is_a_setting_and_a_stack_of_the_kernel_is_not() -> None:
    caught = verdict_of(lines("slowest rank: 3, 11, 6, 14", "perf sched: task_numa_work 16.2 ms -> change_prot_numa"))
    assert (caught.fault_class, caught.action) == ("platform", "ask_human")
    stack = lines(
        "[ 8123.1] Call Trace:", "[ 8123.1]  task_numa_work+0x1ab/0x2e0", "[ 8123.1]  task_work_run+0x5c/0x90"
    )
    assert verdict_of(stack).signature != "slow.numa_balancing"


def test_a_firmware_that_stopped_explains_what_channels_say() -> None:
    text = lines(
        "Jan 11 11:00:00 g4 kernel: NVRM: _kgspRpcRecvPoll: GSP RM heartbeat timed out (diff 9120ms > timeout 5200ms)",
        "Jan 11 11:00:06 g4 kernel: NVRM: Xid (PCI:0000:18:00): 109, pid=4411, channel 0x12, errorString CTX SWITCH TIMEOUT",
    )
    verdict = verdict_of(text)
    assert (verdict.fault_class, verdict.action) == ("framework", "reset_gpu")


def test_jobs_that_fail_on_one_node_are_read_from_rows_without_their_header() -> None:
    rows = ("742051   dgx-m13   FAILED     1:0   00:00:24", "742052   dgx-m13   FAILED     1:0   00:00:23")
    others = ("742053   dgx-m13   FAILED     1:0   00:00:24", "742060   dgx-j10   COMPLETED  0:0   11:20:05")
    command = "$ sacct -X -S 2031-03-24 -o JobID,NodeList,State,ExitCode,Elapsed"
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert verdict_of(lines(error, command, *rows, *others)).action == "cordon_node"
    spread = [r.replace("dgx-m13", f"dgx-m{n}") for n, r in enumerate((*rows, others[0]), 10)]
    assert "derived.ledger.follows_node" not in conclusions(lines(command, *spread, others[1]))
