"""`keepstep history [RUN]`: one line a cycle, over all attempts."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from keepstep.cli.goodput import load_goodput
from keepstep.cli.output import emit, format_duration_s, output_option
from keepstep.cli.runs import RUN_HELP, Column, clock, print_table, resolve_run, run_argument
from keepstep.launcher.views.view import brought_up_to_date
from keepstep.records.cycle import Cycle, Goodput

if TYPE_CHECKING:
    from rich.console import Console


class CycleLine(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.history/1`: a cycle and what it cost. `lost_s` is the recovery before it and its start; with running totals."""

    schema: str = "keepstep.history/1"
    run_id: str
    attempt: int
    cycle: int
    started_at: str
    ended_at: str | None
    duration_s: float | None
    end_reason: str | None
    fault_kind: str | None
    rank: int | None
    node: str | None
    recovery: str | None
    counted: bool
    restored_step: int | None
    restored_from: str
    lost_s: float
    lost_total_s: float
    restarts_total: int


COLUMNS = (
    Column("CYCLE", lambda r: f"{r.attempt}/{r.cycle}"),
    Column("STARTED", lambda r: clock(r.started_at)),
    Column("DURATION", lambda r: format_duration_s(r.duration_s) if r.ended_at else "running", right=True),
    Column("WHY ENDED", lambda r: r.end_reason),
    Column("FAULT", lambda r: r.fault_kind),
    Column("RANK", lambda r: r.rank, right=True),
    Column("NODE", lambda r: r.node),
    Column("RECOVERY", lambda r: r.recovery),
    Column("RESTORED", lambda r: r.restored_step, right=True),
    Column("FROM", lambda r: None if r.restored_from == "none" else r.restored_from),
    Column("LOST", lambda r: format_duration_s(r.lost_s), right=True),
    Column("LOST SO FAR", lambda r: format_duration_s(r.lost_total_s), right=True),
    Column("RESTARTS", lambda r: r.restarts_total, wide=True, right=True),
    Column("COUNTED", lambda r: "yes" if r.counted else "no", wide=True),
)


@click.command("history", epilog=RUN_HELP)
@run_argument
@output_option
def history(run: str | None, output: str) -> None:
    """Show the cycles of a run over all attempts: how long, why ended, who is blamed, what the restart cost.

    CYCLE is attempt/cycle; LOST is the time from the fault before it to its first step. JSON records are keepstep.history/1.
    """
    run_dir = resolve_run(run)
    record = load_goodput(run_dir, all_attempts=True)
    record = msgspec.structs.replace(record, cycles=brought_up_to_date(record.cycles, run_dir))
    lines = cycle_lines(record)

    def table(console: Console, wide: bool) -> None:
        print_table(console, COLUMNS, lines, wide=wide)
        for text in _totals(record, lines):
            console.print(text, markup=False, soft_wrap=True)

    emit(lines, output, table=table, name=lambda r: f"{r.attempt}/{r.cycle}")


def cycle_lines(record: Goodput) -> list[CycleLine]:
    """A line a cycle, oldest first, with totals so far."""
    lines: list[CycleLine] = []
    lost_total_s, restarts = 0.0, 0
    for before, cycle in zip([None, *record.cycles], record.cycles, strict=False):
        lost_s = sum(float(getattr(cycle.phases, name)) for name in cycle.phases.__struct_fields__)
        lost_total_s += lost_s
        restarts += before is not None and before.attempt == cycle.attempt
        fault: dict[str, Any] = cycle.fault or {}
        lines.append(
            CycleLine(
                run_id=cycle.run_id,
                attempt=cycle.attempt,
                cycle=cycle.cycle,
                started_at=cycle.started_at,
                ended_at=cycle.ended_at,
                duration_s=_duration_s(cycle),
                end_reason=cycle.end_reason,
                fault_kind=fault.get("kind"),
                rank=fault.get("rank"),
                node=fault.get("node"),
                recovery=cycle.recovery,
                counted=cycle.counted,
                restored_step=cycle.restored_step,
                restored_from=cycle.restored_from,
                lost_s=lost_s,
                lost_total_s=lost_total_s,
                restarts_total=restarts,
            )
        )
    return lines


def _duration_s(cycle: Cycle) -> float | None:
    if cycle.ended_at is None:
        return None
    try:
        begin, end = (datetime.datetime.fromisoformat(t) for t in (cycle.started_at, cycle.ended_at))
    except ValueError:
        return None
    return (end - begin).total_seconds()


def _totals(record: Goodput, lines: list[CycleLine]) -> list[str]:
    attempts, restarts = len({line.attempt for line in lines}), record.restarts
    ettr = "unknown" if record.ettr is None else f"{record.ettr:.3f}"
    texts = [
        f"{_count(len(lines), 'cycle')} in {_count(attempts, 'attempt')}, {_count(restarts.total, 'restart')} "
        f"({restarts.counted} counted), {format_duration_s(record.wall_s)} of wall-clock, ETTR {ettr}"
    ]
    if record.lost_by_cause:
        parts = [
            f"{cause} {format_duration_s(s)}" for cause, s in sorted(record.lost_by_cause.items(), key=lambda i: -i[1])
        ]
        texts.append(f"lost by cause: {', '.join(parts)}")
    return texts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
