"""`keepstep events [RUN]`: what happened, in order."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from keepstep.cli.output import emit, make_console, note, output_option
from keepstep.cli.runs import (
    RUN_HELP,
    Column,
    cell,
    parse_selectors,
    print_table,
    resolve_run,
    run_argument,
    select,
    since_time,
)
from keepstep.launcher.views.events import Event, EventReader
from keepstep.launcher.views.tailing import JournalTail
from keepstep.launcher.views.view import is_led, run_id_of
from keepstep.records.codec import to_json
from keepstep.records.errors import ConfigError

POLL_S = 0.2
"""How often a followed journal is looked at."""
TABLE_LIMIT = 200
"""Events in a table when no --limit is given."""


MAX_VALUE = 160
"""Characters of one attribute in a table (a traceback is one); JSON has all."""


def _attrs(record: dict[str, Any]) -> str:
    shown = {k: cell(v) for k, v in record["attrs"].items() if v not in (None, "", [], {}) and not k.endswith("_ns")}
    return " ".join(f"{k}={v if len(v) <= MAX_VALUE else v[:MAX_VALUE] + '…'}" for k, v in shown.items())


COLUMNS = (
    Column("TIME", lambda r: r["time"][11:23]),
    Column("KIND", lambda r: r["kind"]),
    Column("CYCLE", lambda r: r["cycle"], right=True),
    Column("NODE", lambda r: r["node"]),
    Column("RANK", lambda r: r["rank"], right=True),
    Column("SEVERITY", lambda r: r["severity"], wide=True),
    Column("ID", lambda r: r["id"], wide=True),
    Column("DETAIL", _attrs),
)


@click.command("events", epilog=RUN_HELP)
@run_argument
@click.option("--since", metavar="SPAN", help="Only what happened in the last 30s, 10m, 2h, 1d, or since a UTC time.")
@click.option("--kind", "kinds", multiple=True, metavar="K", help="Only this kind; `checkpoint` and `*.failed` work.")
@click.option("-l", "selectors", multiple=True, metavar="KEY=VALUE", help="Only events with that field; also !=.")
@click.option("--cycle", type=click.IntRange(min=0), help="Only this cycle.")
@click.option("--limit", type=click.IntRange(min=0), help="Only the newest N; 0 is all. A table has 200 by default.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens next, until the run ends.")
@output_option
def events(
    run: str | None,
    since: str | None,
    kinds: tuple[str, ...],
    selectors: tuple[str, ...],
    cycle: int | None,
    limit: int | None,
    follow: bool,
    output: str,
) -> None:
    """Show the timeline of a run from its journal, newest last. JSON records are keepstep.event/1.

    Steps are samples (step.completed), not every step.
    """
    run_dir = resolve_run(run)
    wanted = parse_selectors(selectors)
    begin = since_time(since, time.time_ns()) if since else ""
    if follow and output == "yaml":
        raise ConfigError("--follow with -o yaml has no end; use -o jsonl")

    def keep(event: Event) -> bool:
        return event.time >= begin and (cycle is None or event.cycle == cycle) and kind_matches(event.kind, kinds)

    tail, reader = JournalTail(run_dir), EventReader(run_id_of(run_dir))
    # By time: a fact may reach the journal after later ones did.
    found = sorted((e for e in reader.read(tail.poll()) if keep(e)), key=lambda e: e.time)
    if wanted:
        chosen = select([msgspec.to_builtins(e) for e in found], wanted)
        found = [msgspec.convert(r, Event) for r in chosen]
    most = (TABLE_LIMIT if output == "table" else 0) if limit is None else limit
    if most and len(found) > most:
        note(f"showing the newest {most} of {len(found)} events; --limit 0 shows all")
        found = found[-most:]
    records = [msgspec.to_builtins(e) for e in found]
    if not follow:
        emit(
            records,
            output,
            table=lambda console, wide: print_table(console, COLUMNS, records, wide=wide),
            name=lambda r: str(r["id"]),
        )
        return
    for record in records:
        _print_one(record, output)
    for event in new_events(run_dir, tail, reader):
        record = msgspec.to_builtins(event)
        if keep(event) and select([record], wanted):
            _print_one(record, output)


def kind_matches(kind: str, patterns: tuple[str, ...]) -> bool:
    """Whether a dotted kind is one of those asked for: itself, one of its parents, or a shell pattern; all without any."""
    return not patterns or any(kind == p or kind.startswith(f"{p}.") or fnmatch.fnmatchcase(kind, p) for p in patterns)


def new_events(run_dir: Path, tail: JournalTail, reader: EventReader) -> Iterator[Event]:
    """Events as they come, until the run has no launcher any more."""
    while True:
        led = is_led(run_dir)  # asked before reading: what the launcher wrote last is not missed
        yield from reader.read(tail.poll())
        if not led:
            return
        time.sleep(POLL_S)


def _print_one(record: dict[str, Any], output: str) -> None:
    if output == "name":
        click.echo(record["id"])
    elif output in ("json", "jsonl"):
        click.echo(to_json(record).decode())
    else:
        from rich.text import Text

        values = [cell(c.value(record)) for c in COLUMNS if output == "wide" or not c.wide]
        widths = [12, 24, 5, 12, 5, 8, 8] if output == "wide" else [12, 24, 5, 12, 5]
        padded = [v.ljust(w) for v, w in zip(values, widths, strict=False)] + values[len(widths) :]
        make_console().print(Text("  ".join(padded)), soft_wrap=True)
    sys.stdout.flush()
