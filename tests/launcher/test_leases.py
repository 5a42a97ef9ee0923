"""Leases by injected clocks: the coordinator never gives ranks away that a node may still run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.launcher.coordination.leases import KILL_S, MARGIN, RTT_FACTOR, STRETCHES, LeaseBook

BASE_S = 5.0
MAX_LEASE_S = STRETCHES[-1] * BASE_S


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def book(clock: Clock, longest_s: float = MAX_LEASE_S) -> LeaseBook:
    return LeaseBook(BASE_S, clock, longest_s)


def lost_at(leases: LeaseBook, clock: Clock, node: str = "n") -> float:
    """When the coordinator would first call `node` lost, should nothing come any more: by bisection, clock put back."""
    began = low = clock.now
    high = low + 10 * MAX_LEASE_S
    while high - low > 1e-6:
        clock.now = (low + high) / 2
        low, high = (low, clock.now) if leases.expired([node]) else (clock.now, high)
    clock.now = began
    return high


class TestLength:
    def test_a_lease_has_its_length_while_renewals_are_quick(self) -> None:
        leases = book(Clock())
        assert [leases.renew("n", rtt) for rtt in (0.0, 0.001, BASE_S / RTT_FACTOR)] == [BASE_S] * 3

    @pytest.mark.parametrize(
        ("rtt_s", "lease_s"), [(0.6, 10.0), (1.0, 10.0), (1.1, 20.0), (2.0, 20.0), (3.0, 20.0), (1e9, 20.0)]
    )
    def test_it_grows_with_the_time_they_take_and_has_a_bound(self, rtt_s: float, lease_s: float) -> None:
        assert book(Clock()).renew("n", rtt_s) == lease_s

    @given(st.floats(-1, 1e12))
    def test_it_is_never_shorter_than_asked_for_nor_longer_than_the_bound(self, rtt_s: float) -> None:
        assert BASE_S <= book(Clock()).renew("n", rtt_s) <= MAX_LEASE_S

    def test_a_lease_longer_than_the_journal_knows_of_is_only_wished_for(self) -> None:
        leases = LeaseBook(BASE_S, Clock())
        assert (leases.renew("n", 1.0), leases.wanted_s) == (BASE_S, 2 * BASE_S)
        leases.longest_s = leases.wanted_s
        assert leases.renew("n", 1.0) == 2 * BASE_S
        assert leases.renew("n", 0.0) == BASE_S


class TestLoss:
    def test_a_node_is_lost_after_its_lease_a_tenth_and_the_time_to_kill(self) -> None:
        clock = Clock()
        leases = book(clock)
        leases.renew("n", 0.0)
        assert lost_at(leases, clock) == pytest.approx(clock.now + MARGIN * BASE_S + KILL_S)

    def test_only_those_that_were_asked_about(self) -> None:
        clock = Clock()
        leases = book(clock)
        for node in "ab":
            leases.renew(node, 0.0)
        clock.now += 4
        leases.renew("b", 0.0)
        clock.now += 3
        assert leases.expired(["a", "b"]) == ["a"]
        assert leases.expired(["b"]) == []

    def test_any_message_is_a_sign_of_life(self) -> None:
        clock = Clock()
        leases = book(clock)
        leases.renew("n", 0.0)
        clock.now += BASE_S
        leases.heard("n")
        assert leases.silence_s("n") == 0
        assert lost_at(leases, clock) == pytest.approx(clock.now + MARGIN * BASE_S + KILL_S)

    def test_a_shorter_lease_does_not_take_the_longer_one_back(self) -> None:
        clock = Clock()
        leases = book(clock)
        leases.renew("n", 2.0)
        clock.now += 1
        leases.renew("n", 0.0)
        assert lost_at(leases, clock) == pytest.approx(clock.now - 1 + MARGIN * 4 * BASE_S + KILL_S)

    def test_a_coordinator_that_just_started_waits_for_the_longest_lease_of_its_predecessors(self) -> None:
        clock = Clock()
        assert lost_at(book(clock, 2 * BASE_S), clock) == pytest.approx(clock.now + MARGIN * 2 * BASE_S + KILL_S)
        assert lost_at(LeaseBook(BASE_S, clock), clock) == pytest.approx(clock.now + MARGIN * BASE_S + KILL_S)

    def test_it_counts_from_when_it_listens_since_nodes_that_find_nobody_go_on_until_then(self) -> None:
        clock = Clock()
        leases = LeaseBook(BASE_S, clock)
        clock.now += 4 * BASE_S
        leases.begin()
        assert lost_at(leases, clock) == pytest.approx(clock.now + MARGIN * BASE_S + KILL_S)

    def test_silence_while_the_coordinator_stood_still_does_not_count(self) -> None:
        clock = Clock()
        leases = book(clock)
        leases.renew("a", 0.0)
        clock.now += 1
        before = {n: lost_at(leases, clock, n) for n in ("a", "never heard of")}
        clock.now += 60
        leases.forgive(60)
        assert leases.expired(["a", "never heard of"]) == []
        assert leases.silence_s("a") == pytest.approx(1)
        assert {n: lost_at(leases, clock, n) - 60 for n in before} == pytest.approx(before)

    def test_a_node_that_was_lost_and_comes_back_starts_anew(self) -> None:
        clock = Clock()
        leases = LeaseBook(BASE_S, clock)
        leases.longest_s = MAX_LEASE_S
        leases.renew("n", 2.0)
        clock.now += 30
        assert leases.expired(["n"]) == ["n"]
        leases.forget("n")
        leases.heard("n")
        assert leases.expired(["n"]) == []
        assert leases.renew("n", 0.0) == BASE_S
        assert lost_at(leases, clock) == pytest.approx(clock.now + MARGIN * BASE_S + KILL_S)


delays = st.floats(0, 30)
renewals = st.lists(
    st.tuples(
        st.floats(0.01, 8),  # pause before the node sends
        delays,  # on the way there
        delays,  # on the way back
        st.floats(0, 5),  # the round trip that it reports
        st.booleans(),  # whether the answer comes at all
        st.booleans(),  # whether the renewal itself comes
    ),
    min_size=1,
    max_size=15,
)


@given(renewals, st.floats(0.91, 1.0), st.integers(0, 15))
def test_a_node_is_never_called_lost_while_it_believes_in_its_lease(
    plan: list[tuple[float, float, float, float, bool, bool]], rate: float, restart_at: int
) -> None:
    """For any delays in both directions, losses, changes of length, a slow clock of the node, and a coordinator that is replaced.

    `rate`: how fast the node's clock runs; the tenth that the coordinator adds covers a clock 9 % slow. A renewal later than
    one on the same connection never overtakes it.
    """
    clock = Clock()
    leases = LeaseBook(BASE_S, clock)
    sent, last_arrival, believes_until = clock.now, clock.now, 0.0
    for index, (pause, there, back, rtt, answered, arrives) in enumerate(plan):
        sent += pause
        if not arrives:
            continue
        last_arrival = max(last_arrival, sent + there)
        assert clock.now <= last_arrival
        clock.now = last_arrival
        if index == restart_at:
            # Its successor knows no more than what was journaled.
            leases = LeaseBook(BASE_S, clock, leases.longest_s)
        if leases.expired(["n"]):
            return  # what it does later is another life
        lease_s = leases.renew("n", rtt)
        leases.longest_s = leases.wanted_s
        if answered and last_arrival + back <= sent + lease_s / rate:
            believes_until = max(believes_until, sent + lease_s / rate)
        assert lost_at(leases, clock) >= believes_until + KILL_S - 1e-5
