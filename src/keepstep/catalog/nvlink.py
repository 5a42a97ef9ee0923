"""Registers that the driver prints with NVLink errors: Xid 74 (up to Hopper) and Xid 144 to 150 (Blackwell).

The tables are `data/nvlink74_bits.csv` and `data/nvlink5_decode.csv`. Register patterns of 144 to 150 changed with driver branch
R575; without the branch a decode counts only if both sets of patterns lead to the same action.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from keepstep.catalog.tables import rows

R575 = 575
"""First driver branch with the newer register patterns."""


class Nvlink5Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of nvlink5_decode.csv. Patterns have 32 places, most significant bit first; "-" is any bit."""

    xid: int
    unit: str
    intrinfo_pattern_pre_r575: str
    intrinfo_pattern_r575_plus: str
    error_status: str
    action: str
    investigatory: str
    severity: str
    action2: str
    hw_sw: str
    version: str
    source: str


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """What registers say. `action`: NVIDIA's bucket, "" when the driver branches disagree or no row fits; `rules`: rows that fit.

    `subcode`: bits 20 to 25 of the first register, which tell the reason of a link that went down.
    """

    action: str
    investigatory: str
    severity: str
    subcode: int
    rules: tuple[Nvlink5Rule, ...] = ()


@functools.cache
def nvlink5_rules() -> tuple[Nvlink5Rule, ...]:
    """All rows, in the order of the table."""
    return tuple(msgspec.convert(rows("nvlink5_decode.csv"), list[Nvlink5Rule], strict=False))


def fits(pattern: str, value: int) -> bool:
    """Whether the bits of a register fit a pattern."""
    bits = f"{value & 0xFFFFFFFF:032b}"
    return all(want in ("-", bit) for want, bit in zip(pattern, bits, strict=True))


def decode_nvlink5(xid: int, registers: Sequence[int], *, unit: str = "", driver: int | None = None) -> Decoded:
    """Decode the registers of an Xid 144 to 150: the first is the interrupt's information, the second the error status.

    `unit` as the line names it; `driver`: the branch (570), None when it is not known.
    """
    if len(registers) < 2:
        return Decoded(action="", investigatory="", severity="", subcode=0)
    info, status = registers[0], registers[1]
    found = []
    for rule in nvlink5_rules():
        if rule.xid != xid or int(rule.error_status, 16) != status or not _same_unit(rule.unit, unit):
            continue
        older = driver is None or driver < R575
        newer = driver is None or driver >= R575
        if (older and fits(rule.intrinfo_pattern_pre_r575, info)) or (
            newer and fits(rule.intrinfo_pattern_r575_plus, info)
        ):
            found.append(rule)
    return Decoded(
        action=_agreed([rule.action for rule in found]),
        investigatory=_agreed([rule.investigatory for rule in found]),
        severity=_agreed([rule.severity for rule in found]),
        subcode=(info >> 20) & 0x3F,
        rules=tuple(found),
    )


def _same_unit(row: str, unit: str) -> bool:
    """The table names some units twice ("TLW_RX/TLW_RX_PIPE0"); the line has either, or both."""
    return not unit or bool({row, *row.split("/")} & {unit, *unit.split("/")})


def _agreed(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ""


@functools.cache
def _bits_74() -> dict[tuple[int, int], str]:
    return {(int(row["register"]), int(row["bit"])): row["means"] for row in rows("nvlink74_bits.csv")}


def decode_74(registers: Sequence[int]) -> dict[str, list[str]]:
    """What the bits set in the registers of an Xid 74 mean: meaning -> ["reg0 bit 21", ...]. Bits in no table: "unknown"."""
    found: dict[str, list[str]] = {}
    for number, value in enumerate(registers):
        for bit in range(32):
            if value >> bit & 1:
                means = _bits_74().get((number, bit), "unknown")
                found.setdefault(means, []).append(f"reg{number} bit {bit}")
    return found


def variant_74(registers: Sequence[int]) -> str:
    """The variant of the entry of Xid 74 that registers pick: "hardware", "signal", "ignorable", or "" when they do not decide."""
    means = set(decode_74(registers))
    for decisive in ("hardware", "signal"):
        if decisive in means:
            return decisive
    return "ignorable" if means and means <= {"ignorable"} else ""


def variant_nvlink5(fatal: bool, decoded: Decoded) -> str:
    """The variant of the entry of an Xid 144 to 150. The line's own word Fatal or Nonfatal decides before any table."""
    about = decoded.investigatory
    if not fatal:
        return "nonfatal_signal" if "LINK_SI" in about else "nonfatal"
    if "PEER" in about:
        return "fatal_peer"
    if "LINK_SI" in about:
        return "fatal_signal"
    return "fatal_software" if "SW" in about or "HOST" in about else "fatal"
