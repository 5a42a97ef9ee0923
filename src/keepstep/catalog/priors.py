"""What is believed before evidence, and how sums of weights become probabilities and words: `data/priors.toml`."""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from keepstep.records.errors import ConfigError
from keepstep.records.verdict import CLASSES, FaultClass


class Shares(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of a weight that count where a sign is not news: explained by another, survived, over, later; and what
    repeats add.

    `absence`: log-odds, not a share, against a class of which no sign was seen.
    """

    explained: float
    confirming: float
    survived: float
    over: float
    later: float
    repeat: float
    repeat_limit: float
    absence: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`temperature` divides the sums of weights; `bias_unknown` is added to "unknown" afterwards. Both in natural log-odds."""

    temperature: float
    bias_unknown: float


class Tiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Least probability of each word. `margin`: least log-odds over the next class; below it no class is named."""

    certain: float
    probable: float
    possible: float
    margin: float


class Priors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. `log_odds`: of each class, natural, before evidence."""

    version: str
    log_odds: dict[FaultClass, float]
    shares: Shares
    calibration: Calibration
    tiers: Tiers


def priors_of(text: str | bytes, name: str) -> Priors:
    """Decode and check a file of priors. Raises ConfigError naming the file and what is wrong."""
    try:
        found = msgspec.toml.decode(text, type=Priors)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error
    missing = [c for c in CLASSES if c not in found.log_odds]
    if missing:
        raise ConfigError(f"{name}: [log_odds] has no value for {', '.join(missing)}")
    if found.calibration.temperature <= 0:
        raise ConfigError(f"{name}: calibration.temperature is {found.calibration.temperature}; it must be above 0")
    return found


@functools.cache
def shipped_priors() -> Priors:
    """The priors that come with the package."""
    file = resources.files("keepstep.catalog") / "data" / "priors.toml"
    return priors_of(file.read_bytes(), "priors.toml")
