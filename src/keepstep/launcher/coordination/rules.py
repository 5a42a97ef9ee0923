"""What follows a cycle: an ordered table of named rules, the first that matches decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from keepstep.launcher.coordination.noprogress import Progress
from keepstep.launcher.messages import Failure
from keepstep.records.exits import EXIT_CONFIG, EXIT_FAILURE, EXIT_NO_RESTART, EXIT_NUMERICAL

MAX_PORT_RETRIES = 3
ENVIRONMENT_ERRORS = frozenset(
    {
        *("OSError", "TimeoutError", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError"),
        *("ConnectionAbortedError", "BrokenPipeError", "BlockingIOError", "InterruptedError", "MemoryError"),
        *("StorageError", "ChannelError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"),
    }
)
"""Exceptions that say more about a disk, a network or a peer than about the script."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when no process of a cycle is left."""

    failures: list[Failure]
    """Of all ranks, ordered by time; ranks that only ended because they were stopped are not in it."""
    fault_kind: str | None
    stop_signum: int | None
    nodes_lost: list[str]
    all_exited_zero: bool
    """Every rank of the job ended by itself with status 0."""
    completed_step: int | None
    """Steps completed by all ranks in this cycle as the script counts them; None when it reports none."""
    steps_done: int | None
    """How many of them were completed in this cycle."""
    counted_restarts: int
    max_restarts: int
    port_retries: int
    last_fingerprint: str | None
    last_fingerprint_step: int | None
    workload: str | None = None
    """What a rank asked for: "stop" or "exclude"."""
    workload_reason: str = ""
    attribution_stop: str | None = None
    """Summary of a verdict that calls for the end of the job, where the configuration lets it end one."""
    excluded: list[str] = []
    """Nodes of this cycle that are left out of the next one."""
    probe: bool = False
    """The cycle tested the nodes' bandwidth instead of running the script."""
    never_stepped: bool = False
    """Ranks report steps, none was ever complete in this attempt, and every rank failed by itself."""
    progress: Progress = Progress()
    """The no-progress count as it is after this cycle, should it count as failed."""
    max_no_progress_cycles: int = 0
    min_progress_iterations: int = 1
    no_restart_exit_code: int = EXIT_NO_RESTART


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The decision: start another cycle, or end with a verdict. `rule` is the name of the rule that decided."""

    rule: str
    action: Literal["restart", "end"]
    counted: bool = False
    verdict: Literal["succeeded", "failed", "no_restart", "stopped"] = "succeeded"
    exit_code: int = 0
    cause: str = ""
    message: str = ""


def first_failure(ended: Ended) -> Failure | None:
    """The first failing rank by time; one that failed because a peer went away only when there is no other."""
    own = [f for f in ended.failures if not f.cascade]
    return min(own or ended.failures, key=lambda f: f.time_ns, default=None)


def address_in_use(failure: Failure) -> bool:
    """Whether the store's port was taken: bad luck that says nothing about the code."""
    text = failure.message or ""
    return failure.error_type is not None and ("EADDRINUSE" in text or "address already in use" in text)


def fingerprint(failure: Failure | None, fault_kind: str | None) -> str | None:
    """What a code bug looks like again: exception type and innermost user frame, or the exit code (PROTOCOLS section 9).

    None for signals, hangs, failures that follow from another rank's, taken ports and injected failures: those say nothing
    about the code.
    """
    if failure is None or fault_kind == "hang" or failure.cascade or failure.injected or failure.status < 0:
        return None
    if address_in_use(failure):
        return None
    if failure.error_type is not None:
        return f"{failure.error_type} at {failure.frame or 'unknown frame'}"
    return f"exit {failure.status}" if failure.status > 0 else None


def says_code_bug(failure: Failure) -> bool:
    """Whether a failure, seen on all ranks, can only be the code's or the configuration's."""
    error = (failure.error_type or "").rpartition(".")[2]
    return fingerprint(failure, None) is not None and error not in ENVIRONMENT_ERRORS


def cause_of(failure: Failure | None, fault_kind: str | None) -> str:
    """The launcher's own class of a fault, until a verdict says more."""
    if failure is None or fault_kind == "hang" or failure.cascade or failure.injected or address_in_use(failure):
        return "unknown"
    return "user_code" if failure.error_type is not None else "unknown"


def _stopped(e: Ended) -> Outcome | None:
    if e.stop_signum is None:
        return None
    cause = {2: "interrupted", 15: "preempted"}.get(e.stop_signum, "signal")
    return Outcome(rule="stopped", action="end", verdict="stopped", exit_code=128 + e.stop_signum, cause=cause)


def _probe(e: Ended) -> Outcome | None:
    if not e.probe:
        return None
    return Outcome(rule="gang_check", action="restart", cause="gang_check")


def _workload_stop(e: Ended) -> Outcome | None:
    if e.workload != "stop":
        return None
    return Outcome(
        rule="workload_stop",
        action="end",
        verdict="no_restart",
        exit_code=e.no_restart_exit_code,
        cause="workload_request",
        message=e.workload_reason,
    )


def _attribution_stop(e: Ended) -> Outcome | None:
    if e.attribution_stop is None:
        return None
    return Outcome(
        rule="attribution_stop",
        action="end",
        verdict="no_restart",
        exit_code=e.no_restart_exit_code,
        cause="attribution_stop",
        message=e.attribution_stop,
    )


