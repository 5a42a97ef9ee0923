"""Grids: keys, values, combinations, and what is wrong with some of them."""

from __future__ import annotations

import pytest

from keepstep.planner.sim.sweep import Axis, parse_axes, points, set_key
from keepstep.records.errors import ConfigError
from tests.planner.scenarios import simple


def test_combinations_in_order() -> None:
    axes = parse_axes(["spares=1,2", "repair.sigma = 0.5 , 1"])
    assert axes == [Axis("spares", ("1", "2")), Axis("repair.sigma", ("0.5", "1"))]
    assert [tuple(at.values()) for at in points(axes)] == [("1", "0.5"), ("1", "1"), ("2", "0.5"), ("2", "1")]
    assert points([]) == [{}]


@pytest.mark.parametrize("spec", ["spares", "spares=", "=1", "spares=1,,2"])
def test_bad_specs_are_named(spec: str) -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        parse_axes([spec])


def test_a_key_twice_and_too_many_points() -> None:
    with pytest.raises(ConfigError, match="spares was given before"):
        parse_axes(["spares=1", "spares=2"])
    many = ",".join(str(i) for i in range(101))
    with pytest.raises(ConfigError, match="10201 combinations"):
        points(parse_axes([f"a={many}", f"b={many}"]))


@pytest.mark.parametrize(
    ("key", "value", "of"),
    [
        ("spares", "7", lambda s: s.spares),
        ("repair.mean_s", "1e3", lambda s: s.repair.mean_s),
        ("interval_s", "42", lambda s: s.job.interval_s),
        ("job.tiers.0.block_s", "3.5", lambda s: s.job.tiers[0].block_s),
        ("kinds.failure.detect_s", "9", lambda s: s.job.kinds[0].detect_s),
        ("process", "weibull", lambda s: s.process),
        ("restart_exposed", "false", lambda s: s.restart_exposed),
    ],
)
def test_keys(key: str, value: str, of: object) -> None:
    changed = of(set_key(simple(), key, value))  # type: ignore[operator]
    assert str(changed).lower() == value or changed == float(value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("spare", "1", "spare: there is no such key; there is job, days"),
        ("job.tiers.9.block_s", "1", "there is no job.tiers.9; there is disk"),
        ("repair.mean_s.x", "1", "there is no"),
        ("spares", "many", "spares many"),
        ("spares", "-3", "spares -3"),
        ("process", "magic", "process magic"),
    ],
)
def test_bad_keys_and_values_are_named(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_key(simple(), key, value)
