"""`keepstep run`: torchrun's flags and our own, turned into a configuration; then the agent takes over."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from keepstep.cli.effective import effective_config
from keepstep.cli.run_flags import run_flags
from keepstep.records.errors import ConfigError
from keepstep.records.exits import EXIT_CONFIG

if TYPE_CHECKING:
    from keepstep.launcher.config import RunConfig


@click.command("run", context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@run_flags
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, script: str, script_args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT under supervision: torchrun's flags, restarts in place, hang detection, honest accounting."""
    # Imported here: the verbs that only read need none of it.
    from keepstep.launcher.clock import boot_ns
    from keepstep.launcher.coordination.runfolder import set_aside_verdict
    from keepstep.launcher.files import make_run_dir, socket_dir, write_durable
    from keepstep.launcher.node.agent import run_agent
    from keepstep.launcher.trust import find_token, require_token
    from keepstep.records.codec import to_pretty_json

    started = boot_ns()
    config = effective_config(ctx, script, list(script_args), flags)
    if flags["dry_run"]:
        _print_dry_run(config)
        return
    # First of all: the token leaves the environment before anything is started.
    token = find_token(config.token_file)
    require_token(token, config.endpoints)
    if token is None:
        # Whatever endpoints are left mean this host: its launchers meet at a Unix socket (docs/decisions/0002).
        config = msgspec.structs.replace(config, endpoints=[])
    _check_script(config.mode, script)
    run_dir = Path(config.run_dir)
    make_run_dir(run_dir)
    lock = _take_the_lead(config, run_dir)
    if lock is not None:
        set_aside_verdict(run_dir)
        write_durable(run_dir / "run.json", to_pretty_json(config))
        _check_syntax(config, run_dir)
    (run_dir / "nodes" / config.node).mkdir(parents=True, exist_ok=True, mode=0o700)
    code = asyncio.run(run_agent(config, socket_dir(run_dir), lock, started, token))
    sys.stdout.flush()
    ctx.exit(code)


def _take_the_lead(config: Any, run_dir: Path) -> Any:
    """The lock of the launcher that starts the coordinator, None when that is another one's or another host's business."""
    from keepstep.launcher.coordination.lead import is_own
    from keepstep.launcher.files import RunLock, RunLockedError

    may_lead = is_own(config.endpoints[0]) if config.is_host is None and config.endpoints else config.is_host
    if may_lead is False:
        return None
    try:
        return RunLock.acquire(run_dir, config.node)
    except RunLockedError:
        if config.nnodes + config.spares == 1:
            raise
        return None


def _check_script(mode: str, script: str) -> None:
    if mode == "script" and not Path(script).is_file():
        what = "is a folder" if Path(script).is_dir() else "no such file"
        raise ConfigError(f"script {script!r}: {what} (working directory {Path.cwd()}); for a module use -m")


def _check_syntax(config: RunConfig, run_dir: Path) -> None:
    """A script that does not compile fails on every rank in every cycle: say so once, at once, exit 42."""
    import traceback

    from keepstep.launcher.files import write_durable
    from keepstep.records.codec import to_pretty_json
    from keepstep.records.cycle import VerdictFile

    if config.mode != "script":
        return
    try:
        compile(Path(config.script).read_bytes(), config.script, "exec")
    except (SyntaxError, ValueError) as error:
        text = "".join(traceback.format_exception_only(error))
        verdict = VerdictFile(
            run_id=config.run_id,
            attempt=-1,
            outcome="failed",
            exit_code=EXIT_CONFIG,
            cause="code_bug",
            traceback=text,
            message=f"{config.script} does not compile",
        )
        write_durable(run_dir / "verdict.json", to_pretty_json(verdict))
        print(f"keepstep: {config.script} does not compile; no rank was started\n{text}", end="", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


def _print_dry_run(config: RunConfig) -> None:
    from keepstep.launcher.coordination.rules import RULES
    from keepstep.launcher.ranks.environment import planned_defaults
    from keepstep.records.codec import to_pretty_json

    click.echo(to_pretty_json(config).decode(), nl=False)
    click.echo("restart rules, the first that matches decides:")
    for number, (text, _) in enumerate(RULES, 1):
        click.echo(f"  {number}. {text}")
    click.echo(
        "environment of every rank besides torchrun's (what is set in this shell stays; paths are those of cycle 0):"
    )
    for name, value, set_by in planned_defaults(config):
        click.echo(f"  {name}={value}  [{set_by}]")
