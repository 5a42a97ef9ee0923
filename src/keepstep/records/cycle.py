"""Cycle record, goodput summary and verdict file: the run folder's JSON files (CONTRACT sections 3)."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import msgspec

from keepstep.records.losses import JobLosses

PHASES = (
    "queue",
    "init",
    "productive",
    "rolled_back",
    "ckpt_block",
    "detect",
    "capture",
    "teardown",
    "decide",
    "replace",
    "rendezvous",
    "start",
    "restore",
    "first_step",
    "drain",
    "other",
)
"""Names of the partition; every nanosecond of wall-clock is in exactly one."""

RECOVERY_TIMES = {
    "cycle_started": "rendezvous",
    "assigned": "process_start",
    "attached": "restore_begin",
    "restored": "restored",
    "first_step": "first_step",
    "committed": "first_committed",
    "captured": "captured",
    "stopped": "stopped",
    "decided": "decided",
}
"""Names of recovery times after the marks they are taken from; a fault adds "fault" and "detected"."""

RestoredFrom = Literal["shm", "peer", "disk", "object", "none"]
"""Memory of the node, memory of another node, a file system, an object store, or nothing."""
DURABLE = frozenset({"disk", "object"})
"""Those that outlive the job's nodes."""
Recovery = Literal["in_process", "respawn", "spare", "checkpoint"]


class FailureHistory(msgspec.Struct, frozen=True, kw_only=True):
    """How often a run was interrupted (`keepstep.goodput.history`), over how much node time, since when (RFC 3339)."""

    failures: int
    node_s: float
    since: str


def restored_from(source: object) -> RestoredFrom:
    """The `source` of a `restored` mark, as records name it; "none" for anything that is no tier."""
    return cast(RestoredFrom, source) if source in get_args(RestoredFrom) else "none"


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank ran and how it ended. `exit` is "exit N", a signal name, or None while it runs."""

    rank: int
    local_rank: int
    node: str
    host: str
    pid: int | None = None
    gpu_uuid: str | None = None
    pci: str | None = None
    exit: str | None = None


class CyclePhases(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the recovery that led into this cycle, and of its own start."""

    detect_s: float = 0.0
    capture_s: float = 0.0
    teardown_s: float = 0.0
    decide_s: float = 0.0
    replace_s: float = 0.0
    rendezvous_s: float = 0.0
    start_s: float = 0.0
    restore_s: float = 0.0
    first_step_s: float = 0.0


class Cycle(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.cycle/1`: one life of the worker group."""

    schema: str = "keepstep.cycle/1"
    run_id: str
    attempt: int
    cycle: int
    started_at: str
    ended_at: str | None = None
    end_reason: str | None = None
    fault: dict[str, Any] | None = None
    incident: str | None = None
    restored_step: int | None = None
    restored_from: RestoredFrom = "none"
    restored_checkpoint: str | None = None
    recovery: Recovery | None = None
    phases: CyclePhases = CyclePhases()
    times: dict[str, str] = {}
    """When each thing of RECOVERY_TIMES happened in this cycle (RFC 3339); what did not happen is not there."""
    scatter: dict[str, Any] | None = None
    ranks: list[RankPlace] = []
    active_nodes: list[str] = []
    spare_nodes: list[str] = []
    placement: str = "first"
    """How its nodes came about: "first", "respawn" (the same), "spare" (substituted), "shrink" or "grow"."""
    substituted: list[list[str]] = []
    """[lost node, the node that took its ranks] of the change that led here."""
    node_notes: dict[str, dict[str, Any]] = {}
    """What a node has to say of its part: GPU memory that was waited for, output that was lost."""
    counted: bool = False
    history: FailureHistory | None = None
    """Of the whole run up to the begin of this cycle; None in its first one."""
    master_addr: str | None = None
    master_port: int | None = None


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of optimizer steps. `final` is the step the surviving history ends at; None when no step was reported."""

    final: int | None = None
    completed: int | None = None
    committed: int | None = None
    rolled_back: int | None = None


class RestartCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many times the worker group was started again, and how many of these count against --max-restarts."""

    total: int = 0
    counted: int = 0
    free: int = 0


class CheckpointCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Saves of the run; `block_s_median` is the median time training stood still for one."""

    committed: int = 0
    failed: int = 0
    last_step: int | None = None
    block_s_median: float | None = None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.goodput/1`. `wall_ns` and `phases_ns` are authoritative and add up exactly; `*_s` are for reading."""

    schema: str = "keepstep.goodput/1"
    run_id: str
    attempt: int
    wall_ns: int
    phases_ns: dict[str, int]
    wall_s: float
    ettr: float | None
    productive_s: float | None
    phases: dict[str, float | None]
    lost_by_cause: dict[str, float]
    straggler_tax_s: float | None = None
    false_positive_tax_s: float | None = None
    steps: StepCounts = StepCounts()
    restarts: RestartCounts = RestartCounts()
    checkpoints: CheckpointCounts = CheckpointCounts()
    cycles: list[Cycle] = []
    losses: JobLosses | None = None
    """The same wall-clock under the names of the six losses; None in records of older versions."""


class VerdictFile(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.verdict_file/1`: written durably before the launcher exits."""

    schema: str = "keepstep.verdict_file/1"
    run_id: str
    attempt: int
    outcome: Literal["succeeded", "failed", "no_restart", "stopped"]
    exit_code: int
    cause: str
    incident: str | None = None
    last_committed_step: int | None = None
    first_failing_rank: int | None = None
    original_exit: str | None = None
    traceback: str | None = None
    message: str | None = None
