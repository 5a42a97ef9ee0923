"""`keepstep ckpt verify`: every byte of checkpoints against their signed manifests."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from keepstep.checkpoint.format.layout import parse_folder_name
from keepstep.checkpoint.keeping.records import VERIFIED, note_verified
from keepstep.checkpoint.keeping.retention import current
from keepstep.checkpoint.keeping.survey import survey
from keepstep.checkpoint.restore.verify import VerifyReport, verify_checkpoint
from keepstep.checkpoint.storage.source import Root, StoreOptions, open_root
from keepstep.cli.ckpt_common import (
    ROOT_HELP,
    format_bytes,
    open_existing,
    reader_policy,
    root_argument,
    short_key,
)
from keepstep.cli.output import NotFoundError, emit, format_duration_s, make_console, note, output_option
from keepstep.cli.runs import Column, print_table
from keepstep.cli.trust_flags import policy_options
from keepstep.records.errors import ConfigError
from keepstep.records.exits import EXIT_PROBLEM

COLUMNS = (
    Column("STEP", lambda r: r.step, right=True),
    Column("RESULT", lambda r: "ok" if r.ok else "PROBLEM"),
    Column("FILES", lambda r: len(r.files) or None, right=True),
    Column("SIZE", lambda r: format_bytes(_size(r)) if r.files else None, right=True),
    Column("SIGNED BY", lambda r: short_key(r.key_sha256, r.signed)),
    Column("CHECKPOINT", lambda r: r.checkpoint),
)


@click.command("verify", epilog=f"{ROOT_HELP} A checkpoint's own folder may be given instead.")
@root_argument
@click.option("--all", "every", is_flag=True, help="Every committed checkpoint, not only the one a restore would take.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Files hashed at once; the default is all cores.")
@click.option("--record", is_flag=True, help="Write down what was found whole; retention keeps the newest such one.")
@policy_options
@output_option
def verify(
    root: str,
    store: StoreOptions,
    every: bool,
    jobs: int | None,
    record: bool,
    output: str,
    **flags: Any,
) -> None:
    """Verify checkpoints: signature, presence and size of every file, every byte. Exit code 3 when anything differs.

    Without --all, of a root the one that a restore would take. Nothing is changed; a restore that meets damage puts the
    checkpoint under quarantine by itself. JSON records: keepstep.verify/1.
    """
    trust = reader_policy(flags, needed=True)
    place, folder = split_target(root, store)
    if folder is not None and every:
        raise ConfigError(f"--all says nothing about one checkpoint; give its root, {place.where}")
    found = survey(place, trust, now_ns=time.time_ns())
    if folder is None:
        folders = [e.name.text for e in found.entries if e.committed and not e.tombstoned]
        newest = current(found.entries)
        if not every:
            # Without a restorable one, say of all why.
            folders = folders if newest is None else [newest.name.text]
        if not folders:
            raise NotFoundError(f"{place.where} holds no committed checkpoint")
    else:
        folders = [folder]
    sizes = {entry.name.text: entry.size_bytes or 0 for entry in found.entries}
    reports = []
    begun = time.monotonic()
    with progress_bar(sum(sizes.get(name, 0) for name in folders)) as told:
        for name in folders:
            reports.append(verify_checkpoint(place, name, policy=trust, jobs=jobs, progress=told))
    took_s = time.monotonic() - begun
    if record:
        _write_down(place, reports)
    emit(
        reports,
        output,
        table=lambda console, wide: print_table(console, COLUMNS, reports, wide=wide),
        name=lambda report: str(report.checkpoint),
    )
    _say(reports, took_s, jobs or len(os.sched_getaffinity(0)))
    if not all(report.ok for report in reports):
        sys.exit(EXIT_PROBLEM)


def split_target(text: str, store: StoreOptions) -> tuple[Root, str | None]:
    """The root that `text` names, or the root and the checkpoint in it. Raises NotFoundError or ConfigError."""
    head, _, tail = text.rstrip("/").rpartition("/")
    if parse_folder_name(tail) is not None:
        place = open_root(head or ("/" if text.startswith("/") else "."), store)
        if place.files(tail) is None:
            raise NotFoundError(f"{place.where} holds no checkpoint {tail}")
        return place, tail
    return open_existing(text, store), None


def _write_down(place: Root, reports: list[VerifyReport]) -> None:
    there = place.record_names(VERIFIED)
    for report in reports:
        if report.ok and report.digest is not None and report.checkpoint not in there:
            note_verified(place, report.checkpoint, report.digest)


def _size(report: VerifyReport) -> int:
    return sum(max(file.size_bytes, 0) for file in report.files)


def _say(reports: list[VerifyReport], took_s: float, jobs: int) -> None:
    """Problems and speed, on stderr."""
    for report in reports:
        for error in report.errors:
            note(f"{report.checkpoint}: {error}")
    read = sum(_size(report) for report in reports)
    bad = sum(not report.ok for report in reports)
    rate = f" ({read / took_s / 1e9:.2f} GB/s, {jobs} at once)" if read and took_s > 0 else ""
    verdict = f"{bad} of {len(reports)} with problems" if bad else f"{len(reports)} as their manifests say"
    note(f"{format_bytes(read)} in {format_duration_s(took_s)}{rate}: {verdict}")


@contextlib.contextmanager
def progress_bar(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while it is a terminal; what is given is told the bytes that were done, by any thread."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    lock = threading.Lock()
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_bytes)

        def told(count: int) -> None:
            with lock:
                bar.advance(task, count)

        yield told
