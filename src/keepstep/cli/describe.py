"""`keepstep describe KIND NAME [RUN]`: everything a run folder knows about one thing."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from keepstep.cli.events import COLUMNS as EVENT_COLUMNS
from keepstep.cli.get import find_cycle, kind_named
from keepstep.cli.goodput import find_run
from keepstep.cli.output import NotFoundError, emit, format_duration_s, output_option
from keepstep.cli.runs import RUN_HELP, cell, harmless, print_table, ranges, resolve_run
from keepstep.launcher.views.events import Event, EventReader
from keepstep.launcher.views.runstate import RunState, node_views, take
from keepstep.launcher.views.tailing import JournalTail
from keepstep.launcher.views.view import job_view, leader, read_object, run_id_of
from keepstep.records.cycle import Cycle, RankPlace
from keepstep.records.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Record = dict[str, Any]
MAX_EVENTS = 20
KINDS = ("jobs", "cycles", "nodes", "ranks")
NO_STEPS = "step.completed"


@click.command("describe", epilog=RUN_HELP)
@click.argument("kind", metavar="KIND")
@click.argument("name", metavar="[NAME]", required=False)
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--cycle", type=click.IntRange(min=0), help="For a rank: in this cycle; the default is the newest.")
@output_option
def describe(kind: str, name: str | None, run: str | None, cycle: int | None, output: str) -> None:
    """Show everything about one job, cycle, node or rank: `describe rank 3`, `describe cycle 2 RUN`, `describe job RUN`.

    The name of a cycle or rank is its number; without a name the newest cycle is meant.
    """
    kind = kind_named(kind)
    if kind not in KINDS:
        raise ConfigError(f"describe {kind}: it describes job, cycle, node or rank; see `keepstep get {kind} -o wide`")
    if cycle is not None and kind != "ranks":
        raise ConfigError(f"--cycle {cycle} is for describe rank")
    if kind == "jobs":
        if run is not None:
            raise ConfigError(f"describe job {name} {run}: one run only")
        run_dir = resolve_run(name)
        record = describe_job(run_dir)
    else:
        if name is None and kind != "cycles":
            raise ConfigError(f"describe {kind[:-1]} needs a name; `keepstep get {kind}` lists them")
        if kind == "cycles" and run is None and name not in (None, "current") and not str(name).isdigit():
            name, run = None, name  # `describe cycle RUN`
        run_dir = find_run(run) if run is not None else resolve_run(None)
        if kind == "nodes":
            record = describe_node(run_dir, str(name))
        elif kind == "cycles":
            record = describe_cycle(run_dir, None if name in (None, "current") else _number(kind, str(name)))
        else:
            record = describe_rank(run_dir, _number(kind, str(name)), cycle)
    emit(record, output, table=lambda console, _: render(record, console), name=lambda r: str(r["name"]))


def _number(kind: str, name: str) -> int:
    if not name.isdigit():
        raise ConfigError(f"describe {kind[:-1]} {name!r}: give its number; `keepstep get {kind}` lists them")
    return int(name)


def read_run(run_dir: Path) -> tuple[RunState, list[Event]]:
    """State and events of a run, from one reading of its journal."""
    records = JournalTail(run_dir).poll()
    state = RunState()
    for epoch, record in records:
        take(state, epoch, record)
    return state, list(EventReader(run_id_of(run_dir)).read(records))


def describe_job(run_dir: Path) -> Record:
    """A run: its state, where it came from, nodes, checkpoints, last events."""
    state, events = read_run(run_dir)
    job = job_view(run_dir, time.time_ns(), state)
    config = read_object(run_dir / "run.json")
    origins = config.get("origins") or {}
    given = {k: config.get(k, origins[k]) for k in sorted(origins) if origins[k] != "default"}
    commits = [c for c in state.checkpoints if c.state == "committed"]
    return {
        "schema": "keepstep.description/1",
        "kind": "job",
        "name": job.run_id,
        "job": msgspec.to_builtins(job),
        "launcher": leader(run_dir),
        "flags given": given,
        "nodes": [msgspec.to_builtins(n) for n in node_views(state)],
        "newest checkpoint": msgspec.to_builtins(commits[-1]) if commits else None,
        "checkpoints": {
            s: sum(c.state == s for c in state.checkpoints) for s in ("committed", "rolled_back", "quarantined")
        },
        "last faults": state.faults[-3:],
        "files": _files(
            run_dir, "run.json", "verdict.json", "summary.json", "logs/launcher.log", "journal", "cycles/current"
        ),
        "events": _newest(events),
    }


def describe_cycle(run_dir: Path, number: int | None) -> Record:
    """A cycle: its record, the fault, the cost, its ranks and files."""
    cycle = find_cycle(run_dir, number)
    _, events = read_run(run_dir)
    plain = msgspec.to_builtins(cycle)
    failed = [p for p in cycle.ranks if p.exit not in (None, "exit 0")]
    return {
        "schema": "keepstep.description/1",
        "kind": "cycle",
        "name": str(cycle.cycle),
        "cycle": {k: v for k, v in plain.items() if k not in ("ranks", "phases", "fault", "scatter")},
        "fault": cycle.fault,
        "seconds": plain["phases"],
        "scatter": cycle.scatter,
        "ranks": {"total": len(cycle.ranks), "by node": _by_node(cycle.ranks)},
        "failed ranks": [msgspec.to_builtins(p) for p in failed],
        "evidence": _evidence(run_dir, cycle.cycle),
        "files": _files(run_dir, f"cycles/cycle-{cycle.cycle:04d}.json", f"logs/cycle-{cycle.cycle:04d}.log"),
        "events": _newest([e for e in events if e.cycle == cycle.cycle and e.attempt == cycle.attempt]),
    }


def describe_node(run_dir: Path, name: str) -> Record:
    """A node: its role, its ranks, how often it came and went."""
    state, events = read_run(run_dir)
    node = next((n for n in node_views(state) if n.node == name), None)
    if node is None:
        near = difflib.get_close_matches(name, state.nodes, cutoff=0.4) or list(state.nodes)[:8]
        raise NotFoundError(f"run {run_id_of(run_dir)} has no node {name!r}; it has {', '.join(near) or 'none'}")
    return {
        "schema": "keepstep.description/1",
        "kind": "node",
        "name": name,
        "node": msgspec.to_builtins(node),
        "processes": {f"rank {rank}": f"pid {state.pids[rank]}" for rank in node.ranks if rank in state.pids},
        "faults": [f for f in state.faults if f.get("node") == name],
        "files": _files(run_dir, f"nodes/{name}"),
        "events": _newest([e for e in events if e.node == name]),
    }


def describe_rank(run_dir: Path, rank: int, number: int | None) -> Record:
    """A rank in a cycle: where it ran, how far it came, how it ended, and what was found when it was stopped."""
    cycle = find_cycle(run_dir, number)
    place = next((p for p in cycle.ranks if p.rank == rank), None)
    if place is None:
        there = ranges([p.rank for p in cycle.ranks]) or "none"
        raise NotFoundError(f"cycle {cycle.cycle} of run {cycle.run_id} has no rank {rank}; it has {there}")
    records = JournalTail(run_dir).poll()
    events = list(EventReader(run_id_of(run_dir)).read(records))
    evidence = _evidence(run_dir, cycle.cycle, rank)
    log = run_dir / "logs" / f"cycle-{cycle.cycle:04d}.log"
    fault = cycle.fault if cycle.fault is not None and cycle.fault.get("rank") == rank else None
    return {
        "schema": "keepstep.description/1",
        "kind": "rank",
        "name": str(rank),
        "rank": {**msgspec.to_builtins(place), "cycle": cycle.cycle, "attempt": cycle.attempt},
        "progress": _progress(records, evidence, cycle, rank),
        "fault": fault,
        "evidence": evidence,
        "files": {"log": str(log), "its lines": f"keepstep logs {run_dir} --cycle {cycle.cycle} --rank {rank}"},
        "events": _newest([e for e in events if e.rank == rank and e.cycle == cycle.cycle]),
    }


def _progress(records: list[tuple[int, Record]], evidence: list[str], cycle: Cycle, rank: int) -> Record:
    """How far a rank came: what its agent said when it stopped, and the progress page as it was found."""
    found: Record = {}
    at: int | None = None
    for _, record in records:
        kind = record.get("type")
        if kind == "cycle":
            at = record.get("cycle")
        elif at == cycle.cycle and kind == "stopped":
            stopped = record.get("stopped") or {}
            if str(rank) in (stopped.get("statuses") or {}):
                found["completed steps"] = (stopped.get("completed") or {}).get(str(rank))
                found["failure"] = next((f for f in stopped.get("failures") or [] if f.get("rank") == rank), None)
        elif at == cycle.cycle and kind == "mark" and (record.get("mark") or {}).get("kind") in ("step", "first_step"):
            found["steps completed by all ranks"] = (record["mark"].get("attrs") or {}).get("step")
    for path in evidence:
        if path.endswith(".json"):
            seen = read_object(Path(path))
            page = seen.get("page") or {}
            found["found"] = {
                "state": seen.get("state"),
                "waits for other ranks": seen.get("in_collective"),
                "phase": page.get("phase"),
                "completed steps": page.get("completed"),
                "open sections": [s[0] for s in page.get("sections") or []],
            }
    return {k: v for k, v in found.items() if v is not None}


def _evidence(run_dir: Path, cycle: int, rank: int | None = None) -> list[str]:
    """Evidence files of a cycle, or of one rank in it."""
    pattern = "*" if rank is None else f"rank-{rank:05d}*"
    folder = run_dir / "evidence" / f"cycle-{cycle:04d}"
    return sorted(str(p) for p in folder.rglob(pattern) if p.is_file())


def _files(run_dir: Path, *names: str) -> Record:
    return {name: str(run_dir / name) for name in names if (run_dir / name).exists()}


def _by_node(places: list[RankPlace]) -> Record:
    nodes: dict[str, list[int]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place.rank)
    return {node: ranges(ranks) for node, ranks in nodes.items()}


def _newest(events: list[Event]) -> list[Record]:
    return [msgspec.to_builtins(e) for e in events if e.kind != NO_STEPS][-MAX_EVENTS:]


# ---- for people


def render(record: Mapping[str, Any], console: Console) -> None:
    """Sections with a line a field; what is not there is left out."""
    console.print(f"{record['kind']} {harmless(str(record['name']))}", markup=False, style="bold")
    for title, value in record.items():
        if title in ("schema", "kind", "name") or value in (None, {}, [], ""):
            continue
        console.print(f"\n{title.capitalize()}", markup=False, style="bold")
        if title == "events":
            print_table(console, EVENT_COLUMNS, value, wide=False)
        else:
            for line in _lines(value):
                console.print(f"  {line}", markup=False, soft_wrap=True)


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        lines: list[str] = []
        shown = {
            k.removesuffix("_s"): _shown(k, v)
            for k, v in value.items()
            if k != "schema" and v not in (None, "", [], {})
        }
        width = max(map(len, shown), default=0) + 2
        for key, item in shown.items():
            if isinstance(item, dict):
                lines += [f"{key.replace('_', ' ')}:", *(f"  {line}" for line in _lines(item))]
            else:
                first, *more = harmless(str(item)).splitlines() or [""]
                lines.append(f"{key.replace('_', ' ') + ':':<{width}}{first}")
                lines += [" " * width + line for line in more]
        return lines
    if isinstance(value, list):
        return [_one_line(item) for item in value]
    return [harmless(str(value))]


def _shown(key: str, value: Any) -> Any:
    if key.endswith("_s") and isinstance(value, int | float):
        return format_duration_s(value)
    if isinstance(value, list):
        return ", ".join(_one_line(v) for v in value)
    return value


def _empty(value: Any) -> bool:
    return value in (None, "", [], {})


def _one_line(item: Any) -> str:
    if isinstance(item, dict):
        return " · ".join(
            f"{k} {cell(v)}" for k, v in item.items() if k != "schema" and not _empty(v) and k[-3:] != "_ns"
        )
    return cell(item)
