"""What a column or key of somebody's table measures, from its name and unit."""

from __future__ import annotations

import functools
import re
from typing import Literal

from keepstep.catalog.counters import counter_named
from keepstep.sources.snapshots.fields import REASONS

MetricKind = Literal["compute", "host", "step", "wait", "score", "throughput", "bandwidth"]
"""Times: compute of the GPU, work of the host (data, launch), whole steps, waiting for others. Of the rest more is better."""

TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "msec": 1e-3, "min": 60.0}
_WAIT = frozenset({
    "wait", "waiting", "waits", "idle", "comm", "communication", "allreduce", "allgather", "reducescatter", "alltoall", "a2a", "nccl", "sync",
    "barrier", "collective", "exposed", "blocked", "stall",
})  # fmt: skip
_HOST = frozenset({
    "host", "cpu", "data", "dataload", "loader", "dataloader", "loading", "prep", "preprocess", "input", "h2d", "io", "read", "python", "gc", "launch", "fetch",
    "tokenize", "decode",
})  # fmt: skip
_STEP = frozenset({"step", "iter", "iteration", "total", "epoch", "batch", "train", "e2e"})
_COMPUTE = frozenset({
    "compute", "fwd", "forward", "bwd", "backward", "gemm", "matmul", "kernel", "optimizer", "opt", "gpu", "attn", "mlp", "loss", "model",
    "busy", "rtt",
})  # fmt: skip
_TIMED = frozenset({"time", "latency", "elapsed", "duration", "times", "timing"})
_SCORE = frozenset({"score", "scores", "relative", "perf"})
_THROUGHPUT = frozenset({"tflops", "tflop", "tf", "gflops", "flops", "tps", "mfu", "throughput", "etpt", "imgs", "rate"})
_BANDWIDTH = frozenset({"bw", "busbw", "algbw", "bandwidth", "gbps", "gbs", "gb"})
_NEVER = frozenset({"timeout", "timestamp", "start", "end", "version", "port", "pid", "size", "count", "lr", "interval", "limit", "threshold", "seq", "eta", "max_time"})

GPU_NAMES = {
    "temp": "temperature", "gtemp": "temperature", "gpu_temp": "temperature", "temperature": "temperature", "temp_c": "temperature",
    "mtemp": "temperature_memory", "mem_temp": "temperature_memory", "hbm_temp": "temperature_memory",
    "clk": "clock_sm", "clock": "clock_sm", "pclk": "clock_sm", "smclk": "clock_sm", "sm_clock": "clock_sm", "sm_clk": "clock_sm", "gpu_clock": "clock_sm",
    "sm_mhz": "clock_sm", "clock_mhz": "clock_sm", "clk_mhz": "clock_sm", "gpc_clock": "clock_sm", "mhz": "clock_sm", "sm_clock_mhz": "clock_sm", "clocks": "clock_sm",
    "max_clock": "clock_sm_max", "sm_max": "clock_sm_max", "clk_max": "clock_sm_max",
    "pwr": "power", "power": "power", "power_w": "power", "watts": "power", "draw": "power", "power_draw": "power",
    "power_limit": "power_limit", "limit_w": "power_limit", "plimit": "power_limit", "cap_w": "power_limit", "power_cap": "power_limit", "cap": "power_limit",
    "power_default": "power_default", "default_limit": "power_default",
    "util": "utilisation", "gpu_util": "utilisation", "gputl": "utilisation", "sm": "utilisation", "sm_util": "utilisation", "utilization": "utilisation",
    "util_pct": "utilisation", "pstate": "pstate", "perf_state": "pstate",
    "gen": "pcie_gen", "pcie_gen": "pcie_gen", "link_gen": "pcie_gen", "gen_cur": "pcie_gen", "pcie_gen_cur": "pcie_gen", "gen_current": "pcie_gen",
    "gen_max": "pcie_gen_max", "pcie_gen_max": "pcie_gen_max", "max_gen": "pcie_gen_max",
    "width": "pcie_width", "pcie_width": "pcie_width", "link_width": "pcie_width", "lanes": "pcie_width", "width_cur": "pcie_width", "pcie_lanes": "pcie_width",
    "width_max": "pcie_width_max", "pcie_width_max": "pcie_width_max",
    "sbecc": "ecc_corrected_volatile", "sbe": "ecc_corrected_volatile", "ecc_sbe": "ecc_corrected_volatile", "dbecc": "ecc_uncorrected_volatile",
    "dbe": "ecc_uncorrected_volatile", "ecc_dbe": "ecc_uncorrected_volatile", "ecc_ce": "ecc_corrected_volatile", "ecc_ue": "ecc_uncorrected_volatile",
    "replays": "pcie_replays", "pcie_replay": "pcie_replays", "pcie_replays": "pcie_replays",
    "throttle": "reasons", "reasons": "reasons", "throttle_reason": "reasons", "throttle_reasons": "reasons", "clocks_event_reasons": "reasons",
    "reason": "reasons", "slowdown": "reasons", "remap_pending": "remap_pending", "remap_failed": "remap_failed",
}  # fmt: skip
"""Names that people and dmon give to levels of a GPU, in a table of GPUs."""

