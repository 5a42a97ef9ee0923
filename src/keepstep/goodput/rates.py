"""How often nodes fail: a Gamma posterior over what is known from elsewhere (a prior, by GPU model) and what a job saw itself.

Rates are failures that interrupt a job, per node and day. Count interruptions, not faults: a switch that takes four nodes along is
one. Published rates are quoted per 1000 node-days, and so are rates given by people.
"""

from __future__ import annotations

import math

import msgspec

from keepstep.goodput.special import gamma_quantile
from keepstep.records.errors import ConfigError

DAY_S = 86_400.0
PRIOR_SHAPE = 0.5
"""Weight of a prior that is only a rate: that of half a failure, as in Jeffreys' prior of a Poisson rate. One failure of the
job's own outweighs it."""
PUBLISHED: dict[str, tuple[float, str]] = {
    "A100": (6.50, "Meta RSC-1, jobs over 128 GPUs, arXiv 2410.21680"),
    "H100": (3.79, "Llama 3: 419 unexpected interruptions of 2,048 nodes in 54 days, arXiv 2407.21783"),
}
"""Failures per 1000 node-days (8 GPUs each), hardware and unexpected ones only, and where that was measured."""
CONFLICT_FAILURES = 3
CONFLICT_PROBABILITY = 0.01
"""A prior is set aside when the job had at least so many failures and the prior gave so many or more less than this probability."""
TYPICAL_DISPERSION = 1.8
"""Variance over mean of daily counts of incidents (faults less than 10 minutes apart are one) on 400 GPU nodes in 345 days:
InfiniteHBD-Trace, stepfun-ai, 584 faults in 482 incidents. A Poisson process has 1; weekly counts of the same trace have 4.1."""
UNKNOWN_SKU = (6.50, "no rate is published for this GPU model: the highest of the published ones (Meta RSC-1)")


class Prior(msgspec.Struct, frozen=True, kw_only=True):
    """A Gamma distribution of the rate: as if `shape` failures had been seen in `node_days`. `source` says where it is from."""

    shape: float
    node_days: float
    source: str

    @property
    def rate_per_node_day(self) -> float:
        """Its mean."""
        return self.shape / self.node_days


class RateEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Failures per node and day: the posterior's mean, and `low` to `high` around it with probability `level`."""

    rate_per_node_day: float
    low: float
    high: float
    level: float
    failures: float
    exposure_node_days: float
    dispersion: float
    shape: float
    """Of the posterior: as if so many failures had been seen."""
    prior: Prior
    prior_set_aside: bool = False
    """The job failed far more often than the prior allows: only its own history counts."""

    def mttf_s(self, nodes: int) -> float:
        """Mean time between failures of a job on `nodes` nodes, in seconds, at the mean rate."""
        return mttf_s(self.rate_per_node_day, nodes)


class PriorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a fleet saw of one GPU model: `failures` that interrupted jobs in `node_days`."""

    failures: float
    node_days: float


class PriorFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`keepstep.failure_prior/1`: a fleet's failures by GPU model; "default" for models that are not named."""

    schema: str
    skus: dict[str, PriorEntry]


def mttf_s(rate_per_node_day: float, nodes: int) -> float:
    """Mean time between failures of `nodes` nodes, in seconds; infinite at rate 0. It falls as 1/nodes within one kind of
    hardware."""
    rate = rate_per_node_day * nodes
    return DAY_S / rate if rate > 0.0 else math.inf


def sku_of(device_name: str) -> str:
    """GPU model from a device's name as drivers give it: "NVIDIA H100 80GB HBM3" -> "H100"; "unknown" when it is not in
    PUBLISHED."""
    words = device_name.upper().replace("-", " ").split()
    return next((sku for sku in PUBLISHED if sku in words), "unknown")


def published_prior(sku: str) -> Prior:
    """The weak prior centred on the published rate of a GPU model (PUBLISHED), or of none (UNKNOWN_SKU)."""
    per_1000, source = PUBLISHED.get(sku.upper(), UNKNOWN_SKU)
    return prior_from_rate(per_1000, source)


def prior_from_rate(per_1000_node_days: float, source: str) -> Prior:
    """The weak prior (PRIOR_SHAPE) whose mean is this rate. Raises ConfigError unless it is positive and finite."""
    if not (0.0 < per_1000_node_days < math.inf):
        raise ConfigError(f"failure rate {per_1000_node_days}: give failures per 1000 node-days, a number above 0")
    return Prior(shape=PRIOR_SHAPE, node_days=PRIOR_SHAPE / per_1000_node_days * 1000.0, source=source)


