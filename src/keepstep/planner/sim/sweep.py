"""Grids of scenarios: one or more keys set to several values each, every combination simulated with the same random numbers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from keepstep.planner.scenario import Scenario
from keepstep.records.errors import ConfigError

MOST_POINTS = 10_000


class Axis(NamedTuple):
    """A key and the values that it takes, as they were spelled."""

    key: str
    values: tuple[str, ...]


def parse_axes(specs: Sequence[str]) -> list[Axis]:
    """Axes of specs like "spares=8,12,16". Raises ConfigError naming a spec that makes no sense."""
    axes: list[Axis] = []
    for spec in specs:
        key, equals, rest = spec.partition("=")
        values = tuple(value.strip() for value in rest.split(","))
        if not equals or not key.strip() or not all(values):
            raise ConfigError(f"--sweep {spec}: give a key and its values, such as spares=8,12,16")
        if key.strip() in [axis.key for axis in axes]:
            raise ConfigError(f"--sweep {spec}: {key.strip()} was given before")
        axes.append(Axis(key.strip(), values))
    return axes


def points(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """All combinations; the last key changes fastest. Raises ConfigError where they are too many."""
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_POINTS:
        raise ConfigError(f"--sweep: {count} combinations, at most {MOST_POINTS}")
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def set_key(scenario: Scenario, key: str, value: str) -> Scenario:
    """The scenario with one key set: `spares`, `repair.mean_s`, `job.interval_s`, `job.tiers.1.every`, `job.kinds.hang.detect_s`.

    A key of the job may go without `job.`; members of lists are named by index or name. Raises ConfigError naming key and value.
    """
    tree: Any = msgspec.json.decode(msgspec.json.encode(scenario))
    path = key.split(".")
    if path[0] not in tree and path[0] in tree["job"]:
        path = ["job", *path]
    at = tree
    for i, name in enumerate(path[:-1]):
        at = _member(at, name, ".".join(path[: i + 1]), key)
    last = path[-1]
    if not isinstance(at, dict) or last not in at:
        raise ConfigError(f"{key}: there is no such key{_known(at)}")
    try:
        at[last] = json.loads(value)
    except ValueError:
        at[last] = value
    try:
        changed = msgspec.convert(tree, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key} {value}: {error}") from None
    changed.check()
    return changed


def _member(at: Any, name: str, path: str, key: str) -> Any:
    if isinstance(at, dict) and name in at:
        return at[name]
    if isinstance(at, list):
        if name.isdigit() and int(name) < len(at):
            return at[int(name)]
        for member in at:
            if isinstance(member, dict) and member.get("name") == name:
                return member
    raise ConfigError(f"{key}: there is no {path}{_known(at)}")


def _known(at: Any) -> str:
    """What there is instead."""
    if isinstance(at, dict):
        return f"; there is {', '.join(at)}"
    if isinstance(at, list):
        names = [str(member.get("name", i)) if isinstance(member, dict) else str(i) for i, member in enumerate(at)]
        return f"; there is {', '.join(names)}"
    return ""
