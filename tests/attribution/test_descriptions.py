"""Machines that are not what a scheduler, a check or a launcher takes them for, and machines that are broken."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, verdict_of

SHORT = (
    "[2031-05-11T09:14:02.112] error: Setting node g12 state to INVAL with reason:"
    "gres/gpu count reported lower than configured (3 < 4)"
)
MIG = "  MIG 2g.20gb     Device  0: (UUID: MIG-3f6b...)"
FALLEN = "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=0, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("more", "described"), [(MIG, True), ("MIG M. : Disabled", False), (lines(MIG, FALLEN), False)]
)
def test_gpus_that_were_divided_anew_are_not_lost(more: str, described: bool) -> None:
    assert ("derived.slurm.gres_outdated" in conclusions(lines(SHORT, more))) is described
    assert (verdict_of(lines(SHORT, more)).fault_class == "platform") is described


def low(node: str, have: int, want: int = 515_000) -> str:
    return f"[2031-03-04T11:02:01.100] error: Node {node} has low real_memory size ({have} < {want})"


@pytest.mark.parametrize(
    ("text", "described"),
    [
        (lines(low("c1", 480_000), low("c2", 480_000), low("c3", 480_000)), True),
        (low("c1", 514_500), True),
        (lines(low("c1", 480_000), low("c2", 480_000)), False),
        (lines(low("c1", 480_000), low("c2", 470_000), low("c3", 480_000)), False),
        (low("c1", 480_000), False),
    ],
)
def test_memory_that_is_short_alike_or_by_little_is_described_wrongly(text: str, described: bool) -> None:
    assert ("derived.slurm.memory_outdated" in conclusions(text)) is described
    verdict = verdict_of(text)
    assert verdict.fault_class == "platform" or not described
    assert not verdict.no_current_fault


LEDGER = lines(
    "$ sacct -X -o JobID,User,State,NodeList,Elapsed",
    "JobID             User      State        NodeList    Elapsed ",
    "------------ --------- ---------- --------------- ---------- ",
    *(f"22{i:02}               u{i}     FAILED            n031   00:00:01 " for i in range(4)),
    "2210              carl  COMPLETED            n030   02:00:11 ",
    "2211               eva  COMPLETED            n032   00:51:08 ",
)


def test_jobs_that_fail_before_they_begin_are_failed_by_the_set_up_of_the_node() -> None:
    differs = "# slurmctld: error: Node n031 appears to have a different slurm.conf than the slurmctld."
    verdict = verdict_of(lines(LEDGER, differs))
    assert (verdict.fault_class, verdict.action, verdict.entity.node) == ("platform", "cordon_node", "n031")
    assert verdict_of(LEDGER).fault_class == "hardware"
    assert verdict_of(lines(LEDGER, differs.replace("n031", "n044"))).entity.node == "n031"


def check(node: str) -> str:
    return f"2031-02-02T10:00:31+00:00 {node} nhc[2210]: Health check failed:  Script timed out."


@pytest.mark.parametrize(
    ("nodes", "took", "slow"),
    [
        (("a001", "a002", "a003"), "real 0m33.402s", True),
        (("a001", "a002", "a003"), "real 0m0.402s", False),
        (("a001", "a002"), "real 0m33.402s", False),
    ],
)
def test_checks_that_wait_for_a_slow_scheduler_say_nothing_of_the_nodes(
    nodes: tuple[str, ...], took: str, slow: bool
) -> None:
    text = lines(*map(check, nodes), "$ time scontrol ping", "Slurmctld(primary) at ctl1 is UP", took)
    assert ("derived.sched.controller_slow" in conclusions(text)) is slow
    assert not verdict_of(text).no_current_fault


DOWN = "[2031-08-22 04:11:02] health_check.py:716 [h200-17_4021_0] GPU 3: NVL link 5 is in DISABLED state"
LEFT = (
    "[2031-08-22 04:11:03] launcher.py:880 [h200-17_4021_0] Node health check failed before rendezvous, leaving. exit 1"
)


def test_a_node_that_left_for_its_link_is_kept_out() -> None:
    verdict = verdict_of(lines(DOWN, LEFT))
    assert (verdict.fault_class, verdict.action, verdict.entity.node) == ("fabric", "cordon_node", "h200-17")
    assert "derived.nvrx.left_for_link" not in conclusions(DOWN)
    assert "derived.nvrx.left_for_link" not in conclusions(LEFT)


VALUE = (
    "WARNING:megatron.core.rerun_state_machine:Unexpected result tensor(inf, device='cuda:5') on rank 85 at iteration #9 "
    "invocation #1 (message='found Inf in local grad norm')"
)


def test_a_trainer_that_asks_for_another_gpu_gets_one() -> None:
    asked = "WARNING:megatron.core.rerun_state_machine:First rerun: unexpected result is reproducible within the tolerance. "
    asked += "Need to rerun on a different GPU to verify correctness"
    verdict = verdict_of(lines(VALUE, asked, "exiting program at iteration 9 with exit code 16"))
    assert verdict.action == "restart_job"
    agreed = (
        "WARNING:megatron.core.rerun_state_machine:Second rerun: unexpected result is reproducible on a different GPU, "
    )
    assert "derived.loss.rerun_wanted" not in conclusions(lines(VALUE, asked, agreed + "therefore was likely correct"))


TABLE = lines(
    "rank  data_ms  forward_ms  backward_ms  step_ms",
    *(f"{r}     8.{r}      61.0        240.2        312.0" for r in range(4)),
    "4     171.7    61.1        76.8         312.1",
)


@pytest.mark.parametrize(
    ("innermost", "own"),
    [
        ("normalize_unicode (textproc/clean.py:77)", True),
        ("read (codecs.py:319)", False),
        ("recv_into (ssl.py:1300)", False),
    ],
)
def test_a_stack_in_the_programs_data_code_says_whose_the_slowness_is(innermost: str, own: bool) -> None:
    stack = ('Thread 4410 (active): "MainThread"', f"    {innermost}", "    __getitem__ (textproc/corpus.py:140)")
    text = lines(
        TABLE, "$ py-spy dump --pid 4410   # rank 4", *stack, "    fetch (torch/utils/data/_utils/fetch.py:54)"
    )
    assert ("derived.straggler.own_data" in conclusions(text)) is own
    assert "derived.straggler.own_data" not in conclusions(text.replace("# rank 4", "# rank 2"))
