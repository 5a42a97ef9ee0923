"""Retention rules by name and their text form: `last:3, hourly:1d, daily:30d, pinned`.

A policy is the union of its rules: what any of them keeps stays. The names are those of the field (Orbax's preservation
policies, the hourly and daily buckets of backup tools such as borg and restic).
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from keepstep.checkpoint.format.layout import FolderName
from keepstep.records.errors import ConfigError

DEFAULT_POLICY = "last:3, hourly:1d, daily:30d, pinned"
VALID_RULES = (
    "last:K, every-steps:N, every:TIME, hourly:N|TIME, daily:N|TIME, weekly:N|TIME, best:METRIC:K:min|max, pinned, all "
    "(TIME: 90s, 30m, 6h, 30d, 4w)"
)

_NS = 1_000_000_000
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PERIODS_S = {"hourly": 3600, "daily": 86400, "weekly": 7 * 86400}
_MAX_SPAN_S = 100 * 365 * 86400
_MONDAY_S = 4 * 86400  # 1970-01-05, the first Monday of Unix time
_METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")


class Kept(Protocol):
    """What the rules look at of a checkpoint."""

    @property
    def name(self) -> FolderName:
        """Its folder's name."""

    @property
    def created_ns(self) -> int:
        """When it was committed (UTC nanoseconds)."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that were saved with it."""


class Last(msgspec.Struct, frozen=True, tag=True):
    """`last:K`: the K newest."""

    count: int


class EverySteps(msgspec.Struct, frozen=True, tag=True):
    """`every-steps:N`: the first one at or after each multiple of N steps (from N on)."""

    steps: int


class Every(msgspec.Struct, frozen=True, tag=True):
    """`every:TIME`: the newest of each period of that length, counted from 1970, for ever."""

    period_s: int


class Window(msgspec.Struct, frozen=True, tag=True):
    """`hourly:24` keeps the newest of each of the 24 latest hours (UTC) that have one; `hourly:1d` of each hour within a
    day of the newest checkpoint. `daily` and `weekly` (from Monday) alike.

    A span is measured back from the newest checkpoint and not from now: a run that stands still loses nothing.
    """

    period: Literal["hourly", "daily", "weekly"]
    count: int | None = None
    within_s: int | None = None


class Best(msgspec.Struct, frozen=True, tag=True):
    """`best:METRIC:K:min|max`: the K with the lowest (highest) value; equal values: the newer. NaN is never best."""

    metric: str
    count: int
    sense: Literal["min", "max"]


class Pinned(msgspec.Struct, frozen=True, tag=True):
    """`pinned`: what a person pinned. Pins hold in every policy; the word only says so."""


class All(msgspec.Struct, frozen=True, tag=True):
    """`all`: every committed checkpoint."""


Rule = Last | EverySteps | Every | Window | Best | Pinned | All


class Policy(msgspec.Struct, frozen=True):
    """A union of rules."""

    rules: tuple[Rule, ...]

    @property
    def text(self) -> str:
        """The policy as `parse_policy` reads it."""
        return ", ".join(format_rule(rule) for rule in self.rules)


def any_of(*policies: Policy) -> Policy:
    """Keep what any of `policies` keeps."""
    return Policy(tuple(dict.fromkeys(rule for policy in policies for rule in policy.rules)))


def parse_policy(text: str, origin: str = "--keep") -> Policy:
    """Read a policy. Raises ConfigError naming `origin`, the part that is wrong, and the valid rules."""
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise ConfigError(f"{origin} {text!r}: names no rule; valid are {VALID_RULES}")
    return Policy(tuple(dict.fromkeys(_parse_rule(part, origin) for part in parts)))


def _parse_rule(text: str, origin: str) -> Rule:
    word, *values = [part.strip() for part in text.split(":")]
    bare: dict[str, Rule] = {"pinned": Pinned(), "all": All()}
    readers: dict[str, Callable[[str], Rule]] = {
        "last": lambda value: Last(_count(value)),
        "every-steps": lambda value: EverySteps(_count(value)),
        "every": lambda value: Every(_span_s(value)),
        "hourly": lambda value: _window("hourly", value),
        "daily": lambda value: _window("daily", value),
        "weekly": lambda value: _window("weekly", value),
    }
    try:
        if word in bare and not values:
            return bare[word]
        if word in readers and len(values) == 1:
            return readers[word](values[0])
        if word == "best":
            return _best(values)
    except ValueError as error:
        raise ConfigError(f"{origin}: {text!r}: {error}; valid are {VALID_RULES}") from None
    raise ConfigError(f"{origin}: {text!r} is no rule; valid are {VALID_RULES}")


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) == 0:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _span_s(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12})([smhdw])", text)
    span_s = 0 if match is None else int(match[1]) * _UNITS_S[match[2]]
    if not 0 < span_s <= _MAX_SPAN_S:
        raise ValueError(f"{text!r} is not a time such as 90s, 30m, 6h, 30d, 4w (at most 100 years)")
    return span_s


