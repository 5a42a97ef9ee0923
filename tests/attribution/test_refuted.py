"""Claims that what stands beside them refutes, each with a nearly equal text that must not be calmed."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, signatures_of, verdict_of

LOW = "nodecheck: FAIL loopback: busbw 171.2 GB/s < 185.0 GB/s (node h-41)"
AGAIN = "re-run of loopback on h-41: 191.8 GB/s, 192.1 GB/s, 191.7 GB/s"


def test_a_check_that_passes_when_it_is_done_again_is_no_fault() -> None:
    assert verdict_of(lines(LOW, AGAIN)).no_current_fault
    assert "derived.alarm.passed_again" in conclusions(lines(LOW, AGAIN))


@pytest.mark.parametrize(
    "again",
    [
        "",
        "re-run of loopback on h-41: 191.8 GB/s",  # one pass may flutter too
        "re-run of loopback on h-41: 191.8 GB/s, 171.7 GB/s, 192.0 GB/s",
        "re-run of loopback on h-42: 191.8 GB/s, 191.7 GB/s, 192.0 GB/s",  # another machine
        "same check on the neighbour: 191.8 GB/s, 191.7 GB/s, 192.0 GB/s",
        "re-run of loopback after the reboot: 191.8 GB/s, 191.7 GB/s, 192.0 GB/s",
        "re-run of loopback on h-41: 1918.2 GB/s, 1917.1 GB/s",  # another unit, or another thing
        "re-run of loopback on h-41: 191.8 GB/s, 191.7 GB/s, 192.0 GB/s\nnhc: Health check failed: check_hw_mcelog: MCEs detected",
        "re-run of loopback on h-41: 191.8 GB/s, 191.7 GB/s\nre-run of loopback on h-41: FAIL busbw 171.0 GB/s < 185.0 GB/s",
        "re-run of loopback on h-41: 191.8 GB/s, 191.7 GB/s\nNVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus.",
    ],
)
def test_a_check_that_was_not_passed_again_stays(again: str) -> None:
    assert not verdict_of(lines(LOW, again)).no_current_fault


BEAT = (
    '{"ts":"2032-09-21T01:32:40Z","finding_type":"rank_process_heartbeat_timeout","rank":4,"age_s":%d,'
    '"process_timeout_s":60,"phase":"%s","checkpoint_timeout_s":900}'
)
SAVE = lines(
    "==> rank4.log <==",
    "01:29:36 saving checkpoint at iteration 300 to /ck",
    "01:33:58 successfully saved checkpoint from iteration 300 to /ck",
    "01:34:07 iteration 301/ 2000 | lm loss: 1.77",
    "01:34:15 iteration 302/ 2000 | lm loss: 1.76",
)


OLD = SAVE.replace("01:3", "01:1").replace("01:2", "01:0")


def test_the_limit_of_steps_does_not_count_in_a_save() -> None:
    verdict = verdict_of(lines(BEAT % (184, "checkpointing"), SAVE))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


@pytest.mark.parametrize(
    ("age", "phase", "log"),
    [
        (984, "checkpointing", OLD),  # beyond the limit of the phase too
        (184, "train", OLD),  # in a step
        (184, "checkpointing", ""),  # nothing came since
        (184, "checkpointing", lines("==> rank4.log <==", "01:29:36 saving checkpoint at iteration 300 to /ck")),
    ],
)
def test_a_rank_that_may_be_stuck_is_not_calmed(age: int, phase: str, log: str) -> None:
    assert "derived.alarm.phase_limit" not in conclusions(lines(BEAT % (age, phase), log))
    assert not verdict_of(lines(BEAT % (age, phase), log)).no_current_fault


LOST = "2032-04-12T21:10:51Z reconcile: w-31 lost task 88/3, marking worker FAILED, task 88/3 -> PENDING (retry 1)"


def test_a_task_that_had_ended_is_not_lost() -> None:
    verdict = verdict_of(lines("2032-04-12T21:10:45Z w-31 task 88/3: exit code 0", LOST))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("platform", "none", True)


@pytest.mark.parametrize(
    "before",
    [
        "2032-04-12T21:10:45Z w-31 task 88/2: exit code 0",  # another task of the worker
        "2032-04-12T21:10:45Z w-31 task 88/3: exit code 1",
        "2032-04-12T21:10:55Z w-31 task 88/3: exit code 0",  # of the second try
        "2032-04-12T21:10:45Z w-31 task 88/3: step 900 loss 2.1",
        "2032-04-12T21:10:45Z w-31 task 88/3: exit code 0\nNVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus.",
    ],
)
def test_a_task_that_is_lost_stays_lost(before: str) -> None:
    verdict = verdict_of(lines(before, LOST))
    assert not verdict.no_current_fault


DOWN = "slurmctld: 2032-01-06T01:09:00 error: Nodes n-[3-4] not responding, setting DOWN"
FAILED = "slurmctld: 2032-01-06T01:09:00 Job 4411 NODE_FAIL, requeue"
ENDED = "2032-01-06T01:00:04 job 4411 finished, exit code 0"


def responding(*nodes: int) -> str:
    return lines(*(f"slurmctld: 2032-01-06T01:12:00 Node n-{n} now responding" for n in nodes))


@pytest.mark.parametrize(
    ("text", "calm"),
    [
        (lines(ENDED, DOWN, FAILED, responding(3, 4)), True),
        (lines(ENDED, DOWN, FAILED, responding(3)), False),  # the other one is not back
        (lines(ENDED, DOWN, FAILED), False),
        (lines(DOWN, FAILED, responding(3, 4)), False),
        (lines(ENDED.replace("4411", "4410"), DOWN, FAILED, responding(3, 4)), False),
    ],
)
def test_a_node_that_failed_after_its_job_is_no_fault_once_it_is_back(text: str, calm: bool) -> None:
    assert verdict_of(text).no_current_fault is calm


@pytest.mark.parametrize(
    ("service", "calm"), [("tensorboard", True), ("dcgm-exporter", True), ("nvidia-fabricmanager", False)]
)
def test_a_service_beside_the_job_is_known_by_its_name(service: str, calm: bool) -> None:
    text = lines(f"systemd[1]: {service}.service: Main process exited, code=killed, status=9/KILL", STEPS)
    assert ("derived.side_process" in conclusions(text)) is calm


MISMATCH = "collective sequence number: 31  nccl:all_to_all  culprit rank 2; error: size mismatch"
DONE = "  collective state: completed on ranks 0,1,2,3"
STEPS = lines(
    "2032-05-02T09:00:04 iteration 120/500 | lm loss 3.1", "2032-05-02T09:04:40 iteration 176/500 | lm loss 3.0"
)


def test_a_call_that_ended_everywhere_had_no_mismatch() -> None:
    verdict = verdict_of(lines(MISMATCH, DONE, STEPS))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("unknown", "none", True)


@pytest.mark.parametrize(
    "rest",
    [
        ("  collective state: started on ranks 0,1,2,3", STEPS),
        (DONE, "  collective state: scheduled on rank 2", STEPS),
        (DONE,),  # no step since
        ("",),
    ],
)
def test_a_call_that_hangs_stays_a_mismatch(rest: tuple[str, ...]) -> None:
    verdict = verdict_of(lines(MISMATCH, *rest))
    assert not verdict.no_current_fault


@pytest.mark.parametrize("program", ["metrics-agent", "nvrx-attrsvc", "wandb-service", "log-shipper"])
def test_a_helper_that_died_is_no_fault_of_the_job(program: str) -> None:
    verdict = verdict_of(lines(f"  411  409 Z    02:51:10 {program} <defunct>", STEPS))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


@pytest.mark.parametrize("program", ["python3", "pt_main_thread", "torchrun", "train_gpt", "ray::worker"])
def test_a_dead_rank_is_not_taken_for_a_helper(program: str) -> None:
    assert "derived.side_process" not in conclusions(lines(f"  411  409 Z    02:51:10 {program} <defunct>", STEPS))


def test_a_dead_helper_of_a_job_that_stands_still_is_not_calmed() -> None:
    assert not verdict_of(lines(STEPS, "  411  409 Z    02:51:10 metrics-agent <defunct>")).no_current_fault


IDLE = "alert GpuIdle: 4 of 4 GPUs at 0 % for 2 h (all series frozen since 03:10)"
LOOK = "$ nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader"
LATER = lines(
    "$ tail job.log", "05:20:00 iteration 4000/9000 | lm loss: 2.0", "05:21:00 iteration 4010/9000 | lm loss: 2.0"
)


def test_old_values_are_refuted_by_a_direct_look_and_steps() -> None:
    verdict = verdict_of(lines(IDLE, LOOK, "98 %", "99 %", "99 %", "97 %", LATER))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


@pytest.mark.parametrize(
    "text",
    [
        lines(IDLE, LOOK, "98 %", "99 %", "0 %", "97 %", LATER),
        lines(IDLE, LOOK, "98 % 99 % 0 % 97 %", LATER),
        lines(IDLE, LOOK, "0 %", "0 %", "0 %", "0 %", LATER),
        lines(IDLE, LOOK, "98 %", "99 %", "99 %", "97 %"),  # busy without steps: they may wait for each other
        lines(LATER, IDLE, LOOK, "98 %", "99 %", "99 %", "97 %"),
    ],
)
def test_an_alarm_for_idle_gpus_stays_where_one_is_idle_or_no_step_is_made(text: str) -> None:
    assert "derived.alarm.old_values" not in conclusions(text)
    assert not verdict_of(text).no_current_fault


GHOST = 'alert: gpu 6 "ghost load", quarantine node x-3'


@pytest.mark.parametrize(
    ("probe", "calm"),
    [
        ("gemm fp16 on gpu 6: 811 TFLOPS (other gpus 806..815)", True),
        ("matmul on gpu 6: 1604 TFLOPS (gpus 0-5,7: 1598..1611)", True),
        ("gemm fp16 on gpu 6: 311 TFLOPS (other gpus 806..815)", False),
        ("gemm 311 TFLOPS (fleet 699)", False),
        ("gemm 702 TFLOPS (fleet 699)", True),
    ],
)
def test_a_reading_is_refuted_by_a_probe_that_is_as_fast_as_its_peers(probe: str, calm: bool) -> None:
    assert verdict_of(lines(GHOST, probe)).no_current_fault is calm


HUNG = "2032-03-01T10:15:00Z watchdog-svc: no log line of job 71 for 300 s, job 71 appears hung"


def test_steps_of_a_clock_without_zone_refute_a_hang_within_minutes() -> None:
    text = lines(HUNG, "$ tail job.log", "[10:15:20] step 4001 | loss 2.31", "[10:20:20] step 4251 | loss 2.30")
    assert verdict_of(text).no_current_fault


@pytest.mark.parametrize(
    "steps",
    [
        ("[10:08:20] step 4001 | loss 2.31", "[10:10:00] step 4081 | loss 2.30"),  # before it
        ("[11:45:20] step 4001 | loss 2.31", "[11:50:20] step 4251 | loss 2.30"),  # another zone, or much later
        ("[10:15:10] step 4001 | loss 2.31",),  # one step was under way
    ],
)
def test_steps_that_may_be_older_than_the_hang_refute_nothing(steps: tuple[str, ...]) -> None:
    assert not verdict_of(lines(HUNG, "$ tail job.log", *steps)).no_current_fault


BRIDGE = lines("monitor: ErrorCode:DCGM_FR_NVLINK_DOWN GPU:0", "GPU 0: NVIDIA H100 PCIe (UUID: GPU-0a)")


@pytest.mark.parametrize(("fitted", "calm"), [("none", True), ("0", True), ("3", False), ("yes", False)])
def test_links_of_a_bridge_that_is_not_fitted_are_not_down(fitted: str, calm: bool) -> None:
    assert verdict_of(lines(BRIDGE, f"inventory: NVLink bridges fitted: {fitted}")).no_current_fault is calm


def call(rank: int, size: int, seq: int, file: str) -> str:
    return (
        f'{{"rank":{rank},"pg":"dp","collective_seq_id":{seq},"profiling_name":"nccl:_reduce_scatter_base","input_sizes":[[{size}]],'
        f'"output_sizes":[[{size // 8}]],"state":"started","frames":[{{"name":"sync","filename":"{file}"}}]}}'
    )


@pytest.mark.parametrize(
    ("seq", "file", "fault"),
    [
        (5001, "/opt/megatron/core/distributed/param_and_grad_buffer.py", "framework"),
        (5001, "/home/me/train.py", "user_code"),
        (
            12,
            "/opt/megatron/core/distributed/param_and_grad_buffer.py",
            "user_code",
        ),  # from the start: a setting or a shape
    ],
)
def test_buckets_of_a_library_that_differ_late_are_the_librarys(seq: int, file: str, fault: str) -> None:
    verdict = verdict_of(lines(call(0, 800, seq, file), call(1, 1600, seq, file)))
    assert verdict.fault_class == fault
    assert verdict.action == ("restart_job" if fault == "framework" else "fail_fast")


EMPTY = "g-77: ldconfig: File /usr/lib64/libcuda.so.570.86.15 is empty, not checked."


def test_empty_driver_libraries_take_a_node_out_only_where_others_have_them() -> None:
    failed = "g-77: RuntimeError: Found no NVIDIA driver on your system."
    assert verdict_of(lines(EMPTY, EMPTY, failed, "g-78: step 10 loss 8.1")).action == "cordon_node"
    assert verdict_of(lines(EMPTY, EMPTY, failed)).action == "ask_human"
    assert "derived.driver.library_empty" not in conclusions(lines(EMPTY, "g-77: step 10 loss 8.1"))


def test_a_launcher_that_was_told_so_did_not_fail_of_its_connection() -> None:
    text = "[n3] launcher.py:1731 Agent .run() raised exception, e=RendezvousClosedError()"
    assert "launcher.network_exception" not in signatures_of(text)
