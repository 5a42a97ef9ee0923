"""Where time went by name: the six losses of a job, what is kept apart from them, and four ratios that must not be mixed."""

from __future__ import annotations

import msgspec

LOSSES = ("detection", "decision", "replacement", "rollback", "straggler", "false_positive")
"""The six losses. Detection: from a fault until it was known. Decision: evidence, teardown, what to do next. Replacement: other
nodes, rendezvous, processes, restore and first step of a recovery. Rollback: training whose steps did not survive. Straggler:
training that waited for slow ranks. False positive: all time of the first four that a wrong action cost."""
KEPT_APART = ("productive", "ckpt_block", "queue", "startup", "drain", "other")
"""The rest of wall-clock. Start-up is `init` and the start of the first cycle of every attempt."""
PARTS = (*LOSSES, *KEPT_APART)
"""Every nanosecond of wall-clock is in exactly one."""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Time, and what it is worth. `time_ns` and `gpu_ns` (nanoseconds times GPUs) are exact, the others are for reading.

    GPUs are those that the job trained on; None where no record says how many. `usd` is None without a price.
    """

    time_ns: int
    time_s: float
    gpu_ns: int | None = None
    gpu_h: float | None = None
    usd: float | None = None


class Ratios(msgspec.Struct, frozen=True, kw_only=True):
    """Four answers to "how much became training". They differ in what they divide by; None: unknown."""

    ettr_without_queue: float | None = None
    """Productive time over wall-clock less queue: how well the job used what it had. `ettr` of keepstep.goodput/1."""
    ettr_with_queue: float | None = None
    """Productive time over wall-clock: what whoever waits for the model sees."""
    paid_gpu_goodput: float | None = None
    """Productive GPU-time over GPU-time of all nodes that were held, spares and start-up included, queue not."""
    step_time_factor: float | None = None
    """Median step time over the best (the pace of the fastest tenth, in stretches of ten steps, on as many ranks): 1.08 is 8 %
    slower. None of the ratios above sees slow steps."""


class JobLosses(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts by the names in PARTS; those that are known add up to wall-clock exactly.

    None: unknown. Then its time is in the part that it would be taken out of: straggler in `productive`, false_positive in
    the first four losses. `productive` is None where no steps are reported, its time is in `other`.
    """

    parts: dict[str, Amount | None]
    ratios: Ratios = Ratios()
    paid: Amount | None = None
    """All nodes that were held, spares included, without queue."""
    slow_steps: Amount | None = None
    """Productive time above the best pace of the run itself, whatever slowed it. No loss by name: a rank that was always slow is
    not in it, and slow storage is."""
    actions: int = 0
    """Incidents after which a node was taken out or the job ended on a verdict's word,"""
    actions_verified: int = 0
    """those of them whose cause a person has verified,"""
    actions_wrong: int | None = None
    """and those that the verification calls wrong; None where nothing was verified."""
