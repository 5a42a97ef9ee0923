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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WAIT = _words("""
    wait waiting waits idle comm communication allreduce allgather reducescatter alltoall nccl sync barrier collective
    exposed blocked stall
""")
_HOST = _words("""
    host cpu data dataload loader dataloader loading prep preprocess input h2d io read python gc launch fetch tokenize
    decode
""")
_SUPPLY = _words("data input loader dataloader io fetch storage disk")
"""Waiting for these is slow host work, not waiting for the other ranks."""
_STEP = _words("step iter iteration total epoch batch train e2e")
_COMPUTE = _words("""
    compute fwd forward bwd backward gemm matmul kernel optimizer opt gpu attn mlp loss model busy rtt
""")
_TIMED = _words("time latency elapsed duration times timing")
_SCORE = _words("score scores relative perf")
_THROUGHPUT = _words("tflops tflop tf gflops flops tps mfu throughput etpt imgs rate")
_BANDWIDTH = _words("bw busbw algbw bandwidth gbps gbs gb")
_NEVER = _words("""
    timeout timestamp start end version port pid size count lr interval limit threshold seq eta
""")

_LEVEL_NAMES = {
    "temperature": "temp gtemp gpu_temp temperature temp_c",
    "temperature_memory": "mtemp mem_temp hbm_temp",
    "clock_sm": "clk clock pclk smclk sm_clock sm_clk gpu_clock sm_mhz clock_mhz clk_mhz gpc_clock mhz sm_clock_mhz clocks",
    "clock_sm_max": "max_clock sm_max clk_max",
    "power": "pwr power power_w watts draw power_draw",
    "power_limit": "power_limit limit_w plimit cap_w power_cap cap",
    "power_default": "power_default default_limit",
    "utilisation": "util gpu_util gputl sm sm_util utilization util_pct",
    "pstate": "pstate perf_state",
    "pcie_gen": "gen pcie_gen link_gen gen_cur pcie_gen_cur gen_current",
    "pcie_gen_max": "gen_max pcie_gen_max max_gen",
    "pcie_width": "width pcie_width link_width lanes width_cur pcie_lanes",
    "pcie_width_max": "width_max pcie_width_max",
    "ecc_corrected_volatile": "sbecc sbe ecc_sbe ecc_ce",
    "ecc_uncorrected_volatile": "dbecc dbe ecc_dbe ecc_ue",
    "pcie_replays": "replays pcie_replay pcie_replays",
    "reasons": "throttle reasons throttle_reason throttle_reasons clocks_event_reasons reason slowdown",
    "remap_pending": "remap_pending",
    "remap_failed": "remap_failed",
}
GPU_NAMES = {name: level for level, names in _LEVEL_NAMES.items() for name in names.split()}
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
    joined = re.sub(r"(all|reduce)[ _-](reduce|gather|scatter|to[ _-]all)", r"\1\2", spaced.lower())
    return tuple(re.findall(r"[a-z]+|\d+", joined))


@functools.lru_cache(maxsize=4096)
def metric_kind(name: str, unit: str = "") -> MetricKind | None:
    """What is measured; None for everything that says nothing about speed."""
    words = frozenset(words_of(name))
    unit = unit.lower()
    if words & _NEVER:
        return None
    if unit in {"gb/s", "gbps", "gib/s", "mb/s"} or words & _BANDWIDTH:
        return "bandwidth"
    if {"per", "s"} <= words or {"per", "sec"} <= words or {"per", "second"} <= words:
        return "throughput"
    if unit in {"tflops", "tflop/s", "tok/s", "tokens/s", "it/s", "samples/s"} or words & _THROUGHPUT:
        return "throughput"
    if words & _SCORE:
        return "score"
    timed = unit in TIME_UNITS or bool(words & (TIME_UNITS.keys() | _TIMED))
    if not timed:
        return None
    if words & _WAIT and not words & _SUPPLY:
        return "wait"
    if words & (_HOST | _SUPPLY):
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
