"""`keepstep ckpt ls ROOT`: the checkpoints of a root, newest first."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from keepstep.checkpoint.format.layout import MARKER_SIGNED, check_run_id
from keepstep.checkpoint.keeping.retention import Entry, current
from keepstep.checkpoint.keeping.survey import Survey, survey
from keepstep.checkpoint.storage.source import Source, StoreOptions
from keepstep.cli.ckpt_common import (
    ROOT_HELP,
    format_bytes,
    open_existing,
    reader_policy,
    root_argument,
    short_key,
)
from keepstep.cli.output import emit, format_duration_s, note, output_option
from keepstep.cli.runs import Column, clock, print_table
from keepstep.cli.trust_flags import policy_options
from keepstep.records.codec import rfc3339


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.checkpoints/1`: one checkpoint of a root.

    `state`: committed, unfinished (no marker), quarantined, abandoned (a later life went back before it), tombstoned (its
    deletion was begun), untrusted (another key, or unsigned) or damaged (its manifest does not verify). `current`: the one a
    restore would take if its bytes verify. `reason` says why it is not just committed. `signed_by`: SHA-256 of the key, null
    when it was not checked.
    """

    schema: str = "keepstep.checkpoints/1"
    checkpoint: str
    run_id: str
    step: int
    cycle: int
    attempt: int
    state: str
    current: bool
    pinned: bool
    time: str | None
    age_s: float | None
    size_bytes: int | None
    world: int | None
    tiers: list[dict[str, str | None]]
    signed: bool | None
    signed_by: str | None
    metrics: dict[str, float]
    reason: str | None
    pins: list[str]
    parent: str | None
    writer: str | None


COLUMNS = (
    Column("", lambda c: "*" if c.current else " "),
    Column("STEP", lambda c: c.step, right=True),
    Column("STATE", lambda c: f"{c.state}, pinned" if c.pinned else c.state),
    Column("TIME", lambda c: clock(c.time)[:19]),
    Column("AGE", lambda c: format_duration_s(c.age_s), right=True),
    Column("SIZE", lambda c: format_bytes(c.size_bytes), right=True),
    Column("WORLD", lambda c: c.world, right=True),
    Column("TIERS", lambda c: [tier["tier"] for tier in c.tiers]),
    Column("SIGNED BY", lambda c: short_key(c.signed_by, c.signed)),
    Column("CHECKPOINT", lambda c: c.checkpoint),
    Column("METRICS", lambda c: [f"{name}={value:g}" for name, value in sorted(c.metrics.items())], wide=True),
    Column("REASON", lambda c: c.reason, wide=True),
    Column("PINS", lambda c: c.pins, wide=True),
    Column("WRITER", lambda c: c.writer, wide=True),
    Column("PARENT", lambda c: c.parent[:12] if c.parent else None, wide=True),
)


@click.command("ls", epilog=ROOT_HELP)
@root_argument
@click.option("--run", metavar="RUN", help="Only checkpoints of this run, as a restore that looks at one run only.")
@policy_options
@output_option
def ls(root: str, store: StoreOptions, run: str | None, output: str, **flags: Any) -> None:
    """List the checkpoints of ROOT, newest first; * marks the one a restore would take.

    Manifests are read and their signatures checked; data files are not (`keepstep ckpt verify` does). JSON records:
    keepstep.checkpoints/1.
    """
    opened = open_existing(root, store)
    trust = reader_policy(flags, needed=False)
    now_ns = time.time_ns()
    found = survey(opened, trust, now_ns=now_ns, run_id=None if run is None else check_run_id(run))
    records = list_records(opened, found, now_ns)
    emit(
        records,
        output,
        table=lambda console, wide: print_table(console, COLUMNS, records, wide=wide),
        name=lambda record: str(record.checkpoint),
    )
    if not records:
        note(f"no checkpoints in {opened.where}")
    elif not any(record.current for record in records):
        note(f"none of these can be restored; -o wide says why, or `keepstep ckpt verify --all {root}`")


def list_records(source: Source, found: Survey, now_ns: int) -> list[Checkpoint]:
    """A record for each checkpoint of `found`, newest first."""
    newest = current(found.entries)
    return [_record(source, found, entry, entry is newest, now_ns) for entry in found.entries]


def _record(source: Source, found: Survey, entry: Entry, is_current: bool, now_ns: int) -> Checkpoint:
    name, listed = entry.name, found.listed[entry.name.text]
    manifest = listed.manifest
    facts = None if manifest is None else manifest.facts
    tiers: list[dict[str, str | None]] = [
        {"tier": note.tier, "time": note.time} for note in found.records.tiers.get(name.text, [])
    ]
    if entry.committed and source.tier not in [tier["tier"] for tier in tiers]:
        tiers.append({"tier": source.tier, "time": None if facts is None else facts.created_at})
    untrusted = entry.state == "damaged" and listed.distrust is not None
    return Checkpoint(
        checkpoint=name.text,
        run_id=name.run_id,
        step=name.step,
        cycle=name.cycle,
        attempt=name.attempt,
        state="untrusted" if untrusted else entry.state,
        current=is_current,
        pinned=bool(entry.pins),
        time=rfc3339(entry.created_ns) if entry.created_ns > 0 else None,
        age_s=(now_ns - entry.created_ns) / 1e9,
        size_bytes=entry.size_bytes,
        world=None if facts is None else facts.world,
        tiers=tiers,
        signed=_signed(source, entry, None if manifest is None else manifest.signed),
        signed_by=None if manifest is None else manifest.key_sha256,
        metrics=entry.metrics,
        reason=entry.problem or _why(entry),
        pins=list(entry.pins),
        parent=None if facts is None else facts.parent,
        writer=None if facts is None else f"{facts.writer.host}:{facts.writer.pid}",
    )


def _signed(source: Source, entry: Entry, known: bool | None) -> bool | None:
    if known is not None or not entry.committed or entry.tombstoned:
        return known
    try:
        marker: Any = source.marker(entry.name.text)
    except Exception:  # what is wrong with the marker is said in the reason
        return None
    return None if marker is None else marker[0] == MARKER_SIGNED


def _why(entry: Entry) -> str | None:
    if entry.state == "quarantined":
        return "quarantined, released" if entry.released else "quarantined"
    if entry.state == "abandoned":
        return f"abandoned by {entry.abandoned_by}"
    if entry.permits:
        return f"named by rollback permit {entry.permits[0]}"
    return None
