"""`keepstep scan PATH...`: log lines -> events; with --follow the kernel's log, as it is written."""

from __future__ import annotations

import collections
import fnmatch
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from keepstep.cli.catalog_flags import catalog_option, chosen_catalog
from keepstep.cli.output import NotFoundError, emit, note, output_option
from keepstep.cli.reading_flags import jobs_of, jobs_option, live_answers, live_option
from keepstep.cli.runs import Column, clock, moment_ns, print_table
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.event import Event, Severity, event_fields
from keepstep.records.exits import EXIT_OK, EXIT_PROBLEM

if TYPE_CHECKING:
    from keepstep.catalog.load import Catalog
    from keepstep.sources.reading import Reading

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
PROBLEMS = frozenset(("error", "fatal"))
TABLE_LIMIT = 500
"""Events in a table when no --limit is given."""
TEXT_WIDTH = 100
"""Characters of a line in a table; `wide` and JSON have more."""
SKIPPED_SHOWN = 5


def _device(record: dict[str, Any]) -> str | None:
    gpu = record.get("gpu") or {}
    named = gpu.get("pci") or gpu.get("uuid") or (None if gpu.get("index") is None else f"gpu {gpu['index']}")
    return named or record.get("nic")


def _where(record: dict[str, Any]) -> str:
    evidence = record.get("evidence", {})
    return f"{evidence.get('path', '')}:{evidence.get('line', 0)}"


COLUMNS = (
    Column("TIME", lambda r: clock(r.get("time"))),
    Column("SEVERITY", lambda r: r["severity"]),
    Column("NODE", lambda r: r.get("node")),
    Column("RANK", lambda r: r.get("rank"), right=True),
    Column("DEVICE", _device),
    Column("SIGNATURE", lambda r: r["signature"]),
    Column("COUNT", lambda r: r.get("count", 1), right=True),
    Column("STALE", lambda r: r.get("stale")),
    Column("WHERE", _where, wide=True),
    Column("LINE", lambda r: str(r.get("evidence", {}).get("text", ""))[:TEXT_WIDTH]),
)


class Wanted(NamedTuple):
    """Which events are shown."""

    since_ns: int | None
    until_ns: int | None
    least: int
    nodes: tuple[str, ...]
    signatures: tuple[str, ...]

    def takes(self, event: Event) -> bool:
        """Whether an event is one of them. One without a time is in every window."""
        end = event.last_ns or event.time_ns
        return (
            SEVERITIES.index(event.severity) >= self.least
            and (not self.nodes or (event.node is not None and any(fnmatch.fnmatch(event.node, n) for n in self.nodes)))
            and (not self.signatures or any(fnmatch.fnmatch(event.signature, s) for s in self.signatures))
            and (self.since_ns is None or end is None or end >= self.since_ns)
            and (self.until_ns is None or event.time_ns is None or event.time_ns <= self.until_ns)
        )


@click.command(
    epilog="Exit codes: 3 events of severity error or fatal were found; 0 none; 6 no such path. "
    "With --follow: until interrupted."
)
@click.argument("paths", nargs=-1)
@click.option("-f", "--follow", is_flag=True, help="Follow PATH: /dev/kmsg (default), a FIFO, `journal` or `dmesg`.")
@click.option("--cursor-file", type=click.Path(path_type=Path), help="Go on where the last --follow with it ended.")
@click.option("--since", metavar="TIME", help="Without older events: 30m, 2h, 1d before now, or an RFC 3339 time.")
@click.option("--until", metavar="TIME", help="Without later events.")
@click.option("--severity", type=click.Choice(SEVERITIES), default="info", help="At least this severe.")
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Only of this node; may be repeated, * works.")
@click.option("--signature", "signatures", multiple=True, metavar="ID", help="Only with this signature: xid.79, xid.*")
@live_option
@jobs_option
@catalog_option
@click.option("--limit", type=click.IntRange(min=0), help="Only the first N; 0 is all. A table has 500 by default.")
@output_option
def scan(
    paths: tuple[str, ...],
    follow: bool,
    cursor_file: Path | None,
    since: str | None,
    until: str | None,
    severity: Severity,
    nodes: tuple[str, ...],
    signatures: tuple[str, ...],
    live: tuple[str, ...],
    jobs: int | None,
    catalog_files: tuple[Path, ...],
    limit: int | None,
    output: str,
) -> None:
    """Find what the catalog knows in logs: files, folders, "-" for standard input, gzip and zstd as they are.

    Lines that say the same are one event with a count.
    """
    now_ns = time.time_ns()
    wanted = Wanted(
        since_ns=None if since is None else moment_ns(since, now_ns, "--since"),
        until_ns=None if until is None else moment_ns(until, now_ns, "--until"),
        least=SEVERITIES.index(severity),
        nodes=nodes,
        signatures=signatures,
    )
    if follow:
        if live:
            raise ConfigError("--live asks once; --follow goes on: give one of them")
        _follow(paths, cursor_file, wanted, chosen_catalog(catalog_files))
        return
    if cursor_file is not None:
        raise ConfigError("--cursor-file goes with --follow: files are read from their begin")
    _show(_read(paths, live, chosen_catalog(catalog_files), jobs_of(jobs)), wanted, limit, output)


