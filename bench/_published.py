"""Published statements about failures and goodput, and what the formulas here give for them."""

from __future__ import annotations

from typing import NamedTuple

from keepstep.goodput.interval import daly_higher_order_s, exact, meta, optimal_s, young_s

RSC_1, RSC_2 = 6.5e-3, 2.34e-3
"""Failures per node and day of two clusters (Meta, arXiv 2410.21680)."""
LLAMA_3 = 419 / (2048 * 54)
"""419 unexpected interruptions of 2,048 nodes in 54 days (arXiv 2407.21783)."""
MINUTE, DAY = 60.0, 86_400.0


class Statement(NamedTuple):
    """What was said, the figure as published, what it comes to here, and whether it reproduces."""

    says: str
    published: str
    here: str
    reproduces: str


def _mttf_s(gpus: int, rate: float) -> float:
    return DAY / (rate * gpus / 8)


def _hours(gpus: int, rate: float = RSC_1) -> float:
    return _mttf_s(gpus, rate) / 3600.0


def _both(at: tuple[float, float, float, float]) -> str:
    return f"Meta's form {meta(*at):.3f}, exact {exact(*at):.3f}"


def daly() -> list[Statement]:
    """The optima of Daly's own example."""
    rows = []
    for mttf_h, shown in ((24.0, "117"), (6.0, "57"), (0.25, "9.1")):
        own, higher = (f(300.0, mttf_h * 3600.0) / MINUTE for f in (optimal_s, daly_higher_order_s))
        says = f"Daly 2006: optimum at d = 5 min, M = {mttf_h:g} h, in minutes"
        rows.append(Statement(says, shown, f"higher order {higher:.1f}, exact {own:.1f}", "yes"))
    return rows


def meta_rates() -> list[Statement]:
    """Mean times to failure of Meta's clusters."""
    small, one = 1000 * 24 / (7.9 * 128), 1000 / 47.7
    return [
        Statement("Meta: MTTF projected for 16,384 GPUs, h", "1.8", f"{_hours(16_384):.2f}", "yes"),
        Statement("Meta: MTTF projected for 131,072 GPUs, h", "0.23", f"{_hours(131_072):.3f}", "yes"),
        Statement(
            "Meta: MTTF measured at 1,024 GPUs, h",
            "7.9",
            f"{_hours(1024):.1f} by the rate of 6.5",
            f"no: it takes {small:.1f} failures per 1000 node-days, of all causes",
        ),
        Statement(
            "Meta: MTTF measured at 8 GPUs, days",
            "47.7",
            f"{_hours(8) / 24:.0f} by the rate of 6.5",
            f"no: it takes {one:.1f} per 1000 node-days",
        ),
    ]


def meta_ettr() -> list[Statement]:
    """Statements on effective training time."""
    rows = []
    for words, rate, block_s, shown in (
        ("saves of 10 s", RSC_1, 10.0, ">= 0.9"),
        ("saves of 5 min", RSC_1, 300.0, "< 0.9"),
        ("saves of 5 min at a rate of 1", 1e-3, 300.0, "about 0.9"),
    ):
        mttf_s = _mttf_s(12_000, rate)
        form, own = (
            meta(young_s(block_s, mttf_s), block_s, mttf_s, 300.0),
            exact(optimal_s(block_s, mttf_s), block_s, mttf_s, 300.0),
        )
        says = f"Meta: 12,000 GPUs, restart 5 min, {words}"
        rows.append(Statement(says, shown, f"Meta's form {form:.3f}, exact {own:.3f}", "yes"))
    for gpus, rate, interval_min, restart_min, shown, agrees in (
        (16_384, RSC_1, 60, 5, "0.7", "yes"),
        (16_384, RSC_1, 5, 5, "0.93", "yes"),
        (100_000, RSC_1, 7, 5, "0.5", "by Meta's form; exact is 10 points higher"),
        (100_000, RSC_2, 2, 2, "0.9", "yes, and more"),
        (100_000, RSC_2, 21, 5, "0.5", "no, unless jobs queue long after each failure"),
    ):
        says = f"Meta: {gpus:,} GPUs at {1000 * rate:g}, interval {interval_min} min, restart {restart_min} min"
        at = (interval_min * MINUTE, 0.0, _mttf_s(gpus, rate), restart_min * MINUTE)
        rows.append(Statement(says, shown, _both(at), agrees))
    return rows


def llama_3() -> list[Statement]:
    """Llama 3's interruptions and its effective training time."""
    rows = [
        Statement(
            "Llama 3: 419 unexpected interruptions of 16,384 GPUs in 54 days",
            "-",
            f"{1000 * LLAMA_3:.2f} per 1000 node-days, MTTF {_hours(16_384, LLAMA_3):.2f} h",
            "-",
        ),
        Statement("Llama 3: share of GPU issues", "58.7 %", f"{100 * 268 / 419:.1f} %: its rows add up to 268", "no"),
        Statement("Llama 3: share of faulty GPUs", "30.1 %", f"{100 * 148 / 419:.1f} %: 148 of 419", "no"),
    ]
    for block_s, restart_min in ((10.0, 10), (10.0, 15), (60.0, 10)):
        mttf_s = _mttf_s(16_384, LLAMA_3)
        own = exact(optimal_s(block_s, mttf_s), block_s, mttf_s, restart_min * MINUTE)
        says = f"Llama 3: effective training time, if saves took {block_s:g} s and restarts {restart_min} min"
        agrees = "yes" if own > 0.9 else "no: saves or restarts were shorter than that"
        rows.append(Statement(says, "> 90 %", f"{100 * own:.1f} %", agrees))
    return rows


def published() -> list[Statement]:
    """All of them."""
    return [*daly(), *meta_rates(), *meta_ettr(), *llama_3()]


def published_markdown() -> str:
    """As a table."""
    lines = ["| statement | published | here | reproduces |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in published())])
