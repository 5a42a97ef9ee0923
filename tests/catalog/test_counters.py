"""Limits of error counters: what a growth over a time means, and every name a counter has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.counters import counter_named, counters


@pytest.mark.parametrize(
    ("counter", "growth", "elapsed_s", "exceeded"),
    [
        ("link_downed", 1, None, True),
        ("link_downed", 0, 60.0, False),
        ("carrier_changes", 2, 1.0, False),
        ("carrier_changes", 3, 1.0, True),
        ("symbol_error", 121, 3600.0, True),
        ("symbol_error", 120, 3600.0, False),
        ("symbol_error", 3, 60.0, True),
        ("symbol_error", 9000, None, None),
        ("port_rcv_errors", 10, 1.0, False),
        ("port_rcv_errors", 11, 1.0, True),
        ("link_error_recovery", 6, 60.0, True),
        ("link_error_recovery", 5, 60.0, False),
        ("port_xmit_wait", 10**12, 1.0, None),
        ("nvlink_recovery", 3, 1260.0, True),
        ("pcie_replay", 9, 60.0, True),
    ],
)
def test_growth_against_the_limit(counter: str, growth: float, elapsed_s: float | None, exceeded: bool | None) -> None:
    assert counters()[counter].exceeded(growth, elapsed_s) is exceeded


@pytest.mark.parametrize(
    ("name", "family", "counter"),
    [
        ("SymbolErrorCounter", "nic", "symbol_error"),
        ("symbol_error", "", "symbol_error"),
        ("link_downed_total", "nic", "link_downed"),
        ("LinkDownedCounter", "", "link_downed"),
        ("port_receive_errors_total", "nic", "port_rcv_errors"),
        ("rx_symbol_err_phy", "nic", "symbol_error"),
        ("recovery", "", "nvlink_recovery"),
        ("crc_flit", "", "nvlink_crc_flit"),
        ("loss", "", None),
        ("symbol_error", "nvlink", None),
    ],
)
def test_names_of_other_tools(name: str, family: str, counter: str | None) -> None:
    found = counter_named(name, family)
    assert (found.counter if found else None) == counter


def test_no_two_counters_share_a_name() -> None:
    seen: dict[str, str] = {}
    for counter in counters().values():
        for name in (counter.counter, *counter.aliases):
            assert seen.setdefault(name.lower(), counter.counter) == counter.counter
            assert counter_named(name) == counter
        assert counter.source and (counter.limit is None) == (counter.per == "")


@given(st.sampled_from(sorted(counters())), st.floats(0, 1e9), st.floats(1, 1e6), st.floats(1, 10))
def test_more_errors_in_the_same_time_never_become_harmless(
    name: str, growth: float, elapsed_s: float, factor: float
) -> None:
    counter = counters()[name]
    if counter.exceeded(growth, elapsed_s):
        assert counter.exceeded(growth * factor, elapsed_s)
        assert counter.per == "poll" or counter.exceeded(growth, elapsed_s / factor)
