"""Rules about collectives: time-outs of process groups and of the fabric, and what ranks do between collectives."""

from __future__ import annotations

import math

from keepstep.launcher.doctor.facts import Facts
from keepstep.launcher.doctor.findings import (
    MARGIN,
    MAX_GROUP_TIMEOUT_S,
    MIN_GROUP_TIMEOUT_S,
    NEEDS_SCRIPT,
    OWN_DOCS,
    Outcome,
    cost,
    found,
    group_timeout,
    needed_s,
    recommended_timeout_s,
)
from keepstep.launcher.ranks.environment import NCCL_DEFAULTS, OTHER_NAMES

IB_UNIT_S = 4.096e-6
"""InfiniBand's local ACK time-out is this times two to the power of NCCL_IB_TIMEOUT."""
IB_MIN_S = 20.0
"""A link that trains again, or a subnet manager that sweeps, takes a few to some twenty seconds."""
IB_HIGHEST = {"NCCL_IB_TIMEOUT": 31, "NCCL_IB_RETRY_CNT": 7}
"""The most that five and three bits of a queue pair's attributes hold."""
DEFAULT_PKEY = 0x7FFF
"""Low fifteen bits of the key of the partition that every host of a fabric is in."""

TORCH_DOCS = "PyTorch: ProcessGroupNCCL environment variables"
GROUP_DOCS = "PyTorch: torch.distributed.init_process_group"
NCCL_DOCS = "NCCL user guide: environment variables"


def _set_timeout(seconds: float) -> str:
    return f"dist.init_process_group(..., timeout=datetime.timedelta(seconds={seconds:.0f}))"


def nccl_timeout(facts: Facts) -> Outcome:
    value = facts.env.get("NCCL_TIMEOUT")
    if value is None:
        return None
    return found(
        "warning",
        "NCCL_TIMEOUT is not a variable of NCCL or PyTorch",
        (value, "environment: NCCL_TIMEOUT"),
        why="Nothing reads it. The limit of a collective is the process group's own and still has its default.",
        fix=f"unset NCCL_TIMEOUT; {_set_timeout(recommended_timeout_s(needed_s(facts)))}; "
        "for network retries NCCL_IB_TIMEOUT",
        source=GROUP_DOCS,
    )


def group_timeout_measured(facts: Facts) -> Outcome:
    timeout = group_timeout(facts)
    if isinstance(timeout, str):
        return timeout
    measured = needed_s(facts)
    if not facts.measured or not measured:
        return "needs RUN with a measured save or first step"
    if timeout[0] >= measured:
        return None
    return found(
        "error",
        "process-group time-out is below measured save plus compile time",
        (f"{timeout[0]:g} s", timeout[1]),
        why=f"The longest save took {facts.measured.save_s or 0:.1f} s and the longest first step "
        f"{facts.measured.first_step_s or 0:.1f} s ({facts.measured.where}): ranks that wait that long are killed "
        "although nothing is wrong.",
        fix=_set_timeout(recommended_timeout_s(measured)),
        source=GROUP_DOCS,
    )


def group_timeout_range(facts: Facts) -> Outcome:
    timeout = group_timeout(facts)
    if isinstance(timeout, str):
        return timeout
    measured = needed_s(facts)
    high = max(MAX_GROUP_TIMEOUT_S, math.ceil(MARGIN * measured))
    if MIN_GROUP_TIMEOUT_S <= timeout[0] <= high or timeout[0] < measured:
        return None
    if timeout[0] > high:
        why = f"A collective that never ends is given up only after that: {cost(facts, timeout[0])} a time."
    else:
        why = "Evaluation, data that comes late or the first collective of a large job can take longer than that."
    return found(
        "warning",
        "process-group time-out is outside two to five minutes",
        (f"{timeout[0]:g} s", timeout[1]),
        why=why,
        fix=_set_timeout(recommended_timeout_s(measured)),
        source=GROUP_DOCS,
    )


def ib_retry_s(timeout: int, retries: int) -> float:
    """Seconds until a queue pair gives a peer up: the first try and every retry, 4.096 us times 2**timeout each."""
    return math.ldexp(IB_UNIT_S, timeout) * (retries + 1)


