"""Environment of ranks: what torchrun sets, what keepstep adds."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.launcher.config import RunConfig
from keepstep.launcher.messages import StartCycle
from keepstep.records import frames
from keepstep.records.codec import to_json

HIDDEN = ("KEEPSTEP_JOB_TOKEN", "KEEPSTEP_DEBUG")


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
    if config.fresh_start:
        env[frames.ENV_FRESH_START] = "1"
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
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        frames.ENV_ATTEMPT: str(command.attempt),
        frames.ENV_CYCLE: str(command.cycle),
        frames.ENV_CYCLE_INFO: str(cycle_info),
        "NVRX_CURRENT_CYCLE_INFO": str(cycle_info),
    }
    if config.virtual_local_rank:
        # torchrun's meaning: every rank sees one device and calls itself local rank 0.
        visible = [d for d in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d] or [
            str(i) for i in range(config.nproc)
        ]
        env |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": visible[local_rank % len(visible)]}
    mine = [
        i
        for i in config.inject
        if i.cycle == command.cycle and i.rank == rank and i.step is not None and i.node in (None, config.node)
    ]
    if mine:
        env[frames.ENV_INJECT] = to_json(mine).decode()
    return env


def uses_trainer(config: RunConfig) -> bool:
    """Whether the script is expected to report steps before it has: its text names keepstep. Corrected by what ranks then do."""
    if config.mode != "script":
        return False
    try:
        return "keepstep" in Path(config.script).read_text(errors="replace")
    except OSError:
        return False
