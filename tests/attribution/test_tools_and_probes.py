"""What tools, probes, gates and counters say beside a job: what is theirs, and what is not talked away."""

from __future__ import annotations

import pytest

from keepstep.sources.joblog.tools import looks_on
from tests.attribution.jobtexts import conclusions, lines, signatures_of, verdict_of

RAISED = lines(
    "Traceback (most recent call last):",
    '  File "/opt/tools/fr_trace.py", line 41, in <module>',
    "    main()",
    '  File "/opt/tools/components/read.py", line 88, in read',
    '    raise KeyError("entries")',
    "KeyError: 'entries'",
)
WATCHDOG = (
    "[rank3]:[E512 08:01:40.220121 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=912, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600021 milliseconds "
    "before timing out."
)


@pytest.mark.parametrize(
    ("command", "tool"),
    [
        ("torchfrtrace --prefix x_ /tmp/fr", True),
        ("python -m torch.distributed.flight_recorder.fr_trace --prefix x_", True),
        ("sudo python3 tools/analyze_dump.py /dumps", True),
        ("nvitop -1", True),
        ("torchrun --nproc-per-node 4 train.py --profile --monitor", False),
        ("python train_monitor.py", False),
        ("wandb agent sweep/1", False),
        ("kubectl exec trainer-0 -c main -- nvitop -1", True),
        ("docker exec -it trainer python /opt/analyze.py", True),
        ("ssh n3 'py-spy dump --pid 12'", True),
        ("srun --overlap --jobid 88 -n 1 gpustat", True),
        ("python scripts/losses.py logs/rank0.log", True),
        ("kubectl exec trainer-0 -- python train.py", False),
        ("ssh n3 'cd /work && python analyze_and_train.py --monitor'", False),
        ("srun -n 8 python run.py", False),
        ("kubectl logs trainer-0", False),
        ("python run.py > run.log", False),
        ("python run.py --log-file run.log", False),
        ("python run.py 2>&1 | tee run.log", False),
        ("python main.py --tensorboard", False),
        ("", False),
    ],
)
def test_a_command_that_only_looks_is_told_by_its_program(command: str, tool: bool) -> None:
    assert looks_on(command) is tool


def test_what_a_tool_raises_is_no_fault_of_the_job() -> None:
    verdict = verdict_of(lines("$ torchfrtrace --prefix x_ /tmp/fr", RAISED))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


def test_the_same_raised_by_the_job_stays_a_fault() -> None:
    assert not verdict_of(lines("$ torchrun fr_trace.py", RAISED)).no_current_fault


@pytest.mark.parametrize(
    "command", ["torchfrtrace --show run.log", "python merge_logs.py rank0.log", "tensorboard --logdir x"]
)
def test_a_traceback_that_a_tool_shows_is_of_whoever_raised_it(command: str) -> None:
    shown = RAISED.replace("/opt/tools/fr_trace.py", "/work/train.py").replace("/opt/tools/components/", "/work/")
    assert not verdict_of(lines(f"$ {command}", shown)).no_current_fault


def test_a_tool_that_fails_takes_back_nothing_of_what_the_job_said() -> None:
    verdict = verdict_of(lines(WATCHDOG, "$ torchfrtrace --prefix x_ /dumps", RAISED))
    assert not verdict.no_current_fault
    assert verdict.action == "ask_human"


EXPORTER = RAISED.replace("/opt/tools/fr_trace.py", "/opt/gpu-exporter/exporter.py")
IN_USE = EXPORTER.replace("KeyError: 'entries'", "OSError: [Errno 98] Address already in use")


@pytest.mark.parametrize(
    ("title", "of_tool"),
    [
        ("$ journalctl -u gpu-exporter", True),
        ("$ kubectl logs dcgm-exporter-x2", True),
        ("$ kubectl logs trainer-0", False),
        ("==> rank0.log <==", False),
    ],
)
def test_what_a_monitor_wrote_into_its_own_log_is_the_monitors(title: str, of_tool: bool) -> None:
    seen = signatures_of(lines(title, IN_USE))
    assert ("python.tool_exception" in seen) is of_tool
    assert ("torch.port_in_use" in seen) is not of_tool
    assert verdict_of(lines(title, EXPORTER)).no_current_fault is of_tool


def test_a_device_that_is_named_in_a_tools_traceback_is_seen() -> None:
    lost = RAISED.replace("KeyError: 'entries'", "pynvml.NVMLError_GpuIsLost: GPU is lost")
    assert not verdict_of(lines("$ nvitop -1", lost)).no_current_fault


def test_a_hang_that_is_told_is_not_talked_away_by_a_tool_that_fails() -> None:
    verdict = verdict_of(lines("# job hangs since 03:10", "$ torchfrtrace --prefix x_ /tmp/fr", RAISED))
    assert (verdict.action, verdict.no_current_fault) == ("ask_human", False)


PROBE = "W 07-17 22:41:06 backend_utils.py:2731] Cluster is abnormal because ray cluster is unhealthy (None). Transitioned to INIT."
RAY = (
    "[2031-02-03 04:11:20,118 W 812 812] gcs_health_check_manager.cc:108: Health check failed for node 9fd1, remaining checks "
    "{left}, status 4, response status 0, status message Deadline Exceeded"
)


