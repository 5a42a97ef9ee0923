"""Rules of `keepstep doctor`: facts in, findings out. Only `facts` reads files and asks processes.

A rule returns what it found, None when all is well, or a sentence that says why it could not look.
"""

from __future__ import annotations

import msgspec

from keepstep.launcher.doctor import cluster, collectives, settings
from keepstep.launcher.doctor.facts import Facts
from keepstep.launcher.doctor.findings import Finding, Rule, Severity

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Most severe first."""


RULES: dict[str, Rule] = {
    "nccl-timeout-variable": collectives.nccl_timeout,
    "group-timeout-measured": collectives.group_timeout_measured,
    "group-timeout-range": collectives.group_timeout_range,
    "ib-timeout": collectives.ib_timeout,
    "heartbeat-timeout": collectives.heartbeat,
    "async-error-handling": collectives.async_errors,
    "slow-rank": collectives.slow_rank,
    "join-timeout": settings.join_timeout,
    "shrinking": settings.shrinking,
    "ib-partition": collectives.ib_partition,
    "save-memory": settings.save_memory,
    "open-files": settings.open_files,
    "hang-limit": settings.hang_limit,
    "progress-marker": settings.progress_marker,
    "clear-text": settings.clear_text,
    "token-file": settings.token,
    "run-folder": settings.run_folder,
    "slurm-requeue": cluster.slurm_requeue,
    "slurm-kill-on-bad-exit": cluster.slurm_kill,
    "slurm-notice": cluster.slurm_notice,
    "slurm-unkillable": cluster.slurm_unkillable,
    "kubernetes-not-ready": cluster.not_ready,
}
"""Every rule by its id, in the order they are reported."""


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that could not look, and what it would have needed."""

    id: str
    why: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.doctor/1`. `passed` names the rules that looked and found nothing."""

    schema: str = "keepstep.doctor/1"
    findings: list[Finding]
    passed: list[str]
    skipped: list[Skipped]


def examine(facts: Facts) -> Report:
    """Apply every rule; findings come with the most severe first, else in the order of the rules."""
    findings, passed, skipped = [], [], []
    for name, rule in RULES.items():
        result = rule(facts)
        if isinstance(result, Finding):
            findings.append(msgspec.structs.replace(result, id=name))
        elif result is None:
            passed.append(name)
        else:
            skipped.append(Skipped(id=name, why=result))
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(findings=findings, passed=passed, skipped=skipped)
