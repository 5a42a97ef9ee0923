"""`keepstep run`: torchrun's flags and our own, turned into a configuration; then the agent takes over."""

from __future__ import annotations

import asyncio
import math
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from keepstep.records.errors import ConfigError
from keepstep.records.exits import EXIT_CONFIG
from keepstep.records.inject import parse_injection

F = TypeVar("F", bound=Callable[..., Any])
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LOOPBACK = {"", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0"}


def _flag(name: str, *more: str, **kwargs: Any) -> Callable[[F], F]:
    """An option in both of torchrun's spellings (--a-b, --a_b) that also reads PET_A_B, as torchrun does."""
    under = name.lstrip("-").replace("-", "_")
    names = [name, *([f"--{under}"] if "-" in name[2:] else []), *more, under]
    return click.option(*names, envvar=f"PET_{under.upper()}", **kwargs)


def _torchrun_flags(command: F) -> F:
    """Every flag of torch 2.13's torchrun. docs/torchrun-flags.md says what each one does here."""
    unused: dict[str, Any] = {"hidden": True, "default": None}
    flags = [
        _flag("--nnodes", default="1:1", help="Number of nodes N (N:N)."),
        _flag("--nproc-per-node", default="1", help="Ranks on this node: a number, cpu, gpu or auto."),
        _flag("--rdzv-backend", default="static", help="static or c10d; both mean keepstep's own coordinator."),
        _flag("--rdzv-endpoint", default="", help="Where the coordinator is: this machine."),
        _flag("--rdzv-id", default="none", help="Run id; the same id resumes the run."),
        _flag("--rdzv-conf", default="", help="k=v,...: join_timeout and lease are used."),
        _flag("--standalone", is_flag=True, help="One node; rendezvous settings are ignored."),
        _flag(
            "--max-restarts",
            type=click.IntRange(0),
            default=10,
            show_default=True,
            help="Real failures to restart after.",
        ),
        _flag("--monitor-interval", type=float, **unused),
        _flag("--start-method", type=click.Choice(["spawn", "fork", "forkserver"]), **unused),
        _flag("--event-log-handler", **unused),
        _flag("--role", default="default", help="Role name of the ranks."),
        _flag("--module", "-m", is_flag=True, help="SCRIPT is a module name, as in python -m."),
        _flag("--no-python", is_flag=True, help="SCRIPT is a program, not a Python file."),
        _flag("--run-path", is_flag=True, hidden=True),
        _flag("--log-dir", default=None, help="Folder for per-rank output files (--redirects, --tee)."),
        _flag("--redirects", "-r", default="0", help="0-3 or RANK:0-3,...: to files only."),
        _flag("--tee", "-t", default="0", help="0-3 or RANK:0-3,...: to files and the terminal."),
        _flag("--local-ranks-filter", default="", help="Only these local ranks' output to the terminal."),
        _flag("--duplicate-stdout-filters", **unused),
        _flag("--duplicate-stderr-filters", **unused),
        _flag("--node-rank", type=int, default=0, help="Used for the default node name when there are several."),
        _flag("--master-addr", default=None, help="Address of rank 0's store."),
        _flag(
            "--master-port",
            type=click.IntRange(1, 65535),
            default=None,
            help="Its port in cycle 0; later ones are fresh.",
        ),
        _flag("--local-addr", **unused),
        _flag("--logs-specs", **unused),
        _flag("--numa-binding", **unused),
        _flag("--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", hidden=True),
        _flag("--shutdown-timeout", type=click.IntRange(0), default=None, hidden=True),
        _flag("--virtual-local-rank", is_flag=True, hidden=True),
    ]
    for flag in reversed(flags):
        command = flag(command)
    return command


def _own_flags(command: F) -> F:
    flags = [
        click.option("--run-dir", default=None, help="Run folder [default: $KEEPSTEP_HOME/runs/RUN-ID]."),
        click.option("--preload", default=None, help="Modules the zygote imports, comma separated."),
        click.option("--no-zygote", is_flag=True, help="Start every rank in a fresh interpreter."),
        click.option("--hang-timeout", default="auto", show_default=True, help="auto, seconds, or off."),
        click.option("--section-timeout", multiple=True, metavar="NAME=S", help="Limit of a section, in seconds."),
        click.option(
            "--stop-grace", type=click.FloatRange(0), default=15.0, show_default=True, help="SIGTERM to SIGKILL, s."
        ),
        click.option("--inject", multiple=True, metavar="SPEC", help="KIND@KEY=VALUE,...: cause a real fault."),
        click.option("--node-name", default=None, help="Name of this node [default: host name]."),
        click.option(
            "--fresh-start", is_flag=True, help="Allow step 0 over a checkpoint root with nothing valid in it."
        ),
        click.option(
            "--dry-run", is_flag=True, help="Print the effective configuration and the restart rules, start nothing."
        ),
    ]
    for flag in reversed(flags):
        command = flag(command)
    return command


@click.command("run", context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@_torchrun_flags
@_own_flags
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, script: str, script_args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT under supervision: torchrun's flags, restarts in place, hang detection, honest accounting."""
    # Imported here: the verbs that only read need none of it.
    from keepstep.launcher.agent import run_agent
    from keepstep.launcher.clock import boot_ns
    from keepstep.launcher.files import RunLock, RunLockedError, make_run_dir, socket_dir, write_durable
    from keepstep.records.codec import to_pretty_json

    started = boot_ns()
    config = effective_config(ctx, script, list(script_args), flags)
    if flags["dry_run"]:
        _print_dry_run(config)
        return
    _check_script(config.mode, script)
    run_dir = Path(config.run_dir)
    make_run_dir(run_dir)
    lock: RunLock | None
    try:
        lock = RunLock.acquire(run_dir, config.node)
    except RunLockedError:
        if config.nnodes == 1:
            raise
        lock = None
    if lock is not None:
        _set_aside_verdict(run_dir)
        write_durable(run_dir / "run.json", to_pretty_json(config))
        _check_syntax(config, run_dir)
    (run_dir / "nodes" / config.node).mkdir(exist_ok=True, mode=0o700)
    code = asyncio.run(run_agent(config, socket_dir(run_dir), lock, started))
    sys.stdout.flush()
    ctx.exit(code)


def effective_config(ctx: click.Context, script: str, args: list[str], flags: dict[str, Any]) -> Any:
    """Flags over PET_* over defaults. Raises ConfigError naming the flag, the value seen and what is valid."""
    from keepstep.launcher.config import RunConfig
    from keepstep.launcher.files import keepstep_home
    from keepstep.launcher.spawn import SpawnError, local_world_size
    from keepstep.launcher.zygote import DEFAULT_PRELOAD

    nnodes = 1 if flags["standalone"] else _nnodes(flags["nnodes"])
    _check_here(flags, nnodes)
    run_id = _run_id(flags, nnodes)
    try:
        nproc = local_world_size(flags["nproc_per_node"])
    except SpawnError as error:
        raise ConfigError(str(error)) from None
    conf = _rdzv_conf(flags["rdzv_conf"])
    node = flags["node_name"] or socket.gethostname().partition(".")[0]
    if not flags["node_name"] and nnodes > 1 and _given(ctx, "node_rank"):
        node += f"-{flags['node_rank']}"
    if not RUN_ID.fullmatch(node):
        # It is the name of a folder too.
        raise ConfigError(
            f"--node-name {node!r}: use letters, digits, '.', '_' and '-', at most 100, first a letter or digit"
        )
    grace = flags["stop_grace"]
    if flags["shutdown_timeout"] is not None and not _given(ctx, "stop_grace"):
        grace = float(flags["shutdown_timeout"])
    if not math.isfinite(grace):
        raise ConfigError(f"--stop-grace {grace}: give a number of seconds")
    hang = _hang(flags["hang_timeout"])
    mode = "exec" if flags["no_python"] else "module" if flags["module"] else "script"
    preload = list(DEFAULT_PRELOAD) if flags["preload"] is None else [m for m in flags["preload"].split(",") if m]
    return RunConfig(
        run_id=run_id,
        run_dir=str(Path(flags["run_dir"] or keepstep_home() / "runs" / run_id).absolute()),
        node=node,
        script=script,
        args=args,
        mode=mode,
        nnodes=nnodes,
        nproc=nproc,
        max_restarts=flags["max_restarts"],
        role=flags["role"],
        master_addr=flags["master_addr"],
        master_port=flags["master_port"],
        monitor_hang=hang,
        section_timeouts_s=_sections(flags["section_timeout"]),
        stop_grace_s=grace,
        preload=preload,
        zygote=not flags["no_zygote"] and mode != "exec",
        inject=[parse_injection(spec) for spec in flags["inject"]],
        tee=_std(flags["tee"], "--tee"),
        redirects=_std(flags["redirects"], "--redirects"),
        log_dir=flags["log_dir"],
        local_ranks_filter=_ranks(flags["local_ranks_filter"]),
        fresh_start=flags["fresh_start"],
        virtual_local_rank=flags["virtual_local_rank"],
        signals=_signals(flags["signals_to_handle"]),
        lease_s=conf.get("lease", 5.0),
        join_timeout_s=conf.get("join_timeout", 600.0),
        origins={p: _origin(ctx, p) for p in sorted(flags)},
    )


def _run_id(flags: dict[str, Any], nnodes: int) -> str:
    """--rdzv-id, else the scheduler's job id, else the run folder's name, else random."""
    given = None if flags["standalone"] or flags["rdzv_id"] == "none" else flags["rdzv_id"]
    run_id = given or os.environ.get("SLURM_JOB_ID")
    if run_id is None:
        if nnodes > 1:
            raise ConfigError(f"--nnodes {nnodes}: give every launcher of the job the same --rdzv-id ID")
        run_id = (Path(flags["run_dir"]).name if flags["run_dir"] else None) or f"run-{secrets.token_hex(4)}"
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"--rdzv-id {run_id!r}: use letters, digits, '.', '_' and '-', at most 100, first a letter or digit"
        )
    return run_id


def _given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)


