"""From flags to a configuration: what each value means, what fits together, and where each came from.

A flag goes before its PET_* variable, that before the file of --config, that before the default.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import secrets
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from keepstep.cli import ft_flags
from keepstep.cli.config_file import where_in_file
from keepstep.cli.output import note
from keepstep.cli.rdzv_conf import parse_rdzv_conf
from keepstep.cli.store_flags import given_store
from keepstep.cli.trust_flags import checked_options
from keepstep.records.errors import ConfigError
from keepstep.records.inject import parse_injection

if TYPE_CHECKING:
    from keepstep.launcher.config import RunConfig

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NAME_RULE = "use letters, digits, '.', '_' and '-', at most 100, first a letter or digit"
LOOPBACK = frozenset({"", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0"})
COORDINATOR_PORT = 29400
"""Port of an endpoint without one; also torch's for its c10d rendezvous."""
ENV_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

SETTINGS: dict[str, str] = {
    "run_id": "rdzv_id",
    "node": "node_name",
    "mode": "module",
    "min_nodes": "nnodes",
    "endpoints": "rdzv_endpoint",
    "tls": "no_tls",
    "nproc": "nproc_per_node",
    "monitor_hang": "hang_timeout",
    "start_hang_s": "start_timeout",
    "section_timeouts_s": "section_timeout",
    "out_of_section_s": "out_of_section_timeout",
    "attribution": "attribution",
    "stop_on_attribution": "attribution_stop",
    "gpu_memory_reclaim_timeout_s": "gpu_memory_reclaim_timeout",
    "gpu_memory_poll_interval_s": "gpu_memory_poll_interval",
    "preempt_notice_s": "preempt_notice",
    "stop_grace_s": "stop_grace",
    "power_ramp_s": "power_ramp",
    "mttr_s": "mttr",
    "zygote": "no_zygote",
    "signals": "signals_to_handle",
    "lease_s": "rdzv_conf",
    "join_timeout_s": "rdzv_conf",
    "last_call_s": "rdzv_conf",
    "is_host": "rdzv_conf",
    "start_hang_given": "start_timeout",
}
"""Field of RunConfig -> the flag it is from, where the two have different names."""
NO_FLAG = frozenset({"script", "args", "levels", "capture_s", "origins"})
"""Fields of RunConfig that no flag sets."""


def effective_config(ctx: click.Context, script: str, args: list[str], flags: dict[str, Any]) -> RunConfig:
    """Configuration of a launcher. Raises ConfigError naming the flag (and the file), the value seen and what is valid."""
    try:
        return _launcher_config(ctx, script, args, _with_ft_flags(ctx, flags))
    except ConfigError as error:
        raise _located(ctx, error) from None


def coordinator_config(ctx: click.Context, flags: dict[str, Any]) -> RunConfig:
    """Configuration of a coordinator on its own, from `job_flags`: no script, no ranks here, `node` is this host's name.

    Without --rdzv-endpoint it is reached at this host's name and the default port. Raises ConfigError.
    """
    from keepstep.launcher.config import RunConfig

    try:
        fields = _job_fields(ctx, flags, standalone=False)
        if not fields["endpoints"]:
            fields["endpoints"] = _endpoints(flags["rdzv_endpoint"]) or [f"{socket.gethostname()}:{COORDINATOR_PORT}"]
        return RunConfig(node=_host(), script="", origins=_origins(ctx, flags), **fields)
    except ConfigError as error:
        raise _located(ctx, error) from None


