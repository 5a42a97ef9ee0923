"""Flags of NVIDIA's ft_launcher: those that mean the same are taken for ours, the others are refused by name.

Its other flags are torchrun's and are accepted as those. The names are those of nvidia-resiliency-ext 0.7.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click

from keepstep.records.errors import ConfigError

META = "keepstep.ft_flags"
"""Key of Context.meta: name of our flag's parameter -> (ft_launcher's spelling as given, value for our flag)."""
NONE = ("", "none", "null")
"""How ft_launcher's flags spell "not set"."""


class FtFlag(NamedTuple):
    """One flag: `ours` is the flag that means the same (None: there is none, `instead` says what to do)."""

    name: str
    ours: str | None = None
    instead: str = ""
    convert: Callable[[str], Any] = str
    """From ft_launcher's way of writing the value to ours; raises ValueError saying what is expected."""
    only: str | None = None
    """The only value that is accepted, because keepstep does just that."""


def _limit(text: str) -> str | None:
    return None if text.lower() in NONE else text


def _hang(text: str) -> str:
    # Without a heartbeat limit ft_launcher waits for one that the script calculates: a learned limit.
    return "auto" if text.lower() in NONE else text


def _sections(text: str) -> tuple[str, ...]:
    if text.lower() in NONE:
        return ()
    pairs = []
    for item in text.split(","):
        name, colon, seconds = item.partition(":")
        if not colon:
            raise ValueError("give NAME:SECONDS,...")
        pairs.append(f"{name.strip()}={seconds.strip()}")
    return tuple(pairs)


def _log_prefix(text: str) -> str:
    # Both write PREFIX_cycleN.log; ft_launcher leaves a final .log of the prefix out.
    return text.removesuffix(".log")


_CHECKS = "use --node-check LEVEL; `keepstep check node` shows what each level looks at"
_ATTRIBUTION = "faults are judged by the coordinator from the job's own records; nothing has to be started"
_FUNNEL = "with several nodes all output goes to one writer in any case; leave it out"
_ALWAYS = "keepstep always does that; leave it out"

