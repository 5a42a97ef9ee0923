"""`keepstep coordinator`: a job's coordinator on a host of its own, and the command that makes a job token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from keepstep.cli.effective import coordinator_config
from keepstep.cli.run_flags import job_flags


def _new_token(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from keepstep.launcher.trust import make_token

        click.echo(make_token())
        ctx.exit(0)


@click.command("coordinator", context_settings={"help_option_names": ["-h", "--help"]})
@job_flags
@click.option(
    "--new-token", is_flag=True, is_eager=True, expose_value=False, callback=_new_token, help="Print a job token."
)
@click.pass_context
def coordinator(ctx: click.Context, /, **flags: Any) -> None:
    """Run the coordinator of a job (and its log funnel) on this host; `keepstep run` on the others names it.

    It listens at the first --rdzv-endpoint and starts again what dies. SIGTERM ends it and leaves the job as it is: ranks train on
    for as long as their lease allows, and another one on the same run folder goes on from its journal. The exit code is the job's.
    """
    from keepstep.launcher.clock import boot_ns
    from keepstep.launcher.coordination.lead import lead_alone
    from keepstep.launcher.files import RunLock, make_run_dir, socket_dir, write_durable
    from keepstep.launcher.trust import find_token, require_token
    from keepstep.records.codec import to_pretty_json

    started = boot_ns()
    config = coordinator_config(ctx, flags)
    token = find_token(config.token_file)
    require_token(token, config.endpoints, on_loopback=True)
    run_dir = Path(config.run_dir)
    make_run_dir(run_dir)
    lock = RunLock.acquire(run_dir, config.node)
    write_durable(run_dir / "run.json", to_pretty_json(config))
    signum = asyncio.run(lead_alone(config, socket_dir(run_dir), token, started))
    lock.release()
    if signum:
        ctx.exit(128 + signum)
    verdict = json.loads((run_dir / "verdict.json").read_text())
    click.echo(f"keepstep: {verdict['outcome']}: {verdict['cause']}", err=True)
    ctx.exit(verdict["exit_code"])
