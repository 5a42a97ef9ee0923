"""`keepstep top [RUN]`: one screen about a run, while it runs."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from keepstep.cli.events import COLUMNS as EVENT_COLUMNS
from keepstep.cli.get import COLUMNS as GET_COLUMNS
from keepstep.cli.output import emit, format_duration_s, output_option
from keepstep.cli.runs import RUN_HELP, Column, cell, harmless, resolve_run, run_argument
from keepstep.goodput import partition
from keepstep.launcher.views.events import Event, EventReader
from keepstep.launcher.views.runstate import RunState, node_views, steps_per_s, take
from keepstep.launcher.views.tailing import JournalTail
from keepstep.launcher.views.view import JobView, job_view, run_id_of
from keepstep.records.timeline import Mark

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MAX_EVENTS = 8
MAX_NODES = 8
ACCOUNT_SHARE = 0.1
"""Largest share of this program's time that goes into accounting a long history."""
STALE_S = 10.0
"""A speed measured from samples that end longer ago than this is shown as the last known one."""


class Watch:
    """What `top` knows of a run, kept up to date from the journal's growth."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.state = RunState()
        self.events: collections.deque[Event] = collections.deque(maxlen=MAX_EVENTS)
        self.ettr: float | None = None
        self._marks: list[Mark] = []
        self._tail = JournalTail(run_dir)
        self._reader = EventReader(run_id_of(run_dir))
        self._account_at = 0.0

    def update(self) -> None:
        """Read what is new; the account is made again when that is affordable."""
        records = self._tail.poll()
        for epoch, record in records:
            take(self.state, epoch, record)
            if record.get("type") == "mark":
                with contextlib.suppress(msgspec.ValidationError):
                    self._marks.append(msgspec.convert(record.get("mark"), Mark))
        self.events += (e for e in self._reader.read(records) if e.kind != "step.completed")
        begin = time.monotonic()
        if self._marks and begin >= self._account_at:
            ended = self.state.outcome is not None
            self.ettr = partition(
                self._marks, now_ns=None if ended else time.time_ns(), attempt=self.state.attempt
            ).ettr
            self._account_at = time.monotonic() + (time.monotonic() - begin) / ACCOUNT_SHARE

    def snapshot(self) -> dict[str, Any]:
        """`keepstep.top/1`."""
        job = job_view(self.run_dir, time.time_ns(), self.state)
        return {
            "schema": "keepstep.top/1",
            "job": msgspec.to_builtins(job),
            "steps_per_s": steps_per_s(self.state),
            "ettr": self.ettr,
            "nodes": [msgspec.to_builtins(node) for node in node_views(self.state)],
            "events": [msgspec.to_builtins(event) for event in self.events],
        }


@click.command("top", epilog=RUN_HELP)
@run_argument
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--once", is_flag=True, help="One look, also on a terminal.")
@output_option
def top(run: str | None, interval: float, once: bool, output: str) -> None:
    """Watch a run: step and speed, ETTR of this attempt, nodes, phase, last events. q or Ctrl-C leaves.

    Without a terminal it is one look; JSON is keepstep.top/1.
    """
    watch = Watch(resolve_run(run))
    watch.update()
    if output == "table" and not once and sys.stdout.isatty() and sys.stdin.isatty():
        _live(watch, interval)
        return
    emit(
        watch.snapshot(),
        output,
        table=lambda console, wide: _print(watch, console, wide),
        name=lambda r: str(r["job"]["run_id"]),
    )


def _live(watch: Watch, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with (
        _keys() as wait_key,
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            watch.update()
            live.update(screen(watch, console.width, console.height, wide=False), refresh=True)
            if wait_key(interval_s) in ("q", "Q"):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Single keys from the terminal, without echo; the terminal is put back as it was. Gives wait(seconds) -> key or ""."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], seconds)
        return os.read(fd, 1).decode("latin-1") if ready else ""

    tty.setcbreak(fd)
    try:
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _print(watch: Watch, console: Console, wide: bool) -> None:
    console.print(screen(watch, console.width, 1000, wide=wide))


def screen(watch: Watch, width: int, height: int, *, wide: bool) -> RenderableType:
    """What is drawn: headline, progress, nodes, and as many of the last events as `height` lines leave room for."""
    from rich.console import Group
    from rich.text import Text

    job = job_view(watch.run_dir, time.time_ns(), watch.state)
    nodes = [msgspec.to_builtins(n) for n in node_views(watch.state)]
    shown = nodes if wide else _notable(nodes)
    lines = [Text(text) for text in headline(watch, job)]
    parts: list[RenderableType] = [*lines, Text(""), _grid(GET_COLUMNS["nodes"][:7], shown, width)]
    if len(shown) < len(nodes):
        parts.append(Text(f"and {len(nodes) - len(shown)} more nodes", style="dim"))
    room = max(1, height - len(lines) - len(shown) - 6)
    events = [msgspec.to_builtins(e) for e in watch.events][-room:]
    return Group(*parts, Text(""), _grid(EVENT_COLUMNS, events, width))


def headline(watch: Watch, job: JobView) -> list[str]:
    """The first lines: who, how it is, how far."""
    state = watch.state
    speed = steps_per_s(state)
    since_s = (time.time_ns() - state.samples[-1][0]) / 1e9 if state.samples else None
    pace = "-" if speed is None else f"{speed:.3g} steps/s"
    if since_s is not None and since_s > STALE_S and job.state == "running":
        pace += f" (last step seen {format_duration_s(since_s)} ago)"
    roles = collections.Counter(n.role for n in state.nodes.values())
    nodes = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    ettr = "unknown" if watch.ettr is None else f"{watch.ettr:.3f}"
    ran_ns = (time.time_ns() if job.state == "running" else state.ended_ns or state.now_ns) - state.first_ns
    ran = f"{'up' if job.state == 'running' else 'ran'} {format_duration_s(ran_ns / 1e9)}"
    doing = f"{job.state}, {job.phase}" if job.phase else job.state
    cause = f" · {job.cause}" if job.cause and job.state != "running" else ""
    return [
        harmless(f"run {job.run_id} · {doing}{cause} · attempt {cell(job.attempt)}, cycle {cell(job.cycle)}"),
        f"step {cell(job.step)} · {pace} · committed {cell(job.committed_step)} · ETTR {ettr} · {ran}",
        f"nodes: {nodes} · ranks: {cell(job.ranks)} · restarts: {cell(job.restarts)} ({cell(job.restarts_counted)} counted)",
    ]


def _notable(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nodes that fit on the screen: those with a problem first."""
    order = {"lost": 0, "excluded": 1, "spare": 2, "waiting": 3}
    return sorted(nodes, key=lambda n: order.get(n["role"], 4))[:MAX_NODES]


def _grid(columns: Sequence[Column], records: list[dict[str, Any]], width: int) -> RenderableType:
    """A table that fits: the last column, which says most, is cut at the edge."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    chosen = [c for c in columns if not c.wide]
    lines = [[cell(column.value(record)) for column in chosen] for record in records]
    others = zip(*([c.title for c in chosen[:-1]], *(line[:-1] for line in lines)), strict=True)
    used = sum(max(map(len, texts)) + 2 for texts in others)
    for column in chosen:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for line in lines:
        last = Text(line[-1])
        last.truncate(max(1, width - used - 2), overflow="ellipsis")
        table.add_row(*map(Text, line[:-1]), last)
    return table
