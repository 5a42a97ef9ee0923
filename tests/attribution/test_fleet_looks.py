"""Crashes after the last save, monitors that a look refutes, watchers that are wrong, resets that are due, and their neighbours."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, verdict_of

DONE = (
    "step 499/500 loss 2.12",
    "step 500/500 loss 2.11",
    "Saved checkpoint at step 500 to /ck/step_500",
    "Training finished successfully.",
)
CRASH = "torchrun: rank: 2 exitcode: -11 (Signal 11 (SIGSEGV) received by PID 60112)"


@pytest.mark.parametrize(
    "crash",
    [CRASH, "Fatal Python error: Aborted", "ERROR Persistent worker aborted in rank 0"],
)
def test_a_crash_after_the_last_save_is_no_fault(crash: str) -> None:
    verdict = verdict_of(lines(*DONE, crash))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


@pytest.mark.parametrize(
    "text",
    [
        lines(*DONE[:2], DONE[3], CRASH),  # nothing was saved
        lines(*DONE[:2], "Saving checkpoint at step 500 to /ck/step_500", DONE[3], CRASH),  # not done with it
        lines(*DONE[:2], DONE[2].replace("500", "400"), DONE[3], CRASH),  # an earlier step
        lines("step 499/500 loss 2.12", DONE[2].replace("500", "499"), DONE[3], CRASH),  # steps are missing
        lines(*DONE[:3], CRASH),  # no word of an end
        lines(*DONE, "NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus.", CRASH),
        lines(*DONE, "OSError: [Errno 28] No space left on device: '/ck/step_500/1.pt'", CRASH),
        lines(*DONE, CRASH, "Rendezvous complete for workers. Result: restart_count=1", "step 1/500 loss 9.1"),
    ],
)
def test_a_crash_that_may_have_cost_work_stays(text: str) -> None:
    assert not verdict_of(text).no_current_fault


def board(name: str = "NVIDIA H100 80GB HBM3", link: int = 18, state: str = "26.562 GB/s") -> str:
    return lines(
        'gpu-health: node v-12: NVLink Unhealthy: "NVLink inactive on all links"',
        f"nvmlDeviceGetNvLinkState(gpu=0, link={link}): NOT_SUPPORTED",
        "$ nvidia-smi nvlink -s -i 0",
        f"GPU 0: {name} (UUID: GPU-8a)",
        "\t Link 0: 26.562 GB/s",
        f"\t Link 1: {state}",
    )


def test_a_link_of_another_generation_is_not_down() -> None:
    verdict = verdict_of(board())
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)
    assert verdict_of(board("NVIDIA A100-SXM4-80GB", 12)).no_current_fault


@pytest.mark.parametrize(
    "text",
    [
        board(link=12),  # this board has it
        board(state="<inactive>"),
        lines(*board().splitlines()[:4]),  # nobody looked at the links
        lines(board(), "NVRM: Xid (PCI:0000:4f:00): 74, pid=812, NVLink: fatal error detected on link 2"),
    ],
)
def test_a_link_that_may_be_down_stays(text: str) -> None:
    assert not verdict_of(text).no_current_fault


CHANGE = "06:30Z change: node b-11 rebooted for a kernel update"
DOWN = '06:34:02Z health-monitor: accelerator-nvidia-nvlink: Unhealthy "NVLink inactive on all links"'
LOOK = "06:36:40Z b-11 $ nvidia-smi nvlink -s | grep -c inActive"
QUIET = "06:36Z..09:00Z accelerator-nvidia-nvlink events: 0"


def test_links_that_trained_after_a_reboot_are_no_fault() -> None:
    verdict = verdict_of(lines(CHANGE, DOWN, LOOK, "0", QUIET))
    assert (verdict.action, verdict.no_current_fault) == ("none", True)


@pytest.mark.parametrize(
    "text",
    [
        lines(CHANGE, DOWN, LOOK, "3", QUIET),
        lines(CHANGE, DOWN, QUIET),  # nobody looked
        lines(CHANGE, DOWN, LOOK, "0"),  # the other machines are not known
        lines(DOWN, LOOK, "0", QUIET),  # no reboot
        lines(CHANGE, LOOK, "0", DOWN),  # down after the look
        lines(CHANGE, DOWN, LOOK, "0", DOWN.replace("06:34:02", "06:50:00"), QUIET.replace(": 0", ": 4")),
        lines(CHANGE.replace("for a kernel update", "after a kernel panic"), DOWN, LOOK, "0", QUIET),
    ],
)
def test_links_that_may_stay_down_are_not_calmed(text: str) -> None:
    assert not verdict_of(text).no_current_fault


def watched(end: str, *more: str, rank: int = 5) -> str:
    return lines(
        *(f"[2031-05-20 11:{14 + i}:02] [Cycle 0] rank 5: iteration {101 + i} done" for i in range(4)),
        *more,
        f"[2031-05-20 11:{end}] [Cycle 0] [rank{rank}] Was out of section for 300.00 seconds. Timeout is 300.00 seconds.",
    )


def test_a_rank_that_worked_was_ended_by_a_blind_watcher() -> None:
    verdict = verdict_of(watched("18:01"))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "restart_job", False)


@pytest.mark.parametrize(
    "text",
    [
        watched("22:02"),  # it had stopped
        watched("18:01", "[2031-05-20 11:17:30] NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus."),
        watched("18:01", "[2031-05-20 11:17:30] torch.OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_a_rank_that_may_have_stopped_does_not_blame_the_watcher(text: str) -> None:
    assert "derived.watcher.blind" not in conclusions(text)


def still(at: str, count: int) -> str:
    return lines(
        "FaultToleranceConfig(rank_heartbeat_timeout=None, rank_out_of_section_timeout=600.0)",
        "02:10:07 iteration 7412 loss 2.207",
        "02:10:13 iteration 7413 loss 2.206",
        f"{at} (on call) no output since 02:10:13; all ranks alive",
        "$ grep -c -E 'out of section|heartbeat' rank_monitor.log",
        str(count),
    )


def test_a_watcher_that_lets_a_job_stand_still_is_wrong() -> None:
    verdict = verdict_of(still("05:44:00", 0))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "restart_job", False)


@pytest.mark.parametrize(("at", "count"), [("02:17:00", 0), ("05:44:00", 3)])
def test_a_watcher_that_is_not_due_or_spoke_is_not_blamed(at: str, count: int) -> None:
    assert "derived.watcher.silent" not in conclusions(still(at, count))


def stuck(seconds: int, frame: str = "bnxt_poll+0x9c/0x250 [bnxt_en]") -> str:
    return lines(
        f"[91400.9] watchdog: BUG: soft lockup - CPU#12 stuck for {seconds}s! [ksoftirqd/12:79]",
        f"[91400.9]  {frame}",
        "[91400.9]  net_rx_action+0x142/0x2e0",
    )


def test_a_network_driver_that_holds_a_cpu_takes_the_node_out() -> None:
    verdict = verdict_of(stuck(8226))
    assert (verdict.fault_class, verdict.action) == ("fabric", "cordon_node")


@pytest.mark.parametrize("text", [stuck(23), stuck(8226, "nvme_poll+0x12/0x40 [nvme]")])
def test_a_cpu_that_came_back_or_was_held_by_another_does_not(text: str) -> None:
    assert verdict_of(text).action != "cordon_node"


def pending(*rows: str, index: int = 5) -> str:
    return lines(
        "$ nvidia-smi -q -d ROW_REMAPPER -i 5",
        "    Remapped Rows",
        "        Pending                       : Yes",
        "        Remapping Failure Occurred    : No",
        f"$ nvidia-smi --query-compute-apps=pid,process_name --format=csv -i {index}",
        "pid, process_name",
        *rows,
    )


def test_a_gpu_that_nobody_holds_is_reset_now() -> None:
    assert verdict_of(pending()).action == "reset_gpu"


@pytest.mark.parametrize(
    "text", [pending("88123, python3"), pending(index=4), lines(pending(), "step 12 loss 2.1", "step 13 loss 2.0")]
)
def test_a_gpu_that_may_be_held_is_drained_first(text: str) -> None:
    assert verdict_of(text).action == "drain_at_checkpoint"


EVICT = "kubectl drain k-3: evicting pod {pod}"
ASKS = "health: node k-3 unhealthy GPU 2 errorCode=DCGM_FR_PENDING_ROW_REMAP recommendedAction=COMPONENT_RESET"
QUEUE = ("$ squeue -w k-3", "JOBID PARTITION NAME USER ST TIME NODES NODELIST(REASON)")


def evicted(pod: str, *rows: str) -> str:
    return lines(ASKS, EVICT.format(pod=pod), *QUEUE, *rows)


RUNS = "771 gpu sft-70b ann R 9:12:01 1 k-3"


def test_a_slurm_node_in_a_pod_is_drained_in_slurm() -> None:
    verdict = verdict_of(evicted("slurm/slurm-compute-3", RUNS))
    assert (verdict.fault_class, verdict.action) == ("platform", "drain_at_checkpoint")


@pytest.mark.parametrize("text", [evicted("slurm/slurm-compute-3"), evicted("web/frontend-3", RUNS)])
def test_another_pod_or_an_idle_one_is_not(text: str) -> None:
    assert "derived.sched.slurm_in_pod" not in conclusions(text)