def parse_span(text: str, origin: str) -> int:
    """Seconds of `text`, e.g. 90s, 30m, 6h, 30d, 4w. Raises ConfigError naming `origin`."""
    try:
        return _span_s(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _window(period: Literal["hourly", "daily", "weekly"], text: str) -> Window:
    return Window(period, within_s=_span_s(text)) if text[-1:].isalpha() else Window(period, count=_count(text))


def _best(values: list[str]) -> Best:
    # The direction has no default: guessing it wrong would delete the best ones.
    if len(values) != 3 or values[2] not in ("min", "max"):
        raise ValueError("write best:METRIC:K:min or best:METRIC:K:max")
    if not _METRIC.fullmatch(values[0]):
        raise ValueError(f"{values[0]!r} is not the name of a metric")
    return Best(values[0], _count(values[1]), "min" if values[2] == "min" else "max")


def format_rule(rule: Rule) -> str:
    """The rule as `parse_policy` reads it."""
    match rule:
        case Last(count):
            return f"last:{count}"
        case EverySteps(steps):
            return f"every-steps:{steps}"
        case Every(period_s):
            return f"every:{format_span(period_s)}"
        case Window(period, count, within_s):
            return f"{period}:{count if within_s is None else format_span(within_s)}"
        case Best(metric, count, sense):
            return f"best:{metric}:{count}:{sense}"
        case Pinned():
            return "pinned"
        case All():
            return "all"


def format_span(seconds: int) -> str:
    """`seconds` in the largest unit that divides it: 86400 -> '1d', 5400 -> '90m'."""
    unit = next((u for u in ("w", "d", "h", "m") if seconds % _UNITS_S[u] == 0 and seconds), "s")
    if unit == "w" and seconds < 4 * _UNITS_S["w"]:
        unit = "d"
    return f"{seconds // _UNITS_S[unit]}{unit}"


# ---- which checkpoints a rule keeps


def kept_by(rule: Rule, newest_first: Sequence[Kept], now_ns: int) -> dict[FolderName, str]:
    """Which of `newest_first` (the restorable checkpoints of one lineage) `rule` keeps, each with the reason."""
    match rule:
        case Last(count):
            return {entry.name: f"{format_rule(rule)}: number {n}" for n, entry in enumerate(newest_first[:count], 1)}
        case EverySteps(steps):
            return _first_of_steps(newest_first, steps)
        case Every(period_s):
            kept = _newest_of_periods(newest_first, period_s, 0, None)
            return {name: f"{format_rule(rule)}: newest of {label}" for name, label in kept.items()}
        case Window():
            return _in_window(rule, newest_first, now_ns)
        case Best():
            return _best_of(rule, newest_first)
        case All():
            return {entry.name: "all" for entry in newest_first}
        case Pinned():
            return {}


def _first_of_steps(newest_first: Sequence[Kept], steps: int) -> dict[FolderName, str]:
    first = {entry.name.step // steps: entry.name for entry in newest_first}  # an older one takes a newer one's place
    return {
        name: f"every-steps:{steps}: first from step {number * steps} on" for number, name in first.items() if number
    }


def _in_window(rule: Window, newest_first: Sequence[Kept], now_ns: int) -> dict[FolderName, str]:
    if not newest_first:
        return {}
    inside = newest_first
    if rule.within_s is not None:
        # The newest one's own clock may be wrong, but then it is not the future that counts.
        end_ns = min(newest_first[0].created_ns, now_ns)
        inside = [entry for entry in newest_first if entry.created_ns >= end_ns - rule.within_s * _NS]
    offset_s = _MONDAY_S if rule.period == "weekly" else 0
    kept = _newest_of_periods(inside, _PERIODS_S[rule.period], offset_s, rule.count)
    return {name: f"{format_rule(rule)}: newest of {label}" for name, label in kept.items()}


def _newest_of_periods(
    newest_first: Sequence[Kept], period_s: int, offset_s: int, count: int | None
) -> dict[FolderName, str]:
    newest: dict[int, FolderName] = {}
    for entry in newest_first:
        number = (entry.created_ns - offset_s * _NS) // (period_s * _NS)
        newest.setdefault(number, entry.name)
    chosen = sorted(newest, reverse=True)[:count]
    return {newest[number]: _label(number * period_s + offset_s, period_s) for number in chosen}


def _label(start_s: int, period_s: int) -> str:
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=start_s)
    text = f"{moment:%Y-%m-%d}" if period_s % 86400 == 0 else f"{moment:%Y-%m-%d %H:%M}Z"
    return text if period_s == 86400 else f"{format_span(period_s)} from {text}"


def _best_of(rule: Best, newest_first: Sequence[Kept]) -> dict[FolderName, str]:
    sign = 1.0 if rule.sense == "min" else -1.0
    rated = [
        (sign * value, entry.name)
        for entry in newest_first
        if (value := entry.metrics.get(rule.metric)) is not None and not math.isnan(value)
    ]
    rated.sort(key=lambda pair: pair[0])  # stable: of equal values the newer stays first
    return {
        name: f"{format_rule(rule)}: {rule.metric} {sign * value:g} is number {place}"
        for place, (value, name) in enumerate(rated[: rule.count], 1)
    }
