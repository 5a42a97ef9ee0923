"""The table that decides what follows a cycle, case by case."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.launcher.messages import Failure
from keepstep.launcher.rules import (
    MAX_PORT_RETRIES,
    RULES,
    Ended,
    cause_of,
    decide,
    fingerprint,
    first_failure,
)

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


def test_an_end_says_why() -> None:
    for known, _, action, _, _ in CASES.values():
        outcome = decide(known)
        assert outcome.cause
        if action == "end" and outcome.verdict == "failed":
            assert outcome.message


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
)


@given(endings)
def test_invariants_of_every_decision(known: Ended) -> None:
    outcome = decide(known)
    if outcome.action == "restart":
        assert known.stop_signum is None
        assert outcome.exit_code == 0
        assert not outcome.counted or known.counted_restarts < known.max_restarts
        assert outcome.counted == (outcome.rule == "restart")
    else:
        # 3 to 6 mean something else, and 0 is only for success.
        assert outcome.exit_code in (0, 1, 42, 43, 129, 130, 143)
        assert (outcome.exit_code == 0) == (outcome.verdict == "succeeded")
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