def _origin(ctx: click.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return {ParameterSource.COMMANDLINE: "flag", ParameterSource.ENVIRONMENT: f"PET_{name.upper()}"}.get(
        source or ParameterSource.DEFAULT, "default"
    )


def _nnodes(text: str) -> int:
    low, _, high = text.partition(":")
    if not low.isdigit() or int(low) < 1 or (high and not high.isdigit()):
        raise ConfigError(f"--nnodes {text!r}: give N or N:N with N >= 1")
    if high and high != low:
        raise ConfigError(f"--nnodes {text!r}: a range MIN:MAX is not supported yet; give a fixed number N")
    return int(low)


def _check_here(flags: dict[str, Any], nnodes: int) -> None:
    """Refuse what would need several hosts: not supported yet, and saying so beats hanging in a rendezvous."""
    if flags["rdzv_backend"] not in ("static", "c10d"):
        raise ConfigError(
            f"--rdzv-backend {flags['rdzv_backend']!r}: keepstep has its own coordinator; use c10d or leave it out"
        )
    if flags["standalone"] or nnodes == 1:
        return
    own = {socket.gethostname(), socket.getfqdn()}
    for flag, value in (("--rdzv-endpoint", flags["rdzv_endpoint"]), ("--master-addr", flags["master_addr"] or "")):
        host = value if flag == "--master-addr" else value.rpartition(":")[0] or value
        if host not in LOOPBACK | own:
            raise ConfigError(
                f"{flag} {value!r}: nodes on several hosts are not supported yet; "
                "several nodes on this machine are (give each its own --node-name)"
            )


def _rdzv_conf(text: str) -> dict[str, float]:
    conf: dict[str, float] = {}
    for pair in text.split(",") if text else []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--rdzv-conf {pair!r}: give KEY=VALUE,...")
        if key in ("join_timeout", "lease", "timeout"):
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"--rdzv-conf {pair!r}: not a number of seconds above 0")
            conf["join_timeout" if key == "timeout" else key] = seconds
    return conf


