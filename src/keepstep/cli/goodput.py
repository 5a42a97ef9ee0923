"""`keepstep goodput RUN`: where the wall-clock of a run went. Of many runs: `goodput_fleet`."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from keepstep.cli.output import NotFoundError, emit, format_duration_s, format_share, note, output_option
from keepstep.cli.run_flags import Number
from keepstep.goodput import summarise
from keepstep.goodput.partition import read_history
from keepstep.goodput.verified import verified_of
from keepstep.launcher.coordination.journal import epochs, read_records
from keepstep.launcher.files import keepstep_home
from keepstep.launcher.views.ledger import faults_of, layouts_of, marks_of
from keepstep.records.codec import from_json
from keepstep.records.cycle import PHASES, Cycle, CyclePhases, Goodput
from keepstep.records.errors import ConfigError, StorageError
from keepstep.records.losses import LOSSES, Amount, JobLosses

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_SHOWN = 8
"""Runs named in an error."""
MAX_CYCLES = 20
"""Cycles drawn without -o wide."""
UNLIMITED = 10_000
"""Columns to measure a table with, to know what it would like to have."""
CYCLE_PHASES = tuple(field.removesuffix("_s") for field in CyclePhases.__struct_fields__)


BY = ("cause", "class", "node", "rack", "incident", "run")
"""What the table of a fleet may be grouped by."""


@click.command("goodput")
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@click.option("--attempt", type=click.IntRange(min=0), help="Which life of the launcher; the default is the last one.")
@click.option("--all-attempts", is_flag=True, help="Account all attempts as one; time between them is queue.")
@click.option("--price", type=Number(above=True, unit="dollars"), metavar="USD", help="Dollars per GPU and hour.")
@click.option(
    "--forecast", is_flag=True, help="Forecasts kept of the run beside what happened: keepstep.calibration/1."
)
@click.option("--fleet", is_flag=True, help="Account many runs together: all of RUN..., or all there are.")
@click.option("--since", metavar="TIME", help="Fleet: from then on: 30d, 12h before now, or an RFC 3339 time.")
@click.option(
    "--slo", type=float, metavar="SHARE", help="Fleet: objective of ETTR, such as 0.9; shows its error budget."
)
@click.option("--by", type=click.Choice(BY), help="Fleet: what lost time is grouped by in the table (default cause).")
@click.option(
    "--write-prior",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Fleet: write its failure rates for --failure-prior of runs and plans.",
)
@click.option("--sku", metavar="MODEL", help="Fleet: GPU model of nodes whose records name none, for failure rates.")
@output_option
def goodput(
    runs: tuple[str, ...],
    attempt: int | None,
    all_attempts: bool,
    price: float | None,
    forecast: bool,
    fleet: bool,
    since: str | None,
    slo: float | None,
    by: str | None,
    write_prior: str | None,
    sku: str | None,
    output: str,
) -> None:
    """Say where the wall-clock of RUN went, phase by phase and cycle by cycle; with --fleet where that of many runs went.

    RUN is a run folder, or the id of a run under $KEEPSTEP_HOME/runs (default ~/.keepstep/runs); with --fleet also a folder
    of run folders. A run that has not ended is accounted up to now. JSON is `keepstep.goodput/1`; phases_ns and wall_ns are
    exact. Of a fleet it is `keepstep.fleet_goodput/1`.
    """
    if attempt is not None and all_attempts:
        raise ConfigError("--attempt and --all-attempts contradict each other; give one of them")
    if fleet:
        if forecast:
            raise ConfigError("--forecast is about one run; with --fleet the score of all forecasts is shown anyway")
        if attempt is not None or all_attempts:
            raise ConfigError("--fleet counts all attempts of every run; leave --attempt and --all-attempts out")
        from keepstep.cli.goodput_fleet import show_fleet

        show_fleet(runs, since=since, slo=slo, price=price, by=by or "cause", prior=write_prior, sku=sku, output=output)
        return
    for flag, given in (
        ("--since", since),
        ("--slo", slo),
        ("--by", by),
        ("--sku", sku),
        ("--write-prior", write_prior),
    ):
        if given is not None:
            raise ConfigError(f"{flag} {given} is about many runs; add --fleet")
    if len(runs) != 1:
        raise ConfigError(f"give one RUN, not {len(runs)}; --fleet accounts several runs, or all of them")
    from keepstep.cli.forecast_table import forecasts_of, render_forecasts, telling_of

    folder = find_run(runs[0])
    if forecast:
        found = forecasts_of(folder)
        emit(
            found, output, table=lambda console, _: render_forecasts(found, console), name=lambda row: str(row.made_at)
        )
        return
    record = load_goodput(folder, attempt=attempt, all_attempts=all_attempts, price=price)

    def draw(console: Console, wide: bool) -> None:
        render_goodput(record, console, wide=wide)
        render_forecasts(telling_of(folder), console)

    emit(record, output, table=draw, name=lambda r: str(r.run_id))


def runs_root() -> Path:
    """Folder of the run folders: $KEEPSTEP_HOME/runs, by default ~/.keepstep/runs."""
    return keepstep_home() / "runs"


def find_run(run: str) -> Path:
    """Folder of the run named by a path or an id. Raises NotFoundError saying where it looked, and the nearest ids."""
    root = runs_root()
    named = Path(run)
    candidates = [named] if named.is_absolute() or len(named.parts) != 1 else [root / run, named]
    for candidate in candidates:
        if (candidate / "journal").is_dir() or (candidate / "run.json").is_file():
            return candidate
    looked = " and ".join(str(candidate.absolute()) for candidate in candidates)
    try:
        known = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    except OSError:
        known = []
    near = difflib.get_close_matches(named.name, known, n=MAX_SHOWN, cutoff=0.4) or known[-MAX_SHOWN:]
    hint = f"nearest runs in {root}: {', '.join(near)}" if near else f"{root} holds no runs"
    raise NotFoundError(f"no run {run!r}: no run folder at {looked}; {hint}")


def load_goodput(
    run_dir: Path,
    *,
    attempt: int | None = None,
    all_attempts: bool = False,
    now_ns: int | None = None,
    price: float | None = None,
) -> Goodput:
    """Account the run in `run_dir` from its journal, cycle records and labels; `price` in dollars per GPU-hour.

    A run that has not ended is counted to `now_ns` (UTC nanoseconds, default: the clock).
    Raises NotFoundError when the journal has no mark (of `attempt`), StorageError when a file cannot be read.
    """
    if not epochs(run_dir):
        raise NotFoundError(f"{run_dir} has no journal; nothing to account")
    records = read_records(run_dir)
    marks = marks_of(records)
    attempts = sorted({mark.attempt for mark in marks})
    if not attempts:
        raise NotFoundError(f"the journal in {run_dir / 'journal'} has no marks yet; nothing to account")
    chosen = attempts[-1] if attempt is None else attempt
    if chosen not in attempts:
        known = ", ".join(map(str, attempts))
        raise NotFoundError(f"run folder {run_dir} has no attempt {chosen}; it has {known}")
    cycles = read_cycles(run_dir)
    ended = any(m.kind == "run_ended" and m.attempt == attempts[-1] for m in marks)
    if now_ns is None and not ended:
        now_ns = time.time_ns()
    faults, problems = faults_of(run_dir, read_history(marks), marks, layouts_of(records))
    for problem in problems:
        note(problem)
    return summarise(
        _run_id(run_dir, cycles),
        chosen,
        marks,
        cycles,
        now_ns,
        whole_history=all_attempts,
        verified=verified_of(f for f in faults if all_attempts or f.key[0] == chosen),
        price=price,
    )


def read_cycles(run_dir: Path) -> list[Cycle]:
    """Cycle records in order; one that cannot be decoded is left out and named on stderr. Raises StorageError."""
    result: list[Cycle] = []
    for path in sorted((run_dir / "cycles").glob("cycle-*.json")):
        try:
            result.append(from_json(path.read_bytes(), Cycle))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            note(f"{path} is not a cycle record and is left out: {error}")
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return result


def _run_id(run_dir: Path, cycles: list[Cycle]) -> str:
    """Id of the run: from its cycle records, else from run.json, else the name of the folder."""
    if cycles:
        return cycles[-1].run_id
    try:
        settings: Any = json.loads((run_dir / "run.json").read_bytes())
    except (OSError, ValueError):
        settings = {}
    run_id = settings.get("run_id") if isinstance(settings, dict) else None
    return run_id if isinstance(run_id, str) else run_dir.absolute().name


def render_goodput(goodput: Goodput, console: Console, *, wide: bool = False) -> None:
    """Draw the account of a run: headline, phases, causes, cycles and counts.

    `wide` shows what is empty too, and every cycle; without it only the newest MAX_CYCLES, and stderr says so.
    """
    from rich.text import Text

    console.print(Text(_headline(goodput)))
    console.print(_phase_table(goodput, wide=wide))
    if goodput.losses is not None:
        wall = Amount(time_ns=goodput.wall_ns, time_s=goodput.wall_s)
        console.print(loss_table(goodput.losses, wall, "losses, by name"))
        console.print(*map(Text, ratio_lines(goodput.losses)), sep="\n", soft_wrap=True)
    if goodput.lost_by_cause:
        console.print(_cause_table(goodput))
    if goodput.cycles:
        _print_cycles(goodput, console, wide=wide)
    for line in _counts(goodput):
        console.print(Text(line))


def _headline(goodput: Goodput) -> str:
    wall = format_duration_s(goodput.wall_s)
    if goodput.ettr is None:
        return (
            f"run {goodput.run_id}, attempt {goodput.attempt}: {wall} of wall-clock; ETTR unknown (no steps reported)"
        )
    return (
        f"run {goodput.run_id}, attempt {goodput.attempt}: ETTR {goodput.ettr:.3f}, "
        f"{format_duration_s(goodput.productive_s)} of {wall} became training that survived"
    )


def loss_table(losses: JobLosses, whole: Amount, title: str, names: Sequence[str] = LOSSES) -> Table:
    """Losses by name with their share of `whole`, of its GPU-time where both are known; money where there is a price."""
    priced = any(part is not None and part.usd is not None for part in losses.parts.values())
    table = make_table(title, "loss", "seconds", "share", "GPU-h", *(("USD",) if priced else ()))
    for name in names:
        part = losses.parts[name]
        if part is None:
            table.add_row(name, "unknown", "-", "-")
            continue
        sized = part.gpu_ns is not None and whole.gpu_ns is not None
        share = format_share(part.gpu_h, whole.gpu_h or 0) if sized else format_share(part.time_s, whole.time_s)
        gpu_h = "-" if part.gpu_h is None else f"{part.gpu_h:.3f}"
        money = () if not priced else ("-",) if part.usd is None else (f"{part.usd:,.2f}",)
        table.add_row(name, f"{part.time_s:.3f}", share, gpu_h, *money)
    return table


def ratio_lines(losses: JobLosses) -> list[str]:
    """The ratios that must not be mixed, slow steps, and what is known of wrong actions."""
    ratios = losses.ratios
    shown = {
        "ETTR without queue": ratios.ettr_without_queue,
        "ETTR with queue": ratios.ettr_with_queue,
        "paid-GPU goodput": ratios.paid_gpu_goodput,
        "step-time factor": ratios.step_time_factor,
    }
    lines = [", ".join(f"{name} {'unknown' if value is None else f'{value:.3f}'}" for name, value in shown.items())]
    if losses.slow_steps is not None:
        lines.append(f"steps slower than the run's best pace: {format_duration_s(losses.slow_steps.time_s)}")
    if losses.actions:
        wrong = "unknown" if losses.actions_wrong is None else str(losses.actions_wrong)
        lines.append(f"actions on a verdict: {losses.actions}, {losses.actions_verified} verified, wrong: {wrong}")
    return lines


def make_table(title: str, *columns: str) -> Table:
    """Table whose first column is text and whose other columns are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=f"\n{title}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _phase_table(goodput: Goodput, *, wide: bool) -> Table:
    table = make_table("phases", "phase", "seconds", "share")
    for name in PHASES:
        seconds = goodput.phases.get(name)
        if seconds or wide or name == "productive":
            shown = "unknown" if seconds is None else f"{seconds:.3f}"
            table.add_row(name, shown, format_share(seconds, goodput.wall_s))
    table.add_row("wall", f"{goodput.wall_s:.3f}", format_share(goodput.wall_s, goodput.wall_s), style="bold")
    return table


