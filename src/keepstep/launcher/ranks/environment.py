"""Environment of ranks: what torchrun sets, what keepstep adds, and defaults for NCCL that the user's own values go before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepstep.checkpoint.storage.source import StoreOptions, store_environment
from keepstep.checkpoint.trust.policy import TrustOptions, environment_of
from keepstep.launcher.config import RunConfig
from keepstep.launcher.messages import StartCycle
from keepstep.records import frames
from keepstep.records.codec import to_json
from keepstep.records.inject import NODE_KINDS, Injection

HIDDEN = ("KEEPSTEP_JOB_TOKEN", "KEEPSTEP_DEBUG")

NCCL_DEFAULTS: dict[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "NCCL_IB_TIMEOUT": "22",
    "NCCL_IB_RETRY_CNT": "7",
}
"""3: a failed collective ends the process without waiting for an abort that may hang itself. Monitoring ends a process whose
watchdog thread stands still for 600 s. 2000 collectives are kept for the flight recorder, which is written when one times out.
InfiniBand waits 4.096 us * 2^22 (17 s) for an answer, eight times (137 s in all), which a short loss of a link survives."""

DUMP_FILE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Prefix of the flight recorder's dump; torch appends the rank."""
DUMP_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Prefix of the pipe that triggers a dump; torch appends the rank and ".pipe" (DumpPipe in torch's ProcessGroupNCCL.hpp)."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("NCCL_ASYNC_ERROR_HANDLING",),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": ("TORCH_FR_BUFFER_SIZE",),
    DUMP_FILE: ("TORCH_FR_DUMP_TEMP_FILE",),
}
"""Variable -> further names under which torch reads the same: the user may have set one of those."""


def cycle_environment(
    config: RunConfig,
    command: StartCycle | None,
    local_rank: int,
    agent_socket: Path,
    cycle_info: Path | None,
    error_file: Path | None,
) -> dict[str, str]:
    """The whole environment of one rank. Without a command: what is the same in all ranks and cycles (for the zygote)."""
    env = {k: v for k, v in os.environ.items() if k not in HIDDEN}
    if config.nproc > 1:
        # As torchrun does: otherwise every rank takes all cores.
        env.setdefault("OMP_NUM_THREADS", "1")
    env[frames.ENV_RUN_ID] = config.run_id
    env[frames.ENV_RUN_DIR] = config.run_dir
    env[frames.ENV_AGENT_SOCKET] = str(agent_socket)
    env |= {name: value for name, value in NCCL_DEFAULTS.items() if _setter(name) is None}
    env |= checkpoint_environment(config)
    if config.fresh_start:
        env[frames.ENV_FRESH_START] = "1"
    if config.failure_prior is not None:
        env[frames.ENV_FLEET_PRIOR] = config.failure_prior
    if config.power_ramp_s:
        env[frames.ENV_POWER_RAMP_S] = f"{config.power_ramp_s:g}"
    if command is None:
        return env
    rank = command.first_rank + local_rank
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(command.world_size),
        "LOCAL_WORLD_SIZE": str(config.nproc),
        "GROUP_RANK": str(command.node_index),
        "GROUP_WORLD_SIZE": str(command.nnodes),
        "ROLE_NAME": config.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(command.world_size),
        "MASTER_ADDR": command.master_addr,
        "MASTER_PORT": str(command.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(command.cycle),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(command.agent_store),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        frames.ENV_ATTEMPT: str(command.attempt),
        frames.ENV_CYCLE: str(command.cycle),
        frames.ENV_MEMORY_TIER: config.memory_tier,
        frames.ENV_PREEMPT_NOTICE_S: f"{stop_notice_s(config):g}",
        frames.ENV_CYCLE_INFO: str(cycle_info),
        "NVRX_CURRENT_CYCLE_INFO": str(cycle_info),
    }
    env |= _dump_paths(config, command.cycle)
    if config.virtual_local_rank:
        # torchrun's meaning: every rank sees one device and calls itself local rank 0.
        visible = [d for d in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d] or [
            str(i) for i in range(config.nproc)
        ]
        env |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": visible[local_rank % len(visible)]}
    mine = [i for i in config.inject if _is_due_in(i, config, command, local_rank)]
    if mine:
        env[frames.ENV_INJECT] = to_json(mine).decode()
    return env


