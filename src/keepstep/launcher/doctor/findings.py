"""What every rule of `keepstep doctor` returns, and what several of them work out from the facts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from keepstep.launcher.doctor.facts import Facts

Severity = Literal["info", "warning", "error"]
MIN_GROUP_TIMEOUT_S, MAX_GROUP_TIMEOUT_S = 120.0, 300.0
MARGIN = 1.25
"""A time-out stays this factor above what was measured: the next save may be slower than the slowest so far."""
OWN_DOCS = "keepstep: docs/architecture.md"
NEEDS_SCRIPT = "needs the training script: --script, or RUN with a script that is still there"
NEEDS_RUN = "needs RUN, a run folder with its run.json"


class Seen(msgspec.Struct, frozen=True):
    """A value and the place it was found in."""

    value: str
    where: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to change. `fix` is a command or a setting; `source` names what the reasoning rests on."""

    id: str = ""
    """Name of the rule; filled in by whoever applies the rules."""
    severity: Severity
    title: str
    seen: Seen
    why: str
    fix: str
    source: str


Outcome = Finding | str | None
"""What a rule found, why it could not look, or None when all is well."""
Rule = Callable[[Facts], Outcome]


def found(severity: Severity, title: str, seen: tuple[str, str], *, why: str, fix: str, source: str) -> Finding:
    """A finding; `seen` is (value, where)."""
    return Finding(severity=severity, title=title, seen=Seen(*seen), why=why, fix=fix, source=source)


def cost(facts: Facts, seconds: float) -> str:
    """What it costs that all GPUs of the job wait: '341.3 GPU-hours on 4,096 GPUs, 682.67 at 2 per GPU-hour'."""
    if not facts.gpus:
        return f"{seconds / 3600:.3f} GPU-hours for every GPU of the job"
    hours = facts.gpus * seconds / 3600
    text = f"{hours:,.1f} GPU-hours on {facts.gpus:,} GPUs"
    if facts.price_per_gpu_hour is None:
        return text
    return f"{text}, {hours * facts.price_per_gpu_hour:,.2f} at {facts.price_per_gpu_hour:g} per GPU-hour"


def needed_s(facts: Facts) -> float:
    """Longest save plus longest first step that were measured: a collective may have to wait for both. 0: unknown."""
    return (facts.measured.save_s or 0.0) + (facts.measured.first_step_s or 0.0) if facts.measured else 0.0


def recommended_timeout_s(measured_s: float) -> float:
    """Process-group time-out: two to five minutes, but always MARGIN times save plus compile (`measured_s`)."""
    return float(
        math.ceil(max(MARGIN * measured_s, min(MAX_GROUP_TIMEOUT_S, max(MIN_GROUP_TIMEOUT_S, 2 * measured_s))))
    )


def group_timeout(facts: Facts) -> tuple[float, str] | str:
    """The script's shortest process-group time-out and where it stands, or why it is not known."""
    if facts.script is None:
        return NEEDS_SCRIPT
    if not facts.script.timeouts:
        return f"{facts.script.path} does not call init_process_group itself (a framework does)"
    known = [(t.seconds, t.line, t.is_default) for t in facts.script.timeouts if t.seconds is not None]
    if not known:
        return f"{facts.script.path}:{facts.script.timeouts[0].line}: the time-out is not a plain number in the text"
    seconds, line, is_default = min(known)
    return seconds, f"{facts.script.path}:{line}" + (", torch's default" if is_default else "")