def _cause_table(goodput: Goodput) -> Table:
    from rich.text import Text

    table = make_table("lost, by cause", "cause", "seconds", "share")
    for cause, seconds in sorted(goodput.lost_by_cause.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(Text(cause), f"{seconds:.3f}", format_share(seconds, goodput.wall_s))
    return table


def _print_cycles(goodput: Goodput, console: Console, *, wide: bool) -> None:
    """What each cycle cost and where it went on from: a table, or a line a cycle where the table does not fit."""
    from rich.text import Text

    cycles = goodput.cycles if wide else goodput.cycles[-MAX_CYCLES:]
    if len(cycles) < len(goodput.cycles):
        note(f"showing the newest {len(cycles)} of {len(goodput.cycles)} cycles; -o wide shows all")
    costs = [{name: float(getattr(cycle.phases, f"{name}_s")) for name in CYCLE_PHASES} for cycle in cycles]
    names = [name for name in CYCLE_PHASES if wide or any(cost[name] for cost in costs)]
    table = make_table("cycles (seconds from fault to training)", "cycle", *names, "total", "restored", "ended")
    lines = [Text("\ncycles (from fault to training)")]
    for cycle, cost in zip(cycles, costs, strict=True):
        number = str(cycle.cycle) if cycle.attempt == goodput.attempt else f"{cycle.attempt}/{cycle.cycle}"
        step = "-" if cycle.restored_step is None else f"step {cycle.restored_step}"
        source = "" if cycle.restored_from == "none" else f" ({cycle.restored_from})"
        ended = cycle.end_reason or ("-" if cycle.ended_at else "running")
        total = sum(cost.values())
        cells = [f"{cost[name]:.3f}" for name in names]
        table.add_row(number, *cells, f"{total:.3f}", f"{step}{source}", Text(ended))
        parts = ", ".join(f"{name} {format_duration_s(cost[name])}" for name in names if cost[name])
        lines.append(Text(f"{number}: {format_duration_s(total)} ({parts}); restored {step}{source}; ended {ended}"))
    if console.measure(table, options=console.options.update(max_width=UNLIMITED)).maximum <= console.width:
        console.print(table)
    else:
        console.print(*lines, sep="\n", soft_wrap=True)
    console.print()


def _counts(goodput: Goodput) -> list[str]:
    steps, restarts, saves = goodput.steps, goodput.restarts, goodput.checkpoints
    lines = [f"restarts: {restarts.total} ({restarts.counted} counted, {restarts.free} free)"]
    if steps.final is not None:
        committed = "none" if steps.committed is None else str(steps.committed)
        lines.insert(
            0,
            f"steps: {steps.final} final, {steps.completed} completed, {steps.rolled_back} rolled back, "
            f"newest committed {committed}",
        )
    if saves.committed or saves.failed:
        block = format_duration_s(saves.block_s_median)
        lines.append(f"checkpoints: {saves.committed} committed, {saves.failed} failed, median block {block}")
    return lines