def _read(paths: Sequence[str], live: Sequence[str], catalog: Catalog, jobs: int) -> Reading:
    from keepstep.sources.reading import read_paths

    if not paths and not live:
        raise ConfigError('give PATH..., "-" for standard input, --live SOURCE, or --follow for the kernel\'s log')
    missing = [p for p in paths if p != "-" and not Path(p).exists()]
    if missing:
        raise NotFoundError(f"no such file or folder: {', '.join(missing)}")
    return read_paths(paths, catalog, deep=False, answers=live_answers(live, catalog), jobs=jobs)


def _show(reading: Reading, wanted: Wanted, limit: int | None, output: str) -> None:
    """Print the events that are wanted, and leave with the exit code that they ask for."""
    _say(reading)
    if not reading.used and not reading.dumps:
        raise KeepstepError(f"nothing could be read: {'; '.join(reading.unreadable) or 'no files there'}")
    events = sorted((e for e in reading.events if wanted.takes(e)), key=_order)
    shown = events[: _limit(limit, output)] if _limit(limit, output) else events
    emit(
        [event_fields(e) for e in shown],
        output,
        table=lambda console, wide: print_table(console, COLUMNS, [event_fields(e) for e in shown], wide=wide),
        name=lambda fields: str(fields["id"]),
    )
    if len(shown) < len(events):
        note(f"{len(shown)} of {len(events)} events shown; --limit 0 shows all, --severity error fewer")
    raise SystemExit(EXIT_PROBLEM if any(e.severity in PROBLEMS for e in events) else EXIT_OK)


def _limit(limit: int | None, output: str) -> int:
    if limit is not None:
        return limit
    return TABLE_LIMIT if output in ("table", "wide") else 0


def _order(event: Event) -> tuple[bool, int, str, int]:
    """By time where there is one; events without times after those, as they stand in their files."""
    return (event.time_ns is None, event.time_ns or 0, event.evidence.path, event.order)


def _say(reading: Reading) -> None:
    """On stderr: what was left out or could not be read, and clocks that differ."""
    for text in reading.unreadable[:SKIPPED_SHOWN]:
        note(f"not read: {text}")
    if len(reading.unreadable) > SKIPPED_SHOWN:
        note(f"not read: {len(reading.unreadable) - SKIPPED_SHOWN} more files")
    for why, count in collections.Counter(s.why for s in reading.skipped).most_common(SKIPPED_SHOWN):
        first = next(s.path for s in reading.skipped if s.why == why)
        note(f"left out: {first}{f' and {count - 1} more' if count > 1 else ''} ({why})")
    if reading.dumps:
        note(f"{len(reading.dumps)} flight-recorder dumps; `keepstep hang {Path(reading.dumps[0]).parent}` reads them")
    for skew in reading.skew:
        note(
            f"the clock of {skew.node} seems {skew.seconds:+.1f} s off that of {skew.reference} ({skew.pairs} shared moments)"
        )


# ---- live


def _follow(paths: Sequence[str], cursor_file: Path | None, wanted: Wanted, catalog: Catalog) -> None:
    """Print events one JSON object a line, as they happen; save the position after each batch was printed."""
    from keepstep.catalog.matcher import Matcher
    from keepstep.records.codec import to_json
    from keepstep.sources.kernel.cursor import load_position, save_position
    from keepstep.sources.kernel.feeds import default_source, open_feed
    from keepstep.sources.kernel.follow import follow

    if len(paths) > 1:
        raise ConfigError(f"--follow takes one source: /dev/kmsg, a FIFO, journal or dmesg; got {', '.join(paths)}")
    source = paths[0] if paths else default_source()
    position = load_position(cursor_file) if cursor_file is not None else None
    batches = follow(lambda at: open_feed(source, at), Matcher(catalog), catalog, position)
    note(f"following {source}; interrupt to stop")
    for batch in batches:
        for line in _lines(batch.events, wanted, to_json):
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if cursor_file is not None and batch.position is not None:
            save_position(cursor_file, batch.position)


def _lines(events: Sequence[Event], wanted: Wanted, encode: Any) -> Iterator[bytes]:
    for event in events:
        if wanted.takes(event):
            yield encode(event_fields(event)) + b"\n"
