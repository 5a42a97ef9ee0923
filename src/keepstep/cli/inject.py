"""`keepstep inject SPEC [RUN]`: cause a fault in a running job."""

from __future__ import annotations

import time
from typing import Any

import click

from keepstep.cli.acting import confirm, user
from keepstep.cli.output import emit, output_option
from keepstep.cli.runs import RUN_HELP, resolve_run, run_argument
from keepstep.launcher import messages as m
from keepstep.launcher.views.operator import UnreachableError, send_operator
from keepstep.launcher.views.view import job_view, leader
from keepstep.records.errors import ConfigError
from keepstep.records.inject import KINDS, OUTSIDE_KINDS, Injection, parse_injection


@click.command("inject", epilog=RUN_HELP)
@click.argument("spec", metavar="SPEC")
@run_argument
@click.option("--reason", default="", help="Why; it goes to the coordinator with the command.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_option
def inject(spec: str, run: str | None, reason: str, dry_run: bool, yes: bool, output: str) -> None:
    """Cause a fault in a running job, now and for real: `inject kill@rank=1`, `inject node-loss@node=n7`, `inject preempt`.

    SPEC is written as for `keepstep run --inject`, without a time. What only a rank can do to itself (raise, nan, ...) must
    be known when the rank starts, and is for `keepstep run --inject`. The run recovers by itself; there is nothing to undo.
    Goes to the coordinator on this host, which is where the leading launcher runs.
    """
    spec, injection = parse_now(spec)
    run_dir = resolve_run(run)
    job = job_view(run_dir, time.time_ns())
    if job.state != "running":
        raise UnreachableError(f"run {job.run_id!r} is not running ({job.state}); only a running job can get a fault")
    where = f"node {injection.node}" if injection.node else f"rank {injection.rank}"
    what = f"{injection.kind} at {where} in cycle {job.cycle} of run {job.run_id!r}"
    lead = leader(run_dir)
    record: dict[str, Any] = {
        "schema": "keepstep.action/1",
        "id": None,
        "kind": "inject",
        "run_id": job.run_id,
        "spec": spec,
        "reason": reason,
        "by": user(),
        "dry_run": dry_run,
        "undo": None,
    }
    if not dry_run:
        confirm(f"cause {what}", yes)
        message = m.Operator(
            id=1, what="inject", run_id=job.run_id, spec=spec, node=injection.node or "", reason=_signed(reason)
        )
        result = send_operator(run_dir, message)
        record |= {"id": result.get("id", f"inject-{time.time_ns()}"), "result": result}
    said = "would inject" if dry_run else f"{record['id']}: injected"
    text = f"{said} {what} (led from {lead.get('host', '?')})\nundo: none needed; the run recovers by itself"
    emit(
        record,
        output,
        table=lambda console, _: console.print(text, markup=False, soft_wrap=True),
        name=lambda r: str(r["id"]),
    )


def parse_now(spec: str) -> tuple[str, Injection]:
    """A fault that can be caused from outside at this moment: the specification as the coordinator takes it, and what it says.

    Raises ConfigError for a kind that only a rank can carry out, and for a time or cycle.
    """
    kind = spec.partition("@")[0]
    if kind in KINDS and kind not in OUTSIDE_KINDS:
        raise ConfigError(
            f"{kind} cannot be caused from outside a rank; a running job can get {', '.join(OUTSIDE_KINDS)}; "
            f"start the job with `keepstep run --inject {kind}@step=N` for the others"
        )
    begin = "after" if kind == "partition" else "seconds"
    for key in ("step", "cycle", begin):
        if f"{key}=" in spec:
            raise ConfigError(f"{spec!r}: a running job gets a fault now, in its current cycle; leave out {key}")
    whole = f"{spec}{',' if '@' in spec else '@'}{begin}=0"
    return whole, parse_injection(whole)


def _signed(reason: str) -> str:
    return f"{user()}: {reason}" if reason else user()
