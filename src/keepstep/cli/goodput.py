"""`keepstep goodput RUN`: where the wall-clock of a run went."""

from __future__ import annotations

import difflib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from keepstep.cli.output import NotFoundError, emit, format_duration_s, format_share, note, output_option
from keepstep.goodput import summarise
from keepstep.launcher.coordination.journal import epochs, read_marks
from keepstep.launcher.files import keepstep_home
from keepstep.records.codec import from_json
from keepstep.records.cycle import PHASES, Cycle, CyclePhases, Goodput
from keepstep.records.errors import ConfigError, StorageError

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


@click.command("goodput")
@click.argument("run", metavar="RUN")
@click.option("--attempt", type=click.IntRange(min=0), help="Which life of the launcher; the default is the last one.")
@click.option("--all-attempts", is_flag=True, help="Account all attempts as one; time between them is queue.")
@output_option
def goodput(run: str, attempt: int | None, all_attempts: bool, output: str) -> None:
    """Say where the wall-clock of RUN went, phase by phase and cycle by cycle.

    RUN is a run folder, or the id of a run under $KEEPSTEP_HOME/runs (default ~/.keepstep/runs). A run that has not
    ended is accounted up to now. JSON is `keepstep.goodput/1`; phases_ns and wall_ns are exact.
    """
    if attempt is not None and all_attempts:
        raise ConfigError("--attempt and --all-attempts contradict each other; give one of them")
    record = load_goodput(find_run(run), attempt=attempt, all_attempts=all_attempts)
    emit(
        record,
        output,
        table=lambda console, wide: render_goodput(record, console, wide=wide),
        name=lambda r: str(r.run_id),
    )


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
    run_dir: Path, *, attempt: int | None = None, all_attempts: bool = False, now_ns: int | None = None
) -> Goodput:
    """Account the run in `run_dir` from its journal and cycle records.

    A run that has not ended is counted to `now_ns` (UTC nanoseconds, default: the clock).
    Raises NotFoundError when the journal has no mark (of `attempt`), StorageError when a file cannot be read.
    """
    if not epochs(run_dir):
        raise NotFoundError(f"{run_dir} has no journal; nothing to account")
    marks = read_marks(run_dir)
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
    return summarise(
        _run_id(run_dir, cycles),
        chosen,
        marks,
        cycles,
        now_ns,
        whole_history=all_attempts,
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


def _table(title: str, *columns: str) -> Table:
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
    table = _table("phases", "phase", "seconds", "share")
    for name in PHASES:
        seconds = goodput.phases.get(name)
        if seconds or wide or name == "productive":
            shown = "unknown" if seconds is None else f"{seconds:.3f}"
            table.add_row(name, shown, format_share(seconds, goodput.wall_s))
    table.add_row("wall", f"{goodput.wall_s:.3f}", format_share(goodput.wall_s, goodput.wall_s), style="bold")
    return table


def _cause_table(goodput: Goodput) -> Table:
    from rich.text import Text

    table = _table("lost, by cause", "cause", "seconds", "share")
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
    table = _table("cycles (seconds from fault to training)", "cycle", *names, "total", "restored", "ended")
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