def steps(*clocks: str, day: str = "") -> str:
    return lines("==> run.log <==", *(f"{day}{c} step {100 + i} loss 1.88 1.9s/it" for i, c in enumerate(clocks)))


def test_a_probe_is_refuted_by_steps_that_came_after_it() -> None:
    verdict = verdict_of(
        lines("==> controller <==", PROBE, steps("22:40:50", "22:41:10", "22:41:30", day="2031-07-17 "))
    )
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("platform", "none", True)


@pytest.mark.parametrize("clocks", [("22:40:11", "22:40:31", "22:40:50"), ("22:40:50", "22:41:08"), ()])
def test_steps_before_a_probe_or_just_behind_it_refute_nothing(clocks: tuple[str, ...]) -> None:
    verdict = verdict_of(lines("==> controller <==", PROBE, steps(*clocks, day="2031-07-17 ")))
    assert not verdict.no_current_fault
    assert verdict.action == "ask_human"


def test_a_late_answer_of_a_node_takes_no_node_out() -> None:
    text = lines(RAY.format(left=4), steps("04:11:25", "04:11:46", "04:12:07", day="2031-02-03 "))
    assert verdict_of(text).no_current_fault
    assert verdict_of(RAY.format(left=4)).action == "ask_human"


def test_what_is_said_beside_a_probe_in_other_lines_stays() -> None:
    other = "2031-02-03 04:12:30 failed to initialize DCGM: Error connecting to nv-hostengine: Host engine connection invalid"
    text = lines(RAY.format(left=4), other, steps("04:11:25", "04:11:46", "04:12:07", day="2031-02-03 "))
    assert "derived.probe.outlived" not in conclusions(text)


def epochs(*seconds: float, first: int = 0, warn: int | None = 0) -> str:
    return lines(
        *(
            f"epoch {first + i} | 5004 it | time {s}s | data_time {round(0.9 * s, 1) if i == 0 else 1.9}s"
            + ("   WARN slow epoch: 14.9x median" if i == warn else "")
            for i, s in enumerate(seconds)
        )
    )


def test_only_the_first_epoch_was_slow_is_a_warm_up() -> None:
    verdict = verdict_of(epochs(1663.4, 111.6, 110.8, 110.4))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("storage", "none", True)


@pytest.mark.parametrize(
    "text",
    [
        epochs(1663.4, 111.6, 110.8, 1660.1),
        epochs(1663.4, 1640.0, 1650.8, 1660.1),
        epochs(1663.4, 111.6, 110.8),
        epochs(1663.4, 111.6, 110.8, 110.4, first=7),
        epochs(1663.4, 111.6, 110.8, 110.4, warn=3),
        epochs(220.0, 111.6, 110.8, 110.4),
        epochs(1663.4, 111.6, 110.8, 110.4, warn=None),
        lines(
            epochs(1663.4, 111.6, 110.8, 110.4), "RuntimeError: CUDA error: an illegal memory access was encountered"
        ),
        lines(epochs(1663.4, 111.6, 110.8, 110.4), WATCHDOG),
    ],
)
def test_slowness_that_comes_back_stays_or_ends_in_a_failure_is_no_warm_up(text: str) -> None:
    assert not [c for c in conclusions(text) if c.startswith("derived.warm_up")]
    assert not verdict_of(text).no_current_fault


def paced(*seconds: float, first: int = 999, warn: int) -> str:
    return lines(
        *(f"step {first + i} time {s}s loss 1.1" + "   WARN slow step" * (i == warn) for i, s in enumerate(seconds))
    )


@pytest.mark.parametrize(
    ("text", "calm"),
    [
        (paced(1.0, 9.8, 1.0, 1.1, 1.0, warn=1), True),
        (lines("resumed from checkpoint at step 998", paced(180.0, 1.0, 1.1, 1.0, warn=0)), True),
        (paced(180.0, 1.0, 1.1, 1.0, warn=0), False),
        (paced(1.0, 9.8, 1.0, 1.1, 9.8, 1.0, 1.0, 1.0, warn=1), False),
        (paced(1.0, 1.0, 1.1, 9.8, 1.0, warn=3), False),
        (paced(1.0, 9.8, 1.0, 1.1, 1.0, 1.0, warn=5), False),
    ],
)
def test_one_slow_step_among_others_is_over_where_it_did_not_come_back(text: str, calm: bool) -> None:
    assert verdict_of(text).no_current_fault is calm


@pytest.mark.parametrize(
    ("alarm", "series", "calm"),
    [
        (127, "61 61 62 127 61 62 61 61 62", True),
        (0, "61 61 62 0 61 62 61 61 62", True),
        (127, "61 61 62 127 126 62 61 61 62", False),
        (127, "61 61 62 61 61 62 61 61 127", False),
        (91, "61 66 72 91 80 74 66 61 62", False),
        (95, "61 61 62 127 61 62 61 61 62", False),
    ],
)
def test_one_sample_out_of_line_is_a_wrong_reading(alarm: int, series: str, calm: bool) -> None:
    text = lines(f"alert: GpuTemperature gpu=3 value={alarm} C node=h-3", f"# one sample a minute: {series}")
    assert verdict_of(text).no_current_fault is calm


