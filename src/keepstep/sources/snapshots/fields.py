"""The levels of a GPU under one name each, whichever tool printed them.

One table: the name that events carry, what nvidia-smi calls it as a query and in its full listing, what DCGM calls it. Names that
nvidia-smi changed over the years stand beside each other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["number", "flag", "text", "reasons"]
"""flag: yes or no; reasons: a bit mask of clock event reasons."""


class Field(NamedTuple):
    """`query`: names of --query-gpu. `full`: last labels of the path in `nvidia-smi -q`, joined by " > ". `dcgm`: exporter
    names."""

    name: str
    kind: Kind
    query: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    dcgm: tuple[str, ...] = ()


REASONS = {
    0x1: "idle",
    0x2: "app_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display",
}
"""Bits of nvmlClocksEventReason* (nvml.h); DCGM_FI_DEV_CLOCK_THROTTLE_REASONS has the same."""

_REASON_WORDS = {
    "idle": (("gpu_idle",), "Idle"),
    "app_clocks": (("applications_clocks_setting",), "Applications Clocks Setting"),
    "sw_power_cap": (("sw_power_cap",), "SW Power Cap"),
    "hw_slowdown": (("hw_slowdown",), "HW Slowdown"),
    "sync_boost": (("sync_boost",), "Sync Boost"),
    "sw_thermal": (("sw_thermal_slowdown",), "SW Thermal Slowdown"),
    "hw_thermal": (("hw_thermal_slowdown",), "HW Thermal Slowdown"),
    "hw_power_brake": (("hw_power_brake_slowdown", "hw_power_brake"), "HW Power Brake Slowdown"),
    "display": (("display_clocks_setting",), "Display Clock Setting"),
}

_REASON_FIELDS = tuple(
    Field(
        f"reason_{name}",
        "flag",
        tuple(f"clocks_{word}_reasons.{q}" for word in ("event", "throttle") for q in queries),
        (*(f"Clocks {word} Reasons > {label}" for word in ("Event", "Throttle")), f"HW Slowdown > {label}", label),
    )
    for name, (queries, label) in _REASON_WORDS.items()
)

FIELDS: tuple[Field, ...] = (
    Field("product", "text", ("name", "gpu_name"), ("Product Name",)),
    Field("driver", "text", ("driver_version",), ("Driver Version",)),
    Field("pstate", "text", ("pstate",), ("Performance State",)),
    Field("utilisation", "number", ("utilization.gpu",), ("Utilization > Gpu", "Utilization > GPU"), ("GPU_UTIL",)),
    Field("pcie_gen", "number", ("pcie.link.gen.current", "pcie.link.gen.gpucurrent"),
          ("PCIe Generation > Current",), ("PCIE_LINK_GEN",)),
    Field("pcie_gen_max", "number", ("pcie.link.gen.max", "pcie.link.gen.hostmax"),
          ("PCIe Generation > Max",), ("PCIE_MAX_LINK_GEN",)),
    Field("pcie_gen_device_max", "number", ("pcie.link.gen.gpumax",), ("PCIe Generation > Device Max",)),
    Field("pcie_width", "number", ("pcie.link.width.current",), ("Link Width > Current",), ("PCIE_LINK_WIDTH",)),
    Field("pcie_width_max", "number", ("pcie.link.width.max",), ("Link Width > Max",), ("PCIE_MAX_LINK_WIDTH",)),
    Field("pcie_replays", "number", ("pcie.replay_counter",), ("Replays Since Reset",), ("PCIE_REPLAY_COUNTER",)),
    Field("temperature", "number", ("temperature.gpu",), ("Temperature > GPU Current Temp", "GPU Current Temp"),
          ("GPU_TEMP",)),
    Field("temperature_margin", "number", ("temperature.gpu.tlimit",), ("GPU T.Limit Temp",), ("GPU_TEMP_LIMIT",)),
    Field("temperature_slowdown", "number", (), ("GPU Slowdown Temp",), ("SLOWDOWN_TEMP",)),
    Field("temperature_memory", "number", ("temperature.memory",), ("Memory Current Temp",), ("MEMORY_TEMP",)),
    Field("clock_sm", "number", ("clocks.current.sm", "clocks.sm", "clocks.current.graphics", "clocks.gr"),
          ("Clocks > SM",), ("SM_CLOCK",)),
    Field("clock_sm_max", "number", ("clocks.max.sm", "clocks.max.graphics", "clocks.max.gr"),
          ("Max Clocks > SM",), ("MAX_SM_CLOCK",)),
    Field("clock_memory", "number", ("clocks.current.memory", "clocks.mem"), ("Clocks > Memory",), ("MEM_CLOCK",)),
    Field("power", "number", ("power.draw", "power.draw.average", "power.draw.instant"),
          ("Power Draw", "Average Power Draw", "Instantaneous Power Draw"), ("POWER_USAGE",)),
    Field("power_limit", "number", ("power.limit", "enforced.power.limit"),
          ("Current Power Limit", "Power Limit", "Enforced Power Limit"), ("POWER_MGMT_LIMIT",)),
    Field("power_default", "number", ("power.default_limit",), ("Default Power Limit",), ("POWER_MGMT_LIMIT_DEF",)),
    Field("ecc_mode", "flag", ("ecc.mode.current",), ("ECC Mode > Current",)),
    Field("ecc_corrected_volatile", "number", ("ecc.errors.corrected.volatile.total",),
          ("Volatile > Single Bit > Total",), ("ECC_SBE_VOL_TOTAL",)),
    Field("ecc_uncorrected_volatile", "number", ("ecc.errors.uncorrected.volatile.total",),
          ("Volatile > Double Bit > Total",), ("ECC_DBE_VOL_TOTAL",)),
    Field("ecc_corrected_aggregate", "number", ("ecc.errors.corrected.aggregate.total",),
          ("Aggregate > Single Bit > Total",), ("ECC_SBE_AGG_TOTAL",)),
    Field("ecc_uncorrected_aggregate", "number", ("ecc.errors.uncorrected.aggregate.total",),
          ("Aggregate > Double Bit > Total",), ("ECC_DBE_AGG_TOTAL",)),
    Field("sram_corrected_volatile", "number", ("ecc.errors.corrected.volatile.sram",),
          ("Volatile > SRAM Correctable",)),
    Field("sram_uncorrected_volatile", "number", ("ecc.errors.uncorrected.volatile.sram",),
          ("Volatile > SRAM Uncorrectable", "Volatile > SRAM Uncorrectable Parity", "Volatile > SRAM Uncorrectable SEC-DED")),
    Field("dram_corrected_volatile", "number",
          ("ecc.errors.corrected.volatile.dram", "ecc.errors.corrected.volatile.device_memory"), ("Volatile > DRAM Correctable",)),
    Field("dram_uncorrected_volatile", "number",
          ("ecc.errors.uncorrected.volatile.dram", "ecc.errors.uncorrected.volatile.device_memory"),
          ("Volatile > DRAM Uncorrectable",)),
    Field("dram_corrected_aggregate", "number", ("ecc.errors.corrected.aggregate.dram",), ("Aggregate > DRAM Correctable",)),
    Field("dram_uncorrected_aggregate", "number", ("ecc.errors.uncorrected.aggregate.dram",),
          ("Aggregate > DRAM Uncorrectable",)),
    Field("sram_uncorrected_aggregate", "number", ("ecc.errors.uncorrected.aggregate.sram",),
          ("Aggregate > SRAM Uncorrectable", "Aggregate > SRAM Uncorrectable Parity", "Aggregate > SRAM Uncorrectable SEC-DED")),
    Field("sram_threshold_exceeded", "flag", (), ("SRAM Threshold Exceeded",), ("THRESHOLD_SRM",)),
    Field("retired_single", "number", ("retired_pages.single_bit_ecc.count", "retired_pages.sbe"),
          ("Single Bit ECC",), ("RETIRED_SBE",)),
    Field("retired_double", "number", ("retired_pages.double_bit.count", "retired_pages.dbe"),
          ("Double Bit ECC",), ("RETIRED_DBE",)),
    Field("retired_pending", "flag", ("retired_pages.pending",),
          ("Pending Page Blacklist", "Pending Page Retirement", "Retired Pages > Pending"), ("RETIRED_PENDING",)),
    Field("remapped_corrected", "number", ("remapped_rows.correctable",), ("Remapped Rows > Correctable Error",),
          ("CORRECTABLE_REMAPPED_ROWS",)),
    Field("remapped_uncorrected", "number", ("remapped_rows.uncorrectable",), ("Remapped Rows > Uncorrectable Error",),
          ("UNCORRECTABLE_REMAPPED_ROWS",)),
    Field("remap_pending", "flag", ("remapped_rows.pending",), ("Remapped Rows > Pending",), ("ROW_REMAP_PENDING",)),
    Field("remap_failed", "flag", ("remapped_rows.failure",), ("Remapping Failure Occurred",), ("ROW_REMAP_FAILURE",)),
    Field("banks_low", "number", ("remapped_rows.histogram.low",), ("Bank Remap Availability Histogram > Low",)),
    Field("banks_none", "number", ("remapped_rows.histogram.none",), ("Bank Remap Availability Histogram > None",)),
    Field("recovery", "text", ("gpu_recovery_action",), ("GPU Recovery Action",), ("GET_GPU_RECOVERY_ACTION", "RECOVERY_ACTION")),
    Field("drain_and_reset", "flag", ("gpu_reset_status.drain_and_reset_recommended", "reset_status.drain_and_reset_recommended"),
          ("Drain and Reset Recommended",)),
    Field("reset_required", "flag", ("gpu_reset_status.reset_required", "reset_status.reset_required"), ("Reset Required",)),
    Field("mig_mode", "text", ("mig.mode.current",), ("MIG Mode > Current",)),
    Field("compute_mode", "text", ("compute_mode",), ("Compute Mode",)),
    Field("persistence", "flag", ("persistence_mode",), ("Persistence Mode",)),
    Field("fabric_state", "text", ("fabric.state",), ("Fabric > State",)),
    Field("fabric_status", "text", ("fabric.status",), ("Fabric > Status",)),
    Field("fabric_bandwidth", "text", ("fabric.health.bandwidth",), ("Health > Bandwidth",)),
    Field("fabric_summary", "text", ("fabric.health.summary",), ("Health > Summary",)),
    Field("memory_used_mib", "number", ("memory.used",), ("FB Memory Usage > Used",), ("FB_USED",)),
    Field("memory_total_mib", "number", ("memory.total",), ("FB Memory Usage > Total",)),
    Field("reasons", "reasons", ("clocks_event_reasons.active", "clocks_throttle_reasons.active"), (),
          ("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS")),
    Field("xid_last", "number", (), (), ("XID_ERRORS",)),
    Field("thermal_violation", "number", (), (), ("THERMAL_VIOLATION",)),
    Field("power_violation", "number", (), (), ("POWER_VIOLATION",)),
    Field("nvlink_crc_flit", "number", (), (), ("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",)),
    Field("nvlink_crc_data", "number", (), (), ("NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",)),
    Field("nvlink_replay", "number", (), (), ("NVLINK_REPLAY_ERROR_COUNT_TOTAL",)),
    Field("nvlink_recovery", "number", (), (), ("NVLINK_RECOVERY_ERROR_COUNT_TOTAL",)),
    *_REASON_FIELDS,
)  # fmt: skip

IDENTITY = {
    "index": "index",
    "gpu_index": "index",
    "uuid": "uuid",
    "gpu_uuid": "uuid",
    "pci.bus_id": "pci",
    "gpu_bus_id": "pci",
    "serial": "serial",
    "gpu_serial": "serial",
    "timestamp": "time",
}
"""Queries of nvidia-smi that tell which GPU and when."""

BY_NAME = {field.name: field for field in FIELDS}
BY_QUERY = {query: field for field in FIELDS for query in field.query}
BY_LABEL = {label.lower(): field for field in FIELDS for label in field.full}
BY_DCGM = {name: field for field in FIELDS for name in field.dcgm}
DCGM_PREFIXES = ("DCGM_FI_DEV_", "DCGM_FI_PROF_", "DCGM_FI_")


def dcgm_field(metric: str) -> Field | None:
    """The field of a metric of DCGM ("DCGM_FI_DEV_GPU_TEMP"); None for one that tells nothing here."""
    for prefix in DCGM_PREFIXES:
        if metric.startswith(prefix):
            return BY_DCGM.get(metric.removeprefix(prefix))
    return None
