"""Checkpoint size, host memory, requests and times from the size of a model, for whoever has not measured them.

The state is taken as spread evenly over all GPUs (fully sharded). Mixed-precision Adam keeps about 16 bytes a parameter: weights 2,
master weights 4, two moments 8, rest 2.
"""

from __future__ import annotations

import math

import msgspec

from keepstep.records.errors import ConfigError

BYTES_PER_PARAM = 16.0
STAGE_GBPS = 20.0
"""GB/s from one GPU into pinned host memory when nothing was measured: an assumption, two thirds of PCIe 4.0 x16 (31.5)."""
PUTS_PER_PREFIX = 3500.0
"""Requests per second that Amazon S3 takes under one partitioned prefix."""
PART_BYTES = 64 * 2**20
"""Of one request: files above are sent in parts."""


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the size of a model. Bytes of 8 bits, GB of 10^9."""

    params: float
    bytes_per_param: float
    nodes: int
    gpus_per_node: int
    storage_gbps: float
    stage_gbps: float
    checkpoint_bytes: float
    bytes_per_node: float
    bytes_per_gpu: float
    host_ram_bytes_per_node: float
    """To stage one save."""
    host_ram_overlapped_bytes_per_node: float
    """When the next save is staged before the last is written: twice."""
    put_requests: int
    put_rate_per_s: float
    """While a save is written at `storage_gbps`."""
    put_limit_per_s: float = PUTS_PER_PREFIX
    prefixes_needed: int
    first_burst_s: float
    """All GPUs begin their first request at once: so long until one prefix has taken these."""
    block_s: float
    """Copy to host memory; the rest is written beside training."""
    block_synchronous_s: float
    """When training waits for the write."""
    persist_lag_s: float
    """Write of all nodes together at `storage_gbps`."""
    load_s: float
    """Reading it back at the same speed."""


def derive(
    params: float,
    nodes: int,
    gpus_per_node: int = 8,
    *,
    bytes_per_param: float = BYTES_PER_PARAM,
    storage_gbps: float,
    stage_gbps: float = STAGE_GBPS,
) -> Derived:
    """Everything above. `storage_gbps`: GB/s that storage takes from all nodes together; `stage_gbps`: GB/s of one GPU.

    Raises ConfigError naming what is not a number above 0.
    """
    given = {"--params": params, "--bytes-per-param": bytes_per_param, "--storage-gbps": storage_gbps}
    given |= {"--stage-gbps": stage_gbps, "--nodes": nodes, "--gpus-per-node": gpus_per_node}
    for flag, value in given.items():
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{flag} {value:g}: a number above 0")
    size = params * bytes_per_param
    gpus = nodes * gpus_per_node
    write_s = size / (storage_gbps * 1e9)
    puts = gpus * max(1, math.ceil(size / gpus / PART_BYTES))
    rate = puts / write_s
    stage_s = size / gpus / (stage_gbps * 1e9)
    return Derived(
        params=params,
        bytes_per_param=bytes_per_param,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        storage_gbps=storage_gbps,
        stage_gbps=stage_gbps,
        checkpoint_bytes=size,
        bytes_per_node=size / nodes,
        bytes_per_gpu=size / gpus,
        host_ram_bytes_per_node=size / nodes,
        host_ram_overlapped_bytes_per_node=2.0 * size / nodes,
        put_requests=puts,
        put_rate_per_s=rate,
        prefixes_needed=max(1, math.ceil(rate / PUTS_PER_PREFIX)),
        first_burst_s=gpus / PUTS_PER_PREFIX,
        block_s=stage_s,
        block_synchronous_s=write_s,
        persist_lag_s=write_s,
        load_s=write_s,
    )