def _launcher_config(ctx: click.Context, script: str, args: list[str], flags: dict[str, Any]) -> RunConfig:
    from keepstep.launcher.config import RunConfig
    from keepstep.launcher.coordination.topology import own_levels
    from keepstep.launcher.ranks.zygote import DEFAULT_PRELOAD

    job = _job_fields(ctx, flags, flags["standalone"])
    nproc = _nproc(flags["nproc_per_node"])
    _check_replicas(flags["replica_size"], job, nproc)
    mode = "exec" if flags["no_python"] else "module" if flags["module"] else "script"
    preload = list(DEFAULT_PRELOAD) if flags["preload"] is None else [m for m in flags["preload"].split(",") if m]
    _note_what_has_no_effect(ctx, flags)
    trust, store = checked_options(flags), given_store(flags)
    return RunConfig(
        **job,
        node=_node(ctx, flags, several=job["nnodes"] + job["spares"] > 1),
        script=script,
        args=args,
        mode=mode,
        nproc=nproc,
        role=flags["role"],
        local_addr=_address(flags["local_addr"]),
        master_addr=flags["master_addr"] if _given(ctx, "master_addr") else None,
        master_port=flags["master_port"],
        monitor_hang=_hang(flags["hang_timeout"]),
        start_hang_s=flags["start_timeout"],
        start_hang_given=_given(ctx, "start_timeout"),
        node_rank=flags["node_rank"] if _given(ctx, "node_rank") else None,
        levels=own_levels(os.environ),
        section_timeouts_s=_sections(flags["section_timeout"]),
        out_of_section_s=flags["out_of_section_timeout"],
        stop_grace_s=_stop_grace(ctx, flags),
        preempt_notice_s=flags["preempt_notice"],
        gpu_memory_reclaim_timeout_s=flags["gpu_memory_reclaim_timeout"],
        gpu_memory_tolerance_mb=flags["gpu_memory_tolerance_mb"],
        gpu_memory_poll_interval_s=flags["gpu_memory_poll_interval"],
        node_check=flags["node_check"],
        preload=preload,
        zygote=not flags["no_zygote"] and mode != "exec",
        failure_prior=_failure_prior(flags["failure_prior"]),
        power_ramp_s=flags["power_ramp"],
        advice=flags["advice"],
        mttr_s=flags["mttr"],
        inject=[parse_injection(spec) for spec in flags["inject"]],
        tee=_std(flags["tee"], "--tee"),
        redirects=_std(flags["redirects"], "--redirects"),
        log_dir=flags["log_dir"],
        local_ranks_filter=_ranks(flags["local_ranks_filter"]),
        trust_key=list(trust.trust_key),
        trust_identity=list(trust.trust_identity),
        trust_issuer=list(trust.trust_issuer),
        trust_root=list(trust.trust_root),
        unsigned=trust.unsigned,
        ckpt_signer=trust.ckpt_signer,
        ckpt_signer_cert=trust.ckpt_signer_cert,
        on_busy=flags["on_busy"],
        store_endpoint=store.endpoint,
        store_region=store.region,
        store_allow_http=store.allow_http,
        kms_key=store.kms_key,
        fresh_start=flags["fresh_start"],
        virtual_local_rank=flags["virtual_local_rank"],
        signals=_signals(flags["signals_to_handle"]),
        origins=_origins(ctx, flags),
    )


def _job_fields(ctx: click.Context, flags: dict[str, Any], standalone: bool) -> dict[str, Any]:
    """The fields that concern the whole job, from `job_flags` alone."""
    from keepstep.launcher.files import keepstep_home

    _refuse_unbuilt(flags)
    if flags["rdzv_backend"] not in ("static", "c10d"):
        raise ConfigError(
            f"--rdzv-backend {flags['rdzv_backend']!r}: keepstep has its own coordinator; use c10d or leave it out"
        )
    min_nodes, nnodes = (1, 1) if standalone else _nnodes(flags["nnodes"])
    if standalone and flags["spares"]:
        raise ConfigError(f"--spares {flags['spares']}: --standalone is one node; leave one of the two out")
    several = nnodes + flags["spares"] > 1
    run_id = _run_id(flags, several, standalone)
    conf = parse_rdzv_conf(flags["rdzv_conf"])
    return {
        "run_id": run_id,
        "run_dir": str(Path(flags["run_dir"] or keepstep_home() / "runs" / run_id).absolute()),
        "nnodes": nnodes,
        "min_nodes": min_nodes,
        "spares": flags["spares"],
        "replica_size": flags["replica_size"],
        "topology": _file(flags["topology"], "--topology"),
        "endpoints": _job_endpoints(ctx, flags) if several else [],
        "token_file": _path(flags["token_file"]),
        "tls": not flags["no_tls"],
        "log_port": flags["log_port"],
        "log_prefix": _path(flags["log_prefix"]),
        "max_restarts": flags["max_restarts"],
        "checkpoint_iteration_file": _path(flags["checkpoint_iteration_file"]),
        "max_no_progress_cycles": flags["max_no_progress_cycles"],
        "min_progress_iterations": flags["min_progress_iterations"],
        "no_restart_exit_code": flags["no_restart_exit_code"],
        "attribution": flags["attribution"] == "on",
        "stop_on_attribution": flags["attribution_stop"],
        "lease_s": conf.lease_s,
        "join_timeout_s": conf.join_timeout_s,
        "last_call_s": conf.last_call_s,
        "is_host": conf.is_host,
        "gang_check": flags["gang_check"],
        "memory_tier": flags["memory_tier"] or ("peer" if nnodes > 1 else "node"),
    }