GATE = "[gate] gpu 0: clocks.current.graphics=1665 != 1830  FAIL"
HEAD = (
    "index, clocks.current.graphics [MHz], power.draw [W], power.limit [W], utilization.gpu [%], "
    "clocks_event_reasons.sw_power_cap, clocks_event_reasons.hw_slowdown"
)
AT_LIMIT = [
    "0, 1665 MHz, 698.7 W, 700.00 W, 100 %, Active, Not Active",
    "1, 1635 MHz, 699.4 W, 700.00 W, 99 %, Active, Not Active",
]


def test_gpus_that_are_all_at_their_limit_and_alike_have_no_fault() -> None:
    verdict = verdict_of(lines(GATE, HEAD, *AT_LIMIT))
    assert (verdict.action, verdict.no_current_fault) == ("none", True)


@pytest.mark.parametrize(
    "odd",
    [
        "2, 1100 MHz, 699.0 W, 700.00 W, 100 %, Active, Not Active",
        "2, 345 MHz, 181.5 W, 700.00 W, 100 %, Not Active, Active",
        "2, 1650 MHz, 420.0 W, 700.00 W, 100 %, Active, Not Active",
        "2, 1650 MHz, 499.0 W, 500.00 W, 100 %, Active, Not Active",
        "2, 1650 MHz, 699.0 W, 700.00 W, 12 %, Active, Not Active",
    ],
)
def test_one_gpu_that_is_not_alike_is_not_calmed(odd: str) -> None:
    text = lines(GATE, HEAD, *AT_LIMIT, odd)
    assert "derived.alarm.all_at_limit" not in conclusions(text)
    assert not verdict_of(text).no_current_fault


COUNTER = "alert: NVLINK ERROR COUNTER NON-ZERO gpu=2 link=7 value={}"


@pytest.mark.parametrize(
    ("alarm", "still", "calm"),
    [
        (COUNTER.format(1), "# windows 12..30: no change on any port.", True),
        (COUNTER.format(1), "replay, hourly: 0 0 0 1 1 1 1 1 1 1 1 1 1", True),
        (COUNTER.format(1), "replay, hourly: 0 0 0 0 0 0 0 0 1 1 1 1 2", False),
        (COUNTER.format(1), "", False),
        (COUNTER.format(5214), "# windows 12..30: no change on any port.", False),
        (COUNTER.format(1).replace("ERROR COUNTER", "UNCORRECTABLE"), "no change on any port", False),
    ],
)
def test_a_corrected_error_that_did_not_come_back_is_over(alarm: str, still: str, calm: bool) -> None:
    text = lines(alarm, still)
    assert ("derived.alarm.settled" in conclusions(text)) is calm
    assert verdict_of(text).no_current_fault is calm


def test_a_settled_counter_takes_back_nothing_of_the_kernel() -> None:
    xid = "kernel: NVRM: Xid (PCI:0000:1b:00): 74, pid='<unknown>', NVLink: fatal error detected on link 7"
    assert not verdict_of(lines(COUNTER.format(1), "no change on any port", xid)).no_current_fault


STUCK = "watchdog: GPU 4 WEDGED (100 % busy for 24 h without a process) -> reset"
WORKED = "# probe on GPU 4: gemm 1.61 PFLOP/s (others 1.60-1.62), rc 0"


@pytest.mark.parametrize(
    ("more", "calm"),
    [
        (WORKED, True),
        ("# probe on GPU 4: gemm timed out, rc=124", False),
        ("", False),
        (
            lines(
                WORKED,
                "kernel: NVRM: Xid (PCI:0000:9a:00): 119, pid=2211, name=python, Timeout after 45s of waiting for RPC",
            ),
            False,
        ),
    ],
)
def test_a_reading_is_stuck_only_where_the_gpu_works(more: str, calm: bool) -> None:
    assert ("derived.alarm.reading_stuck" in conclusions(lines(STUCK, more))) is calm
    assert verdict_of(lines(STUCK, more)).no_current_fault is calm


def power(draw: float, image: str) -> str:
    return lines(
        f"==> dev-{image[-1]} : image {image} <==",
        f"    GPU Power Readings : Average {draw} W   Current Power Limit 35.00 W",
        "    Clocks Event Reasons: SW Power Cap Active   HW Slowdown Not Active   SW Thermal Slowdown Active",
    )


def test_a_power_that_no_board_draws_is_of_what_the_machine_was_given() -> None:
    verdict = verdict_of(lines(power(33.9, "44.20260626.0"), power(588.4, "44.20260705.1")))
    assert verdict.fault_class == "platform"
    assert "derived.power.impossible_here" not in conclusions(lines(power(33.9, "44.1.0"), power(588.4, "44.1.0")))
    assert "derived.power.impossible" not in conclusions(power(36.0, "44.1.0"))
