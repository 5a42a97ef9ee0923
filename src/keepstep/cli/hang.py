"""`keepstep hang PATH...`: flight-recorder dumps -> the ranks that a hang waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from keepstep.attribution.hang import find_culprits
from keepstep.cli.output import NotFoundError, emit, make_console, note, output_option
from keepstep.launcher.files import keepstep_home
from keepstep.records.codec import from_json
from keepstep.records.cycle import Cycle, RankPlace
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.exits import EXIT_PROBLEM
from keepstep.records.hang import Hang
from keepstep.sources.flightrecorder.files import Found, find_dumps
from keepstep.sources.flightrecorder.reading import read_snapshot

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 20
"""Culprits drawn without -o wide."""
HEADLINES = {
    "absent_rank": "others wait for ranks that have not come to a collective",
    "desync": "ranks have lost step with each other",
    "mismatch": "ranks called one collective in different ways",
    "slow_rank": "ranks have not done what others have",
    "no_fault": "nobody lags",
}


@click.command("hang")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--cycle-record", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="keepstep.cycle/1 of the hang, for the nodes of ranks; in a run folder it is found.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that read [default: one for each core].")
@output_option
@click.pass_context
def hang(ctx: click.Context, paths: tuple[str, ...], cycle_record: Path | None, jobs: int | None, output: str) -> None:
    """Name the ranks that a hang waits for, from dumps of torch's flight recorder.

    PATH is a folder of dumps, one a rank, a single dump, a run folder or the id of a run (its newest cycle with dumps), or - for
    one dump on standard input. Dumps are pickles or JSON, as torch writes them, plain or compressed with gzip or zstd; they are
    parsed as data. The name of a file tells its rank, else the process groups in it. JSON is `keepstep.hang/1`.

    Exit 3: there are culprits. 0: nobody lags. 6: no dumps. 1: there are dumps, but none could be read.
    """
    found = find_dumps([_existing(path) for path in paths])
    if not found.sources:
        raise NotFoundError("; ".join(found.notes) or "no dumps")
    record = cycle_record or found.cycle_record
    places = _places(record) if record is not None else {}
    with _progress(found) as advance:
        snapshot = read_snapshot(found.sources, jobs=jobs or 0, expected=frozenset(places), progress=advance)
    if not snapshot.ranks:
        reasons = snapshot.unreadable or ["nothing that was found is a dump"]
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise KeepstepError(f"none of {len(found.sources)} dumps could be read: {reasons[0]}{more}")
    snapshot.notes.extend(found.notes)
    result = find_culprits(snapshot, places)
    emit(result, output, table=lambda console, wide: render(result, console, wide=wide), name=_names)
    if result.culprits:
        ctx.exit(EXIT_PROBLEM)


def _existing(path: str) -> str:
    """The path of a run that is given by its id; anything else stays as it is."""
    run = keepstep_home() / "runs" / path
    is_id = path != "-" and len(Path(path).parts) == 1 and not Path(path).exists() and run.is_dir()
    return str(run) if is_id else path


def _places(path: Path) -> dict[int, RankPlace]:
    """Where the ranks of a cycle ran. Raises ConfigError when the file is no cycle record."""
    try:
        cycle = from_json(path.read_bytes(), Cycle)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a cycle record (keepstep.cycle/1): {error}") from None
    return {place.rank: place for place in cycle.ranks}


@contextmanager
def _progress(found: Found) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal while dumps are read; nothing elsewhere."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda _count: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("reading dumps", total=len(found.sources))
        yield lambda count: bar.advance(task, count)


def _names(result: Hang) -> str:
    return "\n".join(f"rank/{culprit.rank}" for culprit in result.culprits) or result.kind


def render(result: Hang, console: Console, *, wide: bool = False) -> None:
    """Draw the answer: the kind, one row a culprit, why it is one, and what limits the answer."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"{result.kind}: {HEADLINES[result.kind]}", style="bold"))
    shown = result.culprits if wide else result.culprits[:SHOWN]
    if shown:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for title in ("rank", "node", "process group", "collective", "sequence"):
            table.add_column(title, overflow="fold")
        for c in shown:
            cells = (str(c.rank), c.node, c.process_group, c.collective, "" if c.sequence is None else str(c.sequence))
            table.add_row(*(Text(cell or "-") for cell in cells))
        console.print(table)
        for c in shown:
            console.print(Text(f"rank {c.rank}: {c.why}"))
    if len(shown) < len(result.culprits):
        note(f"showing {len(shown)} of {len(result.culprits)} culprits; -o wide shows all")
    missing = ", ".join(map(str, result.ranks_missing[: None if wide else SHOWN]))
    more = "" if wide or len(result.ranks_missing) <= SHOWN else ", ..."
    console.print(
        Text(
            f"ranks seen: {len(result.ranks_seen)}"
            + (f"; no dump, or an empty one, of {missing}{more}" if missing else "")
        )
    )
    for line in result.notes:
        console.print(Text(f"note: {line}", style="dim"))