def parse_prior(text: str, sku: str, where: str) -> Prior:
    """A prior as given by people: failures per 1000 node-days ("4.2"), or the JSON of a PriorFile.

    An entry of a PriorFile counts with its full weight: it is a fleet's own history. `where` names the flag, variable or file in
    errors. Raises ConfigError.
    """
    text = text.strip()
    if not text.startswith("{"):
        try:
            return prior_from_rate(float(text), f"{where}: {text} per 1000 node-days")
        except (ValueError, ConfigError):
            raise ConfigError(
                f"{where} {text!r}: give failures per 1000 node-days (a number above 0), or a file with "
                '{"schema": "keepstep.failure_prior/1", "skus": {"H100": {"failures": 12, "node_days": 3000}}}'
            ) from None
    try:
        file = msgspec.json.decode(text, type=PriorFile)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: not a keepstep.failure_prior/1 record: {error}") from None
    if file.schema != "keepstep.failure_prior/1":
        raise ConfigError(f"{where}: schema {file.schema!r}; this version reads keepstep.failure_prior/1")
    for name, entry in file.skus.items():
        if not (0.0 <= entry.failures < math.inf) or not (0.0 < entry.node_days < math.inf):
            raise ConfigError(
                f"{where}: skus.{name}: {entry.failures:g} failures in {entry.node_days:g} node-days; "
                "failures are at least 0 and node_days above 0"
            )
    named = {name.upper(): entry for name, entry in file.skus.items()}
    own = named.get(sku.upper()) or named.get("DEFAULT")
    if own is None:
        known = published_prior(sku)
        return msgspec.structs.replace(known, source=f'{where} names no {sku!r} and no "default"; {known.source}')
    source = f"{where}: {own.failures:g} failures in {own.node_days:g} node-days"
    return Prior(shape=own.failures + PRIOR_SHAPE, node_days=own.node_days, source=source)


def estimate_rate(
    prior: Prior, failures: float, exposure_node_days: float, *, dispersion: float = 1.0, level: float = 0.9
) -> RateEstimate:
    """The posterior Gamma(shape + failures / dispersion, node_days + exposure / dispersion).

    `dispersion` is the variance of failure counts over their mean: 1 for a Poisson process, more when failures come in
    bursts; it takes that much weight from what the job saw and widens the interval accordingly (quasi-likelihood). Raises
    ValueError for negative counts, a dispersion below 1 or a level outside 0 to 1.

    A Gamma prior of small shape still denies rates far above its mean: its node-days would outvote a job that fails every
    hour until it has as many itself. So a prior that the job's failures contradict (CONFLICT_PROBABILITY) is replaced by
    Jeffreys'.
    """
    if failures < 0 or exposure_node_days < 0 or dispersion < 1.0 or not 0.0 < level < 1.0:
        raise ValueError(
            f"failures {failures}, exposure {exposure_node_days} node-days, dispersion {dispersion}, level {level}: "
            "counts are at least 0, dispersion at least 1, level between 0 and 1"
        )
    aside = failures >= CONFLICT_FAILURES and exposure_node_days > 0
    aside = aside and predictive_tail(prior, failures, exposure_node_days) < CONFLICT_PROBABILITY
    shape = (PRIOR_SHAPE if aside else prior.shape) + failures / dispersion
    node_days = (0.0 if aside else prior.node_days) + exposure_node_days / dispersion
    tail = (1.0 - level) / 2.0
    return RateEstimate(
        rate_per_node_day=shape / node_days,
        low=gamma_quantile(tail, shape) / node_days,
        high=gamma_quantile(1.0 - tail, shape) / node_days,
        level=level,
        failures=failures,
        exposure_node_days=exposure_node_days,
        dispersion=dispersion,
        shape=shape,
        prior=prior,
        prior_set_aside=aside,
    )


def predictive_tail(prior: Prior, failures: float, exposure_node_days: float) -> float:
    """Probability of at least `failures` failures in that exposure, before any was seen: a negative binomial distribution."""
    share = exposure_node_days / (prior.node_days + exposure_node_days)
    below = term = (1.0 - share) ** prior.shape
    for k in range(1, math.ceil(failures)):
        term *= share * (prior.shape + k - 1.0) / k
        below += term
    return max(0.0, 1.0 - below) if failures > 0 else 1.0
