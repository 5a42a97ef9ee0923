"""`keepstep replay` for people: a row an incident, a row a policy, and what the prices rest on."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from keepstep.cli.output import format_duration_s
from keepstep.cli.runs import Column, clock, print_table

if TYPE_CHECKING:
    from rich.console import Console

Fields = dict[str, Any]


def show(record: Fields, console: Console, *, wide: bool) -> None:
    """Draw a keepstep.replay/1 record."""
    priced = record["assumptions"] is not None
    _say(console, _head(record))
    console.print()
    print_table(console, _incident_columns(record), record["incidents"], wide=wide)
    console.print()
    print_table(console, _policy_columns(record, priced), record["policies"], wide=wide)
    if priced:
        console.print()
        for text in _resting_on(record):
            _say(console, text)


def _say(console: Console, text: str) -> None:
    from rich.text import Text

    console.print(Text(text), soft_wrap=True)


def _head(record: Fields) -> str:
    history, read = record["history"], record["read"]
    span = f"{clock(history['first'])} to {clock(history['last'])}" if history["first"] else "no times"
    return (
        f"{read['events']} events, {span}; {history['incidents']} incidents, {history['interruptions']} interruptions "
        f"({history['multi_node']} of several nodes), {history['nodes_seen']} nodes seen"
    )


def _incident_columns(record: Fields) -> list[Column]:
    names = [p["policy"] for p in record["policies"]]
    return [
        Column("TIME", lambda r: clock(r["begin"])),
        Column("NODE", lambda r: r["node"] or (None if r["rank"] is None else f"rank {r['rank']}")),
        Column("CLASS", lambda r: r["class"] if r["label"] in (None, r["class"]) else f"{r['class']} ({r['label']})"),
        Column("TIER", lambda r: r["tier"]),
        Column("SIGNATURE", lambda r: r["signature"], wide=True),
        Column("ID", lambda r: r["id"], wide=True),
        *(Column(name.upper(), functools.partial(_done, name)) for name in names),
    ]


def _done(policy: str, incident: Fields) -> str | None:
    """What a policy did about an incident, and for how much."""
    cost = incident["policies"][policy]
    if cost["prevented_by"] is not None:
        return "prevented"
    if cost["action"] is None:
        return None
    spent = f" {format_duration_s(cost['cost_s'])}" if cost.get("cost_s") else ""
    marks = (" healthy" if cost["healthy"] else "") + (" again" if cost["again"] else "")
    return f"{cost['action']}{spent}{marks}"


def _policy_columns(record: Fields, priced: bool) -> list[Column]:
    columns = [
        Column("POLICY", lambda r: r["policy"]),
        Column("STOPS", lambda r: r["interruptions"], right=True),
        Column("PREVENTED", lambda r: r["prevented"], right=True),
        Column("WASTED", lambda r: r["wasted_restarts"], right=True),
        Column("OUT", lambda r: r["evictions"], right=True),
        Column("HEALTHY OUT", lambda r: r["healthy_out"], right=True),
    ]
    if not priced:
        return columns
    columns += [
        Column("SPARES", lambda r: r["spares"], right=True),
        Column("LOST", lambda r: format_duration_s(r["cost_s"]), right=True),
        Column("FOR A NODE", lambda r: format_duration_s(r["stall_s"]), right=True),
        Column("GPU-HOURS", lambda r: f"{r['gpu_hours']:.1f}", right=True),
        Column("SAVED H", lambda r: f"{r['saved_hours']:+.2f}", right=True),
        Column("SAVED GPU-H", lambda r: f"{r['saved_gpu_hours']:+.1f}", right=True),
    ]
    if record["assumptions"]["usd_per_gpu_hour"] is not None:
        columns += [
            Column("USD", lambda r: f"{r['usd']:.0f}", right=True),
            Column("SAVED USD", lambda r: f"{r['saved_usd']:+.0f}", right=True),
        ]
    return columns


def _resting_on(record: Fields) -> list[str]:
    a = record["assumptions"]
    spares = "as many as paid goodput asks for" if a["spares"] is None else str(a["spares"])
    return [
        f"saved: against {record['baseline']}. An estimate: what a policy would have prevented was never tried.",
        f"assumed: a person comes in {format_duration_s(a['human_s'])}, a node is repaired in {format_duration_s(a['repair_s'])}, "
        f"a healthy one is back in {format_duration_s(a['verify_s'])}, a fault within {format_duration_s(a['window_s'])} is the "
        f"same come again; spares: {spares}",
        f"interval {format_duration_s(a['interval_s'])}; {a['failures_per_1000_node_days']:g} failures per 1000 node-days "
        f"({a['failure_rate_from']})",
    ]
