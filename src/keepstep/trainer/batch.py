"""How a global batch is made of micro batches and accumulation steps when the number of data-parallel replicas changes."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from keepstep.records.errors import ConfigError

Mismatch = Literal["refuse", "linear_lr", "sqrt_lr"]


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every replica runs `accumulation_steps` micro batches of `micro_batch` samples before each optimizer step.

    `global_batch` = micro_batch x dp x accumulation_steps, always exactly. `lr_factor`: multiply the learning rate by it; 1 when
    the global batch is the one asked for.
    """

    global_batch: int
    micro_batch: int
    dp: int
    accumulation_steps: int
    lr_factor: float = 1.0
    asked_global_batch: int


def batch_plan(
    global_batch: int,
    micro_batch: int,
    dp: int,
    *,
    on_mismatch: Mismatch = "refuse",
    reference_dp: int | None = None,
) -> BatchPlan:
    """Accumulation steps that hold `global_batch` samples exactly with `dp` data-parallel replicas.

    When micro_batch x dp does not divide the global batch: "refuse" raises ConfigError naming the nearest values that work. The
    other two change the global batch, so that every replica still has equally many samples, and with it the learning rate:
    "linear_lr" in proportion to the batch (Goyal et al. 2017, arXiv:1706.02677; for SGD), "sqrt_lr" by the square root of
    the ratio (Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741; also the usual choice for Adam). The
    new global batch is the nearest multiple (the smaller of two equally near ones); with `reference_dp`, the number of
    replicas the job was planned for, it is the one that keeps that plan's accumulation steps, and so the time of a step.

    Raises ConfigError for a value below 1, an unknown rule, or a `reference_dp` that does not divide the global batch either.
    """
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("dp", dp)):
        _check_count(name, value)
    if on_mismatch not in ("refuse", "linear_lr", "sqrt_lr"):
        raise ConfigError(f"batch_plan: on_mismatch={on_mismatch!r}; use 'refuse', 'linear_lr' or 'sqrt_lr'")
    if reference_dp is not None:
        _check_count("reference_dp", reference_dp)
    together = micro_batch * dp
    accumulation_steps, rest = divmod(global_batch, together)
    if rest and on_mismatch == "refuse":
        raise ConfigError(
            f"batch_plan: a global batch of {global_batch} is not a multiple of micro_batch {micro_batch} x dp {dp} = {together}; "
            f"{_workable(global_batch, micro_batch, dp)}, or let on_mismatch change the global batch and the learning rate"
        )
    if rest:
        accumulation_steps = _changed_steps(global_batch, micro_batch, dp, reference_dp)
    ratio = accumulation_steps * together / global_batch
    return BatchPlan(
        global_batch=accumulation_steps * together,
        micro_batch=micro_batch,
        dp=dp,
        accumulation_steps=accumulation_steps,
        lr_factor=math.sqrt(ratio) if on_mismatch == "sqrt_lr" else ratio,
        asked_global_batch=global_batch,
    )


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"batch_plan: {name}={value!r} is not a whole number above 0")


def _changed_steps(global_batch: int, micro_batch: int, dp: int, reference_dp: int | None) -> int:
    if reference_dp is None:
        below, rest = divmod(global_batch, micro_batch * dp)
        return max(1, below if 2 * rest <= micro_batch * dp else below + 1)
    steps, rest = divmod(global_batch, micro_batch * reference_dp)
    if rest:
        raise ConfigError(
            f"batch_plan: a global batch of {global_batch} is not a multiple of micro_batch {micro_batch} x reference_dp "
            f"{reference_dp}; {_workable(global_batch, micro_batch, reference_dp, 'reference_dp')}"
        )
    return steps


def _workable(global_batch: int, micro_batch: int, dp: int, dp_name: str = "dp") -> str:
    """The nearest values that hold a global batch exactly, each with the two others as they are."""
    together = micro_batch * dp
    below = global_batch // together * together
    ways = [f"global_batch={' or '.join(str(b) for b in (below, below + together) if b)}"]
    for name, wanted, other in (("micro_batch", micro_batch, dp), (dp_name, dp, micro_batch)):
        near = _nearest_divisors(global_batch // other, wanted) if global_batch % other == 0 else []
        if near:
            ways.append(f"{name}={' or '.join(map(str, near))}")
    return "these work: " + "; ".join(ways)


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """The largest divisor of `number` below `wanted` and the smallest above it."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    return [*[d for d in divisors if d < wanted][-1:], *[d for d in divisors if d > wanted][:1]]
