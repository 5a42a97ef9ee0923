"""Finding slow members from bandwidths of parts of a group."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from keepstep.launcher.health.slownodes import find_slow


class Fabric:
    """A group is as fast as its slowest member, smaller groups are somewhat faster, and every measurement has some noise."""

    def __init__(self, slow: dict[int, float], noise: list[float]) -> None:
        self.slow = slow
        self.noise = noise
        self.asked: list[list[int]] = []

    def measure(self, group: list[int]) -> float:
        assert len(group) > 1 and len(set(group)) == len(group)
        self.asked.append(group)
        wobble = self.noise[len(self.asked) % len(self.noise)]
        return min(self.slow.get(m, 1.0) for m in group) * (1 + 1 / len(group)) * wobble


NOISE = st.lists(st.floats(0.95, 1.05), min_size=1, max_size=7)


@given(count=st.integers(3, 200), where=st.integers(0, 199), speed=st.floats(0.05, 0.6), noise=NOISE)
def test_one_slow_member_is_named_alone_in_few_measurements(
    count: int, where: int, speed: float, noise: list[float]
) -> None:
    fabric = Fabric({where % count: speed}, noise)
    slow, groups = find_slow(list(range(count)), fabric.measure, 0.2)
    assert slow == [where % count]
    assert [g for g, _ in groups] == fabric.asked
    assert len(fabric.asked) <= 4 * math.ceil(math.log2(count)) + 2


@given(count=st.integers(6, 64), data=st.data(), noise=NOISE)
def test_slow_members_of_one_speed_are_all_named(count: int, data: st.DataObject, noise: list[float]) -> None:
    pair = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    slow, _ = find_slow(list(range(count)), Fabric(dict.fromkeys(pair, 0.3), noise).measure, 0.2)
    assert slow == sorted(pair) or slow == list(range(count))


@given(count=st.integers(2, 64), noise=NOISE)
def test_when_all_are_alike_all_stay_suspects(count: int, noise: list[float]) -> None:
    members = list(range(count))
    slow, _ = find_slow(members, Fabric({}, noise).measure, 0.2)
    assert slow == members


@given(st.data())
def test_whatever_is_slow_a_good_member_is_only_named_when_nothing_could_be_told(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 40))
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 2))
    slow, _ = find_slow(list(range(count)), Fabric(dict.fromkeys(bad, 0.2), [1.0]).measure, 0.2)
    assert set(slow) == bad or slow == list(range(count)) or set(slow) < bad


def test_of_two_members_nobody_can_tell_which() -> None:
    assert find_slow([0, 1], Fabric({1: 0.1}, [1.0]).measure, 0.2)[0] == [0, 1]
