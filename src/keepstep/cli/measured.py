"""What the folders of runs say of the inputs of formulas: costs of saves and restarts, failures and node time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keepstep.cli.goodput import load_goodput
from keepstep.goodput.rates import DAY_S, Prior
from keepstep.records import frames
from keepstep.records.cycle import CyclePhases, Goodput
from keepstep.records.timeline import Mark

NS_PER_S = 1_000_000_000
HANGS = frozenset({"hang"})
"""Kinds of faults that are known only when a limit has passed."""


class Value(NamedTuple):
    """An input and where it is from."""

    value: Any
    origin: str


class Run(NamedTuple):
    """A run folder, read once: its account over all attempts, and the marks of its journal."""

    folder: Path
    account: Goodput
    marks: Sequence[Mark]


def open_run(run_dir: Path) -> Run:
    """Raises NotFoundError, StorageError."""
    from keepstep.launcher.coordination.journal import read_marks

    return Run(run_dir, load_goodput(run_dir, all_attempts=True), read_marks(run_dir))


def measured(run: Run) -> dict[str, Value]:
    """What a run says of the inputs; what it does not say is not there.

    block_s, persist_lag_s, restart_s, nodes, ranks_per_node, failures, exposure_node_days. Raises StorageError.
    """
    from keepstep.launcher.views.failures import read_failures, restart_s

    account = run.account
    found: dict[str, Value] = {}
    blocked_s = account.checkpoints.block_s_median
    if blocked_s is not None:
        found["block_s"] = Value(blocked_s, "median of the run's saves")
    lags = [m.attrs["persist_ns"] for m in run.marks if m.kind == "committed" and m.attrs.get("persist_ns")]
    if lags:
        found["persist_lag_s"] = Value(statistics.median(lags) / NS_PER_S, f"median of {len(lags)} commits of the run")
    again_s = restart_s(account)
    if again_s is not None:
        found["restart_s"] = Value(again_s, "median of the run's restarts")
    newest = next((c for c in reversed(account.cycles) if c.active_nodes), None)
    if newest is not None:
        found["nodes"] = Value(len(newest.active_nodes), "the run's newest cycle")
        if newest.ranks:
            per_node = -(-len(newest.ranks) // len(newest.active_nodes))
            found["ranks_per_node"] = Value(per_node, "the run's newest cycle")
    history = read_failures(run.folder, time.time_ns())
    if history is not None:
        found["failures"] = Value(history.failures, f"interruptions of the run since {history.since}")
        found["exposure_node_days"] = Value(history.node_s / DAY_S, "node time of the run's cycles")
    return found


def measured_phases(run: Run) -> dict[str, float]:
    """Medians over the run's restarts: detect_s of faults that were no hangs, decide_s, replace_s, start_s, load_s; with hangs also
    hang_share and hang_s. Empty before the first restart."""
    spent = _restarts(run.account)
    if not spent:
        return {}
    parts = {
        "decide_s": ("capture_s", "teardown_s", "decide_s"),
        "replace_s": ("replace_s", "rendezvous_s"),
        "start_s": ("start_s", "first_step_s"),
        "load_s": ("restore_s",),
    }
    found = {
        name: statistics.median(sum(float(getattr(p, field)) for field in fields) for p in spent)
        for name, fields in parts.items()
    }
    return found | _detection(run.marks)


def _restarts(account: Goodput) -> list[CyclePhases]:
    pairs = zip(account.cycles, account.cycles[1:], strict=False)
    return [cycle.phases for before, cycle in pairs if before.attempt == cycle.attempt]


def _detection(marks: Sequence[Mark]) -> dict[str, float]:
    waits: dict[bool, list[float]] = {False: [], True: []}
    for mark in marks:
        occurred, detected = mark.attrs.get("occurred_ns"), mark.attrs.get("detected_ns")
        if mark.kind == "fault" and isinstance(occurred, int) and isinstance(detected, int):
            waits[mark.attrs.get("kind") in HANGS].append(max(0, detected - occurred) / NS_PER_S)
    found = {}
    if waits[False]:
        found["detect_s"] = statistics.median(waits[False])
    if waits[True]:
        found["hang_s"] = statistics.median(waits[True])
        found["hang_share"] = len(waits[True]) / (len(waits[True]) + len(waits[False]))
    return found


def rate_prior(text: str | None, sku: str, run_dir: Path | None, flag: str = "--failure-rate") -> Prior:
    """What `flag` says, else what the run was started with, else KEEPSTEP_FLEET_PRIOR, else the published rate.

    Raises ConfigError.
    """
    from keepstep.launcher.views.view import read_object
    from keepstep.trainer.cadence import prior_from

    if text is not None:
        return prior_from(text, sku, flag)
    of_run = read_object(run_dir / "run.json").get("failure_prior") if run_dir is not None else None
    if isinstance(of_run, str):
        return prior_from(of_run, sku, "--failure-prior of the run")
    return prior_from(os.environ.get(frames.ENV_FLEET_PRIOR, ""), sku, frames.ENV_FLEET_PRIOR)