def checkpoint_environment(config: RunConfig) -> dict[str, str]:
    """Variables that tell a rank's Checkpointer whom to trust, how to sign, how to reach an object store and what to do when a save
    is in flight. What the flags leave open, the user's own variables may say.
    """
    store = StoreOptions(
        endpoint=config.store_endpoint,
        region=config.store_region,
        kms_key=config.kms_key,
        allow_http=config.store_allow_http,
    )
    busy = {frames.ENV_ON_BUSY: config.on_busy} if config.on_busy is not None else {}
    trust = environment_of(msgspec.convert(config, TrustOptions, from_attributes=True))
    return trust | store_environment(store) | busy


def planned_defaults(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Name, value and who sets it ("keepstep", or the variable of this process) of everything ranks get besides torchrun's.

    Paths are those of cycle 0. For people: nothing is created.
    """
    prefix = recorder_prefix(config, 0)
    for name, value in {**NCCL_DEFAULTS, DUMP_FILE: prefix, DUMP_PIPE: prefix}.items():
        setter = _setter(name)
        yield (name, value, "keepstep") if setter is None else (setter, os.environ[setter], "this shell")
    for name, value in checkpoint_environment(config).items():
        yield name, value, "keepstep"
    yield "TORCHELASTIC_ERROR_FILE", "a file for each rank in the node's folder", "keepstep"


def _setter(name: str) -> str | None:
    """The variable of this process by which the user has set `name`, None when there is none."""
    return next((n for n in (name, *OTHER_NAMES.get(name, ())) if n in os.environ), None)


def recorder_prefix(config: RunConfig, cycle: int) -> str:
    """What torch puts before the rank in the names of flight-recorder dumps and of the pipes that trigger them."""
    return str(Path(config.run_dir) / "nodes" / config.node / "nccl" / f"cycle-{cycle:04d}-rank_")


def _dump_paths(config: RunConfig, cycle: int) -> dict[str, str]:
    """Where this cycle's flight recorder dumps go, and the pipes that trigger one. Creates their folder.

    Torch ends the process when it cannot make its pipe, so none is asked for where the file system has no pipes.
    """
    prefix = recorder_prefix(config, cycle)
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return {}
    paths = {} if _setter(DUMP_FILE) else {DUMP_FILE: prefix}
    if _setter(DUMP_PIPE) is None and _has_pipes(folder):
        paths[DUMP_PIPE] = prefix
    return paths


def _has_pipes(folder: Path) -> bool:
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.unlink(missing_ok=True)
        os.mkfifo(probe, 0o600)
        probe.unlink()
    except OSError:
        return False
    return True


def uses_trainer(config: RunConfig) -> bool:
    """Whether the script is expected to report steps before it has: its text names keepstep. Corrected by what ranks then do."""
    if config.mode != "script":
        return False
    try:
        return "keepstep" in Path(config.script).read_text(errors="replace")
    except OSError:
        return False


NOTICE_RESERVE_S = 5.0


def stop_notice_s(config: RunConfig) -> float:
    """Seconds that ranks get between a request to stop and being stopped.

    Of the notice that the scheduler grants, NOTICE_RESERVE_S (at most a quarter) is kept for stopping them and for the records.
    """
    if config.preempt_notice_s is None:
        return config.stop_grace_s
    return config.preempt_notice_s - min(NOTICE_RESERVE_S, config.preempt_notice_s / 4)


def _is_due_in(injection: Injection, config: RunConfig, command: StartCycle, local_rank: int) -> bool:
    """Whether this rank comes to the step of that injection and causes it, or asks its launcher to."""
    if injection.step is None or injection.cycle != command.cycle or injection.node not in (None, config.node):
        return False
    if injection.kind in NODE_KINDS and injection.node is not None:
        return local_rank == 0
    return injection.rank == command.first_rank + local_rank
