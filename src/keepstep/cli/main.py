"""The `keepstep` command: a table of verbs, each loaded only when it is used.

Loading lazily keeps `keepstep version` fast and lets the base install offer every verb: one whose extra is missing says
which pip command installs it.
"""

from __future__ import annotations

import difflib
import importlib
import os
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.exits import EXIT_FAILURE

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_INTERRUPTED = 130


class Verb(NamedTuple):
    """Where a verb is defined (`module:attribute`), its line in the help, the extra it needs (None: base install)."""

    target: str
    summary: str
    extra: str | None = None


VERBS: dict[str, Verb] = {
    "run": Verb("keepstep.cli.run:run", "Supervise a training job; takes torchrun's flags.", "launch"),
    "coordinator": Verb(
        "keepstep.cli.coordinator:coordinator", "Run a job's coordinator on a host of its own.", "launch"
    ),
    "demo": Verb("keepstep.cli.demo:demo", "Train, break it, resume and account, on this machine.", "launch"),
    "ckpt": Verb("keepstep.cli.ckpt:ckpt", "Look at checkpoints, keep them, sign them."),
    "goodput": Verb("keepstep.cli.goodput:goodput", "Say where the wall-clock of a run went."),
    "plan": Verb("keepstep.cli.plan:plan", "Say what to expect of a job and what to change first."),
    "hang": Verb("keepstep.cli.hang:hang", "Name the ranks a hang waits for, from flight-recorder dumps."),
    "check": Verb("keepstep.cli.check:check", "Check this node, or the bandwidth of a job's nodes."),
    "config": Verb("keepstep.cli.config:config", "Show or check the configuration of a run or a --config file."),
    "completion": Verb("keepstep.cli.misc:completion", "Print the script that completes keepstep in your shell."),
    "get": Verb("keepstep.cli.get:get", "List jobs, cycles, nodes, ranks, checkpoints, spares, incidents, patterns."),
    "describe": Verb("keepstep.cli.describe:describe", "Show everything about one job, cycle, node or rank."),
    "events": Verb("keepstep.cli.events:events", "Show what happened in a run, in order."),
    "logs": Verb("keepstep.cli.logs:logs", "Print the output of ranks."),
    "history": Verb("keepstep.cli.history:history", "Show the cycles of a run, one line each."),
    "top": Verb("keepstep.cli.top:top", "Watch a run: step, speed, ETTR, nodes, last events."),
    "why": Verb("keepstep.cli.why:why", "Say whose fault it was, with evidence, from logs and records.", "diagnose"),
    "bundle": Verb(
        "keepstep.cli.bundle:bundle", "Pack logs and verdict, without names, to show to others.", "diagnose"
    ),
    "label": Verb("keepstep.cli.label:label", "Write down what the cause of an incident was found to be."),
    "learn": Verb("keepstep.cli.learn:learn", "Weigh signs anew by incidents whose cause was verified."),
    "xid": Verb("keepstep.cli.xid:xid", "Look up an Xid or SXid: meaning, action, who disagrees."),
    "scan": Verb("keepstep.cli.scan:scan", "Find known faults in log lines, or follow the kernel's log.", "diagnose"),
    "replay": Verb(
        "keepstep.cli.replay:replay",
        "Run recorded events through attribution and policies; price the difference.",
        "diagnose",
    ),
    "inject": Verb("keepstep.cli.inject:inject", "Cause a fault in a running job.", "launch"),
    "simulate": Verb("keepstep.cli.simulate:simulate", "Simulate a training campaign: time, nodes, money.", "plan"),
    "convert": Verb("keepstep.cli.convert:convert", "Write records in the forms that other tools read."),
    "doctor": Verb("keepstep.cli.doctor:doctor", "Say which settings will cost the job time, why, and the fix."),
    "explain-exit": Verb("keepstep.cli.misc:explain_exit_command", "Say what an exit code means."),
    "version": Verb("keepstep.cli.misc:version", "Print the versions of keepstep, Python and torch."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use. Errors become one line on stderr and the right exit code."""

    def __init__(self, *args: Any, verbs: Mapping[str, Verb] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.verbs = VERBS if verbs is None else verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all verbs, in the order of the table; imports nothing."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a verb, None when there is no such verb. Raises ConfigError when its extra is missing."""
        verb = self.verbs.get(cmd_name)
        if verb is None:
            return None
        module_name, _, attribute = verb.target.partition(":")
        try:
            command = getattr(importlib.import_module(module_name), attribute)
        except ImportError as error:
            if ctx.resilient_parsing:
                # A shell asks for completions: there are none of a verb that is not installed.
                return None
            raise _missing(cmd_name, verb, error) from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{verb.target} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that `args` names. Raises click.UsageError naming the nearest verb when there is none."""
        name = args[0]
        if name not in self.verbs and not name.startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, self.verbs, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"no such verb {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completions of a verb's name from the table, so that the TAB key imports none of them."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(n, help=v.summary) for n, v in self.verbs.items() if n.startswith(incomplete)]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs from the table, so that help imports none of them."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.summary) for name, verb in self.verbs.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; an error becomes a line on stderr and an exit code, after the traceback when that is wanted."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeepstepError as error:
            _report(ctx, str(error), error.exit_code)
        except ModuleNotFoundError as error:
            # A verb loads what its extra brings only when it runs.
            name = ctx.invoked_subcommand or ""
            missing = _missing(name, self.verbs[name], error) if name in self.verbs else ConfigError(str(error))
            _report(ctx, str(missing), missing.exit_code)
        except KeyboardInterrupt:
            _report(ctx, "interrupted", EXIT_INTERRUPTED)
        except Exception as error:
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            _report(ctx, f"{kind}{error} (--debug before the verb shows the traceback)", EXIT_FAILURE)


def _report(ctx: click.Context, message: str, exit_code: int) -> None:
    """Write one line, or in debug mode the traceback before it, and leave with `exit_code`."""
    if debugging(ctx):
        click.echo(traceback.format_exc().rstrip(), err=True)
    click.echo(f"keepstep: {' '.join(message.split())}", err=True)
    ctx.exit(exit_code)


def debugging(ctx: click.Context) -> bool:
    """Whether tracebacks are wanted: --debug, or KEEPSTEP_DEBUG set to anything but 0."""
    return bool(ctx.find_root().params.get("debug")) or os.environ.get("KEEPSTEP_DEBUG", "0") not in ("", "0")


def _missing(name: str, verb: Verb, error: ImportError) -> KeepstepError:
    missing = error.name or str(error)
    if verb.extra is None or missing.partition(".")[0] == "keepstep":
        return ConfigError(f"{name} is not part of this installation ({error})")
    return ConfigError(f"{name} needs {missing}, which is not installed: pip install 'keepstep[{verb.extra}]'")


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from keepstep import __version__

        click.echo(f"keepstep {__version__}")
        ctx.exit(0)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`keepstep VERB --help` explains a verb; `keepstep explain-exit N` an exit code.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks (also KEEPSTEP_DEBUG=1).")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print it.")
def main(debug: bool) -> None:
    """Keep a synchronous training job stepping while hardware fails underneath it, and say where the time went."""


if __name__ == "__main__":
    main()
