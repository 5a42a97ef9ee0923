"""Flags of `keepstep run` and `keepstep coordinator`: torchrun's, our own, and how one value of each is read.

What the values come to together is decided in cli/effective.py; what torchrun's flags do here is in docs/torchrun-flags.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keepstep.cli.config_file import use_config_file
from keepstep.cli.ft_flags import FT_OPTIONS
from keepstep.cli.store_flags import STORE_FLAGS
from keepstep.cli.trust_flags import POLICY_FLAGS, SIGNER_FLAGS
from keepstep.records.errors import ConfigError
from keepstep.records.exits import EXIT_NO_RESTART

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

if TYPE_CHECKING:
    NumberType = click.ParamType[float]
    ListType = click.ParamType[list[str]]
else:
    # Before click 8.5 the class takes no type argument.
    NumberType = ListType = click.ParamType


class Flag(click.Option):
    """An option in both of torchrun's spellings (--a-b, --a_b), of which the help shows the first."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The line of this option in the help."""
        spellings = self.opts
        self.opts = [name for name in spellings if "_" not in name]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = spellings


class Number(NumberType):
    """A finite number that is at least `least` (above it with `above`). Raises ConfigError naming flag and value."""

    name = "number"

    def __init__(self, least: float = 0.0, above: bool = False, unit: str = "seconds") -> None:
        self.least, self.above, self.unit = least, above, unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that `value` spells."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and (number > self.least or (number == self.least and not self.above)):
            return number
        flag = param.opts[0] if param is not None else "number"
        bound = "above" if self.above else "of at least"
        raise ConfigError(f"{flag} {value}: give a number of {self.unit} {bound} {self.least:g}")


class CommaList(ListType):
    """Comma separated items; two commas stand for one in an item, as in torchrun."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The items of `value`."""
        if isinstance(value, list):
            return value
        return [item.replace("\0", ",") for item in str(value).replace(",,", "\0").split(",")]


def _flag(name: str, *more: str, variable: bool = False, **kwargs: Any) -> Decorator[Any]:
    under = name.lstrip("-").replace("-", "_")
    names = [name, *([f"--{under}"] if "-" in name[2:] else []), *more, under]
    return click.option(*names, cls=Flag, envvar=f"PET_{under.upper()}" if variable else None, **kwargs)


def _torch(name: str, *more: str, variable: bool = True, **kwargs: Any) -> Decorator[Any]:
    """A flag of torchrun: it also reads PET_A_B, unless torchrun does not."""
    return _flag(name, *more, variable=variable, **kwargs)


SECONDS = Number()
SECONDS_ABOVE_0 = Number(above=True)
HIDDEN: dict[str, Any] = {"hidden": True}
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")

TORCH_JOB_FLAGS: list[Decorator[Any]] = [
    _torch("--nnodes", default="1:1", help="Nodes that train: N, or MIN:MAX when the job may shrink."),
    _torch("--rdzv-backend", default="static", help="static or c10d; both mean keepstep's own coordinator."),
    _torch(
        "--rdzv-endpoint", default="", metavar="HOST[:PORT]", help="Host of the coordinator; more of them take over."
    ),
    _torch("--rdzv-id", default="none", help="Run id; the same id resumes the run."),
    _torch("--rdzv-conf", default="", help="k=v,...: join_timeout and lease are used."),
    _torch(
        "--max-restarts", type=click.IntRange(0), default=10, show_default=True, help="Real failures to restart after."
    ),
]
"""Those of torchrun that concern the whole job."""

