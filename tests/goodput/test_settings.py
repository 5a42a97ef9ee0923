"""Settings that follow the failure rate: where they go, and the bounds that nothing moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.goodput.settings import HANG_LEAST_S, HANG_MOST_S, Source, hang_floor, spares_to_wait_for
from keepstep.records.cycle import FailureHistory
from keepstep.records.errors import ConfigError

KNOWN = Source(
    prior='{"schema": "keepstep.failure_prior/1", "skus": {"default": {"failures": 650, "node_days": 100000}}}'
)
SINCE = "2026-01-01T00:00:00Z"


def test_large_jobs_wait_less_for_hangs() -> None:
    """6.5 failures per 1000 node-days: 2,048 nodes fail every 1.8 h and 13 % of that hangs; 128 nodes every 29 h."""
    large, middle, small = (hang_floor(KNOWN, None, nodes) for nodes in (2048, 512, 8))
    assert (large.value, small.value) == (HANG_LEAST_S, HANG_MOST_S)
    assert middle.value == pytest.approx(0.001 * 7.21 * 3600 / 0.13, rel=0.03)
    assert "512 nodes at 6.5" in middle.reason


def test_a_run_that_fails_often_moves_the_floor() -> None:
    calm = hang_floor(KNOWN, None, 512).value
    stormy = hang_floor(Source(), FailureHistory(failures=200, node_s=512 * 86_400.0 * 5, since=SINCE), 512)
    assert HANG_LEAST_S <= stormy.value < calm


def test_spares_within_what_was_asked_for() -> None:
    assert spares_to_wait_for(KNOWN, None, 2048, 4).value == 4
    advised = spares_to_wait_for(KNOWN, None, 2048, 100)
    assert 18 <= advised.value <= 30
    assert spares_to_wait_for(KNOWN, None, 2, 100).value <= 1
    days = Source(prior=KNOWN.prior, repair_s=5 * 86_400.0)
    assert spares_to_wait_for(days, None, 2048, 1000).value > 2 * advised.value


@given(st.integers(0, 500), st.floats(0.0, 1e9), st.integers(1, 20_000), st.integers(0, 50))
def test_bounds_hold_whatever_was_seen(failures: int, node_s: float, nodes: int, most: int) -> None:
    history = FailureHistory(failures=failures, node_s=node_s, since=SINCE)
    assert HANG_LEAST_S <= hang_floor(Source(), history, nodes).value <= HANG_MOST_S
    assert 0 <= spares_to_wait_for(Source(repair_s=3600.0), history, min(nodes, 2000), most).value <= most


def test_a_bad_prior_is_named() -> None:
    with pytest.raises(ConfigError, match="--failure-prior"):
        hang_floor(Source(prior="many"), None, 8)