def ib_timeout(facts: Facts) -> Outcome:
    env = facts.env
    if not facts.ib_ports and "NCCL_IB_TIMEOUT" not in env and "NCCL_IB_RETRY_CNT" not in env:
        return "no InfiniBand port here and NCCL_IB_TIMEOUT is not set"
    values = {}
    for name, highest in IB_HIGHEST.items():
        text = env.get(name, NCCL_DEFAULTS[name])
        if not text.isdecimal() or int(text) > highest:
            return found(
                "error",
                f"{name} is not a number from 0 to {highest}",
                (text, f"environment: {name}"),
                why="The adapter has no more bits for it.",
                fix=f"export {name}={NCCL_DEFAULTS[name]}",
                source=NCCL_DOCS,
            )
        values[name] = int(text)
    total_s = ib_retry_s(values["NCCL_IB_TIMEOUT"], values["NCCL_IB_RETRY_CNT"])
    seen = (
        " ".join(f"{k}={v}" for k, v in values.items()) + f": {total_s:.1f} s",
        "environment, else keepstep's default",
    )
    fix = "export " + " ".join(f"{name}={NCCL_DEFAULTS[name]}" for name in IB_HIGHEST)
    if values["NCCL_IB_TIMEOUT"] == 0 or total_s > 3600:
        why = f"Time-out 0 means for ever, and so does one of hours: a dead link holds {cost(facts, 3600)} an hour."
        return found("warning", "InfiniBand retries practically for ever", seen, why=why, fix=fix, source=NCCL_DOCS)
    if total_s < IB_MIN_S:
        why = f"A link that comes back within {IB_MIN_S:g} s costs a restart instead of a pause of {cost(facts, IB_MIN_S)}."
        return found(
            "warning", "InfiniBand gives up before a flapping link is back", seen, why=why, fix=fix, source=NCCL_DOCS
        )
    timeout = group_timeout(facts)
    if not isinstance(timeout, str) and total_s >= timeout[0]:
        why = (
            f"The process group gives up after {timeout[0]:g} s ({timeout[1]}), before the adapter does: the error names "
            f"a collective instead of a link. Waiting costs {cost(facts, min(total_s, timeout[0]))} a time."
        )
        longer_s = max(recommended_timeout_s(needed_s(facts)), math.ceil(MARGIN * total_s))
        fix = _set_timeout(longer_s) if longer_s <= MAX_GROUP_TIMEOUT_S else fix
        return found("info", "InfiniBand retries outlast the process group", seen, why=why, fix=fix, source=NCCL_DOCS)
    return None


def heartbeat(facts: Facts) -> Outcome:
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    text = facts.env.get(name)
    if text is None:
        return None
    timeout = group_timeout(facts)
    if isinstance(timeout, str):
        return timeout
    if text.isdecimal() and int(text) >= timeout[0]:
        return None
    return found(
        "warning",
        "heartbeat limit of the NCCL watchdog is below the process-group time-out",
        (text, f"environment: {name}"),
        why=f"The monitor aborts a process whose watchdog is silent that long. Collectives may take {timeout[0]:g} s "
        f"({timeout[1]}), and a watchdog that then aborts communicators or writes a flight-recorder dump is cut off.",
        fix=f"export {name}={max(int(NCCL_DEFAULTS[name]), math.ceil(2 * timeout[0]))}",
        source=TORCH_DOCS,
    )


def async_errors(facts: Facts) -> Outcome:
    current = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for name in (current, *OTHER_NAMES[current]):
        if facts.env.get(name) in ("0", "2"):
            ignored = facts.env[name] == "0"
            return found(
                "error" if ignored else "warning",
                "NCCL errors do not end the process",
                (facts.env[name], f"environment: {name}"),
                why="A communicator that fails is left as it is and every rank waits for ever."
                if ignored
                else "The communicator is aborted, the process lives on: the script has to notice by itself.",
                fix=f"unset {name} (keepstep then sets {current}={NCCL_DEFAULTS[current]})",
                source=TORCH_DOCS,
            )
    return None


def slow_rank(facts: Facts) -> Outcome:
    why = "All other ranks wait in their next collective until it is done, and the process group's time-out runs."
    fix = "save from all ranks (ks.Checkpointer), or hand the work to a thread or to a process of its own"
    if facts.late_ranks:
        late = facts.late_ranks[-1]
        return found(
            "warning",
            "ranks were seen waiting for one rank's own work",
            (
                f"rank {late.rank} in section {late.section!r}, {late.waiting} waiting",
                f"evidence of cycle {late.cycle}",
            ),
            why=why,
            fix=fix,
            source=OWN_DOCS,
        )
    if facts.script is None:
        return NEEDS_SCRIPT
    if not facts.script.one_rank_work:
        return None
    first, more = facts.script.one_rank_work[0], len(facts.script.one_rank_work) - 1
    return found(
        "info",
        "one rank does slow work alone",
        (f"{first.call}()" + (f" and {more} more" if more else ""), f"{facts.script.path}:{first.line}"),
        why=why,
        fix=fix,
        source=OWN_DOCS,
    )


def ib_partition(facts: Facts) -> Outcome:
    if not facts.ib_ports:
        return "no InfiniBand port here"
    text = facts.env.get("NCCL_IB_PKEY", "0")
    index = int(text) if text.isdecimal() else 0
    port = next((p for p in facts.ib_ports if p.pkeys.get(index, 0) & DEFAULT_PKEY == DEFAULT_PKEY), None)
    if port is None:
        return None
    return found(
        "warning",
        "traffic runs in the default InfiniBand partition",
        (f"{port.pkeys[index]:#06x}", f"{port.name} pkeys/{index} (NCCL_IB_PKEY={index})"),
        why="Every host of the fabric is a member: another tenant can reach this job's queue pairs.",
        fix="let the fabric's administrator make a partition; export NCCL_IB_PKEY=<index of its key under pkeys/>",
        source=NCCL_DOCS,
    )