TORCH_NODE_FLAGS: list[Decorator[Any]] = [
    _torch("--nproc-per-node", default="1", help="Ranks on this node: a number, cpu, gpu or auto."),
    _torch("--standalone", is_flag=True, help="One node; rendezvous settings are ignored."),
    _torch("--monitor-interval", type=float, default=0.1, **HIDDEN),
    _torch("--start-method", type=click.Choice(["spawn", "fork", "forkserver"]), default="spawn", **HIDDEN),
    _torch("--event-log-handler", default="null", **HIDDEN),
    _torch("--role", default="default", help="Role name of the ranks."),
    _torch("--module", "-m", is_flag=True, help="SCRIPT is a module name, as in python -m."),
    _torch("--no-python", is_flag=True, help="SCRIPT is a program, not a Python file."),
    _torch("--run-path", is_flag=True, **HIDDEN),
    _torch("--log-dir", default=None, help="Folder for per-rank output files (--redirects, --tee)."),
    _torch("--redirects", "-r", default="0", help="0-3 or RANK:0-3,...: to files only."),
    _torch("--tee", "-t", default="0", help="0-3 or RANK:0-3,...: to files and the terminal."),
    _torch("--local-ranks-filter", default="", help="Only these local ranks' output to the terminal."),
    _torch("--duplicate-stdout-filters", type=CommaList(), default=[], **HIDDEN),
    _torch("--duplicate-stderr-filters", type=CommaList(), default=[], **HIDDEN),
    _torch("--node-rank", type=int, default=0, help="Used for the default node name when there are several."),
    _torch("--master-addr", default="127.0.0.1", help="Address of rank 0's store; without an endpoint also that."),
    _torch(
        "--master-port", type=click.IntRange(1, 65535), default=None, help="Its port in cycle 0; later ones are fresh."
    ),
    _torch("--local-addr", default=None, help="Address of this node for the other nodes."),
    _torch("--logs-specs", variable=False, default=None, **HIDDEN),
    _torch("--numa-binding", variable=False, type=click.Choice(NUMA_BINDINGS), default=None, **HIDDEN),
    _torch("--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", **HIDDEN),
    _torch("--shutdown-timeout", type=click.IntRange(0), default=None, **HIDDEN),
    _torch("--virtual-local-rank", is_flag=True, **HIDDEN),
]

OWN_JOB_FLAGS: list[Decorator[Any]] = [
    _flag(
        "--config",
        default=None,
        metavar="FILE",
        is_eager=True,
        callback=use_config_file,
        help="TOML with these flags' names; flags and PET_* go before it.",
    ),
    _flag("--run-dir", default=None, help="Run folder [default: $KEEPSTEP_HOME/runs/RUN-ID]."),
    _flag("--spares", type=click.IntRange(0), default=0, show_default=True, help="Further nodes that wait warm."),
    _flag(
        "--replica-size",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Ranks of one model-parallel replica; a job shrinks by whole ones.",
    ),
    _flag(
        "--gang-check",
        type=click.Choice(["off", "first", "swap", "always"]),
        default="off",
        show_default=True,
        help="Test the nodes' bandwidth before the first cycle, after nodes changed, or both.",
    ),
    _flag(
        "--memory-tier",
        type=click.Choice(["off", "node", "peer"]),
        default=None,
        help="Checkpoints in memory: none, this node's, or also a copy on another [default: peer with several nodes].",
    ),
    _flag("--topology", default=None, metavar="FILE", help="Levels (block, leaf, NVLink domain) of all nodes."),
    _flag("--token-file", default=None, metavar="FILE", help="Job token [default: $KEEPSTEP_JOB_TOKEN]."),
    _flag(
        "--no-tls", is_flag=True, help="Clear text between nodes (the token is still proven); not for real networks."
    ),
    _flag(
        "--log-port", type=click.IntRange(1, 65535), default=None, help="Port of the log funnel [default: next one]."
    ),
    _flag("--log-prefix", default=None, metavar="P", help="P_cycleN.log gets a copy of each cycle's log."),
    _flag(
        "--checkpoint-iteration-file",
        default=None,
        metavar="FILE",
        help="Holds the last saved step; progress marker of scripts without ks.Checkpointer.",
    ),
    _flag(
        "--max-no-progress-cycles",
        type=click.IntRange(0),
        default=3,
        show_default=True,
        help="Failed cycles without progress before the job stops for good; 0: never.",
    ),
    _flag(
        "--min-progress-iterations",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Growth of the marker that counts as progress.",
    ),
    _flag(
        "--no-restart-exit-code",
        type=click.IntRange(1, 255),
        default=EXIT_NO_RESTART,
        show_default=True,
        help="Exit code that means: do not requeue.",
    ),
    _flag(
        "--attribution",
        type=click.Choice(["on", "off"]),
        default="on",
        show_default=True,
        help="Give each failed cycle a verdict from its evidence (incidents/).",
    ),
    _flag(
        "--attribution-stop",
        type=click.Choice(["log", "no-restart"]),
        default="log",
        show_default=True,
        help="What a verdict does that calls for fail_fast: be said, or end the job with --no-restart-exit-code.",
    ),
    _flag("--server", default=None, metavar="URL", **HIDDEN),
    _flag("--policy", default=None, metavar="FILE", **HIDDEN),
]
"""Those of our own that concern the whole job."""

