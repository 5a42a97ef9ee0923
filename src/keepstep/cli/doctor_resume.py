"""`keepstep doctor resume`: whether a script that is killed and resumed ends like one that is not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep.cli.output import emit, note, output_option
from keepstep.records.exits import EXIT_FAILURE, EXIT_PROBLEM

if TYPE_CHECKING:
    from rich.console import Console

    from keepstep.launcher.doctor.resume import ResumeCheck
    from keepstep.launcher.doctor.resumestate import Difference

EXIT_CODES = {"same": 0, "diverged": EXIT_PROBLEM, "nondeterministic": EXIT_FAILURE}
SHOWN = 12


@click.command("resume", context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("--nproc-per-node", type=click.IntRange(1), default=1, show_default=True, help="Ranks.")
@click.option("--steps", type=click.IntRange(2), default=8, show_default=True, help="Completed steps to compare up to.")
@click.option("--kill-at", type=click.IntRange(1), default=5, show_default=True, help="Kill a rank before this step.")
@click.option("--kill-rank", type=click.IntRange(0), default=0, show_default=True, help="The rank to kill.")
@click.option("--every", type=click.IntRange(1), default=1, show_default=True, help="Steps between checkpoints.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds for each of three runs."
)
@click.option("--ignore", multiple=True, metavar="KEY", help="Leave this key and all below it out of the comparison.")
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep all runs in DIR, which must not exist."
)
@output_option
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def resume(
    ctx: click.Context,
    nproc_per_node: int,
    steps: int,
    kill_at: int,
    kill_rank: int,
    every: int,
    timeout: float,
    ignore: tuple[str, ...],
    keep: Path | None,
    output: str,
    script: str,
    script_args: tuple[str, ...],
) -> None:
    """Run SCRIPT three times for a few steps and say which state a resume loses.

    Twice without interruption, to tell what is not deterministic by itself; once with a rank killed before --kill-at, resumed from
    its newest checkpoint. The checkpoints after the resume are compared bit by bit, and with them what the script holds and
    does not save. The script must use ks.Checkpointer; its root and cadence are set by this check, and it is ended after --steps.

    Exit code 0 when nothing differs, 3 when something does, 1 when the script could not be checked (it failed, saved nothing,
    or two uninterrupted runs differ), 2 for a wrong argument. JSON is `keepstep.resume_check/1`.
    """
    from keepstep.launcher.doctor.resume import CheckOptions, check_options, check_resume
    from keepstep.records.errors import ConfigError, KeepstepError

    if keep is not None and keep.exists():
        raise ConfigError(f"--keep {keep}: is already there; name a folder that is not")
    folder = Path(tempfile.mkdtemp(prefix="keepstep-resume-")) if keep is None else keep.absolute()
    options = CheckOptions(
        script=script,
        args=script_args,
        folder=str(folder),
        nproc=nproc_per_node,
        steps=steps,
        kill_step=kill_at,
        kill_rank=kill_rank,
        every=every,
        limit_s=timeout,
        ignore=ignore,
    )
    try:
        check_options(options)
        report = check_resume(options)
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except KeepstepError:
        note(f"the runs are kept in {folder}")
        raise
    if keep is None and report.outcome == "same":
        shutil.rmtree(folder, ignore_errors=True)
    emit(
        report.differences if output == "name" else report,
        output,
        table=lambda console, wide: render(report, console, wide=wide),
        name=lambda difference: str(difference.key),
    )
    ctx.exit(EXIT_CODES[report.outcome])


def render(report: ResumeCheck, console: Console, *, wide: bool = False) -> None:
    """Draw the verdict, the first difference with why and what to do, and the table of differences."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    compared = ", ".join(map(str, report.compared_steps))
    ranks = f"{report.nproc} rank{'s' if report.nproc > 1 else ''}"
    console.print(
        f"{report.script} on {ranks}: killed before step {report.kill_step}, resumed at {report.restored_step}, "
        f"compared at {compared}",
        markup=False,
        soft_wrap=True,
    )
    style = {"same": "bold green", "diverged": "bold red", "nondeterministic": "yellow"}[report.outcome]
    text = {
        "same": "same: every compared state is equal to the last bit",
        "diverged": f"diverged: {report.differing_keys} keys differ",
        "nondeterministic": "nondeterministic: the script differs from itself without any interruption",
    }[report.outcome]
    console.print(Text(text, style), soft_wrap=True)
    if report.first is not None:
        console.print(
            f"  first {_place(report.first)}, from step {report.first.first_step}", markup=False, soft_wrap=True
        )
    if report.why:
        console.print(f"  why   {report.why}\n  fix   {report.fix}", markup=False, soft_wrap=True)
    if report.differences:
        table = Table(box=SIMPLE_HEAD)
        for title in ("KEY", "FROM STEP", "IS", "MAX ABS DIFF", "EXPECTED", "FOUND"):
            table.add_column(title, overflow="fold")
        for item in report.differences if wide else report.differences[:SHOWN]:
            gap = "-" if item.max_abs_diff is None else f"{item.max_abs_diff:.3g}"
            row = (_place(item), str(item.first_step), item.kind.replace("_", " "), gap, item.expected, item.found)
            table.add_row(*map(Text, row))
        console.print(table)
        if not wide and len(report.differences) > SHOWN:
            console.print(f"{report.differing_keys - SHOWN} more (-o wide)", markup=False)
    if report.nondeterministic and (wide or report.outcome != "same"):
        listed = ", ".join(report.nondeterministic if wide else report.nondeterministic[:5])
        console.print(
            f"not compared, {len(report.nondeterministic)} keys differ without interruption: {listed}",
            markup=False,
            soft_wrap=True,
        )
    if report.outcome != "same":
        console.print(f"runs kept in {report.folder}", markup=False, soft_wrap=True)


def _place(difference: Difference) -> str:
    return difference.key if difference.rank is None else f"{difference.key} [rank {difference.rank}]"