def _with_ft_flags(ctx: click.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """Values given under ft_launcher's names. Raises ConfigError when one is given under ours too."""
    taken = ctx.meta.get(ft_flags.META, {})
    for name, (shown, _) in taken.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"{shown}: the same as --{name.replace('_', '-')}, which is given too; keep one")
    return flags | {name: value for name, (_, value) in taken.items()}


def _located(ctx: click.Context, error: ConfigError) -> ConfigError:
    """The same error with file and line in front when the flag it is about was set by --config."""
    flag = re.match(r"--([a-z-]+)", str(error))
    place = where_in_file(ctx, flag[1].replace("-", "_")) if flag else ""
    return ConfigError(f"{place}{error}") if place else error


def _given(ctx: click.Context, name: str) -> bool:
    return name in ctx.meta.get(ft_flags.META, {}) or ctx.get_parameter_source(name) not in (
        ParameterSource.DEFAULT,
        None,
    )


def _origins(ctx: click.Context, flags: dict[str, Any]) -> dict[str, str]:
    return {name: _origin(ctx, name) for name in sorted(flags)}


def _origin(ctx: click.Context, name: str) -> str:
    """ "flag", "PET_X", "file", or "default"."""
    if name in ctx.meta.get(ft_flags.META, {}):
        return "flag"
    if name == "stop_grace" and not _given(ctx, name):
        if _given(ctx, "shutdown_timeout"):
            return _origin(ctx, "shutdown_timeout")
        if os.environ.get(ENV_SHUTDOWN_TIMEOUT):
            return ENV_SHUTDOWN_TIMEOUT
    names = {
        ParameterSource.COMMANDLINE: "flag",
        ParameterSource.ENVIRONMENT: f"PET_{name.upper()}",
        ParameterSource.DEFAULT_MAP: "file",
    }
    return names.get(ctx.get_parameter_source(name) or ParameterSource.DEFAULT, "default")


def _refuse_unbuilt(flags: dict[str, Any]) -> None:
    for name, what in (("server", "there is no keepstep server yet"), ("policy", "there are no policy files yet")):
        if flags[name] is not None:
            raise ConfigError(f"--{name} {flags[name]!r}: {what}; leave it out")


def _note_what_has_no_effect(ctx: click.Context, flags: dict[str, Any]) -> None:
    """Say on stderr that a flag of torchrun which would change what the job does is not honoured."""
    for name, instead in (
        ("numa_binding", "start keepstep run under numactl, or bind in the script"),
        ("logs_specs", "output goes where --tee, --redirects, --log-dir and --log-prefix say"),
        ("event_log_handler", "events are in the journal of the run folder"),
        ("duplicate_stdout_filters", "all output is in logs/ of the run folder"),
        ("duplicate_stderr_filters", "all output is in logs/ of the run folder"),
    ):
        if _given(ctx, name) and flags[name]:
            note(f"--{name.replace('_', '-')} has no effect here; {instead}")


def _failure_prior(text: str | None) -> str | None:
    """--failure-prior as ranks get it: the number, or the record that the file holds. Raises ConfigError."""
    if text is None:
        return None
    from keepstep.goodput.rates import parse_prior
    from keepstep.trainer.cadence import prior_text

    held = " ".join(prior_text(text, "--failure-prior").split())
    parse_prior(held, "default", "--failure-prior")
    return held


def _run_id(flags: dict[str, Any], several: bool, standalone: bool) -> str:
    """--rdzv-id, else the scheduler's job id, else the run folder's name, else random."""
    given = None if standalone or flags["rdzv_id"] == "none" else flags["rdzv_id"]
    run_id = given or os.environ.get("SLURM_JOB_ID")
    if run_id is None:
        if several:
            nodes = f"--nnodes {flags['nnodes']}" + (f" --spares {flags['spares']}" if flags["spares"] else "")
            raise ConfigError(f"{nodes}: give every launcher of the job the same --rdzv-id ID")
        run_id = (Path(flags["run_dir"]).name if flags["run_dir"] else None) or f"run-{secrets.token_hex(4)}"
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"--rdzv-id {run_id!r}: {NAME_RULE}")
    return run_id


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _node(ctx: click.Context, flags: dict[str, Any], several: bool) -> str:
    node: str = flags["node_name"] or _host()
    if not flags["node_name"] and several and _given(ctx, "node_rank"):
        node += f"-{flags['node_rank']}"
    if not RUN_ID.fullmatch(node):
        # It is the name of a folder too.
        raise ConfigError(f"--node-name {node!r}: {NAME_RULE}")
    return node


