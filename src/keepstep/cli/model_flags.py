"""Flags that describe a job to `plan` and `simulate`: its size, how it fails, what saves and restarts cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from keepstep.cli.run_flags import Number, NumberType
from keepstep.goodput.interval import optimal_s
from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.records.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([a-z]*)\s*\Z")


class Duration(NumberType):
    """A time: seconds, or a number with ms, s, m (min), h, d or w. Raises ConfigError naming flag and value."""

    name = "duration"

    def __init__(self, above: bool = False) -> None:
        self.above = above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        flag = param.opts[0] if param is not None else "time"
        return parse_duration(value, flag, above=self.above)


def parse_duration(value: Any, where: str, *, above: bool = False) -> float:
    """Seconds of "90", "15m", "1.5h", "3d"; `above`: 0 is refused. `where` names the flag. Raises ConfigError."""
    match = _DURATION.match(str(value))
    seconds = math.nan
    if match is not None and match[2] in _UNITS:
        try:
            seconds = float(match[1]) * _UNITS[match[2]]
        except ValueError:
            seconds = math.nan
    if not 0.0 <= seconds < math.inf or (above and seconds == 0.0):
        bound = "above 0" if above else "of at least 0"
        raise ConfigError(
            f"{where} {value}: give a time {bound}: seconds, or a number with s, m, h, d or w, such as 15m"
        )
    return seconds


DURATION = Duration()
DURATION_ABOVE_0 = Duration(above=True)
SHARE = click.FloatRange(0.0, 1.0)

_JOB_OPTIONS = (
    click.option("--gpus", type=click.IntRange(1), metavar="N", help="GPUs that train."),
    click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, metavar="N"),
    click.option(
        "--failure-rate",
        type=Number(above=True, unit="failures per 1000 node-days"),
        metavar="RATE",
        help="Failures that interrupt the job, per 1000 node-days.",
    ),
    click.option("--delta", type=DURATION, metavar="TIME", help="Training stands still for so long for a save."),
    click.option("--persist-lag", type=DURATION, metavar="TIME", help="From then until the save is durable."),
    click.option("--restart", type=DURATION, metavar="TIME", help="From a failure that is known to training again."),
    click.option("--interval", type=DURATION_ABOVE_0, metavar="TIME", help="Between saves; the best one if not given."),
    click.option("--hang-share", type=SHARE, metavar="SHARE", help="Share of failures that are hangs, 0 to 1."),
    click.option("--hang-timeout", type=DURATION, metavar="TIME", help="Until a hang is noticed."),
    click.option("--spares", type=click.IntRange(0), metavar="N", help="Nodes that wait to replace others."),
    click.option("--mttr", type=DURATION, metavar="TIME", help="Mean time to repair a node, such as 24h."),
    click.option("--price", type=Number(unit="dollars"), metavar="USD", help="Dollars per GPU and hour."),
    click.option("--days", type=Number(above=True, unit="days"), default=54.0, show_default=True, metavar="N"),
    click.option(
        "--tier",
        "tiers",
        multiple=True,
        metavar="SPEC",
        help="A place for checkpoints, nearest first: NAME[,every=N][,block=TIME][,lag=TIME][,load=TIME]; repeatable. "
        "block is on top of what nearer tiers take; instead of --delta and --persist-lag.",
    ),
    click.option(
        "--kind",
        "kinds",
        multiple=True,
        metavar="SPEC",
        help="A class of failures: NAME,share=0..1[,detect=TIME][,tier=NAME][,replace=yes|no][,persists=0..1]; repeatable. "
        "tier: the nearest that survives it. Instead of --hang-share and --hang-timeout.",
    ),
    click.option("--replace", "replace_s", type=DURATION, metavar="TIME", help="Part of a restart: a spare is put in."),
    click.option("--straggler-share", type=SHARE, metavar="SHARE", help="Share of training that waits for slow ranks."),
)
"""Times are in seconds or with a unit: 15m, 24h. `plan` and `simulate` mean the same by all of these."""


def job_options(function: F) -> F:
    """Add the flags above to a command."""
    for option in reversed(_JOB_OPTIONS):
        function = option(function)
    return function


def job_from_flags(flags: Mapping[str, Any], *, rate_per_1000: float | None = None) -> Job:
    """The job that the flags describe; its interval is the exact optimum of the first tier's blocking time unless given.

    `rate_per_1000`: failures per 1000 node-days where --failure-rate is not given; without it the flag is needed.
    Raises ConfigError naming the flag that is missing or makes no sense.
    """
    if flags.get("failure_rate") is None and rate_per_1000 is not None:
        flags = {**flags, "failure_rate": rate_per_1000}
    for name in ("gpus", "failure_rate"):
        if flags.get(name) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is needed; give it")
    per_node = int(flags["gpus_per_node"])
    nodes = -(-int(flags["gpus"]) // per_node)
    tiers = _tiers(flags)
    kinds = _kinds(flags, tiers)
    restart_s, replace_s = flags.get("restart") or 0.0, flags.get("replace_s") or 0.0
    if replace_s > restart_s:
        raise ConfigError(f"--replace {replace_s:g} s is part of --restart {restart_s:g} s and cannot be longer")
    rate = flags["failure_rate"] / 1000.0
    interval_s = flags.get("interval")
    if interval_s is None:
        mttf_s = 86_400.0 / (rate * nodes)
        interval_s = max(1.0, optimal_s(tiers[0].block_s, mttf_s, tiers[0].persist_lag_s))
    job = Job(
        nodes=nodes,
        gpus_per_node=per_node,
        rate_per_node_day=rate,
        interval_s=interval_s,
        tiers=tiers,
        kinds=kinds,
        restart=RestartPhases(start_s=restart_s - replace_s, replace_s=replace_s),
        straggler_share=flags.get("straggler_share") or 0.0,
    )
    job.check()
    return job


def _tiers(flags: Mapping[str, Any]) -> tuple[Tier, ...]:
    if not flags.get("tiers"):
        if flags.get("delta") is None:
            raise ConfigError("--delta is needed: how long training stands still for a save; give it, or --tier")
        return (Tier(name="disk", block_s=flags["delta"], persist_lag_s=flags.get("persist_lag") or 0.0),)
    if flags.get("delta") is not None or flags.get("persist_lag") is not None:
        raise ConfigError("--tier and --delta or --persist-lag: give one of them; block= and lag= say it for each tier")
    tiers = []
    for spec in flags["tiers"]:
        name, values = parse_spec(spec, "--tier", ("every", "block", "lag", "load"))
        where = f"--tier {spec}:"
        every = values.get("every", "1")
        if not every.isdigit() or int(every) < 1:
            raise ConfigError(f"{where} every={every}: a whole number of saves from 1")
        tiers.append(
            Tier(
                name=name,
                every=int(every),
                block_s=parse_duration(values.get("block", "0"), f"{where} block"),
                persist_lag_s=parse_duration(values.get("lag", "0"), f"{where} lag"),
                load_s=parse_duration(values.get("load", "0"), f"{where} load"),
            )
        )
    return tuple(tiers)


def _kinds(flags: Mapping[str, Any], tiers: tuple[Tier, ...]) -> tuple[FailureKind, ...]:
    if not flags.get("kinds"):
        share, timeout_s = flags.get("hang_share") or 0.0, flags.get("hang_timeout")
        if share and timeout_s is None:
            raise ConfigError(f"--hang-share {share:g} needs --hang-timeout: how long until a hang is noticed")
        last = len(tiers) - 1
        crash = FailureKind(name="crash", share=1.0 - share, tier=last, replace=True)
        hang = FailureKind(name="hang", share=share, detect_s=timeout_s or 0.0, tier=last, replace=True)
        return (crash, hang) if share else (crash,)
    if flags.get("hang_share") is not None or flags.get("hang_timeout") is not None:
        raise ConfigError("--kind and --hang-share or --hang-timeout: give one of them; detect= says it for each kind")
    names = [tier.name for tier in tiers]
    kinds = []
    for spec in flags["kinds"]:
        name, values = parse_spec(spec, "--kind", ("share", "detect", "tier", "replace", "persists"))
        where = f"--kind {spec}:"
        tier = values.get("tier", names[-1])
        if tier not in names:
            raise ConfigError(f"{where} tier={tier}: there is {', '.join(names)}")
        replace = values.get("replace", "yes")
        if replace not in ("yes", "no"):
            raise ConfigError(f"{where} replace={replace}: yes or no")
        kinds.append(
            FailureKind(
                name=name,
                share=_share(values.get("share"), f"{where} share"),
                detect_s=parse_duration(values.get("detect", "0"), f"{where} detect"),
                tier=names.index(tier),
                replace=replace == "yes",
                persists=_share(values.get("persists", "0"), f"{where} persists"),
            )
        )
    total = math.fsum(kind.share for kind in kinds)
    if abs(total - 1.0) > 1e-6:
        raise ConfigError(f"--kind: the shares add up to {total:g}; they must be 1")
    return tuple(kinds)


def parse_spec(spec: str, flag: str, keys: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """NAME,key=value,... taken apart. Raises ConfigError naming flag, key and what is known."""
    name, *rest = [part.strip() for part in spec.split(",")]
    if not name or "=" in name:
        raise ConfigError(f"{flag} {spec}: begin with a name, then {', '.join(f'{k}=' for k in keys)}")
    values = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or key not in keys:
            raise ConfigError(f"{flag} {spec}: {part!r} is none of {', '.join(f'{k}=' for k in keys)}")
        values[key] = value
    return name, values


def _share(value: str | None, where: str) -> float:
    try:
        share = float(value or "")
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"{where} {value}: a number from 0 to 1")
    return share
