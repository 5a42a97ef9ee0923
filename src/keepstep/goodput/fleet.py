"""Goodput of many runs in a window of time: `keepstep.fleet_goodput/1`.

Runs are clipped to the window by the intervals of their partitions, and weigh by their GPUs. Every sum is one of whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from keepstep.goodput.bursts import Exposure, Failure
from keepstep.goodput.calibration import Score
from keepstep.goodput.facts import CycleKey
from keepstep.goodput.fleetrates import FleetRates, fleet_rates
from keepstep.goodput.losses import Piece, Size, Tally, clip, held_tally, losses_of, pieces, tallies
from keepstep.goodput.pace import Pace, SlowSpan
from keepstep.goodput.partition import Partition
from keepstep.goodput.slo import SloReport, slo_report
from keepstep.goodput.verified import FaultRecord, Verified, verified_of
from keepstep.records.codec import rfc3339
from keepstep.records.losses import LOSSES, PARTS, Amount, JobLosses, Ratios

UNKNOWN = "unknown"


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that the fleet's account needs of a run. `part` covers all attempts, the time between them as queue."""

    run_id: str
    folder: str = ""
    part: Partition
    sizes: dict[CycleKey, Size]
    faults: tuple[FaultRecord, ...] = ()
    vanished_ns: tuple[int, ...] = ()
    """When attempts were last heard of that ended in the middle of a cycle without a word: failures without a fault."""
    pace: Pace | None = None
    stragglers: tuple[SlowSpan, ...] | None = None
    """What slow ranks took; None: nobody looked."""
    skus: dict[str, str] = {}
    """Node -> GPU model, as far as it is known."""
    sku: str = UNKNOWN
    """Model of the other nodes where those of `skus` do not agree on one."""


class LostRow(msgspec.Struct, frozen=True, kw_only=True):
    """Time lost to one cause, class, node or rack; `share` of all GPU-time that is charged to any."""

    key: str
    lost: Amount
    share: float | None
    incidents: int


class IncidentRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a failed cycle cost within the window: its recovery, the start of the cycle after it, the steps it took back."""

    run_id: str
    incident: str
    time: str
    fault_class: str = msgspec.field(name="class")
    cause: str
    node: str | None
    rack: str | None
    cost: Amount
    losses: dict[str, Amount]
    acted: str
    """"evicted", "ended" (on a verdict's word) or ""."""
    verified: str | None
    wrong: bool | None


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run within the window. `gpus`: the most it trained on."""

    run_id: str
    folder: str
    since: str
    until: str
    gpus: int | None
    wall: Amount
    incidents: int
    losses: JobLosses


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that is in no sum, and why."""

    folder: str
    reason: str


class FleetGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.fleet_goodput/1`. Shares and ratios are weighted by GPU-time."""

    schema: str = "keepstep.fleet_goodput/1"
    since: str
    until: str
    price_usd_per_gpu_h: float | None
    wall: Amount
    """Wall-clock of all runs together."""
    totals: JobLosses
    unknown_in: dict[str, int]
    """Parts of `totals` that some runs know nothing of, and how many; `totals` has the sum of the others."""
    loss_shares: dict[str, float]
    """Of the GPU-time that was neither productive nor queue, of runs that report steps: what each name explains."""
    explained: float | None
    """What the six losses explain of it together."""
    by_cause: list[LostRow]
    by_class: list[LostRow]
    by_node: list[LostRow]
    by_rack: list[LostRow]
    """Empty where no topology names racks."""
    incidents: list[IncidentRow]
    slo: SloReport | None
    rates: FleetRates
    runs: list[RunRow]
    left_out: list[LeftOut] = []
    forecasts: Score | None = None
    """How good the most telling forecast of each run was (`launcher/views/forecasts.py`); None when there was none."""


class _Run(msgspec.Struct, frozen=True):
    """A run clipped to the window."""

    record: RunRecord
    verified: Verified
    found: list[Piece]
    faults: list[FaultRecord]
    """Those detected within the window."""


def fleet(
    records: Sequence[RunRecord],
    begin_ns: int,
    end_ns: int,
    *,
    slo: float | None = None,
    price: float | None = None,
    left_out: Sequence[LeftOut] = (),
) -> FleetGoodput:
    """Account `records` in the window [begin_ns, end_ns); `price` in dollars per GPU-hour. Runs outside it are in no row.

    Raises ConfigError for an objective that is none.
    """
    runs = [run for record in records if (run := _clipped(record, begin_ns, end_ns)).found]
    rows = [_run_row(run, price) for run in runs]
    counted = [run for run in runs if run.record.part.reports_steps]
    shares = _loss_shares(counted)
    sized = [run for run in counted if all(piece.gpus is not None for piece in run.found)]
    wall = Tally()
    for piece in (piece for run in runs for piece in run.found):
        wall.add(piece.time_ns, piece.gpus)
    return FleetGoodput(
        since=rfc3339(begin_ns),
        until=rfc3339(end_ns),
        price_usd_per_gpu_h=price,
        wall=wall.amount(price),
        totals=_totals(runs, rows, price),
        unknown_in={name: count for name in PARTS if (count := sum(row.losses.parts[name] is None for row in rows))},
        loss_shares=shares,
        explained=sum(shares[name] for name in LOSSES if name in shares) if shares else None,
        by_cause=_by(runs, _cause, price),
        by_class=_by(runs, lambda piece, _: piece.cause, price),
        by_node=_by(runs, _node, price),
        by_rack=_by_rack(runs, price),
        incidents=_incidents(runs, price),
        slo=None
        if slo is None
        else slo_report(
            [piece for run in sized for piece in run.found],
            begin_ns,
            end_ns,
            slo,
            price=price,
            runs_left_out=len(runs) - len(sized),
        ),
        rates=rates_of([run.record for run in runs], begin_ns, end_ns),
        runs=sorted(rows, key=lambda row: (-lost_ns(row.losses), row.run_id)),
        left_out=list(left_out),
    )


def _clipped(record: RunRecord, begin_ns: int, end_ns: int) -> _Run:
    verified = verified_of(record.faults)
    found = clip(pieces(record.part, record.sizes, verified.wrong), begin_ns, end_ns)
    return _Run(record, verified, found, [f for f in record.faults if begin_ns <= f.time_ns < end_ns])


# ---- what rates are made from


def rates_of(records: Sequence[RunRecord], begin_ns: int, end_ns: int) -> FleetRates:
    """Failure rates of the runs' nodes in the window [begin_ns, end_ns)."""
    failures = [failure for record in records for failure in failures_of(record)]
    exposures = [exposure for record in records for exposure in exposures_of(record)]
    return fleet_rates(failures, exposures, begin_ns, end_ns)


def failures_of(record: RunRecord) -> list[Failure]:
    """Failures that interrupted a run: faults after which it had to go back, and launchers that vanished."""
    only = _only_sku(record)
    found = [
        Failure(
            t_ns=fault.time_ns,
            run_id=record.run_id,
            fault_class=fault.fault_class,
            sku=record.skus.get(fault.node or "", only),
            node=fault.node,
            rack=fault.rack,
        )
        for fault in record.faults
        if fault.interrupts
    ]
    return found + [
        Failure(t_ns=t_ns, run_id=record.run_id, fault_class=UNKNOWN, sku=only) for t_ns in record.vanished_ns
    ]


def exposures_of(record: RunRecord) -> list[Exposure]:
    """When which nodes were part of the run's cycles, restarts included: failures hit those too."""
    only = _only_sku(record)
    spans: dict[CycleKey, tuple[int, int]] = {}
    for interval in record.part.intervals:
        if interval.cycle is not None:
            key = (interval.attempt, interval.cycle)
            spans[key] = (spans.get(key, (interval.begin_ns, 0))[0], interval.end_ns)
    stays: dict[str, list[tuple[int, int]]] = {}
    for key, (begin_ns, end_ns) in spans.items():
        for node in record.sizes[key].nodes if key in record.sizes else ():
            own = stays.setdefault(node, [])
            # Cycles follow each other without a gap: a node that stays is one exposure, not one a cycle.
            joins = bool(own) and own[-1][1] == begin_ns
            own.append((own.pop()[0] if joins else begin_ns, end_ns))
    return [
        Exposure(node=node, run_id=record.run_id, begin_ns=begin_ns, end_ns=end_ns, sku=record.skus.get(node, only))
        for node, own in stays.items()
        for begin_ns, end_ns in own
    ]


def _only_sku(record: RunRecord) -> str:
    """Nodes of which nothing is known are taken for the model that all known ones of the run have: jobs seldom mix them."""
    known = set(record.skus.values())
    return known.pop() if len(known) == 1 else record.sku


# ---- sums


def lost_ns(losses: JobLosses) -> int:
    """GPU-time (time, where sizes are unknown) that became neither training nor queue, as far as it is known."""
    kept = [part for name, part in losses.parts.items() if part is not None and name not in ("productive", "queue")]
    return sum(part.time_ns if part.gpu_ns is None else part.gpu_ns for part in kept)


def _run_row(run: _Run, price: float | None) -> RunRow:
    wall = Tally()
    for piece in run.found:
        wall.add(piece.time_ns, piece.gpus)
    losses = losses_of(
        run.found,
        reports_steps=run.record.part.reports_steps,
        pace=run.record.pace,
        verified=_counted(run),
        stragglers=run.record.stragglers,
        price=price,
    )
    return RunRow(
        run_id=run.record.run_id,
        folder=run.record.folder,
        since=rfc3339(run.found[0].begin_ns),
        until=rfc3339(run.found[-1].end_ns),
        gpus=max((piece.gpus for piece in run.found if piece.gpus is not None), default=None),
        wall=wall.amount(price),
        incidents=len(run.faults),
        losses=losses,
    )


def _counted(run: _Run) -> Verified:
    """Counts of the actions within the window. Whether anything is known of them does not depend on the window."""
    inside = verified_of(run.faults)
    keys = {fault.key for fault in run.faults}
    wrong = None if run.verified.wrong is None else run.verified.wrong & keys
    return Verified(actions=inside.actions, verified=inside.verified, wrong=wrong)


def _totals(runs: Sequence[_Run], rows: Sequence[RunRow], price: float | None) -> JobLosses:
    parts: dict[str, Amount | None] = {}
    for name in PARTS:
        parts[name] = _sum([row.losses.parts[name] for row in rows], price)
    wrong = [row.losses.actions_wrong for row in rows if row.losses.actions_wrong is not None]
    held = Tally()
    for run in runs:
        own = held_tally(run.found)
        held.time_ns += own.time_ns
        held.gpu_ns = None if own.gpu_ns is None or held.gpu_ns is None else held.gpu_ns + own.gpu_ns
    return JobLosses(
        parts=parts,
        ratios=_fleet_ratios(runs),
        paid=held.amount(price),
        slow_steps=_sum([row.losses.slow_steps for row in rows], price),
        actions=sum(row.losses.actions for row in rows),
        actions_verified=sum(row.losses.actions_verified for row in rows),
        actions_wrong=sum(wrong) if wrong else None,
    )


def _sum(amounts: Iterable[Amount | None], price: float | None) -> Amount | None:
    """Sum of what is known, None where nothing is."""
    known = [part for part in amounts if part is not None]
    if not known:
        return None
    gpu_ns = [part.gpu_ns for part in known]
    sized = [ns for ns in gpu_ns if ns is not None]
    tally = Tally(time_ns=sum(part.time_ns for part in known), gpu_ns=sum(sized) if len(sized) == len(gpu_ns) else None)
    return tally.amount(price)


def _fleet_ratios(runs: Sequence[_Run]) -> Ratios:
    """Ratios of GPU-time over runs that report steps and whose size is known; step-time factors weigh by productive time."""
    productive = used = queued = held = 0
    factors: list[tuple[float, int]] = []
    for run in runs:
        if not run.record.part.reports_steps or any(piece.gpus is None for piece in run.found):
            continue
        own = 0
        for piece in run.found:
            gpu_ns = piece.time_ns * (piece.gpus or 0)
            own += gpu_ns if piece.name == "productive" else 0
            queued += gpu_ns if piece.name == "queue" else 0
            used += 0 if piece.name == "queue" else gpu_ns
            held += piece.time_ns * (piece.held or 0)
        productive += own
        if run.record.pace is not None and own:
            factors.append((run.record.pace.factor, own))
    weight = sum(own for _, own in factors)
    return Ratios(
        ettr_without_queue=productive / used if used else None,
        ettr_with_queue=productive / (used + queued) if used + queued else None,
        paid_gpu_goodput=productive / held if held else None,
        step_time_factor=sum(f * own for f, own in factors) / weight if weight else None,
    )


def _loss_shares(runs: Sequence[_Run]) -> dict[str, float]:
    sums = dict.fromkeys(PARTS, 0)
    for run in runs:
        if any(piece.gpus is None for piece in run.found):
            continue
        for name, tally in tallies(run.found, run.record.stragglers).items():
            sums[name] += tally.gpu_ns or 0
    lost = {name: ns for name, ns in sums.items() if name not in ("productive", "queue")}
    whole = sum(lost.values())
    return {name: ns / whole for name, ns in lost.items() if ns} if whole else {}


# ---- what lost time is charged to


def _by(
    runs: Sequence[_Run], key_of: Callable[[Piece, FaultRecord | None], str | None], price: float | None
) -> list[LostRow]:
    """Lost time by key, the most first; pieces without a key are charged to nothing."""
    sums: dict[str, Tally] = {}
    blamed: dict[str, set[tuple[int, CycleKey]]] = {}
    for index, run in enumerate(runs):
        faults = {fault.key: fault for fault in run.record.faults}
        for piece in run.found:
            fault = None if piece.blamed is None else faults.get(piece.blamed)
            key = None if piece.cause is None else key_of(piece, fault)
            if key is None:
                continue
            sums.setdefault(key, Tally()).add(piece.time_ns, piece.gpus)
            if fault is not None:
                blamed.setdefault(key, set()).add((index, fault.key))
    whole = sum(tally.gpu_ns or 0 for tally in sums.values())
    rows = [
        LostRow(
            key=key,
            lost=tally.amount(price),
            share=None if tally.gpu_ns is None or not whole else tally.gpu_ns / whole,
            incidents=len(blamed.get(key, ())),
        )
        for key, tally in sums.items()
    ]
    return sorted(rows, key=lambda row: (-_size(row.lost), row.key))


def _size(amount: Amount) -> int:
    return amount.time_ns if amount.gpu_ns is None else amount.gpu_ns


def _cause(piece: Piece, fault: FaultRecord | None) -> str | None:
    """The fault's signature or kind; start-ups and restarts without a fault are themselves."""
    return piece.cause if fault is None else fault.cause


def _node(piece: Piece, fault: FaultRecord | None) -> str | None:
    """The node that is blamed. What no fault led to is charged to no node."""
    return None if fault is None else fault.node or UNKNOWN


def _rack(piece: Piece, fault: FaultRecord | None) -> str | None:
    return None if fault is None else fault.rack or UNKNOWN


def _by_rack(runs: Sequence[_Run], price: float | None) -> list[LostRow]:
    if not any(fault.rack for run in runs for fault in run.record.faults):
        return []
    return _by(runs, _rack, price)


def _incidents(runs: Sequence[_Run], price: float | None) -> list[IncidentRow]:
    """Incidents that were detected in the window or cost something in it, the dearest first."""
    rows = []
    for run in runs:
        inside = {fault.key for fault in run.faults}
        cost: dict[CycleKey, dict[str, Tally]] = {}
        for piece in run.found:
            if piece.blamed is not None:
                cost.setdefault(piece.blamed, {}).setdefault(piece.name, Tally()).add(piece.time_ns, piece.gpus)
        rows += [
            _incident(run.record.run_id, fault, cost.get(fault.key, {}), price)
            for fault in run.record.faults
            if fault.key in cost or fault.key in inside
        ]
    return sorted(rows, key=lambda row: (-_size(row.cost), row.run_id, row.incident))


def _incident(run_id: str, fault: FaultRecord, cost: Mapping[str, Tally], price: float | None) -> IncidentRow:
    whole = Tally()
    for tally in cost.values():
        whole.time_ns += tally.time_ns
        whole.gpu_ns = None if whole.gpu_ns is None or tally.gpu_ns is None else whole.gpu_ns + tally.gpu_ns
    return IncidentRow(
        run_id=run_id,
        incident=fault.incident,
        time=rfc3339(fault.time_ns),
        fault_class=fault.fault_class,
        cause=fault.cause,
        node=fault.node,
        rack=fault.rack,
        cost=whole.amount(price),
        losses={name: tally.amount(price) for name, tally in sorted(cost.items())},
        acted=fault.acted,
        verified=fault.verified,
        wrong=fault.wrong,
    )
