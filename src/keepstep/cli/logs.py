"""`keepstep logs [RUN]`: output of ranks, from the log file of a cycle."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import click

from keepstep.cli.get import find_cycle
from keepstep.cli.output import NotFoundError, note
from keepstep.cli.runs import RUN_HELP, harmless, resolve_run, run_argument
from keepstep.launcher.views.view import is_led
from keepstep.records.errors import ConfigError

POLL_S = 0.2
BLOCK_BYTES = 1 << 16
MAX_LINE_BYTES = (1 << 20) + 64
"""Longest piece held in memory; the launcher itself cuts a rank's line at 1 MiB."""
_RANK = re.compile(rb"\[rank (\d+)\] ")

Wanted = Callable[[bytes], bool]


@click.command("logs", epilog=RUN_HELP)
@run_argument
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank; may be repeated.")
@click.option("--node", help="Only ranks of this node.")
@click.option("--cycle", type=click.IntRange(min=0), help="Of this cycle; the default is the newest.")
@click.option("-p", "--previous", is_flag=True, help="Of the cycle before the newest.")
@click.option("--tail", "tail", type=click.IntRange(min=0), help="Only the last N lines (of those that are wanted).")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, also in later cycles, until the run ends.")
@click.option("--launcher", is_flag=True, help="What the launcher and the coordinator said, instead of the ranks.")
@click.option("--grep", metavar="RE", help="Only lines in which this regular expression is found.")
def logs(
    run: str | None,
    ranks: tuple[int, ...],
    node: str | None,
    cycle: int | None,
    previous: bool,
    tail: int | None,
    follow: bool,
    launcher: bool,
    grep: str | None,
) -> None:
    """Print the output of the ranks of a cycle; each line begins with [rank N].

    Bytes are passed on as the ranks wrote them, except on a terminal: there control characters are shown, not obeyed.
    """
    if previous and cycle is not None:
        raise ConfigError(f"--previous and --cycle {cycle} contradict each other; give one of them")
    if launcher and (ranks or node or previous or cycle is not None):
        raise ConfigError("--launcher is one log for the whole run; leave out --rank, --node, --cycle and --previous")
    run_dir = resolve_run(run)
    path = run_dir / "logs" / "launcher.log" if launcher else find_log(run_dir, cycle, previous=previous)
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist (yet)")
    wanted = line_filter(run_dir, path, ranks, node, grep)
    pinned = launcher or previous or cycle is not None
    while True:
        with path.open("rb") as file:
            if tail is not None:
                file.seek(tail_offset(file, tail, wanted))
            over: Callable[[], bool] | None = None
            if follow:
                over = _log_is_over(run_dir, path, pinned=pinned)
            for piece in read_lines(file, wanted, over):
                _write(piece)
        later = None if pinned or not follow else _later_log(run_dir, path)
        if later is None:
            return
        path, tail = later, None
        note(f"going on with {path.name}")
        wanted = line_filter(run_dir, path, ranks, node, grep)


def find_log(run_dir: Path, cycle: int | None, *, previous: bool = False) -> Path:
    """Log file of a cycle; the newest, or with `previous` the one before. Raises NotFoundError naming those there are."""
    known = _cycle_logs(run_dir)
    folder = run_dir / "logs"
    if cycle is not None:
        if cycle not in known:
            there = ", ".join(map(str, list(known)[-8:])) or "none"
            raise NotFoundError(f"{folder} holds no log of cycle {cycle}; cycles with one (the newest 8): {there}")
        return known[cycle]
    order = list(known.values())
    if len(order) <= int(previous):
        what = "no cycle before the newest" if order else "no log of a cycle yet"
        raise NotFoundError(f"{folder} holds {what}; --launcher shows what the launcher said")
    return order[-2 if previous else -1]


