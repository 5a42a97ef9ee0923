"""A job of Slurm, whichever command showed it: its state, how it ended, and what that says."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.scheduler.making import moment, note

USER_SIGNALS = (10, 12)
"""SIGUSR1 and SIGUSR2 on Linux: what `sbatch --signal` sends as a warning."""

NO_OUTPUT = 53
"""Signal number in the exit code of a job whose output file could not be opened, so that it never ran."""

SIGNATURES = {
    "NODE_FAIL": "slurm.job_node_fail",
    "PREEMPTED": "slurm.job_preempted",
    "TIMEOUT": "slurm.job_time_limit",
    "DEADLINE": "slurm.job_time_limit",
    "OUT_OF_MEMORY": "slurm.job_oom",
    "BOOT_FAIL": "slurm.job_boot_fail",
    "LAUNCH_FAILED": "slurm.job_failed",
    "RECONFIG_FAIL": "slurm.job_failed",
    "CANCELLED": "slurm.job_cancelled",
    "REVOKED": "slurm.job_cancelled",
    "FAILED": "slurm.job_failed",
    "COMPLETED": "slurm.job_completed",
    "RUNNING": "slurm.job_running",
    "COMPLETING": "slurm.job_running",
    "CONFIGURING": "slurm.job_pending",
    "SUSPENDED": "slurm.job_running",
    "STOPPED": "slurm.job_running",
    "STAGE_OUT": "slurm.job_running",
    "SIGNALING": "slurm.job_running",
    "RESIZING": "slurm.job_pending",
    "PENDING": "slurm.job_pending",
    "REQUEUED": "slurm.job_pending",
    "REQUEUE_FED": "slurm.job_pending",
    "REQUEUE_HOLD": "slurm.job_pending",
    "RESV_DEL_HOLD": "slurm.job_pending",
    "SPECIAL_EXIT": "slurm.job_pending",
}
"""Job states of sacct(1) and squeue(1)."""

_SHORT = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
}
_SHORT |= {"F": "FAILED", "NF": "NODE_FAIL", "OOM": "OUT_OF_MEMORY", "PD": "PENDING", "PR": "PREEMPTED", "R": "RUNNING"}
_SHORT |= {"RQ": "REQUEUED", "RS": "RESIZING", "RV": "REVOKED", "S": "SUSPENDED", "SE": "SPECIAL_EXIT", "ST": "STOPPED"}
_SHORT |= {"TO": "TIMEOUT", "RH": "REQUEUE_HOLD", "SI": "SIGNALING", "SO": "STAGE_OUT"}

_HELD = re.compile(r"launch failed|MaxRequeue|requeued in held", re.IGNORECASE)


class JobRow(NamedTuple):
    """A job or step as one record shows it. Codes as (code, signal). `from_sacct`: codes of 128 and more have lost 128 there."""

    job: str
    step: str
    state: str
    exit: tuple[int, int] | None = None
    derived: tuple[int, int] | None = None
    reason: str = ""
    nodes: str = ""
    began: object = None
    ended: object = None
    elapsed: str = ""
    limit: str = ""
    restarts: str = ""
    preempted: object = None
    user: str = ""
    from_sacct: bool = False


def state_of(text: object) -> tuple[str, str] | None:
    """State and the rest ("by 1000") of what a state column holds; None when it is no state. Cut ones ("OUT_OF_ME+") count."""
    if isinstance(text, list):
        text = text[0] if text else ""
    if not isinstance(text, str) or not text.strip():
        return None
    first, _, rest = text.strip().partition(" ")
    word = first.upper().rstrip("+").removesuffix("(MAINT)")
    if first.endswith("+"):
        full = [s for s in SIGNATURES if s.startswith(word)]
        return (full[0], rest) if len(full) == 1 else None
    word = _SHORT.get(word, word)
    return (word, rest) if word in SIGNATURES else None


def code_of(text: object) -> tuple[int, int] | None:
    """ "143:0" as (143, 0). Numbers are raw wait states, as in JSON of Slurm up to 23.02."""
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text < 2**16:
        return text >> 8, text & 0x7F
    match = re.fullmatch(r"\s*(\d{1,3}):(\d{1,3})\s*", text) if isinstance(text, str) else None
    return (int(match[1]), int(match[2])) if match else None


def signal_of(row: JobRow) -> int | None:
    """The signal that ended it, where the record leaves no doubt."""
    if row.exit is None:
        return None
    code, signal = row.exit
    if signal and signal != 125:  # 125 is Slurm's mark for out of memory
        return signal
    return code - 128 if 128 < code <= 192 else None


def job_events(row: JobRow, line: Line, document: Document, catalog: Catalog) -> list[Event]:
    """What one record says. Steps count only for what their job does not show: memory, and the warning signal."""
    attrs: dict[str, Any] = {
        "state": row.state, "step": row.step, "reason": row.reason if row.reason not in ("None", "(null)") else "",
        "nodes": row.nodes, "elapsed": row.elapsed, "limit": row.limit, "restarts": row.restarts, "by_uid": row.user,
    }  # fmt: skip
    if row.exit is not None:
        attrs |= {"code": row.exit[0], "signal": signal_of(row)}
        # sacct prints 137 as 9:0, so that an exit with 9 and a kill look alike.
        attrs["ambiguous_code"] = (row.from_sacct and row.exit[0] in (6, 9, 11, 15) and not row.exit[1]) or None
    if row.derived is not None and row.derived != (0, 0):
        attrs["derived_code"], attrs["derived_signal"] = row.derived

    def made(signature: str, **more: Any) -> Event:
        at = row.ended if moment(row.ended)[0] is not None else row.began
        sole = row.nodes if re.fullmatch(r"[\w.-]+", row.nodes) else None
        return note(catalog, signature, document, line, at=at, node=sole, job=row.job, attrs={**attrs, **more})

    found = []
    if row.exit == (0, NO_OUTPUT) and not row.step:
        found.append(made("slurm.output_path"))
    warned = signal_of(row) in USER_SIGNALS and row.state in ("FAILED", "CANCELLED")
    if warned:
        found.append(made("slurm.user_signal"))
    if row.step:
        # The external step holds what a user does beside the job: a shell, a monitor.
        return [*found, made("slurm.job_oom")] if row.state == "OUT_OF_MEMORY" and row.step != "extern" else found
    if row.state == "COMPLETED" and moment(row.preempted)[0] is not None:
        return [made("slurm.job_preempted_completed")]
    found.append(made(SIGNATURES[row.state]))
    if row.derived is not None and row.derived[1] == 125 and row.state != "OUT_OF_MEMORY":
        found.append(made("slurm.job_oom"))
    if _HELD.search(row.reason) or row.state == "SPECIAL_EXIT":
        found.append(made("slurm.held_after_requeues"))
    return found
