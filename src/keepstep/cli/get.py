"""`keepstep get KIND [RUN]`: tables of what a run folder knows; `get patterns`: of what the catalog knows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from keepstep.cli.catalog_flags import catalog_option, chosen_catalog
from keepstep.cli.goodput import read_cycles, runs_root
from keepstep.cli.output import NotFoundError, emit, format_duration_s, note, output_option
from keepstep.cli.runs import (
    RUN_HELP,
    Column,
    cell,
    clock,
    parse_selectors,
    print_table,
    ranges,
    resolve_run,
    run_argument,
    select,
)
from keepstep.launcher.views.runstate import node_views, read_state
from keepstep.launcher.views.view import brought_up_to_date, job_view, read_object, run_dirs, run_id_of
from keepstep.records.codec import from_json
from keepstep.records.cycle import Cycle
from keepstep.records.errors import ConfigError
from keepstep.records.label import read_label

Record = dict[str, Any]
SHORT = 60
"""Characters of a message in a table; -o wide shows all."""


def _age(key: str) -> Callable[[Record], str]:
    return lambda r: format_duration_s(r.get(key))


def _short(key: str) -> Callable[[Record], str]:
    def shown(record: Record) -> str:
        text = cell(record.get(key))
        return text if len(text) <= SHORT else text[: SHORT - 1] + "…"

    return shown


def _of(key: str) -> Callable[[Record], Any]:
    return lambda r: r.get(key)


COLUMNS: dict[str, tuple[Column, ...]] = {
    "jobs": (
        Column("RUN", _of("run_id")),
        Column("STATE", _of("state")),
        Column("PHASE", _of("phase"), wide=True),
        Column("ATTEMPT", _of("attempt"), right=True),
        Column("CYCLE", _of("cycle"), right=True),
        Column("STEP", _of("step"), right=True),
        Column("COMMITTED", _of("committed_step"), right=True),
        Column("RESTARTS", _of("restarts"), right=True),
        Column("AGE", _age("age_s"), right=True),
        Column("CAUSE", _of("cause")),
        Column("NODES", _of("nodes"), wide=True, right=True),
        Column("RANKS", _of("ranks"), wide=True, right=True),
        Column("FOLDER", _of("run_dir"), wide=True),
        Column("MESSAGE", _of("message"), wide=True),
    ),
    "cycles": (
        Column("CYCLE", _of("cycle"), right=True),
        Column("ATTEMPT", _of("attempt"), right=True),
        Column("STARTED", lambda r: clock(r["started_at"])),
        Column("ENDED", lambda r: clock(r["ended_at"]) if r["ended_at"] else "running"),
        Column("WHY", _of("end_reason")),
        Column("RANK", lambda r: (r.get("fault") or {}).get("rank"), right=True),
        Column("NODE", lambda r: (r.get("fault") or {}).get("node")),
        Column("RECOVERY", _of("recovery")),
        Column("RESTORED", _of("restored_step"), right=True),
        Column("NODES", lambda r: len(r["active_nodes"]) or None, right=True),
        Column("RANKS", lambda r: len(r["ranks"]) or None, right=True),
        Column("SPARES", lambda r: r["spare_nodes"], wide=True),
        Column("CHECKPOINT", _of("restored_checkpoint"), wide=True),
        Column("DETAIL", lambda r: (r.get("fault") or {}).get("detail"), wide=True),
    ),
    "nodes": (
        Column("NODE", _of("node")),
        Column("ROLE", _of("role")),
        Column("HOST", _of("host")),
        Column("RANKS", lambda r: ranges(r["ranks"])),
        Column("JOINED", _of("joined"), right=True),
        Column("LOST", _of("lost"), right=True),
        Column("REASON", _short("reason")),
        Column("PID", _of("pid"), wide=True, right=True),
        Column("LEVELS", lambda r: "/".join(map(str, r["levels"])), wide=True),
        Column("WHOLE REASON", _of("reason"), wide=True),
    ),
    "ranks": (
        Column("RANK", _of("rank"), right=True),
        Column("LOCAL", _of("local_rank"), right=True),
        Column("NODE", _of("node")),
        Column("HOST", _of("host")),
        Column("PID", _of("pid"), right=True),
        Column("EXIT", lambda r: r["exit"] or ("running" if r["running"] else None)),
        Column("CYCLE", _of("cycle"), wide=True, right=True),
        Column("GPU", _of("gpu_uuid"), wide=True),
        Column("PCI", _of("pci"), wide=True),
    ),
    "checkpoints": (
        Column("STEP", _of("step"), right=True),
        Column("STATE", _of("state")),
        Column("CYCLE", _of("cycle"), right=True),
        Column("ATTEMPT", _of("attempt"), right=True),
        Column("COMMITTED", lambda r: clock(r["committed_at"])),
        Column("PERSIST", _age("persist_s"), right=True),
        Column("TIERS", lambda r: [one["tier"] for one in r["tiers"]]),
        Column("CHECKPOINT", _of("checkpoint")),
        Column("REASON", _of("reason"), wide=True),
    ),
    "incidents": (
        Column("INCIDENT", _of("id")),
        Column("CLASS", _of("class")),
        Column("CONFIDENCE", _of("confidence"), right=True),
        Column("TIER", _of("tier")),
        Column("ACTION", _of("action")),
        Column("CYCLE", _of("cycle"), right=True),
        Column("VERIFIED", _of("verified")),
        Column("SUMMARY", _short("summary")),
        Column("WHOLE SUMMARY", _of("summary"), wide=True),
    ),
    "patterns": (
        Column("ID", _of("id")),
        Column("KIND", _of("kind")),
        Column("ROLE", _of("role")),
        Column("CLASS", _of("class")),
        Column("ACTION", _of("action")),
        Column("PATTERNS", _of("patterns"), right=True),
        Column("STREAM", _of("stream"), wide=True),
        Column("SCOPE", _of("scope"), wide=True),
        Column("DEPTH", _of("depth"), wide=True, right=True),
        Column("WEIGHTS", lambda r: [f"{name} {weight:g}" for name, weight in r["weights"].items()], wide=True),
        Column("SOURCE", _of("source"), wide=True),
    ),
}
COLUMNS["spares"] = COLUMNS["nodes"]
NAMES = {
    "jobs": "run_id",
    "cycles": "cycle",
    "nodes": "node",
    "spares": "node",
    "ranks": "rank",
    "checkpoints": "checkpoint",
    "incidents": "id",
    "patterns": "id",
}
"""Field that names a record."""
ALIASES = {
    **{kind: kind for kind in COLUMNS},
    **{kind.removesuffix("s"): kind for kind in COLUMNS},
    "runs": "jobs",
    "run": "jobs",
    "ckpt": "checkpoints",
    "ckpts": "checkpoints",
}


def kind_named(text: str) -> str:
    """The kind that a word means. Raises ConfigError naming all kinds."""
    kind = ALIASES.get(text.lower())
    if kind is None:
        raise ConfigError(f"no kind {text!r}; there are {', '.join(COLUMNS)}")
    return kind


@click.command("get", epilog=RUN_HELP)
@click.argument("kind", metavar="KIND")
@run_argument
@click.option("--cycle", type=click.IntRange(min=0), help="Only this cycle; for ranks the default is the newest.")
@click.option("-l", "selectors", multiple=True, metavar="KEY=VALUE", help="Only records with that field; also !=.")
@catalog_option
@output_option
def get(
    kind: str,
    run: str | None,
    cycle: int | None,
    selectors: tuple[str, ...],
    catalog_files: tuple[Path, ...],
    output: str,
) -> None:
    """List jobs, cycles, nodes, ranks, checkpoints, spares or incidents; or the patterns of the catalog.

    `get jobs` is about all runs under $KEEPSTEP_HOME/runs, the others about one run. A job whose launcher is gone without a
    verdict is `lost`: the same `keepstep run` goes on with it. JSON records: keepstep.job/1, cycle/1, node/1, rank/1,
    checkpoint/1, pattern/1.
    """
    kind, wanted = kind_named(kind), parse_selectors(selectors)
    if cycle is not None and kind in ("jobs", "nodes", "spares", "patterns"):
        raise ConfigError(f"--cycle {cycle} says nothing about {kind}; leave it out")
    if catalog_files and kind != "patterns":
        raise ConfigError(f"--catalog says nothing about {kind}; leave it out")
    if kind == "patterns":
        records = list_patterns(run, catalog_files)
    else:
        records = list_jobs(run) if kind == "jobs" else READERS[kind](resolve_run(run), cycle)
    records = select(records, wanted)
    emit(
        records,
        output,
        table=lambda console, wide: print_table(console, COLUMNS[kind], records, wide=wide),
        name=lambda r: str(r[NAMES[kind]]),
    )
    if not records and output in ("table", "wide"):
        note(f"no {kind}")


def list_jobs(run: str | None) -> list[Record]:
    """All runs under $KEEPSTEP_HOME/runs, or one; the one that changed last first."""
    found = run_dirs([runs_root()]) if run is None else [resolve_run(run)]
    return [_plain(job_view(run_dir, time.time_ns())) for run_dir in found]


def list_patterns(run: str | None, catalog_files: Sequence[Path]) -> list[Record]:
    """Entries of the catalog, by id. Raises ConfigError for a run: the catalog is of no run."""
    if run is not None:
        raise ConfigError(f"get patterns {run}: the catalog belongs to no run; leave it out")
    catalog = chosen_catalog(catalog_files)
    version = catalog.describe()
    found = []
    for entry in sorted(catalog, key=lambda e: e.id):
        fields = {name: getattr(entry, name) for name in ("id", "kind", "role", "severity", "scope", "depth", "action")}
        about = {"title": entry.title, "stream": entry.stream, "source": entry.source, "why": entry.why}
        counted = {
            "class": entry.fault_class,
            "weights": dict(entry.weights),
            "never": list(entry.never),
            "patterns": len(entry.pattern),
        }
        used = {"catalog_version": version["version"], "catalog_digest": version["digest"]}
        found.append({"schema": "keepstep.pattern/1", **fields, **counted, **about, **used})
    return found


def list_cycles(run_dir: Path, cycle: int | None) -> list[Record]:
    """Cycle records, oldest first."""
    cycles = brought_up_to_date(read_cycles(run_dir), run_dir)
    return [_plain(c) for c in cycles if cycle is None or c.cycle == cycle]


def list_nodes(run_dir: Path, _cycle: int | None = None) -> list[Record]:
    """Nodes of the newest attempt, in the order they joined."""
    return [_plain(node) for node in node_views(read_state(run_dir))]


def list_spares(run_dir: Path, _cycle: int | None = None) -> list[Record]:
    """Nodes that wait to take over."""
    return [node for node in list_nodes(run_dir) if node["role"] == "spare"]


def list_ranks(run_dir: Path, cycle: int | None) -> list[Record]:
    """Ranks of a cycle, by default of the newest."""
    record = find_cycle(run_dir, cycle)
    extra = {"schema": "keepstep.rank/1", "cycle": record.cycle, "running": record.ended_at is None}
    return [{**extra, **_plain(place)} for place in record.ranks]


def list_checkpoints(run_dir: Path, cycle: int | None) -> list[Record]:
    """Commits that the journal knows of, oldest first."""
    return [_plain(c) for c in read_state(run_dir).checkpoints if cycle is None or c.cycle == cycle]


def list_incidents(run_dir: Path, cycle: int | None) -> list[Record]:
    """Incident records, oldest first; a verdict inside one counts as part of it."""
    found = []
    for path in sorted((run_dir / "incidents").glob("*.json")):
        record = read_object(path)
        if not record:
            note(f"{path} is not an incident record and is left out")
            continue
        verdict = record.get("verdict")
        label = read_label(run_dir, path.stem)
        record = {
            "id": path.stem,
            "run_id": run_id_of(run_dir),
            **(verdict if isinstance(verdict, dict) else {}),
            **record,
            "verified": None if label is None else label.fault_class,
        }
        if cycle is None or record.get("cycle") == cycle:
            found.append(record)
    return found


def find_cycle(run_dir: Path, cycle: int | None) -> Cycle:
    """A cycle's record, the newest without a number. Raises NotFoundError naming the cycles there are."""
    numbers = sorted(
        int(match[1])
        for path in (run_dir / "cycles").glob("cycle-*.json")
        if (match := re.fullmatch(r"cycle-(\d+)\.json", path.name))
    )
    wanted = cycle if cycle is not None else numbers[-1] if numbers else None
    if wanted is None or wanted not in numbers:
        there = f"it has {ranges(numbers)}" if numbers else "it has none yet"
        raise NotFoundError(f"{run_dir / 'cycles'} holds no cycle {'record' if cycle is None else cycle}; {there}")
    path = run_dir / "cycles" / f"cycle-{wanted:04d}.json"
    try:
        return brought_up_to_date([from_json(path.read_bytes(), Cycle)], run_dir)[0]
    except msgspec.MsgspecError as error:
        raise NotFoundError(f"{path} is not a cycle record: {error}") from error


def _plain(record: Any) -> Record:
    plain: Record = msgspec.to_builtins(record)
    return plain


READERS: dict[str, Callable[[Path, int | None], list[Record]]] = {
    "cycles": list_cycles,
    "nodes": list_nodes,
    "spares": list_spares,
    "ranks": list_ranks,
    "checkpoints": list_checkpoints,
    "incidents": list_incidents,
}