def _nnodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    low = int(found[1]) if found else 0
    high = int(found[2] or low) if found else 0
    if low < 1:
        raise ConfigError(f"--nnodes {text!r}: give N, or MIN:MAX, with N or MIN >= 1")
    if high < low:
        raise ConfigError(f"--nnodes {text!r}: MIN {low} is more than MAX {high}")
    return low, high


def _nproc(text: str) -> int:
    from keepstep.launcher.ranks.spawn import SpawnError, local_world_size

    try:
        return local_world_size(text)
    except SpawnError as error:
        raise ConfigError(str(error)) from None


def _check_replicas(size: int, job: dict[str, Any], nproc: int) -> None:
    """A job of full size is a whole number of replicas, and its smallest size holds one."""
    for nodes, what in ((job["nnodes"], "at most"), (job["min_nodes"], "at least")):
        ranks = nodes * nproc
        if ranks < size or (nodes == job["nnodes"] and ranks % size):
            raise ConfigError(
                f"--replica-size {size}: {nodes} nodes ({what}) of {nproc} ranks are {ranks} ranks, which is no whole "
                "number of replicas; change --nnodes, --nproc-per-node or --replica-size"
            )


def _job_endpoints(ctx: click.Context, flags: dict[str, Any]) -> list[str]:
    """Where the coordinator of several nodes is; none means: these nodes are launchers on this host.

    torchrun's static rendezvous names the host of rank 0 instead, by --master-addr.
    """
    if flags["rdzv_endpoint"]:
        return _endpoints(flags["rdzv_endpoint"])
    host = flags.get("master_addr") if flags["rdzv_backend"] == "static" else None
    if host is None or not _given(ctx, "master_addr") or host in LOOPBACK:
        return []
    return [_endpoint(host, f"--master-addr {host!r}")]


def _endpoints(text: str) -> list[str]:
    if not text:
        return []
    found = [_endpoint(item.strip(), f"--rdzv-endpoint {text!r}") for item in text.split(",")]
    twice = next((e for i, e in enumerate(found) if e in found[:i]), None)
    if twice:
        raise ConfigError(f"--rdzv-endpoint {text!r}: {twice} is given twice")
    return found


def _endpoint(text: str, what: str) -> str:
    """host:port with the default port where there is none; IPv6 addresses in brackets."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%a-z]+\]|[^\s:\[\]/]+)(?::([0-9]{1,5}))?", text)
    port = int(found[2] or COORDINATOR_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise ConfigError(f"{what}: give HOST or HOST:PORT, an IPv6 address in brackets, a port from 1 to 65535")
    return f"{found[1]}:{port}"


def _address(text: str | None) -> str | None:
    """A host name or an address without a port, as --local-addr takes it."""
    if text is None:
        return None
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
            raise ConfigError(f"--local-addr {text!r}: give an address or a host name, without a port") from None
    return text


def _path(text: str | None) -> str | None:
    return None if text is None else str(Path(text).absolute())


def _file(text: str | None, flag: str) -> str | None:
    if text is not None and not Path(text).is_file():
        raise ConfigError(f"{flag} {text!r}: no such file (working directory {Path.cwd()})")
    return _path(text)


def _stop_grace(ctx: click.Context, flags: dict[str, Any]) -> float:
    """--stop-grace, else torchrun's --shutdown-timeout, else the variable that torchrun reads for it, else 15 s."""
    if _given(ctx, "stop_grace"):
        return float(flags["stop_grace"])
    if flags["shutdown_timeout"] is not None:
        return float(flags["shutdown_timeout"])
    text = os.environ.get(ENV_SHUTDOWN_TIMEOUT)
    if not text:
        return float(flags["stop_grace"])
    if not text.isdigit():
        raise ConfigError(f"{ENV_SHUTDOWN_TIMEOUT}={text!r}: give a whole number of seconds, or use --stop-grace")
    return float(text)


def _hang(text: str) -> str:
    if text in ("auto", "off"):
        return text
    try:
        if 0 < float(text) < math.inf:
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
        if not equals or not name or not 0 < limits[name] < math.inf:
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