OWN_NODE_FLAGS: list[Decorator[Any]] = [
    _flag("--preload", default=None, help="Modules the zygote imports, comma separated."),
    _flag("--no-zygote", is_flag=True, help="Start every rank in a fresh interpreter."),
    _flag("--hang-timeout", default="auto", show_default=True, help="auto, seconds, or off."),
    _flag(
        "--start-timeout",
        type=SECONDS_ABOVE_0,
        default=1800.0,
        show_default=True,
        help="Limit up to the end of the first step, s.",
    ),
    _flag("--section-timeout", multiple=True, metavar="NAME=S", help="Limit of a section, in seconds."),
    _flag(
        "--out-of-section-timeout",
        type=SECONDS_ABOVE_0,
        default=None,
        help="Limit of the time outside every section, s [default: none].",
    ),
    _flag("--stop-grace", type=SECONDS, default=15.0, show_default=True, help="SIGTERM to SIGKILL, s."),
    _flag(
        "--preempt-notice",
        type=SECONDS_ABOVE_0,
        default=None,
        help="SIGTERM to SIGKILL as the scheduler grants it, s [default: --stop-grace].",
    ),
    _flag(
        "--gpu-memory-reclaim-timeout",
        type=SECONDS,
        default=50.0,
        show_default=True,
        help="How long a restart waits for free GPU memory, s; 0: not at all.",
    ),
    _flag(
        "--gpu-memory-tolerance-mb",
        type=Number(unit="megabytes"),
        default=512.0,
        show_default=True,
        help="Used memory that counts as free.",
    ),
    _flag(
        "--gpu-memory-poll-interval",
        type=SECONDS_ABOVE_0,
        default=2.0,
        show_default=True,
        help="How often it is looked at, s.",
    ),
    _flag(
        "--node-check",
        type=click.IntRange(0, 3),
        default=1,
        show_default=True,
        help="Level of `keepstep check node` before this node may join; 0: none.",
    ),
    _flag(
        "--failure-prior",
        default=None,
        metavar="FILE|RATE",
        help="Failures per 1000 node-days (or a record of them) to set the checkpoint interval by.",
    ),
    _flag(
        "--advice",
        type=click.Choice(["off", "auto"]),
        default="off",
        show_default=True,
        help="auto: floor of the learned hang limit and number of spares follow the failure rate, within bounds.",
    ),
    _flag(
        "--mttr",
        type=SECONDS_ABOVE_0,
        default=None,
        help="Mean time to repair a node, s, for --advice [default: a day].",
    ),
    _flag(
        "--power-ramp",
        type=SECONDS,
        default=0.0,
        show_default=True,
        help="The first steps of a cycle come to full speed over so many s; 0: at once.",
    ),
    _flag("--inject", multiple=True, metavar="SPEC", help="KIND@KEY=VALUE,...: cause a real fault."),
    _flag("--node-name", default=None, help="Name of this node [default: host name]."),
    _flag(
        "--on-busy",
        type=click.Choice(["wait", "skip"]),
        default=None,
        help="What a save does that falls due while one is in flight, where the script does not say [default: wait].",
    ),
    *(_flag(name, **kwargs) for name, kwargs in (POLICY_FLAGS | SIGNER_FLAGS | STORE_FLAGS).items()),
    _flag("--fresh-start", is_flag=True, help="Allow step 0 over a checkpoint root with nothing valid in it."),
    _flag("--dry-run", is_flag=True, help="Print configuration, environment and restart rules; start nothing."),
]


def run_flags(command: F) -> F:
    """Every flag of `keepstep run`: torchrun's, ours, and ft_launcher's."""
    return _all([*TORCH_JOB_FLAGS, *TORCH_NODE_FLAGS, *OWN_JOB_FLAGS, *OWN_NODE_FLAGS, *FT_OPTIONS], command)


def job_flags(command: F) -> F:
    """The flags of `keepstep run` that concern the whole job; cli/effective.py makes a configuration of them."""
    return _all([*TORCH_JOB_FLAGS, *OWN_JOB_FLAGS], command)


def _all(decorators: Sequence[Decorator[Any]], command: F) -> F:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
