"""`keepstep ckpt suspect` and `keepstep ckpt release`: keep what is from before a suspected corruption, until it is over."""

from __future__ import annotations

import re
import secrets
import sys
import time
from typing import Any

import click

from keepstep.checkpoint.format.layout import check_run_id
from keepstep.checkpoint.keeping.records import new_suspicion, read_records, release, whoami, write_suspicion
from keepstep.checkpoint.storage.source import StoreOptions
from keepstep.cli.ckpt_common import ROOT_HELP, open_existing, root_argument
from keepstep.cli.output import NotFoundError, emit, output_option
from keepstep.records.errors import ConfigError


@click.command("suspect", epilog=ROOT_HELP)
@root_argument
@click.option("--since-step", type=click.IntRange(min=0), required=True, help="Weights may be corrupt since this step.")
@click.option("--reason", required=True, help="What was seen.")
@click.option("--run", metavar="RUN", help="Only checkpoints of this run.")
@click.option("--name", help="Name to release it by; the default is made up.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("-y", "--yes", is_flag=True, help="Accepted like everywhere; nothing is asked, since nothing is lost.")
@output_option
def suspect(
    root: str,
    store: StoreOptions,
    since_step: int,
    reason: str,
    run: str | None,
    name: str | None,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Keep every checkpoint of ROOT up to --since-step, whatever the retention policy, until this is released.

    A restore is not changed by it. Going back to one of them is `keepstep ckpt pin --allow-rollback`.
    """
    opened = open_existing(root, store)
    named = name or f"suspicion-{secrets.token_hex(4)}"
    record = new_suspicion(since_step, reason, time.time_ns(), None if run is None else check_run_id(run))
    if not dry_run:
        write_suspicion(opened, named, record)
    said = f"keep everything up to step {since_step} in {opened.where}: {reason}"
    undo = f"keepstep ckpt release {root} {named} --reason TEXT"
    _emit_action("suspect", named, said, reason, dry_run, undo, output)


@click.command("release", epilog=ROOT_HELP)
@root_argument
@click.argument("name", metavar="NAME")
@click.option("--reason", required=True, help="What was found out.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_option
def release_verb(root: str, store: StoreOptions, name: str, reason: str, dry_run: bool, yes: bool, output: str) -> None:
    """Let retention delete what a suspicion, or the quarantine of checkpoint NAME, has kept.

    A released checkpoint is still not restored: quarantine stands. A pin keeps it nevertheless.
    """
    opened = open_existing(root, store)
    records = read_records(opened, time.time_ns())
    held = {*records.suspicions, *(folder for folder in records.quarantined_ns if folder not in records.released)}
    if name not in held:
        there = ", ".join(sorted(held)) or "nothing"
        raise NotFoundError(f"{opened.where} holds no open suspicion or quarantine {name!r}; there is {there}")
    said = f"release {name} in {opened.where}: {reason}"
    if not dry_run:
        if not yes and not sys.stdin.isatty():
            raise ConfigError(f"this would {said}; give --yes, or --dry-run to see it only")
        if not yes:
            click.confirm(f"{said}?", abort=True, err=True)
        release(opened, name, reason, time.time_ns())
    suspicion = records.suspicions.get(name)
    undo = (
        f"keepstep ckpt pin {root} {name} --reason TEXT"
        if suspicion is None
        else f"keepstep ckpt suspect {root} --since-step {suspicion.since_step} --reason TEXT"
    )
    _emit_action("release", name, said, reason, dry_run, undo, output)


def _emit_action(kind: str, name: str, said: str, reason: str, dry_run: bool, undo: str, output: str) -> None:
    record: dict[str, Any] = {
        "schema": "keepstep.action/1",
        "id": None if dry_run else name,
        "kind": f"ckpt-{kind}",
        "reason": reason,
        "by": re.sub(r":\d+\Z", "", whoami()),
        "dry_run": dry_run,
        "undo": None if dry_run else undo,
    }
    text = f"would {said}" if dry_run else f"{name}: {said}\nundo: {undo}"
    emit(
        record,
        output,
        table=lambda console, _: console.print(text, markup=False, soft_wrap=True),
        name=lambda _: name,
    )
