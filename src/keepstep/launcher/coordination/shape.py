"""From the configuration of a run to what decisions depend on."""

from __future__ import annotations

from pathlib import Path

from keepstep.goodput.settings import REPAIR_S, Source
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.state import JobShape
from keepstep.launcher.coordination.topology import read_topology


def advice_source(config: RunConfig) -> Source | None:
    """What advice starts from, None when none is to be followed."""
    if config.advice != "auto":
        return None
    return Source(prior=config.failure_prior, repair_s=REPAIR_S if config.mttr_s is None else config.mttr_s)


def job_shape(config: RunConfig) -> JobShape:
    """The part of the configuration that decisions depend on. Raises ConfigError (topology file)."""
    return JobShape(
        run_id=config.run_id,
        nnodes=config.nnodes,
        min_nodes=min(config.min_nodes, config.nnodes),
        spares=config.spares,
        replica_size=config.replica_size,
        max_restarts=config.max_restarts,
        master_addr=config.master_addr,
        master_port=config.master_port,
        max_no_progress_cycles=config.max_no_progress_cycles,
        min_progress_iterations=config.min_progress_iterations,
        no_restart_exit_code=config.no_restart_exit_code,
        stop_on_attribution=config.stop_on_attribution == "no-restart",
        gang_check=config.gang_check,
        marker_file=config.checkpoint_iteration_file is not None,
        advice=advice_source(config),
        topology=read_topology(Path(config.topology)) if config.topology else {},
    )