_REASON_WORDS = {
    "hw_thermal": ("hwthermal", "thermalhw"),
    "sw_thermal": ("swthermal", "thermal"),
    "hw_power_brake": ("powerbrake",),
    "hw_slowdown": ("hwslowdown",),
    "sw_power_cap": ("swpower", "powercap"),
    "app_clocks": ("applicationsclocks", "appclocks", "clockssetting"),
    "idle": ("gpuidle", "idle"),
}


@functools.lru_cache(maxsize=4096)
def words_of(name: str) -> tuple[str, ...]:
    """The words of a name: "gpuComputeMs" and "gpu_compute-ms" give gpu, compute, ms."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return tuple(re.findall(r"[a-z]+|\d+", spaced.lower().replace("all_reduce", "allreduce").replace("all-reduce", "allreduce")
                            .replace("all_gather", "allgather").replace("reduce_scatter", "reducescatter")))  # fmt: skip


@functools.lru_cache(maxsize=4096)
def metric_kind(name: str, unit: str = "") -> MetricKind | None:
    """What is measured; None for everything that says nothing about speed."""
    words = frozenset(words_of(name))
    unit = unit.lower()
    if words & _NEVER:
        return None
    if unit in {"gb/s", "gbps", "gib/s", "mb/s"} or words & _BANDWIDTH:
        return "bandwidth"
    if unit in {"tflops", "tflop/s", "tok/s", "tokens/s", "it/s", "samples/s"} or words & _THROUGHPUT:
        return "throughput"
    if words & _SCORE:
        return "score"
    timed = unit in TIME_UNITS or bool(words & (TIME_UNITS.keys() | _TIMED))
    if not timed:
        return None
    if words & _WAIT:
        return "wait"
    if words & _HOST:
        return "host"
    if words & _COMPUTE:
        return "compute"
    return "step" if words & _STEP else "compute"


def is_speed(name: str, unit: str) -> bool:
    """Whether a word in running text names a measurement: by what it means, not by the unit behind it alone."""
    if gpu_level(name) is not None:
        return unit.lower() not in TIME_UNITS
    known = _WAIT | _HOST | _STEP | _COMPUTE | _TIMED | _SCORE | _THROUGHPUT | _BANDWIDTH
    return metric_kind(name, unit) is not None and bool(frozenset(words_of(name)) & known)


def gpu_level(name: str) -> str | None:
    """The level of a GPU that a column of a table of GPUs holds."""
    plain = "_".join(words_of(name)).removesuffix("_current").removesuffix("_now")
    return GPU_NAMES.get(plain)


def reasons_in(text: str) -> dict[str, bool] | None:
    """Clock event reasons that a cell names in words or as a bit mask; None when it names none."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    if plain in {"none", "no", "notactive", "ok", "0", "0x0"} or re.fullmatch(r"0x0+", plain):
        return {}
    if re.fullmatch(r"0x[0-9a-f]{1,16}", plain):
        mask = int(plain, 16)
        return {f"reason_{name}": True for bit, name in REASONS.items() if mask & bit}
    for reason, spellings in _REASON_WORDS.items():
        if any(s in plain for s in spellings):
            return {f"reason_{reason}": True}
    return None


def is_counter(name: str) -> bool:
    """Whether a column holds totals of an error counter."""
    return counter_named(name) is not None
