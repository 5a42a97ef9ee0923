"""What tools, probes, gates and counters say beside a job: what is theirs, and what is not talked away."""

from __future__ import annotations

import pytest

from keepstep.sources.joblog.tools import looks_on
from tests.attribution.jobtexts import lines, verdict_of

RAISED = lines(
    "Traceback (most recent call last):",
    '  File "/opt/tools/thing.py", line 41, in <module>',
    "    main()",
    '  File "/opt/tools/read.py", line 88, in read',
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
    assert not verdict_of(lines("$ torchrun thing.py", RAISED)).no_current_fault


def test_a_tool_that_fails_takes_back_nothing_of_what_the_job_said() -> None:
    verdict = verdict_of(lines(WATCHDOG, "$ torchfrtrace --prefix x_ /dumps", RAISED))
    assert not verdict.no_current_fault
    assert verdict.action == "ask_human"


def test_what_a_tool_tells_of_a_device_counts() -> None:
    told = RAISED.replace(
        "KeyError: 'entries'", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert not verdict_of(lines("$ nvitop -1", told)).no_current_fault