FT_FLAGS: tuple[FtFlag, ...] = (
    FtFlag("term-timeout", "preempt-notice"),
    FtFlag("workers-stop-timeout", "stop-grace"),
    FtFlag("ft-cfg-path", None, "use --config FILE (TOML, the same names as the flags)"),
    FtFlag("ft-ignore-missing-cfg", None, "no file is needed; leave it out"),
    FtFlag("ft-workload-check-interval", None, "deadlines are timers, nothing is polled; leave it out"),
    FtFlag("ft-initial-rank-heartbeat-timeout", "start-timeout", convert=_limit),
    FtFlag("ft-rank-heartbeat-timeout", "hang-timeout", convert=_hang),
    FtFlag("ft-rank-section-timeouts", "section-timeout", convert=_sections),
    FtFlag("ft-rank-out-of-section-timeout", "out-of-section-timeout", convert=_limit),
    FtFlag("ft-safety-factor", None, "learned limits have a fixed factor; give limits with --hang-timeout S"),
    FtFlag("ft-skip-section-response", None, "sections are written to shared memory, nobody answers; leave it out"),
    FtFlag("ft-rank-termination-signal", None, "ranks get SIGTERM, and SIGKILL after --stop-grace S"),
    FtFlag("ft-log-level", None, "use `keepstep --debug run ...`"),
    FtFlag("ft-restart-check-interval", None, "restarts are decided at once, nothing is polled; leave it out"),
    FtFlag("ft-restart-policy", None, "a failed rank restarts all ranks", only="any-failed"),
    FtFlag("ft-rdzv-impl", None, "keepstep has its own coordinator; leave it out"),
    FtFlag("ft-segment", None, "use --topology FILE, and --replica-size N for ranks that belong together"),
    FtFlag("ft-node-health-check-interval", None, _CHECKS),
    FtFlag("ft-node-health-check-endpoint", None, _CHECKS),
    FtFlag("ft-enable-nic-monitor", None, _CHECKS),
    FtFlag("ft-enable-nic-healthcheck", None, _CHECKS),
    FtFlag("ft-pci-topo-file", None, _CHECKS),
    FtFlag("ft-link-down-path-template", None, _CHECKS),
    FtFlag("ft-link-state-path-template", None, _CHECKS),
    FtFlag("ft-enable-dist-storage-healthcheck", None, _CHECKS),
    FtFlag("ft-storage-health-check-path", None, _CHECKS),
    FtFlag("ft-segment-health-check-dir", None, _CHECKS),
    FtFlag("ft-max-no-progress-cycles", "max-no-progress-cycles"),
    FtFlag("ft-min-progress-iterations", "min-progress-iterations"),
    FtFlag("ft-checkpoint-iteration-file", "checkpoint-iteration-file", convert=_limit),
    FtFlag("ft-no-restart-exit-code", "no-restart-exit-code"),
    FtFlag("ft-gpu-memory-reclaim-timeout", "gpu-memory-reclaim-timeout"),
    FtFlag("ft-gpu-memory-tolerance-mb", "gpu-memory-tolerance-mb"),
    FtFlag("ft-gpu-memory-poll-interval", "gpu-memory-poll-interval"),
    FtFlag("ft-check-remaining-processes", None, _ALWAYS),
    FtFlag("ft-install-exception-hook", None, "tracebacks of ranks are kept in any case; leave it out"),
    FtFlag("ft-numa-bind-strict", None, "start `keepstep run` under numactl, or bind in the script"),
    FtFlag("ft-cycle-info-dir", None, "cycle records are in cycles/ of --run-dir DIR"),
    FtFlag("ft-cycle-info-job-id", None, "use --rdzv-id ID"),
    FtFlag("ft-per-cycle-applog-prefix", "log-prefix", convert=_log_prefix),
    FtFlag("ft-nvrx-logfile", None, "the launcher's own messages are in logs/launcher.log of --run-dir DIR"),
    FtFlag("ft-enable-log-server", None, _FUNNEL),
    FtFlag("ft-log-server-port", "log-port"),
    FtFlag("ft-log-aggregator-count", None, _FUNNEL),
    FtFlag("ft-log-leaf-max-queue-chunks", None, _FUNNEL),
    FtFlag("ft-log-server-log-prefix", None, _FUNNEL),
    FtFlag("ft-log-server-graceful-shutdown-timeout", None, _FUNNEL),
    FtFlag("ft-attribution-endpoint", None, _ATTRIBUTION),
    FtFlag("ft-attribution-startup-timeout", None, _ATTRIBUTION),
    FtFlag("ft-attribution-llm-api-key-file", None, "no language model is asked; leave it out"),
    FtFlag("ft-attribution-llm-base-url", None, "no language model is asked; leave it out"),
    FtFlag("ft-attribution-llm-model", None, "no language model is asked; leave it out"),
    FtFlag("ft-attribution-analysis-backend", None, _ATTRIBUTION),
    FtFlag("ft-attribution-stop-action", "attribution-stop", convert=str.lower),
    FtFlag("ft-attribution-log-level", None, "use `keepstep --debug run ...`"),
    FtFlag("ft-attribution-export-url", None, "incidents are in incidents/ of --run-dir DIR"),
)

SWITCHES = {"ft-ignore-missing-cfg"}
"""Those that take no value."""


def spellings(name: str) -> list[str]:
    """How a flag may be written: --ft-a-b, --ft_a_b and, as ft_launcher itself has it, --ft-a_b."""
    under = name.replace("-", "_")
    return list(dict.fromkeys([f"--{name}", f"--{under}", f"--{name[:3]}{under[3:]}"]))


def _option(row: FtFlag) -> Callable[[Any], Any]:
    def take(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is None or value is False:
            return
        shown = f"--{row.name}" if value is True else f"--{row.name} {value}"
        if row.only is not None and value == row.only:
            return
        if row.ours is None:
            expected = f" (only {row.only!r} is possible)" if row.only else ""
            raise ConfigError(f"{shown}: keepstep has no such flag{expected}; {row.instead}")
        _take(ctx, row.ours, shown, row.convert, value)

    switch: dict[str, Any] = {"is_flag": True} if row.name in SWITCHES else {"default": None}
    names = [*spellings(row.name), row.name.replace("-", "_")]
    return click.option(*names, hidden=True, expose_value=False, callback=take, **switch)


def _take(ctx: click.Context, ours: str, shown: str, convert: Callable[[str], Any], text: str) -> None:
    target = next(p for p in ctx.command.params if f"--{ours}" in p.opts)
    try:
        value = convert(text)
        if value is not None:
            value = target.type_cast_value(ctx, value)
    except (ValueError, ConfigError, click.BadParameter) as error:
        why = error.message if isinstance(error, click.BadParameter) else str(error)
        raise ConfigError(f"{shown} (--{ours}): {why}") from None
    if value is not None and target.name is not None:
        ctx.meta.setdefault(META, {})[target.name] = (shown, value)


FT_OPTIONS = [_option(row) for row in FT_FLAGS]
