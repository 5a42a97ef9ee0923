"""`keepstep replay EVENTS...`: recorded events through attribution and policies again, and what each policy would have cost."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from keepstep.cli.catalog_flags import catalog_option, chosen_catalog
from keepstep.cli.model_flags import DURATION, DURATION_ABOVE_0, job_from_flags, job_options
from keepstep.cli.output import NotFoundError, emit, note, output_option
from keepstep.planner.policies import BUILT_IN, Policy
from keepstep.planner.policycost import HUMAN_S, REPAIR_S, VERIFY_S, WINDOW_S, Account, Case, Prices, price
from keepstep.records.codec import rfc3339
from keepstep.records.errors import ConfigError
from keepstep.records.verdict import FaultClass

if TYPE_CHECKING:
    from keepstep.catalog.load import Catalog
    from keepstep.launcher.eventhistory import EventHistory, PastIncident
    from keepstep.records.event import Event

DAY_S = 86_400.0
BAD_SHOWN = 5
_PRICED_BY = ("gpus", "delta", "tiers", "restart", "interval", "price", "spares", "mttr", "failure_rate")
"""Flags of which one is enough to ask for prices."""


class _History(NamedTuple):
    """What was read, as far as outputs need it."""

    events: Sequence[Event]
    incidents: Sequence[PastIncident]
    summary: EventHistory
    labels: Mapping[str, FaultClass]
    counts: dict[str, Any]


@click.command(
    epilog="Without --gpus and --delta: verdicts and actions, no prices. Exit codes: 0; 2 a line is no event; 6 no such file."
)
@click.argument("paths", nargs=-1, required=True, metavar="EVENTS...")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="P",
    help=f"{', '.join(BUILT_IN)} [default: all of these], or a file of rules (TOML, JSON); repeatable.",
)
@click.option(
    "--baseline", default="restart-always", show_default=True, metavar="P", help="What others are compared with."
)
@click.option(
    "--labels", multiple=True, type=click.Path(path_type=Path), help="What `keepstep label` stored; repeatable."
)
@click.option("--human", type=DURATION, metavar="TIME", help="Until a person has come and decided [default: 30m].")
@click.option("--verify", type=DURATION, metavar="TIME", help="Until a healthy node taken out is back [default: 6h].")
@click.option("--reset", type=DURATION, metavar="TIME", help="Reset of a GPU, on top of --restart [default: 0].")
@click.option("--window", type=DURATION_ABOVE_0, metavar="TIME", help="A fault come again within it [default: 24h].")
@click.option("--as-of-then", is_flag=True, help="Count what was over only later: by a reboot, a repair, a recovery.")
@click.option("--skip-bad", is_flag=True, help="Leave lines out that are no events, and say how many.")
@job_options
@catalog_option
@output_option
def replay(
    paths: tuple[str, ...],
    policies: tuple[str, ...],
    baseline: str,
    labels: tuple[Path, ...],
    as_of_then: bool,
    skip_bad: bool,
    catalog_files: tuple[Path, ...],
    output: str,
    **flags: Any,
) -> None:
    """Judge the incidents in recorded events as they were known then, and price what policies would have done.

    EVENTS are lines of `keepstep scan -o jsonl`; "-" is standard input. Costs are estimates (docs/replay.md).
    JSON is `keepstep.replay/1`.
    """
    chosen = _policies(policies, baseline)
    catalog = chosen_catalog(catalog_files)
    history = _read(paths, catalog, labels, skip_bad, as_of_then)
    priced = any(flags.get(name) not in (None, ()) for name in _PRICED_BY)
    prices, rate_from = _prices(flags, history.summary) if priced else (None, "")
    cases = [_case(i, history.labels) for i in history.incidents]
    accounts = [price(cases, p, prices or _FREE) for p in chosen]
    record = _record(history, accounts, baseline, catalog, prices, rate_from)
    from keepstep.cli.replay_table import show

    emit(
        record,
        output,
        table=lambda console, wide: show(record, console, wide=wide),
        name=lambda r: "\n".join(str(i["id"]) for i in r["incidents"]),
    )


# ---- what is asked for


def _policies(names: Sequence[str], baseline: str) -> list[Policy]:
    """The policies by name or file, the baseline among them. Raises ConfigError, NotFoundError."""
    wanted = list(dict.fromkeys([*(names or BUILT_IN), baseline]))
    return [_policy(name) for name in wanted]


def _policy(name: str) -> Policy:
    if name in BUILT_IN:
        return BUILT_IN[name]
    from keepstep.planner.policyfile import parse_policy

    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise NotFoundError(f"policy {name}: no such file, and none of {', '.join(BUILT_IN)}{hint}")
    try:
        return parse_policy(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy {name}: cannot be read: {error}") from error


def _prices(flags: Mapping[str, Any], summary: EventHistory) -> tuple[Prices, str]:
    """Prices by the flags, and where the failure rate is from. Raises ConfigError naming a flag that is missing."""
    rate, rate_from = flags.get("failure_rate"), "--failure-rate"
    if rate is None and flags.get("gpus") is not None:
        nodes = -(-flags["gpus"] // flags["gpus_per_node"])
        # A history of hours, or of no interruption, is taken for a day with one: the interval needs some rate.
        days, count = max(summary.span_days, 1.0), max(summary.interruptions, 1)
        rate = 1000.0 * count / (nodes * days)
        rate_from = f"{summary.interruptions} interruptions in {summary.span_days:.1f} days of {nodes} nodes"
    job = job_from_flags(flags, rate_per_1000=rate)
    if flags.get("restart") is None:
        note("no --restart: a restart is counted as 0 s")

    def given(name: str, default: float) -> float:
        return default if flags.get(name) is None else float(flags[name])

    prices = Prices(
        job=job,
        gpus=flags["gpus"],
        span_s=summary.span_days * DAY_S,
        human_s=given("human", HUMAN_S),
        repair_s=given("mttr", REPAIR_S),
        verify_s=given("verify", VERIFY_S),
        reset_s=given("reset", 0.0),
        window_s=given("window", WINDOW_S),
        spares=flags.get("spares"),
        usd_per_gpu_hour=flags.get("price"),
    )
    return prices, rate_from


def _free() -> Prices:
    """Prices for a replay that asks for none: what is prevented does not depend on them."""
    from keepstep.goodput.job import Job

    return Prices(job=Job(nodes=1, rate_per_node_day=0.0, interval_s=1.0), gpus=1, span_s=0.0)


_FREE = _free()


def _read(paths: Sequence[str], catalog: Catalog, labels: Sequence[Path], skip_bad: bool, as_of_then: bool) -> _History:
    """Read, cut into incidents and judge; say on stderr what was left out. Raises ConfigError, NotFoundError, KeepstepError."""
    from keepstep.cli.replay_labels import labels_of
    from keepstep.launcher.eventhistory import as_of_then as without_later_marks
    from keepstep.launcher.eventhistory import history_of, past_incidents
    from keepstep.sources.eventlines import STDIN, read_event_lines

    missing = [p for p in paths if p != STDIN and not Path(p).is_file()]
    if missing:
        raise NotFoundError(f"no such file: {', '.join(missing)}")
    lines = read_event_lines(paths, skip_bad=skip_bad)
    for text in lines.bad[:BAD_SHOWN]:
        note(f"left out: {text}")
    if lines.bad:
        note(f"{len(lines.bad)} lines are no events and were left out")
    events = without_later_marks(lines.events) if as_of_then else lines.events
    incidents = past_incidents(events, catalog)
    labelled = labels_of(labels, incidents)
    for text in labelled.unmatched:
        note(f"label not used: {text}")
    return _History(
        events, incidents, history_of(events, incidents), labelled.classes, _counts(events, lines.bad, catalog)
    )


def _counts(events: Sequence[Event], bad: Sequence[str], catalog: Catalog) -> dict[str, Any]:
    """How many events there were, and how many of them could not count, and why."""
    stale = Counter(e.stale for e in events if e.stale is not None)
    untimed = sum(1 for e in events if e.time_ns is None)
    strange = sum(1 for e in events if e.signature not in catalog)
    for reason, count in sorted(stale.items()):
        hint = "" if reason == "replay" else "; --as-of-then counts what was current at its own time"
        note(f"{count} events are stale ({reason}) and do not count{hint}")
    if untimed:
        note(f"{untimed} events have no time and cannot be placed")
    if strange:
        note(f"{strange} events have signatures that this catalog does not know; --catalog FILE adds a site's")
    return {
        "events": len(events),
        "bad_lines": len(bad),
        "stale": {reason: stale[reason] for reason in sorted(stale)},
        "without_time": untimed,
        "unknown_signature": strange,
    }


def _case(incident: PastIncident, labels: Mapping[str, FaultClass]) -> Case:
    return Case(
        id=incident.id,
        time_s=incident.begin_ns / 1e9,
        node=incident.node,
        rank=incident.rank,
        verdict=incident.verdict,
        interrupted=incident.interrupted,
        hang=incident.hang,
        label=labels.get(incident.id),
    )


# ---- the record


def _record(
    history: _History,
    accounts: Sequence[Account],
    baseline: str,
    catalog: Catalog,
    prices: Prices | None,
    rate_from: str,
) -> dict[str, Any]:
    base = next(a for a in accounts if a.policy == baseline)
    return {
        "schema": "keepstep.replay/1",
        "read": history.counts,
        "catalog": catalog.describe(),
        "history": msgspec.to_builtins(history.summary),
        "assumptions": None if prices is None else _assumptions(prices, rate_from),
        "baseline": baseline,
        "incidents": [
            _incident_fields(one, number, history.labels, accounts, prices)
            for number, one in enumerate(history.incidents)
        ],
        "policies": [_account_fields(a, base, prices) for a in accounts],
    }


def _assumptions(prices: Prices, rate_from: str) -> dict[str, Any]:
    """What the prices rest on, in seconds. Those that nobody measured are the defaults of flags."""
    job = prices.job
    return {
        "gpus": prices.gpus,
        "nodes": job.nodes,
        "interval_s": round(job.interval_s, 3),
        "failures_per_1000_node_days": round(1000.0 * job.rate_per_node_day, 4),
        "failure_rate_from": rate_from,
        "human_s": prices.human_s,
        "repair_s": prices.repair_s,
        "verify_s": prices.verify_s,
        "reset_s": prices.reset_s,
        "window_s": prices.window_s,
        "spares": prices.spares,
        "usd_per_gpu_hour": prices.usd_per_gpu_hour,
        "rollback": "half an interval of the tier that survives, and its persist lag; at most what was trained since",
    }


def _incident_fields(
    one: PastIncident,
    number: int,
    labels: Mapping[str, FaultClass],
    accounts: Sequence[Account],
    prices: Prices | None,
) -> dict[str, Any]:
    verdict = one.verdict
    return {
        "id": one.id,
        "begin": rfc3339(one.begin_ns),
        "end": rfc3339(one.end_ns),
        "node": one.node,
        "nodes": list(one.nodes),
        "rank": one.rank,
        "class": verdict.fault_class,
        "tier": verdict.tier,
        "confidence": round(verdict.confidence, 6),
        "signature": verdict.signature,
        "action": verdict.action,
        "no_current_fault": verdict.no_current_fault,
        "interrupted": one.interrupted,
        "label": labels.get(one.id),
        "summary": verdict.summary,
        "policies": {a.policy: _cost_fields(a, number, prices) for a in accounts},
    }


def _cost_fields(account: Account, number: int, prices: Prices | None) -> dict[str, Any]:
    cost = account.cases[number]
    fields: dict[str, Any] = {
        "action": cost.action,
        "node_out": cost.node_out,
        "healthy": cost.healthy,
        "prevented_by": cost.prevented_by,
        "again": cost.again,
    }
    if prices is None:
        return fields
    gpu_hours = cost.phases.cost_s * prices.gpus / 3600.0
    phases = {name: round(value, 3) for name, value in msgspec.structs.asdict(cost.phases).items() if value}
    usd = None if prices.usd_per_gpu_hour is None else round(gpu_hours * prices.usd_per_gpu_hour, 2)
    return fields | {
        "cost_s": round(cost.phases.cost_s, 3),
        "phases": phases,
        "gpu_hours": round(gpu_hours, 4),
        "usd": usd,
    }


def _account_fields(account: Account, base: Account, prices: Prices | None) -> dict[str, Any]:
    actions = Counter(c.action for c in account.cases if c.action is not None)
    fields: dict[str, Any] = {
        "policy": account.policy,
        "interruptions": account.interruptions,
        "prevented": account.prevented,
        "wasted_restarts": account.wasted_restarts,
        "evictions": account.evictions,
        "healthy_out": account.healthy_out,
        "actions": {name: actions[name] for name in sorted(actions)},
    }
    if prices is None:
        return fields
    phases: Counter[str] = Counter()
    for cost in account.cases:
        phases.update(msgspec.structs.asdict(cost.phases))
    saved_usd = None if account.usd is None or base.usd is None else round(base.usd - account.usd, 2)
    return fields | {
        "wasted_s": round(account.wasted_s, 3),
        "healthy_node_hours": round(account.healthy_node_hours, 4),
        "spares": account.spares,
        "stall_s": round(account.stall_s, 3),
        "phases": {name: round(value, 3) for name, value in sorted(phases.items()) if value},
        "cost_s": round(account.cost_s, 3),
        "gpu_hours": round(account.gpu_hours, 4),
        "usd": None if account.usd is None else round(account.usd, 2),
        "saved_hours": round((base.cost_s - account.cost_s) / 3600.0, 4),
        "saved_gpu_hours": round(base.gpu_hours - account.gpu_hours, 4),
        "saved_usd": saved_usd,
    }
