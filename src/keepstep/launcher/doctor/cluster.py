"""Rules about the scheduler that starts the job: Slurm and Kubernetes."""

from __future__ import annotations

import math

from keepstep.launcher.doctor.facts import Facts, Toleration
from keepstep.launcher.doctor.findings import Outcome, cost, found
from keepstep.records.exits import EXIT_CONFIG, EXIT_NO_RESTART, EXIT_NUMERICAL

NOT_READY_KEYS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
DEFAULT_TOLERATION_S = 300.0
TOLERATION_S = 60.0
"""Longer than this is worth a finding."""
NEEDS_SLURM = "no scontrol here and no --slurm-config"
SLURM_DOCS = "slurm.conf(5)"
KUBERNETES_DOCS = "Kubernetes: taint-based evictions"


def slurm_requeue(facts: Facts) -> Outcome:
    if facts.slurm is None:
        return NEEDS_SLURM
    own = {facts.config.no_restart_exit_code if facts.config else EXIT_NO_RESTART, EXIT_CONFIG, EXIT_NUMERICAL}
    for key, effect in (
        ("RequeueExit", "Slurm starts the job again"),
        ("RequeueExitHold", "Slurm puts the job back on hold, and it looks pending"),
    ):
        hit = sorted(own & exit_codes(facts.slurm.get(key, "")))
        if hit:
            return found(
                "error",
                f"{key} lists exit codes that mean: do not retry",
                (facts.slurm[key], f"{facts.slurm_where}: {key}"),
                why=f"After exit {', '.join(map(str, hit))} {effect}, also with --no-requeue.",
                fix=f"take {', '.join(map(str, hit))} out of {key}, then scontrol reconfigure; "
                "or --no-restart-exit-code with a code that is not listed",
                source=SLURM_DOCS,
            )
    return None


def exit_codes(text: str) -> set[int]:
    """Exit codes of a Slurm list such as "1,5-7"; what is no number is left out."""
    codes: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdecimal() and (not high or high.isdecimal()):
            codes.update(range(int(low), min(255, int(high or low)) + 1))
    return codes


def slurm_kill(facts: Facts) -> Outcome:
    if facts.slurm is None:
        return NEEDS_SLURM
    if facts.slurm.get("KillOnBadExit") != "1":
        return None
    return found(
        "warning",
        "srun ends all launchers as soon as one has exited",
        ("1", f"{facts.slurm_where}: KillOnBadExit"),
        why="The step's exit code is then often 143 instead of the launchers' 93 or 42.",
        fix="srun --kill-on-bad-exit=0, or let the batch script decide by the run folder's verdict.json, "
        "which is written before any launcher exits",
        source=SLURM_DOCS,
    )


def slurm_notice(facts: Facts) -> Outcome:
    if facts.slurm is None:
        return NEEDS_SLURM
    notice = facts.config.preempt_notice_s if facts.config else None
    save = facts.measured.save_s if facts.measured else None
    need_s, what = max((notice or 0.0, "--preempt-notice"), (save or 0.0, "the longest save measured"))
    kill_wait = seconds_of(facts.slurm.get("KillWait", ""))
    if not need_s or kill_wait is None:
        return "needs --preempt-notice or a measured save (RUN), and Slurm's KillWait"
    if kill_wait >= need_s:
        return None
    return found(
        "warning",
        "Slurm kills before the last checkpoint can be written",
        (f"{kill_wait:g} s", f"{facts.slurm_where}: KillWait"),
        why=f"That is the time between SIGTERM and SIGKILL at the time limit and on scancel; {what} is {need_s:.1f} s.",
        fix=f"#SBATCH --signal=TERM@{max(60, math.ceil(need_s) + 60)} (its timer is coarse), or raise KillWait",
        source=SLURM_DOCS,
    )


def slurm_unkillable(facts: Facts) -> Outcome:
    if facts.slurm is None:
        return NEEDS_SLURM
    limit, message = (seconds_of(facts.slurm.get(k, "")) for k in ("UnkillableStepTimeout", "MessageTimeout"))
    if limit is None:
        return "Slurm does not say its UnkillableStepTimeout"
    need_s = max(60.0, 5 * (message or 0.0))
    if limit >= need_s:
        return None
    return found(
        "warning",
        "Slurm drains nodes whose processes die slowly",
        (f"{limit:g} s", f"{facts.slurm_where}: UnkillableStepTimeout"),
        why="A rank that waits for storage or for its GPU's driver cannot die at once; after that time the node is "
        "drained and a healthy node is lost to the job.",
        fix=f"UnkillableStepTimeout={max(180, math.ceil(need_s))} in slurm.conf",
        source=SLURM_DOCS,
    )


def seconds_of(text: str) -> float | None:
    """Seconds of a Slurm setting such as "30 sec" or "30"; None when it is something else."""
    number = text.split(maxsplit=1)[0] if text.split() else ""
    return float(number) if number.isdecimal() else None


def toleration_s(tolerations: list[Toleration], key: str) -> float:
    """How long a pod stays on a node with the NoExecute taint `key`; infinite when it tolerates the taint for ever.

    A pod that says nothing gets five minutes from the API server.
    """
    mine = [
        t
        for t in tolerations
        if t.effect in ("", "NoExecute") and (t.key == key or (not t.key and t.operator == "Exists"))
    ]
    if not mine:
        return DEFAULT_TOLERATION_S
    return min(math.inf if t.toleration_seconds is None else float(max(0, t.toleration_seconds)) for t in mine)


def not_ready(facts: Facts) -> Outcome:
    if not facts.in_kubernetes and facts.tolerations is None:
        return "not in Kubernetes, and no --pod"
    longest = max(toleration_s(facts.tolerations or [], key) for key in NOT_READY_KEYS)
    if longest <= TOLERATION_S:
        return None
    shown = "for ever" if math.isinf(longest) else f"{longest:g} s"
    price = cost(facts, 3600 if math.isinf(longest) else longest)
    per = "an hour" if math.isinf(longest) else "a time"
    return found(
        "warning",
        "a pod on a node that is not ready is replaced late",
        (shown, facts.pod_where or "Kubernetes' default; --pod shows what this pod has"),
        why="Without a spare the job waits for the replacement of a lost node that long, after the node was found "
        f"not ready: {price} {per}.",
        fix=f"tolerations: key {NOT_READY_KEYS[0]} and key {NOT_READY_KEYS[1]}, operator Exists, effect NoExecute, "
        "tolerationSeconds 30",
        source=KUBERNETES_DOCS,
    )
