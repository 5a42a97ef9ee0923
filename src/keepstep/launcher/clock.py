"""Time: CLOCK_BOOTTIME anchored to UTC once a boot, so that a step of the wall clock never moves a recorded duration."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec


def boot_ns() -> int:
    """CLOCK_BOOTTIME in nanoseconds (goes on during suspend)."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Anchor(msgspec.Struct, frozen=True):
    """A pair of readings of one boot: UTC = utc_ns + (CLOCK_BOOTTIME - boot_ns)."""

    boot_id: str
    utc_ns: int
    boot_ns: int

    @classmethod
    def take(cls) -> Anchor:
        return cls(boot_id(), time.time_ns(), boot_ns())

    def utc(self, at_boot_ns: int) -> int:
        """UTC nanoseconds of a CLOCK_BOOTTIME reading of this boot."""
        return self.utc_ns + at_boot_ns - self.boot_ns

    def now(self) -> int:
        return self.utc(boot_ns())

    def from_monotonic(self, monotonic_ns: int) -> int:
        """UTC nanoseconds of a CLOCK_MONOTONIC reading of this host (ranks and pages use that clock)."""
        return self.utc(monotonic_ns + boot_ns() - time.monotonic_ns())
