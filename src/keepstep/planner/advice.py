"""What to change first: each change tried on the exact model, with the interval chosen anew, sorted by what it gains."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from keepstep.goodput.job import Job, RestartPhases, Tier
from keepstep.goodput.renewal import goodput
from keepstep.goodput.settings import hang_floor_s
from keepstep.goodput.spares import SparePlan
from keepstep.planner.optimum import best_job

LEAST_POINTS = 0.05
"""Changes that gain less are not listed: measured inputs are not that exact."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to change: from what to what, and the hundredths of goodput (and dollars over the campaign) that it gains alone."""

    change: str
    now: str
    to: str
    gain_points: float
    gain_usd: float | None
    why: str


def changes(
    job: Job,
    given: Job,
    value: float,
    fixed_interval: bool,
    spares: SparePlan | None,
    usd_per_point: float | None,
) -> list[Change]:
    """Settings first, then what to build, by gain. `value`: exact goodput of `job`; `given`: the job as it was asked about."""

    def row(change: str, now: str, to: str, gain: float, why: str) -> Change:
        points = 100.0 * gain
        usd = None if usd_per_point is None else points * usd_per_point
        return Change(change=change, now=now, to=to, gain_points=points, gain_usd=usd, why=why)

    rows = []
    if fixed_interval:
        best = best_job(job)
        rows.append(
            row("interval", _s(job.interval_s), _s(best.interval_s), goodput(best) - value, "the exact optimum")
        )
    else:
        rows += [
            row(
                f"every of tier {tier.name}", str(before.every), str(tier.every), goodput(job) - value_of, "the optimum"
            )
            for tier, before, value_of in _regraded(job, given)
        ]
    for change, now, to, tried, why in _what_if(job):
        there = goodput(best_job(tried, fixed_interval=fixed_interval))
        rows.append(row(change, now, to, there - value, why))
    rows = [r for r in rows if r.gain_points >= LEAST_POINTS]
    if spares is not None:
        rows += _spare_rows(spares, value, usd_per_point)
    if not fixed_interval:
        first = row(
            "interval", "-", _s(job.interval_s), 0.0, "train so long between saves: the exact optimum for these inputs"
        )
        return [first, *sorted(rows, key=lambda r: -r.gain_points)]
    return sorted(rows, key=lambda r: -r.gain_points)


def _regraded(job: Job, given: Job) -> Iterator[tuple[Tier, Tier, float]]:
    for index, (tier, before) in enumerate(zip(job.tiers, given.tiers, strict=True)):
        if tier.every != before.every:
            tiers = (*job.tiers[:index], before, *job.tiers[index + 1 :])
            yield tier, before, goodput(msgspec.structs.replace(job, tiers=tiers))


def _what_if(job: Job) -> Iterator[tuple[str, str, str, Job, str]]:
    """Things that can be built, each as the job it would make."""
    for index, kind in enumerate(job.kinds):
        limit_s = hang_floor_s(job.mttf_s, kind.share)
        if kind.detect_s > limit_s:
            kinds = list(job.kinds)
            kinds[index] = msgspec.structs.replace(kind, detect_s=limit_s)
            yield (
                f"detection of {kind.name}",
                _s(kind.detect_s),
                _s(limit_s),
                msgspec.structs.replace(job, kinds=tuple(kinds)),
                "a limit learned from gaps between steps (--hang-timeout auto --advice auto); above the longest normal one",
            )
    phases = job.restart
    if phases.replace_s > 0.0:
        warm = RestartPhases(decide_s=phases.decide_s, replace_s=0.0, start_s=phases.start_s)
        why = "spares that wait with processes and libraries loaded"
        yield "replacement", _s(phases.replace_s), "0 s", msgspec.structs.replace(job, restart=warm), why
    if phases.start_s > 0.0:
        half = msgspec.structs.replace(phases, start_s=phases.start_s / 2.0)
        why = "restart in place instead of a new allocation, processes forked from a warm parent"
        yield "start", _s(phases.start_s), _s(half.start_s), msgspec.structs.replace(job, restart=half), why
    if any(tier.load_s > 0.0 for tier in job.tiers):
        tiers = tuple(msgspec.structs.replace(tier, load_s=tier.load_s / 2.0) for tier in job.tiers)
        now, to = _s(job.tiers[-1].load_s), _s(job.tiers[-1].load_s / 2.0)
        yield "load", now, to, msgspec.structs.replace(job, tiers=tiers), "restore from a nearer copy"
    if any(tier.persist_lag_s > 0.0 for tier in job.tiers):
        tiers = tuple(msgspec.structs.replace(tier, persist_lag_s=0.0) for tier in job.tiers)
        why = "copies in the memory of a peer count at once; the upload goes on beside"
        now = _s(max(tier.persist_lag_s for tier in job.tiers))
        yield "persist lag", now, "0 s", msgspec.structs.replace(job, tiers=tiers), why
    if any(tier.block_s > 0.0 for tier in job.tiers):
        tiers = tuple(msgspec.structs.replace(tier, block_s=tier.block_s / 2.0) for tier in job.tiers)
        now, to = _s(job.tiers[0].block_s), _s(job.tiers[0].block_s / 2.0)
        yield (
            "blocking",
            now,
            to,
            msgspec.structs.replace(job, tiers=tiers),
            "stage to host memory, write beside training",
        )
    if job.straggler_share > 0.0:
        yield (
            "stragglers",
            f"{100.0 * job.straggler_share:.3g} %",
            "0 %",
            msgspec.structs.replace(job, straggler_share=0.0),
            "slow ranks found and replaced",
        )
    if job.rate_per_node_day > 0.0:
        less = msgspec.structs.replace(job, rate_per_node_day=0.8 * job.rate_per_node_day)
        now, to = (f"{1000.0 * j.rate_per_node_day:.3g} per 1000 node-days" for j in (job, less))
        yield "failure rate", now, to, less, "nodes that fail again and again taken out, returns gated by a test"


def _spare_rows(spares: SparePlan, value: float, usd_per_point: float | None) -> list[Change]:
    """The number of spares; gain by paid goodput."""
    given, best = spares.given, spares.best
    where = ""
    if spares.blocks is not None:
        each = spares.blocks.spares_per_block
        where = f"; {each} in each block of {spares.blocks.block_nodes} if they cannot leave theirs"
    gain = 0.0 if given is None else 100.0 * (best.goodput_paid - given.goodput_paid)
    if given is not None and gain < LEAST_POINTS:
        return []
    return [
        Change(
            change="spares",
            now="-" if given is None else str(given.spares),
            to=f"{best.spares}{where}",
            gain_points=gain,
            gain_usd=None if usd_per_point is None else gain * usd_per_point,
            why=f"{spares.mean_down:.3g} nodes are in repair on average; gain with spares in the denominator",
        )
    ]


def _s(seconds: float) -> str:
    """A time as a person would give it to the flag."""
    return (
        f"{seconds:.3g} s"
        if seconds < 120.0
        else f"{seconds / 60.0:.3g} min"
        if seconds < 7200.0
        else f"{seconds / 3600.0:.3g} h"
    )
