"""`keepstep ckpt prune ROOT`: delete what a retention policy does not keep."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from keepstep.checkpoint.keeping.policy import DEFAULT_POLICY, VALID_RULES, parse_policy, parse_span
from keepstep.checkpoint.keeping.prune import Pruned, Task, decide_now, prune
from keepstep.checkpoint.keeping.retention import Line
from keepstep.checkpoint.keeping.survey import survey
from keepstep.checkpoint.storage.source import StoreOptions, open_deleter
from keepstep.cli.ckpt_common import (
    ROOT_HELP,
    ended_runs,
    format_bytes,
    open_existing,
    reader_policy,
    root_argument,
)
from keepstep.cli.output import emit, note, output_option
from keepstep.cli.runs import Column, print_table
from keepstep.cli.trust_flags import policy_options
from keepstep.records.errors import ConfigError
from keepstep.records.exits import EXIT_FAILURE

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (
    Column("STEP", lambda line: line.step, right=True),
    Column("WHAT", lambda line: "keep" if line.keep else "delete"),
    Column("SIZE", lambda line: format_bytes(line.size_bytes), right=True),
    Column("STATE", lambda line: line.state),
    Column("WHY", lambda line: line.reasons[0] + (f" (+{len(line.reasons) - 1})" if len(line.reasons) > 1 else "")),
    Column("CHECKPOINT", lambda line: line.checkpoint, wide=True),
    Column("ALL REASONS", lambda line: "; ".join(line.reasons), wide=True),
)


@click.command("prune", epilog=f"{ROOT_HELP} Rules: {VALID_RULES}.")
@root_argument
@click.option("--keep", default=DEFAULT_POLICY, show_default=True, metavar="POLICY", help="What any rule keeps stays.")
@click.option(
    "--grace", default="1d", show_default=True, metavar="TIME", help="Least age of unfinished, abandoned ones."
)
@click.option(
    "--quarantine", default="30d", show_default=True, metavar="TIME", help="How long quarantined ones are kept."
)
@click.option("--run-over", "over", multiple=True, metavar="RUN", help="No process saves for RUN any more; repeatable.")
@click.option("--reason", help="Why; it is written into the tombstones.")
@click.option("--dry-run", is_flag=True, help="Say of each checkpoint what would be done and why, and do nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@policy_options
@output_option
def prune_verb(
    root: str,
    store: StoreOptions,
    keep: str,
    grace: str,
    quarantine: str,
    over: tuple[str, ...],
    reason: str | None,
    dry_run: bool,
    yes: bool,
    output: str,
    **flags: Any,
) -> None:
    """Delete checkpoints of ROOT that no rule of --keep keeps. It cannot be undone.

    Whatever the policy: the newest that can be restored stays, and the newest known to be whole; so do pins, everything from
    before an open suspicion, markers that do not verify, and folders that a save may be writing. On an object store, run it
    as an identity that may delete; the training's own must not. JSON record: keepstep.prune/1.
    """
    policy = parse_policy(keep)
    grace_s, quarantine_s = parse_span(grace, "--grace"), parse_span(quarantine, "--quarantine")
    opened = open_existing(root, store)
    trust = reader_policy(flags, needed=True)
    entries = survey(opened, trust, now_ns=time.time_ns()).entries
    task = Task(
        root=opened,
        policy=policy,
        deleter=None,
        trust=trust,
        ended_runs=ended_runs(entries, over),
        grace_s=grace_s,
        quarantine_s=quarantine_s,
        reason=reason,
    )
    if not dry_run:
        _confirm(decide_now(task, time.time_ns()), opened.where, yes)
        task = task.with_right(open_deleter(root, store))
    result = prune(task)
    emit(result, output, table=_table(result), name=lambda done: done.action)
    for checkpoint, why in result.failed.items():
        note(f"{checkpoint} is not deleted: {why}")
    if result.failed:
        sys.exit(EXIT_FAILURE)


def _confirm(lines: list[Line], where: str, yes: bool) -> None:
    """Ask on a terminal. Raises ConfigError where nobody can be asked, click.Abort when the answer is no."""
    doomed = [line for line in lines if not line.keep]
    if yes or not doomed:
        return
    what = (
        f"{len(doomed)} of {len(lines)} checkpoints ({format_bytes(sum(x.size_bytes or 0 for x in doomed))}) of {where}"
    )
    if not sys.stdin.isatty():
        raise ConfigError(f"this would delete {what}; give --yes, or --dry-run to see which")
    steps = ", ".join(str(line.step) for line in reversed(doomed))
    click.confirm(f"Delete {what}: steps {steps}?", abort=True, err=True)


def _table(result: Pruned) -> Callable[[Console, bool], None]:
    def draw(console: Console, wide: bool) -> None:
        print_table(console, COLUMNS, result.lines, wide=wide)
        doomed = [line for line in result.lines if not line.keep]
        if result.dry_run:
            size = format_bytes(sum(line.size_bytes or 0 for line in doomed))
            text = f"dry run of {result.policy!r}: would delete {len(doomed)} of {len(result.lines)} ({size})"
        else:
            text = (
                f"{result.action}: deleted {len(result.deleted)} of {len(result.lines)} "
                f"({format_bytes(result.freed_bytes)})\nundo: none; what was deleted is gone"
            )
        console.print(text, markup=False, soft_wrap=True)

    return draw
