"""The table that decides what follows a cycle, case by case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.cli.main import main
from keepstep.launcher.coordination.noprogress import Progress
from keepstep.launcher.coordination.rules import (
    ENVIRONMENT_ERRORS,
    MAX_PORT_RETRIES,
    RULES,
    Ended,
    cause_of,
    decide,
    fingerprint,
    first_failure,
    says_code_bug,
)
from keepstep.launcher.messages import Failure

FRAME = "/home/u/train.py:12 in main"
BUG: dict[str, Any] = {"error_type": "ValueError", "frame": FRAME}
BUG_PRINT = f"ValueError at {FRAME}"
IN_USE = (
    "The server socket has failed to listen. port: 29500, code: -98, name: EADDRINUSE, message: address already in use"
)


def fails(rank: int = 0, status: int = 1, **fields: Any) -> Failure:
    return Failure(rank=rank, status=status, **{"time_ns": 100 + rank, **fields})


def ended(*failures: Failure, **fields: Any) -> Ended:
    known: dict[str, Any] = {
        "failures": list(failures),
        "fault_kind": "exit" if failures else None,
        "stop_signum": None,
        "nodes_lost": [],
        "all_exited_zero": not failures and fields.get("fault_kind") is None,
        "completed_step": 10,
        "steps_done": 5,
        "counted_restarts": 0,
        "max_restarts": 3,
        "port_retries": 0,
        "last_fingerprint": None,
        "last_fingerprint_step": None,
    }
    return Ended(**{**known, **fields})


taken = fails(error_type="DistNetworkError", message=IN_USE)
cascade = fails(error_type="DistBackendError", cascade=True)
again = {"last_fingerprint": BUG_PRINT, "last_fingerprint_step": 10}

used = {"counted_restarts": 3}
unknown = {"all_exited_zero": False}
stuck: dict[str, Any] = {"progress": Progress(last=100, count=3), "max_no_progress_cycles": 3}

CASES: dict[str, tuple[Ended, str, str, int, bool]] = {
    # name: what is known, rule, action, exit code, counted
    "all ranks exited 0": (ended(), "succeeded", "end", 0, False),
    "nothing failed, but some rank's end is unknown": (ended(all_exited_zero=False), "restart", "restart", 0, True),
    "a rank was killed": (ended(fails(status=-9)), "restart", "restart", 0, True),
    "a rank raised": (ended(fails(**BUG)), "restart", "restart", 0, True),
    "a hang without any failure": (ended(fault_kind="hang"), "restart", "restart", 0, True),
    "only failures that follow from others": (ended(cascade), "restart", "restart", 0, True),
    # signals asked for come before everything
    "asked to stop, all exited 0": (ended(stop_signum=15), "stopped", "end", 143, False),
    "asked to stop and a rank was killed": (ended(fails(status=-9), stop_signum=2), "stopped", "end", 130, False),
    "asked to stop and a rank exited 42": (ended(fails(status=42), stop_signum=15), "stopped", "end", 143, False),
    "hang-up": (ended(stop_signum=1), "stopped", "end", 129, False),
    # codes that mean something
    "exit 42": (ended(fails(status=42)), "config_or_code_bug", "end", 42, False),
    "exit 43": (ended(fails(status=43)), "numerical_guard", "end", 43, False),
    "exit 43 of a later rank": (ended(fails(0, -9), fails(1, 43)), "numerical_guard", "end", 43, False),
    "43 before 42": (ended(fails(0, 42), fails(1, 43)), "numerical_guard", "end", 43, False),
    "exit 3 is not passed through": (ended(fails(status=3)), "restart", "restart", 0, True),
    "exit 42 although a node is gone": (
        ended(fails(status=42), nodes_lost=["b"]),
        "config_or_code_bug",
        "end",
        42,
        False,
    ),
    # the same failure twice
    "twice at the same step": (ended(fails(**BUG), **again), "same_failure_twice", "end", 42, False),
    "twice with no step between": (
        ended(fails(**BUG), **{**again, "last_fingerprint_step": 7}, steps_done=0),
        "same_failure_twice",
        "end",
        42,
        False,
    ),
    "twice in a script that reports no steps": (
        ended(fails(**BUG), **{**again, "last_fingerprint_step": None}, steps_done=None, completed_step=None),
        "same_failure_twice",
        "end",
        42,
        False,
    ),
    "again, but later": (ended(fails(**BUG), **{**again, "last_fingerprint_step": 7}), "restart", "restart", 0, True),
    "another failure": (ended(fails(**{**BUG, "error_type": "KeyError"}), **again), "restart", "restart", 0, True),
    "killed twice is no bug": (
        ended(fails(status=-9), last_fingerprint=None, last_fingerprint_step=10, steps_done=0),
        "restart",
        "restart",
        0,
        True,
    ),
    "the same exit code twice": (
        ended(fails(status=7), last_fingerprint="exit 7", last_fingerprint_step=10),
        "same_failure_twice",
        "end",
        42,
        False,
    ),
    "twice, but only after the budget": (
        ended(fails(**BUG), **again, counted_restarts=3),
        "same_failure_twice",
        "end",
        42,
        False,
    ),
    # ports
    "port taken": (ended(taken), "address_in_use", "restart", 0, False),
    "port taken again": (ended(taken, port_retries=MAX_PORT_RETRIES - 1), "address_in_use", "restart", 0, False),
    "port taken once more than is free": (ended(taken, port_retries=MAX_PORT_RETRIES), "restart", "restart", 0, True),
    "port taken, budget used": (ended(taken, counted_restarts=3), "address_in_use", "restart", 0, False),
    "the script's own port": (
        ended(fails(error_type="OSError", message="[Errno 98] Address already in use")),
        "restart",
        "restart",
        0,
        True,
    ),
    # nodes and budget
    "node lost": (ended(cascade, nodes_lost=["b"]), "node_lost", "restart", 0, False),
    "node lost, budget used": (ended(cascade, nodes_lost=["b"], counted_restarts=3), "node_lost", "restart", 0, False),
    "node lost and no failure at all": (
        ended(nodes_lost=["b"], fault_kind="node_lost"),
        "node_lost",
        "restart",
        0,
        False,
    ),
    "budget used": (ended(fails(status=-9), counted_restarts=3), "budget_exhausted", "end", 1, False),
    "no restarts wanted": (ended(fails(status=-9), max_restarts=0), "budget_exhausted", "end", 1, False),
    "the last restart of the budget": (ended(fails(status=-9), counted_restarts=2), "restart", "restart", 0, True),
    "node taken out": (ended(cascade, excluded=["b"]), "node_excluded", "restart", 0, False),
    "node taken out, budget used": (ended(excluded=["b"], **used, **unknown), "node_excluded", "restart", 0, False),
    "a rank asked for its node to be left out": (
        ended(excluded=["b"], workload="exclude", workload_reason="ECC", **unknown),
        "node_excluded",
        "restart",
        0,
        False,
    ),
    "one node lost, another taken out": (ended(nodes_lost=["a"], excluded=["b"]), "node_lost", "restart", 0, False),
    "asked to be left out while all ranks finish": (
        ended(excluded=["b"], workload="exclude"),
        "succeeded",
        "end",
        0,
        False,
    ),
    # a test of the nodes says nothing about the script
    "gang check done": (ended(probe=True), "gang_check", "restart", 0, False),
    "gang check failed, budget used": (ended(fails(status=1), probe=True, **used), "gang_check", "restart", 0, False),
    "gang check failed with no progress before": (
        ended(fails(), probe=True, **stuck),
        "gang_check",
        "restart",
        0,
        False,
    ),
    "gang check, asked to stop": (ended(probe=True, stop_signum=15), "stopped", "end", 143, False),
    # a rank asked for the end
    "request_stop": (ended(workload="stop", **unknown), "workload_stop", "end", 93, False),
    "request_stop, another code wanted": (
        ended(workload="stop", no_restart_exit_code=17, **unknown),
        "workload_stop",
        "end",
        17,
        False,
    ),
    "a verdict ends the job": (
        ended(fails(status=-9), attribution_stop="INC-0001: KeyError"),
        "attribution_stop",
        "end",
        93,
        False,
    ),
    "request_stop although all ranks exit 0": (ended(workload="stop"), "workload_stop", "end", 93, False),
    "request_stop and a rank exited 43": (ended(fails(status=43), workload="stop"), "workload_stop", "end", 93, False),
    "a signal and request_stop": (ended(stop_signum=15, workload="stop"), "stopped", "end", 143, False),
    # before the first step
    "all ranks failed before the first step": (
        ended(fails(**BUG), never_stepped=True),
        "failed_before_first_step",
        "end",
        42,
        False,
    ),
    "all ranks failed before the first step, twice": (
        ended(fails(**BUG), **again, never_stepped=True),
        "same_failure_twice",
        "end",
        42,
        False,
    ),
    # no progress
    "no progress": (ended(fails(status=-9), **stuck), "no_progress", "end", 93, False),
    "no progress, another code wanted": (
        ended(fails(status=-9), **stuck, no_restart_exit_code=17),
        "no_progress",
        "end",
        17,
        False,
    ),
    "no progress, but one try is left": (
        ended(fails(status=-9), **{**stuck, "max_no_progress_cycles": 4}),
        "restart",
        "restart",
        0,
        True,
    ),
    "no progress, but the check is off": (
        ended(fails(status=-9), **{**stuck, "max_no_progress_cycles": 0}),
        "restart",
        "restart",
        0,
        True,
    ),
    "no progress with a node lost": (ended(nodes_lost=["b"], **stuck), "no_progress", "end", 93, False),
    "no progress and a code bug": (ended(fails(**BUG), **again, **stuck), "same_failure_twice", "end", 42, False),
    "no progress, but it finished": (ended(**stuck), "succeeded", "end", 0, False),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    known, rule, action, code, counted = CASES[name]
    outcome = decide(known)
    assert (outcome.rule, outcome.action, outcome.exit_code, outcome.counted) == (rule, action, code, counted)


def test_every_rule_of_the_table_has_a_case_and_its_name() -> None:
    assert [text.partition(":")[0] for text, _ in RULES] == list(
        dict.fromkeys(text.partition(":")[0] for text, _ in RULES)
    )
    assert {text.partition(":")[0] for text, _ in RULES} == {case[1] for case in CASES.values()}


ORDER = (
    *(
        "stopped",
        "gang_check",
        "workload_stop",
        "attribution_stop",
        "succeeded",
        "numerical_guard",
        "config_or_code_bug",
        "same_failure_twice",
    ),
    *("failed_before_first_step", "no_progress", "address_in_use", "node_lost", "node_excluded"),
    *("budget_exhausted", "restart"),
)


def test_the_order_of_the_table() -> None:
    assert tuple(text.partition(":")[0] for text, _ in RULES) == ORDER


def test_the_text_of_a_rule_says_what_it_does() -> None:
    """`run --dry-run` prints these texts: rule: when -> action, ..."""
    says = {text.partition(":")[0]: text.rpartition("-> ")[2] for text, _ in RULES}
    for known, rule, action, code, counted in CASES.values():
        if known.no_restart_exit_code != 93:
            continue
        said = {"93": "--no-restart-exit-code"}.get(str(code), str(code)) if action == "end" else ""
        said = "128+n" if rule == "stopped" else said
        assert says[rule].startswith("next cycle" if rule == "gang_check" else action)
        assert (f"end, {said}" == says[rule]) if action == "end" else (("counted" in says[rule]) == counted)


def test_dry_run_prints_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    with pytest.raises(SystemExit) as ended_with:
        main(["run", "--dry-run", "--run-dir", str(tmp_path / "run"), str(script)])
    assert ended_with.value.code in (0, None)
    shown = capsys.readouterr().out
    places = [shown.index(text) for text, _ in RULES]
    assert places == sorted(places)


def test_an_end_says_why() -> None:
    for known, rule, action, _, _ in CASES.values():
        outcome = decide(known)
        assert outcome.cause
        if action == "end" and outcome.verdict in ("failed", "no_restart"):
            assert outcome.message == known.workload_reason if rule == "workload_stop" else outcome.message


def test_the_reason_of_a_rank_is_the_message() -> None:
    outcome = decide(ended(workload="stop", workload_reason="loss diverged", **unknown))
    assert (outcome.verdict, outcome.cause, outcome.message) == ("no_restart", "workload_request", "loss diverged")


def test_no_progress_names_count_marker_and_flags() -> None:
    outcome = decide(CASES["no progress"][0])
    assert (outcome.verdict, outcome.cause) == ("no_restart", "no_progress")
    assert outcome.message.startswith(
        "3 failed cycles in a row, each with less than 1 iterations of progress (marker 100;"
    )
    assert "--max-no-progress-cycles" in outcome.message and "--min-progress-iterations" in outcome.message


def test_the_verdict_of_a_repeated_failure_shows_it() -> None:
    outcome = decide(CASES["twice at the same step"][0])
    assert outcome.message == f"the same failure twice with no progress between: {BUG_PRINT}"


FINGERPRINTS: dict[str, tuple[Failure | None, str | None, str | None]] = {
    "an exception": (fails(**BUG), "exit", BUG_PRINT),
    "an exception without a frame": (fails(error_type="ValueError"), "exit", "ValueError at unknown frame"),
    "an exit code": (fails(status=7), "exit", "exit 7"),
    "a signal": (fails(status=-9), "exit", None),
    "a signal of a rank that left a traceback": (fails(status=-6, **BUG), "exit", None),
    "a cascade": (cascade, "exit", None),
    "an injected exception": (fails(**BUG, injected=True), "exit", None),
    "an injected exit": (fails(status=7, injected=True), "exit", None),
    "a hang": (fails(**BUG), "hang", None),
    "a taken port": (taken, "spawn", None),
    "nothing": (None, "exit", None),
    "exit 0": (fails(status=0), "exit", None),
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_fingerprint(name: str) -> None:
    failure, kind, expected = FINGERPRINTS[name]
    assert fingerprint(failure, kind) == expected


@pytest.mark.parametrize(
    ("failure", "kind", "cause"),
    [
        (fails(**BUG), "exit", "user_code"),
        (fails(status=7), "exit", "unknown"),
        (fails(status=-9), "exit", "unknown"),
        (cascade, "exit", "unknown"),
        (fails(**BUG, injected=True), "exit", "unknown"),
        (fails(**BUG), "hang", "unknown"),
        (taken, "spawn", "unknown"),
        (None, "node_lost", "unknown"),
    ],
)
def test_cause(failure: Failure | None, kind: str, cause: str) -> None:
    assert cause_of(failure, kind) == cause


@pytest.mark.parametrize("name", sorted(ENVIRONMENT_ERRORS))
@pytest.mark.parametrize("module", ["", "torch.distributed."])
def test_errors_of_disks_networks_and_peers_are_no_code_bug(name: str, module: str) -> None:
    assert not says_code_bug(fails(error_type=module + name, frame=FRAME))


@pytest.mark.parametrize(
    ("failure", "bug"),
    [(fails(**BUG), True), (fails(status=7), True), (fails(status=-9), False), (cascade, False), (taken, False)],
)
def test_what_says_code_bug(failure: Failure, bug: bool) -> None:
    assert says_code_bug(failure) == bug


class TestFirstFailure:
    def test_first_by_time_and_not_by_order_or_rank(self) -> None:
        late, early = fails(0, 1, time_ns=900), fails(5, -9, time_ns=100)
        assert first_failure(ended(late, early)) == early

    def test_a_cascade_is_never_first_while_there_is_another(self) -> None:
        loud = fails(0, 1, time_ns=1, cascade=True, traceback="x" * 1000)
        assert first_failure(ended(loud, fails(3, -11, time_ns=900))) == fails(3, -11, time_ns=900)

    def test_the_first_cascade_when_there_is_nothing_else(self) -> None:
        failures = [fails(r, 1, time_ns=t, cascade=True) for r, t in ((0, 30), (1, 10), (2, 20))]
        assert first_failure(ended(*failures)) == failures[1]

    def test_nothing_failed(self) -> None:
        assert first_failure(ended()) is None


failures = st.builds(
    Failure,
    rank=st.integers(0, 7),
    status=st.sampled_from([-15, -9, -6, 1, 2, 3, 7, 42, 43, 93, 255]),
    time_ns=st.integers(0, 1000),
    error_type=st.sampled_from([None, "ValueError", "DistNetworkError"]),
    message=st.sampled_from([None, IN_USE, "x"]),
    frame=st.sampled_from([None, FRAME]),
    cascade=st.booleans(),
    injected=st.booleans(),
)
endings = st.builds(
    Ended,
    failures=st.lists(failures, max_size=4),
    fault_kind=st.sampled_from([None, "exit", "hang", "spawn", "node_lost"]),
    stop_signum=st.sampled_from([None, 1, 2, 15]),
    nodes_lost=st.sampled_from([[], ["b"]]),
    all_exited_zero=st.booleans(),
    completed_step=st.sampled_from([None, 0, 5, 6]),
    steps_done=st.sampled_from([None, 0, 3]),
    counted_restarts=st.integers(0, 4),
    max_restarts=st.integers(0, 3),
    port_retries=st.integers(0, 4),
    last_fingerprint=st.sampled_from([None, BUG_PRINT, "exit 7", "ValueError at unknown frame"]),
    last_fingerprint_step=st.sampled_from([None, 0, 5]),
    workload=st.sampled_from([None, None, "stop", "exclude"]),
    excluded=st.sampled_from([[], ["a"]]),
    never_stepped=st.booleans(),
    probe=st.booleans(),
    progress=st.builds(Progress, last=st.sampled_from([None, 0, 7]), count=st.integers(0, 4)),
    max_no_progress_cycles=st.integers(0, 3),
    no_restart_exit_code=st.sampled_from([93, 17]),
)


@given(endings)
def test_invariants_of_every_decision(known: Ended) -> None:
    outcome = decide(known)
    if outcome.action == "restart":
        assert known.stop_signum is None
        assert outcome.exit_code == 0
        assert not outcome.counted or known.counted_restarts < known.max_restarts
        assert outcome.counted == (outcome.rule == "restart")
        assert known.probe or known.workload != "stop"
        assert known.probe or not known.max_no_progress_cycles or known.progress.count < known.max_no_progress_cycles
    else:
        # 3 to 6 mean something else, and 0 is only for success.
        assert outcome.exit_code in (0, 1, 42, 43, 129, 130, 143, known.no_restart_exit_code)
        assert (outcome.exit_code == 0) == (outcome.verdict == "succeeded")
        assert (outcome.exit_code == known.no_restart_exit_code) == (outcome.verdict == "no_restart")
    if outcome.verdict == "succeeded" and outcome.action == "end":
        assert known.all_exited_zero
        assert not known.failures
    shuffled = msgspec.structs.replace(known, failures=known.failures[::-1])
    if len({f.time_ns for f in known.failures}) == len(known.failures):
        assert decide(shuffled) == outcome


@given(endings)
def test_signals_cascades_and_injected_faults_are_never_called_a_bug(known: Ended) -> None:
    innocent = [f for f in known.failures if f.status < 0 or f.cascade or f.injected]
    outcome = decide(msgspec.structs.replace(known, failures=innocent))
    assert outcome.rule != "same_failure_twice"
