"""Registers of NVLink errors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.nvlink import decode_74, decode_nvlink5, fits, nvlink5_rules, variant_74, variant_nvlink5

REGISTER = st.integers(0, 0xFFFFFFFF)


def value_for(pattern: str) -> int:
    """A register that fits a pattern."""
    return int(pattern.replace("-", "0"), 2)


def test_every_row_is_found_by_its_own_registers_on_both_driver_branches() -> None:
    assert len(nvlink5_rules()) == 94
    for rule in nvlink5_rules():
        status = int(rule.error_status, 16)
        for driver, pattern in ((570, rule.intrinfo_pattern_pre_r575), (580, rule.intrinfo_pattern_r575_plus)):
            decoded = decode_nvlink5(rule.xid, [value_for(pattern), status], unit=rule.unit, driver=driver)
            assert rule in decoded.rules, rule
            assert decoded.action == rule.action, rule


def test_a_register_is_read_by_the_driver_branch() -> None:
    older = decode_nvlink5(145, [0x00000082, 0x40], driver=570)
    newer = decode_nvlink5(145, [0x00000004, 0x40], driver=580)
    assert (older.action, newer.action) == ("RESET_GPU", "RESET_GPU")
    assert [rule.unit for rule in older.rules] == ["RLW_REMAP"]
    assert decode_nvlink5(145, [0x00000082, 0x40], driver=580).rules == ()


def test_without_the_driver_branch_both_must_agree() -> None:
    # The same number is RLW_REMAP before R575; after it no unit has it: one reading, so it counts.
    assert decode_nvlink5(145, [0x00000082, 0x40]).action == "RESET_GPU"
    for first in range(1 << 10):
        for status in (0x1, 0x2, 0x4):
            either = decode_nvlink5(145, [first, status])
            actions = {rule.action for rule in either.rules}
            assert either.action == (actions.pop() if len(actions) == 1 else "")


def test_the_unit_of_the_line_narrows_the_rows() -> None:
    assert decode_nvlink5(146, [0x0A, 0x4], unit="TLW_RX_PIPE0", driver=580).action == "RESET_GPU"
    assert decode_nvlink5(146, [0x0A, 0x4], unit="TLW_TX_PIPE0", driver=580).rules == ()


def test_the_reason_of_a_link_that_went_down_is_in_bits_20_to_25() -> None:
    decoded = decode_nvlink5(149, [0x016415C6, 0x0], unit="NETIR_LINK_EVT")
    assert decoded.subcode == 0b010110
    assert decoded.investigatory == "INVESTIGATE_SW_USER"
    assert variant_nvlink5(True, decoded) == "fatal_software"


def test_too_few_registers_tell_nothing() -> None:
    assert decode_nvlink5(149, []).rules == () == decode_nvlink5(149, [0x11]).rules


@given(
    st.integers(140, 155), st.lists(REGISTER, max_size=7), st.sampled_from(["", "NETIR", "no such unit"]), st.booleans()
)
def test_any_registers_give_some_answer_and_the_line_decides_whether_it_is_fatal(
    xid: int, registers: list[int], unit: str, fatal: bool
) -> None:
    decoded = decode_nvlink5(xid, registers, unit=unit)
    assert variant_nvlink5(fatal, decoded).startswith("fatal" if fatal else "nonfatal")


@given(REGISTER)
def test_a_pattern_of_free_bits_fits_everything(value: int) -> None:
    assert fits("-" * 32, value)
    assert fits(f"{value:032b}", value)
    assert not fits(f"{value ^ 1:032b}", value)


def test_bits_of_xid_74() -> None:
    assert variant_74([1 << 21]) == "signal"
    assert variant_74([1 << 8 | 1 << 21]) == "hardware"
    assert variant_74([1 << 0 | 1 << 23]) == "ignorable"
    assert variant_74([0, 0, 1 << 16]) == ""
    assert variant_74([]) == ""
    assert decode_74([1 << 4, 0, 1 << 13]) == {"ecc_if_repeated": ["reg0 bit 4"], "unexpected": ["reg2 bit 13"]}


def test_a_bit_in_no_table_keeps_a_line_from_being_ignorable() -> None:
    assert variant_74([1 << 0 | 1 << 2]) == ""
    assert decode_74([1 << 2]) == {"unknown": ["reg0 bit 2"]}
