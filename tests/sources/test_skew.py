"""By how much clocks of nodes seem to differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.records.event import Event
from keepstep.sources.skew import MIN_SKEW_S, Skew, add_skew, estimate
from tests.sources.making import NOON, SECOND, event


def timeouts(skews_s: dict[str, float], moments: int, jitter_s: float = 0.2) -> list[Event]:
    """Every node reports every collective, each by its own clock."""
    return [
        event(
            "nccl.timeout",
            "collective.timeout",
            node=node,
            time_ns=NOON + round((60 * n + skew + jitter_s * ((n + len(node)) % 3)) * SECOND),
            time_quality="zone_assumed",
            attrs={"seq": str(n)},
        )
        for n in range(moments)
        for node, skew in skews_s.items()
    ]


def test_a_clock_that_is_ahead() -> None:
    events = timeouts({"h1": 0.0, "h2": 0.0, "h3": 37.0}, 4)
    (found,) = estimate(events)
    assert (found.node, found.pairs) == ("h3", 4) and abs(found.seconds - 37) < 1


def test_a_zone_that_is_not_printed() -> None:
    (found,) = estimate(timeouts({"h1": 0.0, "h2": 0.0, "h9": 9 * 3600.0}, 3))
    assert round(found.seconds / 3600) == 9


def test_two_moments_are_not_enough() -> None:
    assert estimate(timeouts({"h1": 0.0, "h2": 37.0}, 2)) == []


def test_moments_that_do_not_agree_say_nothing() -> None:
    events = timeouts({"h1": 0.0}, 6) + [
        event("nccl.timeout", node="h2", time_ns=NOON + gap * SECOND, time_quality="exact", attrs={"seq": str(n)})
        for n, gap in enumerate((5, 400, 150, 900, 10, 3000))
    ]
    assert estimate(events) == []


def test_times_stay_and_the_difference_is_noted() -> None:
    events = [event(node="h1", time_ns=NOON), event(node="h2", time_ns=NOON), event(time_ns=NOON)]
    noted = add_skew(events, [Skew("h2", "h1", 37.0, 4)])
    assert [e.attrs.get("skew_s") for e in noted] == [None, 37.0, None]
    assert [e.time_ns for e in noted] == [NOON] * 3


@given(
    st.dictionaries(st.sampled_from(["h1", "h2", "h3", "h4"]), st.floats(-5000, 5000), min_size=2), st.integers(3, 8)
)
def test_what_is_said_is_right(skews: dict[str, float], moments: int) -> None:
    found = estimate(timeouts(skews, moments, 0.0))
    for one in found:
        assert abs(one.seconds - (skews[one.node] - skews[one.reference])) < 0.01
        assert abs(one.seconds) >= MIN_SKEW_S