def _hang(text: str) -> str:
    if text in ("auto", "off"):
        return text
    try:
        if float(text) > 0:
            return text
    except ValueError:
        pass
    raise ConfigError(f"--hang-timeout {text!r}: give auto, off, or a number of seconds above 0")


def _sections(pairs: tuple[str, ...]) -> dict[str, float]:
    limits = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name or not 0 < limits[name] < float("inf"):
            raise ConfigError(f"--section-timeout {pair!r}: give NAME=SECONDS with SECONDS above 0")
    return limits


def _signals(text: str) -> tuple[str, ...]:
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise ConfigError(f"--signals-to-handle {text!r}: {name!r} is not a signal that can be handled")
    return tuple(names)


def _ranks(text: str) -> list[int]:
    try:
        return [int(rank) for rank in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--local-ranks-filter {text!r}: give local ranks as 0,1,...") from None


def _std(text: str, flag: str) -> str:
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        raise ConfigError(f"{flag} {text!r}: give 0, 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:VALUE,...")
    return text


def _check_script(mode: str, script: str) -> None:
    if mode == "script" and not Path(script).is_file():
        what = "is a folder" if Path(script).is_dir() else "no such file"
        raise ConfigError(f"script {script!r}: {what} (working directory {Path.cwd()}); for a module use -m")


def _check_syntax(config: Any, run_dir: Path) -> None:
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


def _set_aside_verdict(run_dir: Path) -> None:
    """An earlier attempt's verdict must not be taken for this one's."""
    verdict = run_dir / "verdict.json"
    if verdict.exists():
        number = len(list(run_dir.glob("verdict-*.json")))
        verdict.rename(run_dir / f"verdict-{number:04d}.json")


def _print_dry_run(config: Any) -> None:
    from keepstep.launcher.rules import RULES
    from keepstep.records.codec import to_pretty_json

    click.echo(to_pretty_json(config).decode(), nl=False)
    click.echo("restart rules, the first that matches decides:")
    for number, (text, _) in enumerate(RULES, 1):
        click.echo(f"  {number}. {text}")
