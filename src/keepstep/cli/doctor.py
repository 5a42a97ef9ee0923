"""`keepstep doctor`: settings that will cost a job time, each with why and what to set instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep.cli.goodput import find_run
from keepstep.cli.output import emit, output_option
from keepstep.launcher.doctor import Report, examine
from keepstep.launcher.doctor.facts import gather
from keepstep.records.exits import EXIT_PROBLEM

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
FILE = click.Path(path_type=Path)


class DoctorCommand(click.Command):
    """`doctor [RUN]`, and `doctor resume SCRIPT`, which is a command of its own (a run named resume is `./resume`)."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of whichever of the two `args` call for."""
        if args[:1] != ["resume"]:
            return super().make_context(info_name, args, parent, **extra)
        from keepstep.cli.doctor_resume import resume

        return resume.make_context(f"{info_name} resume", args[1:], parent, **extra)


@click.command("doctor", cls=DoctorCommand)
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--script", type=FILE, help="Training script to read (not run) [default: RUN's own].")
@click.option("--checkpoints", type=FILE, metavar="DIR", help="Root of ks.Checkpointer: sizes a save by the newest.")
@click.option("--slurm-config", type=FILE, metavar="FILE", help="Saved `scontrol show config` [default: ask scontrol].")
@click.option("--pod", type=FILE, metavar="FILE", help="Output of `kubectl get pod NAME -o json`.")
@click.option(
    "--image-pull-s", type=click.FloatRange(0), metavar="S", help="Time a cold node takes to fetch the image."
)
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="GPUs of the job, for prices [default: RUN's ranks].")
@click.option("--price", type=click.FloatRange(0), metavar="P", help="Price of a GPU-hour.")
@output_option
def doctor(
    run: str | None,
    script: Path | None,
    checkpoints: Path | None,
    slurm_config: Path | None,
    pod: Path | None,
    image_pull_s: float | None,
    gpus: int | None,
    price: float | None,
    output: str,
) -> None:
    """Check settings before a job runs, or against what RUN measured, and explain each finding.

    `keepstep doctor resume SCRIPT` is another check: it runs a script, kills it and says which state the resume lost.

    RUN is a run folder or a run's id. Without it the environment, this host, its scheduler and --script are looked at.
    Exit code 3 when a finding is an error, else 0. JSON is `keepstep.doctor/1`: findings (id, severity, title, seen, why,
    fix, source), passed, skipped.
    """
    report = examine(
        gather(
            run_dir=find_run(run) if run is not None else None,
            script=script,
            checkpoints=checkpoints,
            slurm_config=slurm_config,
            pod=pod,
            image_pull_s=image_pull_s,
            gpus=gpus,
            price_per_gpu_hour=price,
        )
    )
    emit(
        report.findings if output == "name" else report,
        output,
        table=lambda console, wide: render(report, console, wide=wide),
        name=lambda finding: str(finding.id),
    )
    if any(finding.severity == "error" for finding in report.findings):
        click.get_current_context().exit(EXIT_PROBLEM)


def render(report: Report, console: Console, *, wide: bool = False) -> None:
    """Draw the findings and one line of counts; `wide` adds which rules could not look, and why."""
    from rich.text import Text

    for finding in report.findings:
        console.print(
            Text.assemble((finding.severity, STYLES[finding.severity]), f"  {finding.title}  [{finding.id}]"),
            Text(f"  seen  {finding.seen.value}  ({finding.seen.where})"),
            Text(f"  why   {finding.why}"),
            Text(f"  fix   {finding.fix}"),
            Text(f"  from  {finding.source}\n"),
            sep="\n",
            soft_wrap=True,
        )
    if wide:
        for skipped in report.skipped:
            console.print(Text(f"not checked  {skipped.id}: {skipped.why}"), soft_wrap=True)
    more = "" if wide or not report.skipped else " (-o wide says why)"
    console.print(
        f"findings: {len(report.findings)}; rules passed: {len(report.passed)}, not checked: {len(report.skipped)}{more}",
        markup=False,
        soft_wrap=True,
    )