def _cycle_logs(run_dir: Path) -> dict[int, Path]:
    """Log files by cycle, oldest first."""
    found = {}
    for path in (run_dir / "logs").glob("cycle-*.log"):
        number = path.stem.removeprefix("cycle-")
        if number.isdigit():
            found[int(number)] = path
    return dict(sorted(found.items()))


def _later_log(run_dir: Path, path: Path) -> Path | None:
    mine = int(path.stem.removeprefix("cycle-"))
    return next((p for number, p in _cycle_logs(run_dir).items() if number > mine), None)


def _log_is_over(run_dir: Path, path: Path, *, pinned: bool) -> Callable[[], bool]:
    """Whether nothing more will come in this file: the run has no launcher any more, or a later cycle has its log."""
    return lambda: not is_led(run_dir) or (not pinned and _later_log(run_dir, path) is not None)


def line_filter(run_dir: Path, path: Path, ranks: tuple[int, ...], node: str | None, grep: str | None) -> Wanted:
    """Which lines are wanted. Raises ConfigError for a bad expression, NotFoundError for a node the cycle does not have."""
    chosen: set[int] | None = set(ranks) or None
    if node is not None:
        record = find_cycle(run_dir, int(path.stem.removeprefix("cycle-")))
        own = {place.rank for place in record.ranks if place.node == node}
        if not own:
            nodes = ", ".join(dict.fromkeys(place.node for place in record.ranks))
            raise NotFoundError(f"cycle {record.cycle} has no node {node!r}; it has {nodes or 'none'}")
        chosen = own if chosen is None else own & chosen
    try:
        pattern = re.compile(grep.encode()) if grep is not None else None
    except re.error as error:
        raise ConfigError(f"--grep {grep!r}: {error}") from None

    def wanted(line: bytes) -> bool:
        if chosen is not None:
            match = _RANK.match(line)
            if match is None or int(match[1]) not in chosen:
                return False
        return pattern is None or pattern.search(line) is not None

    return wanted


def tail_offset(file: BinaryIO, count: int, wanted: Wanted) -> int:
    """Where the last `count` wanted lines begin. Reads backwards in blocks; holds one line at most."""
    at = file.seek(0, 2)
    if count == 0:
        return at
    rest = b""  # the beginning of a line whose end has been seen
    last = True
    while at > 0:
        size = min(BLOCK_BYTES, at)
        at -= size
        file.seek(at)
        lines = (file.read(size) + rest).split(b"\n")
        begins_at = at + sum(map(len, lines)) + len(lines) - 1
        for line in reversed(lines[1:]):
            begins_at -= len(line)
            # After the last newline there is no line unless something stands there.
            if (line or not last) and wanted(line):
                count -= 1
                if count == 0:
                    return begins_at
            begins_at -= 1
            last = False
        rest = lines[0] if len(lines[0]) <= MAX_LINE_BYTES else lines[0][:BLOCK_BYTES]
    return 0


def read_lines(file: BinaryIO, wanted: Wanted, over: Callable[[], bool] | None) -> Iterator[bytes]:
    """Wanted lines from here to the end; with `over` also those that come later, until it is true.

    A line longer than MAX_LINE_BYTES comes in pieces. A line whose end has not been written is held back until it is over.
    """
    held, inside, keep = b"", False, False
    while True:
        ending = over is None or over()
        while piece := file.readline(MAX_LINE_BYTES - len(held)):
            held += piece
            whole = held.endswith(b"\n")
            if not whole and len(held) < MAX_LINE_BYTES:
                break  # the end of the file, for now
            keep = keep if inside else wanted(held.rstrip(b"\r\n"))
            if keep:
                yield held
            held, inside = b"", not whole
        if ending:
            break
        time.sleep(POLL_S)
    if held and (keep if inside else wanted(held)):
        yield held + b"\n"


def _write(line: bytes) -> None:
    """One line to standard output: raw bytes for a program, harmless text for a terminal."""
    if sys.stdout.isatty():
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        click.echo(harmless(text))
        return
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