def _succeeded(e: Ended) -> Outcome | None:
    if not e.all_exited_zero or e.failures or e.fault_kind or e.nodes_lost:
        return None
    return Outcome(rule="succeeded", action="end", cause="finished")


def _numerical(e: Ended) -> Outcome | None:
    if not any(f.status == EXIT_NUMERICAL for f in e.failures):
        return None
    return Outcome(
        rule="numerical_guard",
        action="end",
        verdict="failed",
        exit_code=EXIT_NUMERICAL,
        cause="numerical_guard",
        message="a rank saw a loss or gradient that is not finite; a human should look before the job goes on",
    )


def _exit_42(e: Ended) -> Outcome | None:
    if not any(f.status == EXIT_CONFIG for f in e.failures):
        return None
    return Outcome(
        rule="config_or_code_bug",
        action="end",
        verdict="failed",
        exit_code=EXIT_CONFIG,
        cause="config_or_code_bug",
        message="the script exited 42: a configuration or code bug that another try would meet again",
    )


def _repeated(e: Ended) -> Outcome | None:
    print_ = fingerprint(first_failure(e), e.fault_kind)
    if print_ is None or print_ != e.last_fingerprint:
        return None
    if e.steps_done and e.completed_step != e.last_fingerprint_step:
        return None
    return Outcome(
        rule="same_failure_twice",
        action="end",
        verdict="failed",
        exit_code=EXIT_CONFIG,
        cause="code_bug",
        message=f"the same failure twice with no progress between: {print_}",
    )


def _never_stepped(e: Ended) -> Outcome | None:
    if not e.never_stepped:
        return None
    first = fingerprint(first_failure(e), e.fault_kind)
    return Outcome(
        rule="failed_before_first_step",
        action="end",
        verdict="failed",
        exit_code=EXIT_CONFIG,
        cause="code_bug",
        message=f"every rank failed before the first step: {first}",
    )


def _no_progress(e: Ended) -> Outcome | None:
    if not e.max_no_progress_cycles or e.progress.count < e.max_no_progress_cycles:
        return None
    return Outcome(
        rule="no_progress",
        action="end",
        verdict="no_restart",
        exit_code=e.no_restart_exit_code,
        cause="no_progress",
        message=(
            f"{e.progress.count} failed cycles in a row, each with less than {e.min_progress_iterations} iterations of "
            f"progress (marker {e.progress.last}; --max-no-progress-cycles, --min-progress-iterations)"
        ),
    )


def _port_in_use(e: Ended) -> Outcome | None:
    failure = first_failure(e)
    if failure is None or not address_in_use(failure) or e.port_retries >= MAX_PORT_RETRIES:
        return None
    return Outcome(rule="address_in_use", action="restart", cause="address_in_use")


def _disruption(e: Ended) -> Outcome | None:
    if not e.nodes_lost:
        return None
    return Outcome(rule="node_lost", action="restart", cause="node_lost")


def _node_excluded(e: Ended) -> Outcome | None:
    if not e.excluded:
        return None
    return Outcome(rule="node_excluded", action="restart", cause="node_excluded", message=e.workload_reason)


def _budget(e: Ended) -> Outcome | None:
    if e.counted_restarts < e.max_restarts:
        return None
    return Outcome(
        rule="budget_exhausted",
        action="end",
        verdict="failed",
        exit_code=EXIT_FAILURE,
        cause="budget_exhausted",
        message=f"{e.counted_restarts} of {e.max_restarts} restarts used (--max-restarts)",
    )


def _restart(e: Ended) -> Outcome | None:
    return Outcome(rule="restart", action="restart", counted=True, cause=e.fault_kind or "exit")


RULES: tuple[tuple[str, Callable[[Ended], Outcome | None]], ...] = (
    ("stopped: asked to stop by a signal -> end, 128+n", _stopped),
    ("gang_check: the cycle was a test of the nodes (--gang-check) -> next cycle, free", _probe),
    ("workload_stop: a rank called run.request_stop -> end, --no-restart-exit-code", _workload_stop),
    (
        "attribution_stop: a verdict says that another try would fail alike (--attribution-stop no-restart) -> end, "
        "--no-restart-exit-code",
        _attribution_stop,
    ),
    ("succeeded: every rank exited 0 -> end, 0", _succeeded),
    ("numerical_guard: a rank exited 43 -> end, 43", _numerical),
    ("config_or_code_bug: a rank exited 42 -> end, 42", _exit_42),
    ("same_failure_twice: same fingerprint, no progress between -> end, 42", _repeated),
    ("failed_before_first_step: every rank of a script with steps, by itself -> end, 42", _never_stepped),
    (
        "no_progress: --max-no-progress-cycles failed cycles without progress -> end, --no-restart-exit-code",
        _no_progress,
    ),
    (f"address_in_use: the store's port was taken -> restart, free, at most {MAX_PORT_RETRIES} times", _port_in_use),
    ("node_lost: a node went away -> restart, free", _disruption),
    ("node_excluded: a node was taken out (checks, run.request_exclude_node) -> restart, free", _node_excluded),
    ("budget_exhausted: --max-restarts used up -> end, 1", _budget),
    ("restart: anything else -> restart, counted", _restart),
)


def decide(ended: Ended) -> Outcome:
    """Apply the table."""
    for _, rule in RULES:
        outcome = rule(ended)
        if outcome is not None:
            return outcome
    raise AssertionError("the last rule always matches")
