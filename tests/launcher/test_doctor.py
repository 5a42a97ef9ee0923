"""Every rule of `keepstep doctor`: facts that trigger it, and the nearest facts that must not."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.launcher.config import RunConfig
from keepstep.launcher.doctor import RULES, examine
from keepstep.launcher.doctor.cluster import exit_codes, toleration_s
from keepstep.launcher.doctor.collectives import ib_retry_s
from keepstep.launcher.doctor.facts import Facts, IbPort, LateRank, Measured, TokenFile, Toleration
from keepstep.launcher.doctor.findings import Finding, cost, recommended_timeout_s
from keepstep.launcher.doctor.scriptscan import GroupTimeout, OneRankWork, Script

GIB = 2**30


def config(**fields: Any) -> RunConfig:
    return RunConfig(**{"run_id": "r", "run_dir": "/runs/r", "node": "n0", "script": "t.py", **fields})


def script(seconds: float | None = 300.0, **fields: Any) -> Script:
    return Script(path="t.py", timeouts=[GroupTimeout(line=3, seconds=seconds)], **fields)


def measured(**fields: float) -> Measured:
    return Measured(where="/runs/r, 2 cycles", **fields)


def tolerations(seconds: int | None, *keys: str) -> list[Toleration]:
    return [Toleration(key=key, operator="Exists", effect="NoExecute", toleration_seconds=seconds) for key in keys]


NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
TENANT = IbPort(name="mlx5_0:1", pkeys={0: 0x8012, 1: 0x7FFF})


class Case(NamedTuple):
    """Facts that make rule `id` report with `severity` and `text` in the finding."""

    id: str
    severity: str
    text: str
    facts: Facts


TRIGGERS = [
    Case("nccl-timeout-variable", "warning", "NCCL_IB_TIMEOUT", Facts(env={"NCCL_TIMEOUT": "1800"})),
    Case(
        "group-timeout-measured",
        "error",
        "seconds=300",
        Facts(script=script(199), measured=measured(save_s=120, first_step_s=80)),
    ),
    Case("group-timeout-range", "warning", "outside two to five minutes", Facts(script=script(301))),
    Case("group-timeout-range", "warning", "outside two to five minutes", Facts(script=script(119))),
    Case("ib-timeout", "warning", "8.6 s", Facts(env={"NCCL_IB_TIMEOUT": "18"})),
    Case("ib-timeout", "error", "0 to 31", Facts(env={"NCCL_IB_TIMEOUT": "32"})),
    Case("ib-timeout", "error", "0 to 7", Facts(env={"NCCL_IB_RETRY_CNT": "8"})),
    Case("ib-timeout", "warning", "for ever", Facts(env={"NCCL_IB_TIMEOUT": "0"})),
    Case("ib-timeout", "info", "seconds=172", Facts(ib_ports=[TENANT], script=script(137))),
    Case("heartbeat-timeout", "warning", f"{HEARTBEAT}=600", Facts(env={HEARTBEAT: "299"}, script=script(300))),
    Case("heartbeat-timeout", "warning", "ten minutes", Facts(env={HEARTBEAT: "ten minutes"}, script=script(300))),
    Case("async-error-handling", "error", "for ever", Facts(env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})),
    Case("async-error-handling", "error", "unset NCCL_ASYNC", Facts(env={"NCCL_ASYNC_ERROR_HANDLING": "0"})),
    Case("async-error-handling", "warning", "lives on", Facts(env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"})),
    Case("slow-rank", "warning", "rank 3", Facts(late_ranks=[LateRank(cycle=2, rank=3, section="eval", waiting=7)])),
    Case("slow-rank", "info", "t.py:9", Facts(script=script(one_rank_work=[OneRankWork(line=9, call="save")]))),
    Case(
        "join-timeout",
        "error",
        "join_timeout=1000",
        Facts(config=config(join_timeout_s=799.0), image_pull_s=600, measured=measured(restore_s=200)),
    ),
    Case("shrinking", "warning", "--nnodes 4 --spares", Facts(config=config(nnodes=4, min_nodes=3))),
    Case("ib-partition", "warning", "0xffff", Facts(ib_ports=[TENANT, IbPort(name="mlx5_1:1", pkeys={0: 0xFFFF})])),
    Case("ib-partition", "warning", "pkeys/1", Facts(env={"NCCL_IB_PKEY": "1"}, ib_ports=[TENANT])),
    Case(
        "save-memory",
        "error",
        "does not fit",
        Facts(shard_bytes=GIB + 1, available_bytes=GIB, available_where="memory.max"),
    ),
    Case(
        "save-memory",
        "warning",
        "hardly fits",
        Facts(shard_bytes=GIB, available_bytes=GIB, available_where="memory.max"),
    ),
    Case("open-files", "error", "LimitNOFILE=4416", Facts(config=config(nnodes=256, nproc=8), open_files=(1024, 4096))),
    Case("open-files", "warning", "ulimit -n 4416", Facts(config=config(nnodes=256, nproc=8), open_files=(4415, -1))),
    Case("hang-limit", "warning", "auto", Facts(config=config(monitor_hang="off"))),
    Case("progress-marker", "warning", "restarts 10 times", Facts(config=config(), script=script())),
    Case("clear-text", "error", "h0:29400", Facts(config=config(tls=False, endpoints=["localhost:1", "h0:29400"]))),
    Case("token-file", "error", "mode 0640", Facts(config=config(), token=TokenFile(path="/t", mode=0o640))),
    Case(
        "token-file",
        "error",
        "another user",
        Facts(config=config(), token=TokenFile(path="/t", mode=0o600, is_own=False)),
    ),
    Case("token-file", "error", "missing", Facts(config=config(), token=TokenFile(path="/t", mode=None))),
    Case("run-folder", "warning", "in memory", Facts(config=config(), run_dir_type="tmpfs")),
    Case("run-folder", "error", "another host", Facts(config=config(endpoints=["a:1", "b:1"]), run_dir_type="tmpfs")),
    Case("run-folder", "error", "another host", Facts(config=config(endpoints=["a:1", "b:1"]), run_dir_type="ext4")),
    Case("slurm-requeue", "error", "out of RequeueExit,", Facts(slurm={"RequeueExit": "1,90-93"})),
    Case("slurm-requeue", "error", "RequeueExitHold", Facts(slurm={"RequeueExit": "", "RequeueExitHold": "42"})),
    Case("slurm-requeue", "error", "77", Facts(slurm={"RequeueExit": "77"}, config=config(no_restart_exit_code=77))),
    Case("slurm-kill-on-bad-exit", "warning", "verdict.json", Facts(slurm={"KillOnBadExit": "1"})),
    Case(
        "slurm-notice",
        "warning",
        "--preempt-notice is 31",
        Facts(slurm={"KillWait": "30 sec"}, config=config(preempt_notice_s=31.0)),
    ),
    Case(
        "slurm-notice", "warning", "longest save", Facts(slurm={"KillWait": "30 sec"}, measured=measured(save_s=30.5))
    ),
    Case(
        "slurm-unkillable",
        "warning",
        "=500",
        Facts(slurm={"UnkillableStepTimeout": "60 sec", "MessageTimeout": "100 sec"}),
    ),
    Case(
        "kubernetes-not-ready",
        "warning",
        "42.7 GPU-hours on 512 GPUs, 85.33 at 2",
        Facts(in_kubernetes=True, gpus=512, price_per_gpu_hour=2.0),
    ),
    Case("kubernetes-not-ready", "warning", "300 s", Facts(tolerations=tolerations(30, NOT_READY))),
    Case("kubernetes-not-ready", "warning", "for ever", Facts(tolerations=[Toleration(operator="Exists")])),
]

NEAR_MISSES = [
    ("nccl-timeout-variable", Facts(env={"NCCL_IB_TIMEOUT": "22"})),
    ("group-timeout-measured", Facts(script=script(200), measured=measured(save_s=120, first_step_s=80))),
    ("group-timeout-range", Facts(script=script(300))),
    ("group-timeout-range", Facts(script=script(120))),
    ("group-timeout-range", Facts(script=script(500), measured=measured(save_s=400))),
    # Below what was measured is the other rule's finding.
    ("group-timeout-range", Facts(script=script(60), measured=measured(save_s=61))),
    ("ib-timeout", Facts(env={"NCCL_IB_TIMEOUT": "20"})),
    ("ib-timeout", Facts(ib_ports=[TENANT], script=script(138))),
    ("heartbeat-timeout", Facts(env={HEARTBEAT: "300"}, script=script(300))),
    ("async-error-handling", Facts(env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})),
    ("slow-rank", Facts(script=script())),
    (
        "join-timeout",
        Facts(config=config(join_timeout_s=800.0), image_pull_s=600, measured=measured(restore_s=200)),
    ),
    ("shrinking", Facts(config=config(nnodes=4, min_nodes=4, spares=2))),
    ("ib-partition", Facts(ib_ports=[TENANT])),
    ("save-memory", Facts(shard_bytes=8 * GIB, available_bytes=10 * GIB)),
    ("open-files", Facts(config=config(nnodes=256, nproc=8), open_files=(4416, 4416))),
    ("open-files", Facts(config=config(nnodes=256, nproc=8), open_files=(-1, -1))),
    ("hang-limit", Facts(config=config(monitor_hang="auto"))),
    ("progress-marker", Facts(config=config(), script=script(uses_checkpointer=True))),
    ("progress-marker", Facts(config=config(checkpoint_iteration_file="/m"), script=script())),
    ("progress-marker", Facts(config=config(max_no_progress_cycles=0), script=script())),
    ("clear-text", Facts(config=config(tls=False, endpoints=["127.0.0.1:29400"]))),
    ("clear-text", Facts(config=config(tls=True, endpoints=["h0:29400"]))),
    ("token-file", Facts(config=config(), token=TokenFile(path="/t", mode=0o600))),
    ("run-folder", Facts(config=config(endpoints=["a:1", "b:1"]), run_dir_type="lustre")),
    ("run-folder", Facts(config=config(endpoints=["a:1"]), run_dir_type="ext4")),
    ("slurm-requeue", Facts(slurm={"RequeueExit": "1,90-92", "RequeueExitHold": "143"})),
    ("slurm-requeue", Facts(slurm={"RequeueExit": "93"}, config=config(no_restart_exit_code=77))),
    ("slurm-kill-on-bad-exit", Facts(slurm={"KillOnBadExit": "0"})),
    ("slurm-notice", Facts(slurm={"KillWait": "30 sec"}, config=config(preempt_notice_s=30.0))),
    ("slurm-unkillable", Facts(slurm={"UnkillableStepTimeout": "60 sec", "MessageTimeout": "10 sec"})),
    ("kubernetes-not-ready", Facts(in_kubernetes=True, tolerations=tolerations(60, NOT_READY, UNREACHABLE))),
]


@pytest.mark.parametrize("case", TRIGGERS, ids=lambda case: f"{case.id}-{case.severity}")
def test_rule_reports(case: Case) -> None:
    found = next(f for f in examine(case.facts).findings if f.id == case.id)
    assert found.severity == case.severity
    assert case.text in f"{found.title} {found.seen.value} {found.seen.where} {found.why} {found.fix}"
    assert all((found.title, found.seen.value, found.seen.where, found.why, found.fix, found.source))


@pytest.mark.parametrize(("name", "facts"), NEAR_MISSES)
def test_near_miss_passes(name: str, facts: Facts) -> None:
    assert RULES[name](facts) is None


def test_every_rule_has_both() -> None:
    assert {case.id for case in TRIGGERS} == set(RULES) == {name for name, _ in NEAR_MISSES}


def test_every_rule_is_accounted_for_once() -> None:
    report = examine(Facts())
    names = [f.id for f in report.findings] + report.passed + [s.id for s in report.skipped]
    assert sorted(names) == sorted(RULES)
    assert not report.findings
    assert all(skipped.why for skipped in report.skipped)


def test_errors_come_first() -> None:
    facts = Facts(env={"NCCL_TIMEOUT": "1"}, slurm={"KillOnBadExit": "1", "RequeueExit": "93"})
    assert [f.severity for f in examine(facts).findings] == ["error", "warning", "warning"]


def test_timeout_that_is_no_number_is_not_judged() -> None:
    result = RULES["group-timeout-range"](Facts(script=script(None)))
    assert isinstance(result, str)
    assert "t.py:3" in result


@given(st.floats(0, 1e6))
def test_recommended_timeout_never_triggers_its_own_rules(save_s: float) -> None:
    seconds = recommended_timeout_s(save_s)
    assert seconds >= max(120.0, save_s)
    assert seconds <= 300 or seconds <= math.ceil(1.25 * save_s)
    facts = Facts(script=script(seconds), measured=measured(save_s=save_s))
    assert not isinstance(RULES["group-timeout-range"](facts), Finding)
    assert not isinstance(RULES["group-timeout-measured"](facts), Finding)


def test_infiniband_arithmetic() -> None:
    # 4.096 us * 2**22 = 17.18 s, eight tries.
    assert ib_retry_s(22, 7) == pytest.approx(137.44, abs=0.01)
    assert ib_retry_s(14, 0) == pytest.approx(0.0671, abs=0.0001)


def test_cost() -> None:
    assert cost(Facts(gpus=4096), 300) == "341.3 GPU-hours on 4,096 GPUs"
    assert cost(Facts(gpus=4096, price_per_gpu_hour=2.5), 300).endswith(", 853.33 at 2.5 per GPU-hour")
    assert cost(Facts(), 3600) == "1.000 GPU-hours for every GPU of the job"


@given(st.sets(st.integers(0, 255)))
def test_exit_code_lists_round_trip(codes: set[int]) -> None:
    assert exit_codes(",".join(map(str, codes))) == codes


@pytest.mark.parametrize(("text", "codes"), [("", set()), ("5-7, 93", {5, 6, 7, 93}), ("7-5", set()), ("x,3", {3})])
def test_exit_code_lists(text: str, codes: set[int]) -> None:
    assert exit_codes(text) == codes


def test_the_shortest_toleration_of_a_taint_counts() -> None:
    both = [*tolerations(30, NOT_READY), *tolerations(600, NOT_READY)]
    assert toleration_s(both, NOT_READY) == 30
    assert toleration_s(both, UNREACHABLE) == 300
    assert toleration_s([Toleration(key=NOT_READY, effect="NoSchedule")], NOT_READY) == 300
